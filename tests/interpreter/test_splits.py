"""A prefix divided over programs: any division, in any order of arrival, with empty parts, gives the undivided result."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import Config

from .bounds import expect
from .calls import call, check, launches, names, to_device
from .plans import attends, block_n, counters, divided, even, items, rested
from .strategies import configs, draft_call, outputs, verify_call

BASE = Config(
    prefix_lens=(140, 40, 0), widths=4, kind="qlen_only", q_heads=2, kv_heads=1, head_dim=32, v_head_dim=32, page_size=16,
    sinks=True, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
)  # fmt: skip

KINDS = {
    "chain": {"kind": "chain"},
    "qlen_only": {"kind": "qlen_only"},
    "full_mask": {"kind": "full_mask"},
    "ragged": {"kind": "full_mask", "widths": (2, 5, 0)},
    "branches": {"kind": "branches"},
}


def build(c: Config, device: str) -> dict[str, Any]:
    return to_device(draft_call(c, 3, 1, 2) if c.kind == "branches" else verify_call(c), device)


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_parts(device: str, kind: str, parts: int) -> None:
    """Shorter prefixes than parts: some are empty, for L 0 all. Who the table says combines them, and the last program."""
    a = build(BASE.but(**KINDS[kind]), device)
    starts = [even(n, parts, block_n(a)) for n in (140, 40, 0)]
    shipped = divided(a, starts).shape.config.combine
    for combine in dict.fromkeys((shipped, "last" if parts == 3 else shipped)):
        plan = divided(a, starts, combine=combine)
        check(a, variant="fused_split", plan=plan, splits=parts)
        assert counters(plan).tolist() == rested(plan), "the counters are ready for the next layer"


@given(
    c=configs(("chain", "qlen_only", "full_mask")),
    where=outputs(),
    parts=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15 if not torch.cuda.is_available() else 60)
def test_any_division_in_any_order(device: str, c: Config, where: dict[str, Any], parts: list[int], seed: int) -> None:
    a = to_device(verify_call(c), device)
    align, chance = block_n(a), random.Random(seed)
    starts = []
    for n, count in zip(c.prefix_lens, parts, strict=False):
        starts.append([0, *sorted(chance.randint(0, n // align) * align for _ in range(count - 1))])
    order = list(range(sum(map(len, starts))))
    chance.shuffle(order)
    check(a, **where, variant="fused_split", plan=divided(a, starts, order=order), splits=5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_order_of_arrival_changes_no_bit(device: str, order: list[int]) -> None:
    """Whichever part comes last combines them, always from the first to the last."""
    a = build(BASE.but(prefix_lens=(140,), q_heads=4, kv_heads=2), device)
    starts = [even(140, 3, block_n(a))]
    want = call(a, variant="fused_split", plan=divided(a, starts, combine="last"))
    got = call(a, variant="fused_split", plan=divided(a, starts, order=order, combine="last"))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("filling", [0xFF, 0x7F, 0x00])
@pytest.mark.parametrize("parts", [2, 5])
def test_workspace_is_undefined_on_entry(device: str, parts: int, filling: int) -> None:
    """NaN of either sign, or what another layer left: nothing that was not written in this call is read."""
    a = build(BASE, device)
    plan = divided(a, [even(n, parts, block_n(a)) for n in (140, 40, 0)])
    size = plan.shape.workspace_bytes(plan.batch)
    workspace = torch.full((size + 4096,), 0xA5, dtype=torch.uint8, device=device)
    workspace[:size] = filling
    expected = expect(a, splits=parts)
    for _ in range(2):
        check(a, variant="fused_split", plan=plan, workspace=workspace[:size], expected=expected)
    assert (workspace[size:] == 0xA5).all(), "written past the workspace"


def test_layers_share_a_plan(device: str) -> None:
    """The same plan, workspace and step; other Q, K and V: no second planning launch, and the counters come back to 0."""
    a = build(BASE, device)
    plan = divided(a, [even(n, 3, block_n(a)) for n in (140, 40, 0)])
    workspace = torch.full((plan.shape.workspace_bytes(plan.batch),), 0xFF, dtype=torch.uint8, device=device)
    before = plan.buffer.clone()
    for layer in range(3):
        b = {**a, "q": a["q"] * (layer + 1), "v_cache": a["v_cache"].flip(2), "k_scale": 0.3 * layer}
        with launches() as seen:
            check(b, variant="fused_split", plan=plan, workspace=workspace, splits=3)
        assert names(seen) == attends(plan)
        assert torch.equal(plan.buffer, before)


@pytest.mark.parametrize("window", [0, 17, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_outside_the_window(device: str, kind: str, window: int) -> None:
    """Parts that lie before every row's window contribute nothing, and their partial results are still defined."""
    a = build(BASE.but(**KINDS[kind], window=window), device)
    plan = divided(a, [even(n, 4, block_n(a)) for n in (140, 40, 0)])
    size = plan.shape.workspace_bytes(plan.batch)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    check(a, variant="fused_split", plan=plan, workspace=workspace, splits=4)


def test_unused_items_do_nothing(device: str) -> None:
    a = build(BASE, device)
    plan = divided(a, [[0], [0], [0]])
    assert (items(plan)[3:, 0] == -1).all() and plan.capacity > 3
    check(a, variant="fused_split", plan=plan)
