"""`scripts/compile_all`: what it compiles, what it writes, and its exit code."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import compile_all
from sglang_specverify.kernels import tables
from sglang_specverify.kernels.aot import Compiled, problems
from sglang_specverify.kernels.aot_cases import CACHES, DIMS, OPERATIONS, shipped
from sglang_specverify.kernels.aot_specialized import specialized

COMPILED = Compiled("verify_attention_kernel", "sm_90", 168, 0, 0, 0, 65536, {"wgmma.mma_async": 4}, (), 2.0)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(compile_all.main)
    return CliRunner().invoke(app, arguments)


def invented(job: Any, path: Path) -> compile_all.Outcome:
    """Whatever has a head dim of 256 does not compile, and FP8 spills."""
    name = compile_all.name_of(job)
    if "d256" in name:
        return compile_all.Outcome(name, job.arch, "rule", {}, None, ["does not compile"])
    compiled = Compiled(**{**vars(COMPILED), "spill_stores": 8 * ("e4m3" in name)})
    return compile_all.Outcome(name, job.arch, "fused entry 0", {"block_m": 16}, compiled, problems(compiled))


@pytest.fixture
def inventing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_all, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(compile_all, "run_job", invented)


def test_every_entry_of_every_table_is_compiled() -> None:
    """With every kind of mask and every head dim and cache type that it serves."""
    for arch in tables.shipped():
        table = tables.read(arch)
        assert table is not None
        cases = list(shipped(arch))
        everything = [*cases, *specialized(arch)]
        assert len({case.name for case in everything}) == len(everything)
        served = {case.configured()[2] for case in everything}
        assert served == {f"{kernel} entry {n}" for kernel, entries in table.kernels.items() for n in range(len(entries))}
        assert {(case.operation, case.kind) for case in cases} == set(OPERATIONS)
        assert {(case.dims, case.cache) for case in cases} >= {(dims, cache) for dims in DIMS for cache in ("bf16", "e4m3")}
        assert {case.cache for case in cases} == set(CACHES)
        # Where the number of rows in all decides, also a call that does not say it.
        asking = {name for name in ("fused", "tree_suffix") for entry in table.kernels[name] if "total_rows" in dict(entry.when)}
        assert {case.kernel for case in cases if case.facts().total_rows == 0} == asking


@pytest.mark.usefixtures("inventing")
def test_a_problem_is_in_the_file_and_in_the_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    result = run("--arch", "sm_90", "--only", "fused chain", "--jobs", "2", "--out", str(out))
    assert result.exit_code == 1
    written = json.loads(out.read_text())
    assert {"date", "command", "versions", "hardware", "targets"} <= set(written)
    names = list(written["resources"])
    assert written["launches"] == len(names) > 10
    assert set(written["problems"]) == {name for name in names if "d256" in name or "e4m3" in name}
    assert "8 bytes stored" in next(text[0] for name, text in written["problems"].items() if "e4m3" in name)
    assert written["entries"]["sm_90 fused entry 0"]["spill_bytes"] == 8
    assert written["entries"]["sm_90 rule"]["problems"] == written["entries"]["sm_90 rule"]["launches"]
    assert written["architectures"] == {
        "sm_90": {
            "launches": len(names),
            "problems": len(written["problems"]),
            "accepted_spills": 0,
            "registers": 168,
            "shared_bytes": 65536,
        }
    }
    for name in written["problems"]:
        assert name in result.output


@pytest.mark.usefixtures("inventing")
def test_no_problem_is_exit_code_0(tmp_path: Path) -> None:
    result = run("--arch", "sm_90", "--only", "fused chain d128 bf16", "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.json").read_text())["problems"] == {}


def test_spills_that_are_accepted_are_counted_apart() -> None:
    spilling = Compiled(**{**vars(COMPILED), "spill_stores": 8})
    outcomes = [
        compile_all.Outcome("a", "sm_90", "fused entry 0", {}, spilling, []),
        compile_all.Outcome("b", "sm_90", "fused entry 1", {}, spilling, ["spills registers"]),
        compile_all.Outcome("c", "sm_90", "fused entry 1", {}, COMPILED, []),
        compile_all.Outcome("d", "sm_90", "rule", {}, None, ["does not compile"]),
    ]
    row = compile_all.architectures(outcomes)["sm_90"]
    assert (row["launches"], row["problems"], row["accepted_spills"]) == (4, 2, 1)


def test_real_launches_are_compiled_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out, cache = tmp_path / "out.json", tmp_path / "compiled.jsonl"
    arguments = ("--arch", "gfx950", "--only", "merge d64", "--jobs", "1", "--out", str(out), "--cache", str(cache))
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    resources = json.loads(out.read_text())["resources"]
    assert list(resources) == ["gfx950 merge d64 bfloat16", "gfx950 merge d64 float16"]
    assert all(" registers; 0 bytes spilled; " in text for text in resources.values())
    kept = cache.read_text()
    assert len(kept.splitlines()) == 2
    assert run(*arguments).exit_code == 0
    assert json.loads(out.read_text())["resources"] == resources
    assert cache.read_text() == kept


def test_unknown_hardware_is_refused(tmp_path: Path) -> None:
    result = run("--arch", "sm_89", "--out", str(tmp_path / "out.json"))
    assert "arch: got 'sm_89'; allowed: sm_90" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
