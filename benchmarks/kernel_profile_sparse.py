"""Calls of sparse MLA for `benchmarks.kernel_profile_child`: inputs over pools of their own size, and the check of an arm."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import sparse_mla_arms
from benchmarks import sparse_mla_measure as measuring
from benchmarks.measure import why
from benchmarks.sparse_mla_arms import Arm
from benchmarks.sparse_mla_points import Point
from benchmarks.sparse_mla_pool import PAGE_ROWS, Inputs, inputs_over, make_pool

ARMS: dict[str, Arm] = {arm.name: arm for arm in sparse_mla_arms.ARMS}
#: Calls with rows of their own, the least that inputs have. A profiler saves and restores memory, and flushes the caches itself.
LAYERS = 2


def make(point: dict[str, Any], device: torch.device) -> Inputs:
    """Inputs of a point over pools with no more rows than its calls read, but for whole pages."""
    chosen = Point(**point)
    return inputs_over(make_pool(device, _rows(chosen.lists * chosen.topk), _rows(chosen.window_rows)), chosen)


def _rows(of_a_call: int) -> int:
    return max(1, -(-LAYERS * of_a_call // PAGE_ROWS)) * PAGE_ROWS


def checked(arm: Arm, made: Inputs) -> dict[str, Any]:
    """A row of the arm's call: its work, and its error against FP64, or why it is not to be profiled."""
    row: dict[str, Any] = {"variant": arm.name, "bytes": made.point.bytes, "flops": made.point.flops}
    try:
        oracles = measuring.oracles_of(made, v4_bytes=arm.v4_bytes)
        wrong, row["error"] = measuring.check(arm.build(made), made, oracles)
    except Exception as failure:
        return {**row, "why": why(failure)}
    return {**row, "why": f"wrong: {wrong[0]}"} if wrong else row
