"""Long chains: which points a pool holds, what is read over it, and which arms are timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import gate, long_context, measure, timing
from benchmarks import long_context_checks as checks
from benchmarks import long_context_compile as compiling
from benchmarks import long_context_measure as measuring
from benchmarks import long_context_points as points
from benchmarks.arms import Arm, Call
from benchmarks.inputs import ROTATED_BYTES, Inputs
from benchmarks.long_context import Selection
from benchmarks.long_context_pool import Pool, beyond_32_bits, inputs_over, make_pool
from sglang_specverify import kernels
from sglang_specverify.hardware import from_name
from sglang_specverify.kernels.reference import verify_attention_reference

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}


@pytest.fixture
def pool() -> Pool:
    return make_pool(8 << 20, CPU)


def test_the_pool_bounds_the_points() -> None:
    chosen = long_context.select(list(Selection), quick=False, pool_bytes=points.POOL_BYTES)
    assert len(chosen) == len(set(chosen)) > 70
    assert {points.chain(16, 1 << 20), points.chain(64, 1 << 18)} < set(chosen)
    left = long_context.left_out(list(Selection), points.POOL_BYTES)
    assert left == [points.chain(32, 1 << 20).name, points.chain(64, 1 << 20).name]
    for point in chosen:
        layers, slots = points.layout(point, points.POOL_BYTES)
        assert layers * slots * points.slot_bytes(point) <= points.POOL_BYTES and slots >= points.tokens(point)
        # Either the layers push each other out of the L2 cache, or one alone is more than it holds.
        assert layers * points.tokens(point) * points.slot_bytes(point) >= ROTATED_BYTES


def test_every_other_shape_is_measured_at_every_corner() -> None:
    chosen = long_context.select([Selection.VARIATIONS], quick=False, pool_bytes=points.POOL_BYTES)
    assert len(chosen) == len(points.CORNERS) * len(points.VARIATIONS)
    assert {point.batch for point in chosen[: len(points.VARIATIONS)]} == {points.CORNERS[0][0]}
    assert all(points.states(point) == ("warm", "cold") for point in chosen)
    assert points.states(points.chain(2, 1 << 12)) == ("cold",)


@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
def test_the_pool_is_afterwards_what_it_was(pool: Pool, cache: str) -> None:
    point = points.chain(3, 50, cache=cache, **SMALL)
    pool.view(point, *points.layout(point, pool.bytes))
    before = pool.k.clone(), pool.v.clone()
    with pytest.raises(KeyError), inputs_over(pool, point) as made:
        assert not torch.equal(pool.k, before[0]), "nothing was planted"
        assert made.slots.unique().numel() == 3 * 54
        raise KeyError
    assert torch.equal(pool.k, before[0]) and torch.equal(pool.v, before[1])


def test_another_cache_type_fills_the_pool_anew(pool: Pool) -> None:
    half, eighth = (points.chain(1, 50, cache=cache, **SMALL) for cache in ("bf16", "e4m3"))
    for point, limit in ((half, 7.0), (eighth, 14.0), (half, 7.0)):
        k, v = pool.view(point, 1, 2000)
        assert bool(k.float().isfinite().all()) and 0.5 < float(k.float().std()) < 2.1
        assert float(k.float().abs().max()) < limit and not torch.equal(k.float(), v.float())


def attention(made: Inputs, **changes: Any) -> torch.Tensor:
    came = {"table": made.table, "prefix_lens": made.prefix_lens} | changes
    out = verify_attention_reference(
        made.q, made.k[0], made.v[0], came["table"], made.row_ids, came["prefix_lens"], num_draft_tokens=made.point.width,
        k_scale=made.k_scale, v_scale=made.v_scale,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("lengths", [[3000, 3000], [3000, 17], [0, 1]])
def test_the_gate_sees_one_wrong_key_of_thousands(pool: Pool, lengths: list[int]) -> None:
    point = points.chain(2, max(lengths), **SMALL)
    with inputs_over(pool, point, lengths) as made:
        wanted = [(sample, gate.expected(made, sample)) for sample in gate.samples(made, 6)]
        assert measuring.error(made, attention(made), wanted) <= gate.LIMIT
        last = made.table.clone()
        last[made.row_ids.long(), made.prefix_lens.long()] = last[made.row_ids.long(), made.prefix_lens.long() + 1]
        assert measuring.error(made, attention(made, table=last), wanted) > gate.LIMIT
        not_finite = attention(made)
        not_finite[1, 0, 0] = float("nan")
        assert measuring.error(made, not_finite, wanted) == float("inf")


def test_rows_that_no_sample_looks_at_are_held_to_the_first_arm(pool: Pool) -> None:
    def build(wrong: bool) -> Any:
        def arm(made: Inputs) -> Call:
            out = attention(made)
            sampled = {sample.row for sample in gate.samples(made, measuring.SAMPLES)}
            out[next(row for row in range(len(out)) if row not in sampled)] *= 1.1 if wrong else 1.0
            return lambda layer: out

        return arm

    arms = [Arm("good", "ours", build(False)), Arm("bad", "ours", build(True))]
    row = measuring.measure(points.chain(4, 30, **SMALL), arms, None, pool, with_step=False)
    assert "why" not in row["arms"]["good"]
    assert row["arms"]["bad"]["error"] <= gate.LIMIT and "from another variant" in row["arms"]["bad"]["why"]
    assert not row["beyond_32_bits"] and "step" not in row


def test_offsets_beyond_32_bits_are_told() -> None:
    # Nothing touches this memory, so it takes none.
    huge = torch.empty(1 << 33, dtype=torch.uint8)
    with inputs_over(make_pool(8 << 20, CPU), points.chain(1, 20, **SMALL)) as made:
        assert not beyond_32_bits(made)
        k = huge.view(torch.float16).view(1, -1, 2, 64)
        assert beyond_32_bits(replace(made, k=k, table=made.table + ((1 << 31) // 128 + 5)))


def test_slow_arms_are_timed_as_they_are_and_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": 50.0, "near": 60.0, "far": 900.0, "slow": 30_000.0, "broken": 10.0}
    seen: list[tuple[str, int]] = []

    def capture(call: Any, layers: int) -> timing.Replay:
        name = call(0)
        seen.append((name, layers))
        if name == "broken":
            raise RuntimeError("operation not permitted when stream is capturing")
        return timing.Replay(lambda: times[name], calls=4)

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "elapsed_us", lambda work: times[work()])
    row: dict[str, Any] = {"selected": "ours", "arms": {name: {"group": "ours"} for name in times}}
    calls = {name: lambda layer, name=name: name for name in times}
    measure.time_arms(row, calls, 5, ("warm", "cold"), measuring.replay_of)
    assert {name for name, _ in seen} == {"ours", "near", "far", "broken"} and {layers for _, layers in seen} == {1, 5}
    for state in ("warm", "cold"):
        assert (
            row["arms"]["ours"][state] == row["arms"]["ours (again)"][state] == {"us": 50, "spread": 0, "rounds": 9, "calls": 4}
        )
        assert row["arms"]["far"][state]["rounds"] == row["arms"]["slow"][state]["rounds"] == timing.SLOW_ROUNDS
        assert row["arms"]["slow"][state]["calls"] == 1
    assert "not captured" in row["arms"]["broken"]["why"]


@pytest.fixture
def on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "VARIANTS", ("reference",))


@pytest.mark.usefixtures("on_reference")
def test_checks_pass_for_what_is_right(pool: Pool) -> None:
    rows = list(checks.run(pool, tiny=True, deadline=time.monotonic() + 60))
    assert len(rows) == 9 and all(row["ok"] for row in rows), rows
    assert list(checks.run(pool, tiny=True, deadline=time.monotonic() - 1)) == []


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("fault", ["batch", "offset", "empty"])
def test_checks_fail_for_what_is_not(pool: Pool, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def wrong(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, *others: Any, out: Any, **options: Any
    ) -> None:
        options.pop("variant")
        lens = others[1]
        low = table % 4096 if fault == "offset" else table
        found = verify_attention_reference(q, k, v, low, *others, **options)
        assert isinstance(found, torch.Tensor)
        out.copy_(found)
        if fault == "batch":
            out *= 1 + 0.001 * len(lens)
        if fault == "empty":
            out.view(len(lens), -1)[lens == 0] = float("nan")

    monkeypatch.setattr(kernels, "verify_attention", wrong)
    kinds = {"batch": "rows alone", "offset": "far and near", "empty": "prefixes of [0"}
    failed = [checks.guarded(name, check) for name, check in checks.every(pool, tiny=True) if name.startswith(kinds[fault])]
    assert len(failed) >= 2 and not any(row["ok"] for row in failed), failed


def test_other_hardware_than_the_tables_is_refused() -> None:
    table = long_context.tables.read(long_context.ARCH)
    assert table is not None
    assert long_context.untuned(from_name("H200"), table.triton) is None
    assert "gfx950" in str(long_context.untuned(from_name("MI350X"), table.triton))
    assert "3.6.0" in str(long_context.untuned(from_name("H200"), "3.6.0"))


def test_bad_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(long_context.main)
    out = str(tmp_path / "out.json")
    cases = ((["--device", "cpu"], "--dry-run"), (["--skip", "fa5"], "no arm fa5"), ([], "--allow-untuned"))
    for arguments, complaint in cases:
        result = CliRunner().invoke(app, ["--out", out, *arguments])
        assert result.exit_code == 2 and complaint in result.output
    assert not (tmp_path / "out.json").exists()


def test_every_shape_compiles_in_a_process_for_each_side() -> None:
    chosen = long_context.select([Selection.PLANE, Selection.VARIATIONS], quick=False, pool_bytes=points.POOL_BYTES)
    found = compiling.jobs(chosen)
    assert len(found) == 2 * (1 + len(points.VARIATIONS)) and all("--shape" in job for job in found)
    assert len(compiling.jobs(points.plane(), skip=["triton", "upstream_splitkv"])) == 1
    for shape in compiling.shapes():
        assert all(points.fits(point, points.SMALL_POOL) for point in compiling.small(shape))


def test_no_compiler_outlives_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    begin = time.monotonic()
    with compiling.ahead(points.plane(), 4, begin + 0.5):
        while not (tmp_path / "pids").exists():
            time.sleep(0.01)
    assert time.monotonic() - begin < 20
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_a_dry_run_holds_this_projects_arms_to_the_gate(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    others = [option for name in ("fused", "fa3", "triton", "upstream_splitkv") for option in ("--skip", name)]
    command = [sys.executable, "-m", "benchmarks.long_context", "--device", "cpu", "--dry-run", "--quick", "--only", "plane"]
    # In a process of its own: Triton's interpreter is chosen when Triton is imported.
    done = subprocess.run(
        [*command, *others, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["points"]
    assert row["selected"] == "fused_split" and set(row["arms"]) == {"fused_split", "deterministic"}
    for name, arm in row["arms"].items():
        assert "why" not in arm and arm["error"] < gate.LIMIT, f"{name}: {arm}"
    assert row["step"]["error"] < gate.LIMIT
