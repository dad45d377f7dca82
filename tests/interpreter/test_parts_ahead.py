"""The parts of a divided prefix, read by the last program ahead of their combination or behind each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_specverify.kernels.launch import LaunchConfig
from tests.kernels.cases import Config

from .bounds import expect
from .calls import call, check, launches, to_device
from .plans import block_n, divided, even, plan_for
from .strategies import verify_call

BASE = Config(
    prefix_lens=(20,), widths=4, kind="chain", q_heads=2, kv_heads=1, head_dim=16, v_head_dim=16, page_size=1,
    sinks=True, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize(("registers", "ahead"), [(0, True), (64, False)])
def test_parts_are_combined_in_rounds(device: str, registers: int, ahead: bool) -> None:
    """Fewer parts than a round takes, as many, and more; and no bit depends on who comes last."""
    lens = (180, 60, 0, 30)
    a = to_device(verify_call(BASE.but(prefix_lens=lens)), device)
    parts = [even(n, count, block_n(a)) for n, count in zip(lens, (9, 4, 1, 2), strict=True)]
    config = replace(plan_for(a, divide=True).shape.config, max_registers=registers, combine="last")
    expected = expect(a, splits=9)
    outs = []
    for order in (range(16), reversed(range(16))):
        plan = divided(a, parts, order=list(order), combine="last")
        plan = replace(plan, shape=replace(plan.shape, config=config))
        with launches() as seen:
            check(a, variant="fused_split", plan=plan, expected=expected)
        assert seen[-1].constants["PARTS_AHEAD"] == ahead
        outs.append(call(a, variant="fused_split", plan=plan))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_parts_are_read_ahead_where_registers_allow(device: str) -> None:
    """Of few rows; a second program on a multiprocessor, or a limit, leaves fewer registers, and fewer parts stand together."""
    a = to_device(verify_call(BASE.but(head_dim=128, v_head_dim=128)), device)

    def constants(config: LaunchConfig) -> tuple[bool, int]:
        with launches() as seen:
            call(a, variant="fused_split", plan=plan_for(a, divide=True, config=config))
        return seen[-1].constants["PARTS_AHEAD"], seen[-1].constants["COMBINE"]

    one = LaunchConfig(16, 16, 8, 1)
    four_warps = replace(one, num_warps=4)
    assert [constants(each) for each in (one, four_warps, replace(four_warps, ctas_per_sm=2))] == [(True, 1)] * 3
    changes = ({"ctas_per_sm": 2}, {"max_registers": 128}, {"block_m": 64}, {"block_m": 128})
    assert [constants(replace(one, **change)) for change in changes] == [(False, 8), (False, 8), (False, 3), (False, 1)]
