"""What a launch configuration may change of the divided kernel: how it loops over keys and parts, and the shortest part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_specverify.kernels.fused import fused_launch
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.plan import DETERMINISTIC_CHUNK
from tests.kernels.cases import Config

from .bounds import ROUNDOFF, checked, expect
from .calls import call, check, launches, to_device
from .plans import block_n, divided, even, items, plan_for
from .strategies import draft_call, verify_call

#: Prefixes that end before, at and behind the end of a tile of 16 keys, and none.
LENS = (47, 16, 33, 0)
BASE = Config(
    prefix_lens=LENS, widths=4, kind="chain", q_heads=2, kv_heads=1, head_dim=16, v_head_dim=16, page_size=1,
    sinks=True, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
)  # fmt: skip


def build(c: Config, device: str) -> dict[str, Any]:
    return to_device(draft_call(c, 3, 1, 2) if c.kind == "branches" else verify_call(c), device)


def config_of(a: dict[str, Any], **changes: int) -> LaunchConfig:
    return replace(plan_for(a, divide=True).shape.config, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "divide", "ahead"),
    [
        ("chain", {}, True, True),
        ("chain", {"page_size": 16, "slot_map": True, "strided": True}, True, True),
        ("chain", {"page_size": 4, "widths": (3, 0, 5, 2)}, False, True),
        ("chain", {"softcap": 5.0, "slot_map": True}, False, True),
        ("branches", {"page_size": 4}, True, True),
        ("branches", {"slot_map": True, "softcap": 5.0}, False, True),
        # These read slots where they need them: a tree its masks too, and a window says which keys there are.
        ("qlen_only", {}, True, False),
        ("chain", {"window": 17}, True, False),
    ],
)
def test_loops(device: str, kind: str, changes: dict[str, Any], divide: bool, ahead: bool) -> None:
    """Full tiles of the prefix in the loop with masks, or in one of their own with the slots of the rest read before."""
    a = build(BASE.but(kind=kind, **changes), device)
    for peel in (0, 2):
        plan = plan_for(a, divide=divide, config=config_of(a, peel=peel))
        with launches() as seen:
            check(a, variant="fused_split" if divide else "fused", plan=plan)
        wanted = (peel == 2 and a["window"] < 0, peel == 2 and ahead)
        assert (seen[-1].constants["PEEL"], seen[-1].constants["EDGE_AHEAD"]) == wanted


@pytest.mark.parametrize("kind", ["chain", "branches"])
def test_loops_in_parts(device: str, kind: str) -> None:
    """Empty parts, parts that end at a tile, and the last one with the drafts alone."""
    a = build(BASE.but(kind=kind, prefix_lens=(47, 64, 0)), device)
    plan = divided(a, [even(n, 4, block_n(a)) for n in (47, 64, 0)])
    for peel in (0, 2):
        plan = replace(plan, shape=replace(plan.shape, config=config_of(a, peel=peel)))
        check(a, variant="fused_split", plan=plan, splits=4)


@pytest.mark.parametrize(("registers", "ahead"), [(0, True), (64, False)])
def test_parts_are_combined_in_rounds(device: str, registers: int, ahead: bool) -> None:
    """Fewer parts than a round takes, as many, and more; and no bit depends on who comes last."""
    lens = (180, 60, 0, 30)
    a = build(BASE.but(prefix_lens=lens), device)
    parts = [even(n, count, block_n(a)) for n, count in zip(lens, (9, 4, 1, 2), strict=True)]
    config = config_of(a, max_registers=registers)
    expected = expect(a, splits=9)
    outs = []
    for order in (range(16), reversed(range(16))):
        plan = divided(a, parts, order=list(order))
        plan = replace(plan, shape=replace(plan.shape, config=config))
        with launches() as seen:
            check(a, variant="fused_split", plan=plan, expected=expected)
        assert seen[-1].constants["PARTS_AHEAD"] == ahead
        outs.append(call(a, variant="fused_split", plan=plan))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_in_the_type_of_q(device: str, dtype: torch.dtype) -> None:
    """Each part's output is rounded once more: that adds the type's unit roundoff times A at the most."""
    a = build(BASE.but(prefix_lens=(100, 60, 0), q_dtype=dtype, cache_dtype=dtype), device)
    plan = divided(a, [even(n, count, block_n(a)) for n, count in zip((100, 60, 0), (5, 3, 1), strict=True)])
    plan = replace(plan, shape=replace(plan.shape, config=config_of(a, half_parts=1)))
    exact = expect(a, splits=5)
    expected = replace(exact, out_bound=exact.out_bound + ROUNDOFF[dtype][0] * exact.sensitivity)
    with launches() as seen:
        check(a, variant="fused_split", plan=plan, expected=expected)
    assert seen[-1].arguments["partial_out"].dtype == dtype


def test_parts_are_read_ahead_where_registers_allow(device: str) -> None:
    """Of few rows; a second program on a multiprocessor, or a limit, leaves fewer registers, and fewer parts stand together."""
    a = build(BASE.but(head_dim=128, v_head_dim=128, prefix_lens=(20,)), device)

    def constants(config: LaunchConfig) -> tuple[bool, int]:
        with launches() as seen:
            call(a, variant="fused_split", plan=plan_for(a, divide=True, config=config))
        return seen[-1].constants["PARTS_AHEAD"], seen[-1].constants["COMBINE"]

    one = LaunchConfig(16, 16, 8, 1)
    four_warps = replace(one, num_warps=4)
    assert [constants(each) for each in (one, four_warps, replace(four_warps, ctas_per_sm=2))] == [(True, 1)] * 3
    changes = ({"ctas_per_sm": 2}, {"max_registers": 128}, {"block_m": 64}, {"block_m": 128})
    assert [constants(replace(one, **change)) for change in changes] == [(False, 8), (False, 8), (False, 3), (False, 1)]


def test_shortest_part(device: str) -> None:
    """Twice as many parts where half as short ones are allowed; deterministic parts have a length of their own."""
    a = build(BASE.but(prefix_lens=(1100,)), device)

    def lengths(**options: Any) -> list[int]:
        return [int(word[2] - word[1]) for word in items(plan_for(a, divide=True, **options)) if word[0] >= 0]

    short = config_of(a, min_part=128)
    assert lengths() == [256, 256, 256, 256, 76] and lengths(config=short) == [256, 256, 256, 256, 76]
    assert lengths(programs=16) == [256, 256, 256, 256, 76]
    assert lengths(programs=16, config=short) == [128] * 8 + [76]
    assert max(lengths(deterministic=True, config=short)) > 128 and DETERMINISTIC_CHUNK > 128


def test_early_launch_is_for_hopper_and_later(device: str) -> None:
    """And for this kernel, which waits in its first line: another with the same configuration would read too early."""
    a, problem = checked(build(BASE, device))
    config = LaunchConfig(16, 16, 4, 2, pdl=1)
    for arch, early in (("sm_90", True), ("sm_100", True), ("sm_80", False), ("gfx950", False), ("none", False)):
        launch = fused_launch(a, problem, a.q, None, config, arch)
        assert (launch.constants["PDL"], launch.options.get("launch_pdl", False)) == (early, early)
        assert "launch_pdl" not in config.options(arch)
    assert not fused_launch(a, problem, a.q, None, replace(config, pdl=0), "sm_90").constants["PDL"]
