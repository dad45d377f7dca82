"""The arms of `benchmarks.latency`: the divided kernel, that of another commit, and plans that leave out a part of the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.arms import Call, arguments_of, make_plan
from benchmarks.inputs import Inputs
from sglang_specverify.kernels.fused import fused_launch, split_of
from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.plan import ITEM_WORDS, Plan


def planned(made: Inputs, *, tamper: Callable[[Plan], None] | None = None, kernel: Any = None) -> Call:
    """Calls with a plan and scratch that were made before.

    Args:
        tamper: done to the plan when it is filled.
        kernel: in place of the fused kernel; it gets those of its constants that it knows.
    """
    plan: Plan = make_plan(made, "fused_split")
    arguments, problem = arguments_of(made)
    if tamper is not None:
        tamper(plan)
    size = max(16, plan.shape.workspace_bytes(plan.batch))
    out = torch.empty_like(made.q)
    split = split_of(plan, torch.empty(size, dtype=torch.uint8, device=out.device), out.device)
    launches = []
    for layer in range(made.layers):
        a = replace(arguments, k_cache=made.k[layer], v_cache=made.v[layer])
        launch = fused_launch(a, problem, out, None, plan.shape.config, arch_of(out.device), plan=plan, split=split)
        if kernel is not None:
            constants = {name: value for name, value in launch.constants.items() if name in kernel.arg_names}
            # As it was chosen before parts were read ahead.
            rows = plan.shape.config.block_m * launch.constants["BLOCK_DV"]
            constants["COMBINE"] = max(1, min(8, 96 * 32 * plan.shape.config.num_warps // rows))
            launch = replace(launch, kernel=kernel, constants=constants)
        launches.append(launch)

    def call(layer: int) -> torch.Tensor:
        launches[layer].run()
        return out

    return call


def _items(plan: Plan) -> torch.Tensor:
    """int32 [n, 8], a view: the items that are used."""
    words = plan.buffer[: plan.capacity * ITEM_WORDS].view(-1, ITEM_WORDS)
    return words[: int(plan.buffer[plan.items_at])]


def _nothing(plan: Plan) -> None:
    """Every program finds that it has no item: a launch, and one read."""
    _items(plan)[:, 0] = -1


def _uncombined(plan: Plan) -> None:
    """No program finds that it is the last: parts are written and counted."""
    counters = plan.counters_at
    plan.buffer[counters : counters + plan.shape.counters(plan.batch)] = -(1 << 30)


def _without_drafts(plan: Plan) -> None:
    """No part is the last one either, which alone has drafts."""
    _uncombined(plan)
    _items(plan)[:, 4] += 1


def _one_tile(plan: Plan) -> None:
    """Parts of one tile of keys."""
    items = _items(plan)
    items[:, 1] = torch.maximum(items[:, 1], items[:, 2] - plan.shape.config.block_n)


def _one_tile_uncombined(plan: Plan) -> None:
    _one_tile(plan)
    _uncombined(plan)


def _one_tile_without_drafts(plan: Plan) -> None:
    _one_tile(plan)
    _without_drafts(plan)


#: What is left out, by name.
ABLATIONS: dict[str, Callable[[Plan], None]] = {
    "launch and item": _nothing,
    "one tile, no drafts, no combination": _one_tile_without_drafts,
    "one tile, no combination": _one_tile_uncombined,
    "one tile": _one_tile,
    "no drafts, no combination": _without_drafts,
    "no combination": _uncombined,
}
