"""The tensors of a point are what they claim to be, and the gate tells a right output from those of typical faults."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from benchmarks import gate, inputs
from benchmarks.inputs import Inputs
from benchmarks.points import DRAFT_STEP, Point, tiny
from sglang_specverify import kernels

CPU = torch.device("cpu")
POINTS = {point.name: point for point in tiny()}


def reference(made: Inputs, **changes: object) -> torch.Tensor:
    """Layer 0 through the package's own FP64 definition."""
    point = made.point
    options = {
        "page_size": point.page_size, "window": point.window, "sinks": made.sinks, "k_scale": made.k_scale,
        "v_scale": made.v_scale, "variant": "reference",
    }  # fmt: skip
    shared = (made.q, made.k[0], made.v[0], made.table, made.row_ids, made.prefix_lens)
    if made.draft_slots is not None:
        out = kernels.draft_decode_attention(*shared, made.draft_slots, topk=point.width, step=DRAFT_STEP, **options | changes)
    else:
        if point.kind == "tree":
            options |= {"mask": made.mask, "positions": made.positions}
        out = kernels.verify_attention(*shared, num_draft_tokens=point.width, **options | changes)
    assert isinstance(out, torch.Tensor)
    return out


def every_row(made: Inputs) -> list[gate.Sample]:
    rows = made.point.batch * made.point.width
    return [gate.Sample(row // made.point.width, row, head) for row in range(rows) for head in range(made.point.q_heads)]


@pytest.mark.parametrize("name", POINTS)
def test_the_gate_agrees_with_the_definition(name: str) -> None:
    made = inputs.make(POINTS[name], CPU)
    # fp16 outputs round to 2^-11 of a value at most, so a row differs by no more than that.
    assert gate.error(made, reference(made), every_row(made)) < 2**-11


def faults(made: Inputs) -> dict[str, Inputs | torch.Tensor]:
    """Outputs of implementations that read something wrong."""
    assert made.mask is not None
    width, length = made.point.width, made.lengths[0]
    sibling = made.mask.clone()
    sibling[0, 1, 0] = False
    extra = made.mask.clone()
    extra[0, 0, width - 1] = True
    short, moved = made.prefix_lens.clone(), made.table.clone()
    short[0] -= 1
    row = int(made.row_ids[0])
    moved[row, 0] = moved[row, length // 2]
    return {
        "a parent missed": reference(replace(made, mask=sibling)),
        "a stranger seen": reference(replace(made, mask=extra)),
        "the last prefix key missed": reference(replace(made, prefix_lens=short)),
        "a stale slot": reference(replace(made, table=moved)),
        "not a number": torch.full_like(made.q, torch.nan),
        "a row of another": reference(made).roll(1, 0),
    }


@pytest.mark.parametrize("length", [40, 2000])
def test_the_gate_rejects_typical_faults_however_long_the_prefix(length: int) -> None:
    made = inputs.make(Point("tree", 1, 6, length, q_heads=4, kv_heads=2, head_dim=64), CPU)
    for fault, out in faults(made).items():
        assert gate.error(made, out, every_row(made)) > 3 * gate.LIMIT, fault


def test_the_gate_compares_a_prefix_pass_with_the_prefix() -> None:
    made = inputs.make(POINTS["tree bs 2 W 6 L 40 (4/2/64)"], CPU)
    nothing = torch.zeros_like(made.mask)
    prefix = reference(replace(made, mask=nothing))
    assert gate.error(made, prefix, every_row(made), prefix_only=True) < 2**-11
    assert gate.error(made, prefix, every_row(made)) > 3 * gate.LIMIT


def test_samples_hold_the_first_and_the_last_row() -> None:
    made = inputs.make(POINTS["tree bs 2 W 6 L 40 (4/2/64)"], CPU)
    chosen = gate.samples(made)
    assert chosen[:2] == [gate.Sample(0, 0, 0), gate.Sample(1, 11, 3)]
    assert len(chosen) == 8 and all(sample.row // 6 == sample.request for sample in chosen)


@pytest.mark.parametrize("name", POINTS)
def test_slots_are_one_for_each_position_of_each_request(name: str) -> None:
    made = inputs.make(POINTS[name], CPU)
    point = made.point
    drafts = point.width * (DRAFT_STEP + 1) if point.kind == "draft" else point.width
    used = []
    for request, length in enumerate(made.lengths):
        for position in range(length + drafts):
            page = int(made.table[made.row_ids[request], position // point.page_size])
            used.append(page * point.page_size + position % point.page_size)
            assert used[-1] == int(made.slots[request, position])
    assert len(set(used)) == len(used) and max(used) < made.k.shape[1]
    assert used != sorted(used)


def test_trees_are_trees() -> None:
    for seed in range(20):
        mask, levels = inputs.tree(32, 5, random.Random(seed))
        assert max(levels) == 4 and levels[0] == 0
        for node in range(32):
            ancestors = mask[node].nonzero().flatten().tolist()
            assert ancestors[0] == 0 and ancestors[-1] == node and len(ancestors) == levels[node] + 1
            parent = ancestors[-2] if node else None
            assert parent is None or mask[node, :node].equal(mask[parent, :node])


def test_planted_keys_carry_about_half_of_every_row() -> None:
    made = inputs.make(Point("tree", 1, 6, 4000, q_heads=4, kv_heads=2, head_dim=64), CPU)
    assert made.mask is not None
    length = made.lengths[0]
    k = made.k[0, made.slots[0]].double().repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", made.q.double(), k) * made.sm_scale
    visible = torch.cat([torch.ones(6, length, dtype=torch.bool), made.mask[0]], 1)
    weights = scores[..., : length + 6].masked_fill(~visible, -torch.inf).softmax(-1)
    drafts = weights[..., length:].sum(-1)
    needles = weights[..., :length].topk(10).values.sum(-1)
    # A root sees one draft among ten planted keys, whose weights vary by a factor of e^0.5.
    assert float(drafts.min()) > 0.01 and float(drafts.max()) < 0.8
    assert 0.3 < float((drafts + needles).mean()) < 0.7


def test_layers_exceed_the_cache_twice_but_not_the_pool() -> None:
    small = Point("tree", 1, 4, 128)
    slots = inputs.pool_slots(small)
    assert inputs.layers_for(small, slots) * 132 * 4096 >= inputs.ROTATED_BYTES
    assert inputs.layers_for(small, slots) * slots * 4096 <= inputs.POOL_BYTES
    large = Point("tree", 64, 128, 131072)
    assert inputs.layers_for(large, inputs.pool_slots(large)) == 1
    assert inputs.pool_slots(Point("tree", 8, 64, 2048, page_size=64)) % 64 == 0


def test_inputs_are_the_same_for_the_same_seed() -> None:
    first, second = (inputs.make(POINTS["tree bs 2 W 6 L 40 (4/2/64)"], CPU, seed=3) for _ in range(2))
    assert torch.equal(first.q, second.q) and torch.equal(first.k, second.k) and torch.equal(first.table, second.table)
