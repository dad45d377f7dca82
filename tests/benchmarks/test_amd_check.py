"""The check that a user of an AMD GPU runs: what it calls a failure, where it refuses, its arm of aiter, and a dry run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import amd_check, measure
from benchmarks.points import Point
from benchmarks.stock_aiter import AITER
from sglang_specverify.hardware import NO_GPU, from_name

TINY = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
ROW = {"case": "aiter tree", "page_size": 1, "cache": "bf16", "result": "ok"}
PARITY = {"device": "cuda", "rows": [ROW]}


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(amd_check.main)
    return made


def test_the_points_are_of_every_kind() -> None:
    points = list(amd_check.chosen())
    assert {point.kind for point in points} == {"tree", "chain", "draft"} and {point.cache for point in points} == {
        "bf16",
        "e4m3",
    }
    assert len(set(points)) == len(points)
    assert {arm.name for arm in amd_check.ARMS} == {"fused", "fused_split", "triton", "upstream_splitkv", "aiter_unified"}


def test_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in (NO_GPU, from_name("H200")):
        monkeypatch.setattr(amd_check, "detect", lambda machine=machine: machine)
        outcome = CliRunner().invoke(app(), ["--out", str(tmp_path / "out.json")])
        assert outcome.exit_code == 2 and not (tmp_path / "out.json").exists()


def arm(name: str, group: str, why: str) -> dict[str, Any]:
    return {"points": [{"name": "chain", "arms": {name: {"group": group, "why": why}}}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"parity": {"rows": [{**ROW, "result": "OFF by more than 0.01"}]}}, ["parity, aiter tree, page 1, bf16: OFF by more"]),
        ({"parity": {"rows": [], "why": "no sglang"}}, ["parity did not run: no sglang"]),
        ({"points": [{"name": "chain", "why": "MemoryError: 61 GB"}]}, ["chain: MemoryError"]),
        (arm("fused", "ours", "wrong: relative error 1"), ["chain: fused: wrong"]),
        (arm("fused_split", "ours", "ArgumentError: variant: got"), []),
        (arm("triton", "stock", "wrong: relative error 1"), []),
    ],
)
def test_what_a_failure_is(change: dict[str, Any], says: list[str]) -> None:
    found = amd_check.failures({"parity": PARITY, "points": [], **change})
    assert len(found) == len(says) and all(one.startswith(begin) for one, begin in zip(found, says, strict=True))


@pytest.mark.parametrize("more", [{}, {"cache": "e4m3", "page_size": 16}, {"window": 8, "sinks": True}], ids=str)
def test_the_arm_of_aiter(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for aiter: prefix, drafts, scales and a window of as many keys as this project means by it."""
    from tests.backends.aiter_stand_in import unified_attention

    row = measure.measure(Point("chain", 2, 4, 40, **TINY, **more), AITER, None, torch.device("cpu"))
    assert "aiter does not import" in row["arms"]["aiter_unified"]["why"]
    module = ModuleType("unified_attention")
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "aiter.ops.triton.attention.unified_attention", module)
    module.unified_attention = unified_attention  # type: ignore[attr-defined]
    row = measure.measure(Point("chain", 2, 4, 40, **TINY, **more), AITER, None, torch.device("cpu"))
    assert "why" not in row["arms"]["aiter_unified"]
    module.unified_attention = lambda **call: unified_attention(**call | {"seqused_k": call["seqused_k"] - 1})  # type: ignore[attr-defined]
    row = measure.measure(Point("chain", 2, 4, 40, **TINY, **more), AITER, None, torch.device("cpu"))
    assert row["arms"]["aiter_unified"]["why"].startswith("wrong")


@pytest.mark.parametrize("hangs", [False, True])
def test_parity_that_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    """A fault of the GPU ends the process between two cases: the ones it did not come to are a failure, with the reason."""

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        found = {"device": "cuda", "rows": [ROW], "not run": ["aiter chain", "triton tree"]}
        Path(command[-1]).write_text(json.dumps(found))
        if hangs:
            raise subprocess.TimeoutExpired(command, how["timeout"])
        return subprocess.CompletedProcess(command, -6, "", "Memory access fault by GPU node-1")

    # In its place alone: what a result file says of the machine comes from processes too.
    monkeypatch.setattr(amd_check, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    outcome = CliRunner().invoke(app(), ["--dry-run", "--minutes", "0", "--out", str(tmp_path / "out.json")])
    (failure,) = json.loads((tmp_path / "out.json").read_text())["failures"]
    assert outcome.exit_code == 1 and failure.startswith("parity ended before aiter chain, triton tree: ")
    assert ("not done after" if hangs else "exit code -6: Memory access fault") in failure


def test_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity of chains over aiter in a process of its own, no time left for a point, and a file that says what made it."""
    pytest.importorskip("sglang")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: run python -m benchmarks.amd_check itself")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "dry.json"
    done = CliRunner().invoke(app(), ["--dry-run", "--minutes", "0", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [row["case"] for row in found["parity"]["rows"]] == ["aiter chain", "aiter chain"]
    assert found["failures"] == [] and found["points"] == [] and set(found["machine"]) == {"hip", "aiter"}
    assert {"date", "command", "versions", "hardware", "ceilings"} < set(found)
