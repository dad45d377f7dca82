"""`benchmarks.latency` in the interpreter: its arms are right, and its ablations leave out what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gate, inputs
from benchmarks.latency import POINTS, TINY, kernel_of, lines, measure, ours
from benchmarks.latency_arms import ABLATIONS, planned
from sglang_specverify.kernels import fused_kernel

CPU = torch.device("cpu")
CHAIN = replace(TINY[0], q_heads=2, kv_heads=1, length=514)


def test_points_are_told_apart() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS) == 21


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
    made = inputs.make(CHAIN, CPU)
    samples = gate.samples(made)
    wrong = []
    for name, tamper in {"nothing": lambda plan: None, **ABLATIONS}.items():
        call = planned(made, tamper=tamper)
        out = call(0).fill_(torch.nan)
        call(0)
        written = bool(torch.isfinite(out).all())
        wrong.append((name, written, written and gate.error(made, out, samples) <= gate.LIMIT))
    writing = {"nothing": (True, True), "one tile": (True, False)}
    assert wrong == [(name, *writing.get(name, (False, False))) for name in ("nothing", *ABLATIONS)]
