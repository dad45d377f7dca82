"""`benchmarks.latency` in the interpreter: its arms are right, and its ablations leave out what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gate, inputs, latency_arms, wide_trees
from benchmarks.arms import make_plan
from benchmarks.latency import POINTS, TINY, kernel_of, lines, measure, ours
from benchmarks.latency_arms import ABLATIONS, planned
from benchmarks.points import Point
from sglang_specverify.hardware import from_name
from sglang_specverify.kernels import fused_kernel
from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.specialized import ARCH

from . import specialized_calls
from .calls import attention, launches

CPU = torch.device("cpu")
CHAIN = replace(TINY[0], q_heads=2, kv_heads=1, length=514)


def test_points_are_told_apart() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS) == 28


@pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for machines without a GPU")
def test_dry_run() -> None:
    source = Path(str(fused_kernel.__file__))
    row = measure(CHAIN, kernel_of(source), CPU, ablations=True)
    assert set(row["arms"]) == {*ours(inputs.make(CHAIN, CPU)), "before"}
    assert all(found["error"] <= gate.LIMIT for found in row["arms"].values()), lines(row)
    assert set(row["ablations"]) == set(ABLATIONS)
    assert not any(row["ablations"].values()), lines(row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plan is the interpreter's")
def test_ablations_leave_work_out() -> None:
    """Outputs are not written where nothing combines the parts, and wrong where keys are left out: nothing runs by accident."""
    tile = make_plan(inputs.make(CHAIN, CPU), "fused_split").shape.config.block_n
    # Long enough for parts of several tiles.
    made = inputs.make(replace(CHAIN, length=max(CHAIN.length, 16 * tile + 2)), CPU)
    samples = gate.samples(made)
    wrong = []
    for name, tamper in {"nothing": lambda plan: None, **ABLATIONS}.items():
        call = planned(made, tamper=tamper)
        with launches() as seen:
            out = call(0).fill_(torch.nan)
        # Whoever combines finds no parts of an earlier call.
        for scratch in ("partial_out", "partial_lse"):
            attention(seen).arguments[scratch].fill_(torch.nan)
        call(0)
        written = bool(torch.isfinite(out).all())
        wrong.append((name, written, written and gate.error(made, out, samples) <= gate.LIMIT))
    writing = {"nothing": (True, True), "one tile": (True, False)}
    assert wrong == [(name, *writing.get(name, (False, False))) for name in ("nothing", *ABLATIONS)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs in its emulator")
def test_arms_of_wide_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are right, each divides and combines as it says, and there are none where the kernel does not serve."""
    made = inputs.make(Point("tree", 1, 3, 530, q_heads=1, kv_heads=1, head_dim=64), CPU, most_layers=1)
    assert wide_trees.arms_of(made) == {}
    monkeypatch.setattr(wide_trees, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(latency_arms, "detect", lambda: replace(from_name(ARCH), multiprocessors=3))
    assert wide_trees.arms_of(inputs.make(CHAIN, CPU, most_layers=1)) == {}
    found = {}
    for name, build in wide_trees.arms_of(made).items():
        call, launches = build(), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launch, "run", lambda launch, into=launches: into.append(launch))
            out = call(0)
        specialized_calls.run(launches)
        assert gate.error(made, out, gate.samples(made)) <= gate.LIMIT, name
        plan, items_at = (launches[0].arguments[each] for each in ("plan", "items_at"))
        found[name.removeprefix("specialized, ")] = (
            int(plan[items_at]), [launch.options.get("launch_pdl", False) for launch in launches]
        )  # fmt: skip
    parts = found["last"][0]
    assert parts > 1 and found == {
        "last": (parts, [False]),
        "launch": (found["launch"][0], [False, True]),
        "launch in order": (found["launch"][0], [False, False]),
        "launch, parts of 128 keys": (5, [False, True]),
        "launch, parts of 256 keys": (3, [False, True]),
    }
