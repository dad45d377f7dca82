"""The arms of `benchmarks.latency`: the divided kernel with each way to combine its parts, that of another commit, and plans that
leave out a part of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks.arms import Call, arguments_of, make_plan
from benchmarks.inputs import Inputs
from sglang_specverify.errors import ArgumentError
from sglang_specverify.hardware import detect
from sglang_specverify.kernels.combine_parts import combinations
from sglang_specverify.kernels.fused import fused_launch, split_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig, arch_of
from sglang_specverify.kernels.plan import ALIGN, ITEM_WORDS, MIN_CHUNKS, Plan
from sglang_specverify.kernels.specialized import ARCH, specialized_launch


def planned(
    made: Inputs,
    *,
    variant: str = "fused_split",
    combine: str = "",
    early: bool = True,
    least: int | None = None,
    changes: Mapping[str, int] | None = None,
    tamper: Callable[[Plan], None] | None = None,
    kernel: Any = None,
) -> Call:
    """Calls with a plan and scratch that were made before.

    Args:
        variant: "fused_split" or "specialized_split".
        combine: who combines the parts, "last" or "launch"; as the tables say where empty.
        early: a second launch may start before the first one has ended, where the device can do that.
        least: keys of the shortest part that is worth a program; what the planner thinks where None.
        changes: fields of the launch that are other than the tables say.
        tamper: done to the plan when it is filled.
        kernel: in place of the fused kernel; it gets those of its constants that it knows.
    """
    with _shortest_part(least):
        plan: Plan = make_plan(made, variant)
        config = replace(plan.shape.config, combine=combine or plan.shape.config.combine, **(changes or {}))
        if config != plan.shape.config:
            plan = make_plan(made, variant, config)
    arguments, problem = arguments_of(made)
    if tamper is not None:
        tamper(plan)
    size = max(16, plan.shape.workspace_bytes(plan.batch))
    out = torch.empty_like(made.q)
    split = split_of(plan, torch.empty(size, dtype=torch.uint8, device=out.device), out.device)
    layers = []
    for layer in range(made.layers):
        a = replace(arguments, k_cache=made.k[layer], v_cache=made.v[layer])
        arch, config = arch_of(out.device), plan.shape.config
        if variant == "fused_split":
            first = fused_launch(a, problem, out, None, config, arch, plan=plan, split=split)
        else:
            arch, programs = ARCH, detect().multiprocessors
            first = specialized_launch(a, problem, out, None, config, programs=programs, plan=plan, split=split)
        launches = [first, *combinations(a, problem, out, None, arch, split)]
        if not early:
            launches = [_in_order(launch) for launch in launches]
        if kernel is not None:
            (launch,) = launches
            constants = {name: value for name, value in launch.constants.items() if name in kernel.arg_names}
            # As it was chosen before parts were read ahead.
            rows = plan.shape.config.block_m * launch.constants["BLOCK_DV"]
            constants["COMBINE"] = max(1, min(8, 96 * 32 * plan.shape.config.num_warps // rows))
            launches = [replace(launch, kernel=kernel, constants=constants)]
        layers.append(launches)

    def call(layer: int) -> torch.Tensor:
        for launch in layers[layer]:
            launch.run()
        return out

    return call


def changes_of(text: str) -> dict[str, int]:
    """Fields of a launch and their values, `block_n=64,num_stages=5`.

    Raises:
        ArgumentError: another form, or no number of a launch.
    """
    known = [field.name for field in fields(LaunchConfig) if field.type == "int"]
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value.isdecimal():
            raise ArgumentError("config", repr(text), f"NAME=NUMBER,... of {', '.join(known)}")
        found[name] = int(value)
    return found


@contextmanager
def _shortest_part(keys: int | None) -> Iterator[None]:
    before = dict(MIN_CHUNKS)
    MIN_CHUNKS.update({who: keys or least for who, least in before.items()})
    try:
        yield
    finally:
        MIN_CHUNKS.update(before)


def _in_order(launch: Launch) -> Launch:
    """The launch without the attribute that lets it start early; what its kernel then waits for has ended."""
    return replace(launch, options={name: value for name, value in launch.options.items() if name != "launch_pdl"})


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


#: Parts of twice the shortest length that there can be.
LONGER = 2 * ALIGN

#: What is left out, by name.
ABLATIONS: dict[str, Callable[[Plan], None]] = {
    "launch and item": _nothing,
    "one tile, no drafts, no combination": _one_tile_without_drafts,
    "one tile, no combination": _one_tile_uncombined,
    "one tile": _one_tile,
    "no drafts, no combination": _without_drafts,
    "no combination": _uncombined,
}
