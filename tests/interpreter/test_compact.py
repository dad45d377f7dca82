"""Compaction of visible slots: against a list-by-list partition, guards, padding, mask sizes, far offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import compact
from sglang_specverify.kernels.compact import compact_visible_slots
from tests.kernels.cases import GUARD_BYTE

from .calls import launches, to_device
from .compactions import GUARD, Case, assert_partition, build, run, want

cases = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    prefix_lens=st.lists(st.sampled_from([0, 1, 2, 7, 15, 16, 17, 63, 70]), min_size=0, max_size=4).map(tuple),
    width=st.sampled_from([1, 2, 3, 4, 5, 8, 15, 16, 17, 33]),
    layout=st.sampled_from(["qlen_only", "full_mask"]),
    page_size=st.sampled_from([1, 1, 2, 16, 64]),
    slot_map=st.booleans(),
    tree=st.booleans(),
    mask_type=st.sampled_from([torch.bool, torch.uint8]),
    lens_type=st.sampled_from([torch.int32, torch.int64]),
    guard=st.sampled_from([0, 37]),
)


@given(case=cases, spare=st.integers(0, 3), padding=st.sampled_from(["none", "int", "tensor"]), data=st.data())
def test_against_lists(device: str, case: Case, spare: int, padding: str, data: Any) -> None:
    a = build(case)
    rows = len(case.prefix_lens) * case.width
    if rows == 0:
        return
    real = rows if padding == "none" else data.draw(st.integers(0, rows))
    num_rows = {"none": None, "int": real, "tensor": torch.tensor([real], dtype=torch.int32, device=device)}[padding]
    assert_partition(a, device, rows=rows + spare, real=real, num_rows=num_rows)


@pytest.mark.parametrize("width", [64, 127, 128, 255, 256])
@pytest.mark.parametrize("layout", ["qlen_only", "full_mask"])
def test_wide_trees(device: str, width: int, layout: str) -> None:
    a = build(Case(seed=3, prefix_lens=(20,), width=width, layout=layout, tree=False))
    assert_partition(a, device, rows=width, real=min(width, 40), num_rows=min(width, 40))


def test_the_reference_agrees(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a CPU without the interpreter computes the same."""
    monkeypatch.setattr(compact, "uses_triton", lambda _: False)
    for seed, layout in enumerate(["qlen_only", "full_mask"] * 4):
        a = build(Case(seed=seed, layout=layout, page_size=1 + 3 * (seed % 2), slot_map=seed > 3, tree=seed % 3 == 0))
        rows, real = 15, 15 - seed
        slots, lens = (torch.full(shape, GUARD, dtype=torch.int32) for shape in ((rows, 5), (rows,)))
        compact_visible_slots(**a, num_rows=real, out_slots=slots, out_lens=lens)
        expected = want(a, rows, real, spare=0)
        assert torch.equal(slots, expected[0][:, 3:8]) and torch.equal(lens, expected[1])


def test_a_partition_is_told_from_its_neighbours(device: str) -> None:
    """Negative controls of `assert_partition`: one bit of the mask, one slot, one row too many."""
    a = build(Case(tree=False))
    bit, slot = a["mask"].clone(), a["table"].clone()
    bit[7] = ~bit[7]
    n, row = int(a["prefix_lens"][1]), int(a["row_ids"][1])
    slot[row, n] = 4711
    got = run(a, device, 15)
    for wrong, real in (({**a, "mask": bit}, 15), ({**a, "table": slot}, 15), (a, 14)):
        expected = want(wrong, 15, real)
        assert not (torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]))


@pytest.mark.parametrize("entry", [-1, -(1 << 31), 64, 1 << 30])
@pytest.mark.parametrize("page_size", [1, 2])
def test_unseen_drafts_without_a_slot(device: str, entry: int, page_size: int) -> None:
    """Entries that nobody sees may be anything: they become -1, and the map is read neither before its start nor past its end."""
    a = build(Case(seed=2, prefix_lens=(4, 8), width=4, page_size=page_size))
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[:, :, 2:] = False
    guarded_map = torch.full((64 + 16,), GUARD, dtype=torch.int64)
    guarded_map[8:-8] = torch.arange(64).flip(0)
    table = a["table"].clone()
    for r, n in enumerate((4, 8)):
        table[a["row_ids"][r].long(), (n + 2) // page_size] = entry
        table[a["row_ids"][r].long(), (n + 3) // page_size] = entry
    a = {**a, "mask": mask, "table": table, "slot_map": guarded_map[8:-8]}
    slots, lens = run(a, device, 8)
    assert lens[2:-2].tolist() == [2] * 8
    seen = [[63 - int(table[int(a["row_ids"][r]), (n + j) // page_size]) * page_size - (n + j) % page_size for j in (0, 1)]
            for r, n in enumerate((4, 8))]  # fmt: skip
    assert slots[2:-2, 3:7].tolist() == [[*seen[r], -1, -1] for r in (0, 1) for _ in range(4)]


@pytest.mark.parametrize("lens", [(3, 1, 9, 2, 4), (0, 0, 0, 0, 0), (7, 0, 1, 30, 2)])
@pytest.mark.parametrize("layout", ["qlen_only", "full_mask"])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
def test_mask_sizes(device: str, lens: tuple[int, ...], layout: str, kind: torch.dtype) -> None:
    """bs 5, W 5, L [3, 1, 9, 2, 4]: a full mask is 220 entries. Bytes past them are never read, one entry fewer is refused."""
    case = Case(seed=1, prefix_lens=lens, layout=layout, mask_type=kind, guard=0)
    a = build(case)
    entries = sum(5 * (n + 5) for n in lens) if layout == "full_mask" else 5 * 5 * 5
    assert len(a["mask"]) == entries and (lens != (3, 1, 9, 2, 4) or layout == "qlen_only" or entries == 220)
    plain = run(a, device, 25)
    guarded = torch.cat([a["mask"].view(torch.uint8), torch.full((64,), GUARD_BYTE, dtype=torch.uint8)]).view(kind)
    assert all(map(torch.equal, plain, run({**a, "mask": guarded}, device, 25)))
    if layout == "qlen_only" or device == "cpu":
        with pytest.raises(ArgumentError, match=f"mask: got {entries - 1} entries"):
            run({**a, "mask": a["mask"][:-1]}, device, 25)


@pytest.mark.parametrize("layout", ["qlen_only", "full_mask"])
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("lens", [(7, 11), (0, 3, 1)])
def test_each_request_as_alone(device: str, layout: str, width: int, lens: tuple[int, ...]) -> None:
    """Rows are strided by W and by nothing else: each request's rows equal those of its run at bs 1."""
    a = build(Case(seed=5, prefix_lens=lens, width=width, layout=layout))
    slots, counts = run(a, device, len(lens) * width)
    for r in range(len(lens)):
        alone = {**a, "row_ids": a["row_ids"][r : r + 1], "prefix_lens": a["prefix_lens"][r : r + 1]}
        if layout == "full_mask":
            alone["mask_offsets"] = a["mask_offsets"][r : r + 2]
        else:
            alone["mask"] = a["mask"][r * width * width :]
        one_slots, one_counts = run(alone, device, width)
        here = slice(2 + r * width, 2 + (r + 1) * width)
        assert torch.equal(slots[here], one_slots[2:-2]) and torch.equal(counts[here], one_counts[2:-2])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("requests", "width", "rows"), [(38, 6, 232), (4, 5, 23), (1, 4, 7)])
def test_padded_rows_that_are_no_multiple_of_w(device: str, requests: int, width: int, rows: int, as_tensor: bool) -> None:
    """232 rows for 38 requests of 6: 228 are used and the tail is left alone, also where `num_rows` is the padded count."""
    a = build(Case(seed=6, prefix_lens=tuple(r % 7 for r in range(requests)), width=width))
    num_rows: Any = torch.tensor([rows], dtype=torch.int32, device=device) if as_tensor else rows
    assert_partition(a, device, rows=rows, real=requests * width, num_rows=num_rows)


@pytest.mark.parametrize("layout", ["qlen_only", "full_mask"])
@pytest.mark.parametrize("real", [0, 1, 2, 3])
def test_smaller_replays(device: str, layout: str, real: int) -> None:
    """Buffers of 4 requests, then `real` of them: only their rows are written, and nothing of the others is read.

    What the others hold would be far outside every buffer.
    """
    case = Case(seed=8, prefix_lens=(3, 1, 9, 2), layout=layout, page_size=2)
    a = to_device(build(case), device)
    num_rows = torch.tensor([20], dtype=torch.int32, device=device)
    slots, lens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((20, 5), (20,)))
    compact_visible_slots(**a, num_rows=num_rows, out_slots=slots, out_lens=lens)
    first = slots.clone(), lens.clone()
    slots.fill_(GUARD), lens.fill_(GUARD)
    num_rows.fill_(5 * real)
    a["prefix_lens"][real:] = 1 << 40
    a["row_ids"][real:] = -(1 << 30)
    if layout == "full_mask":
        a["mask_offsets"][real + 1 :] = 1 << 50
    compact_visible_slots(**a, num_rows=num_rows, out_slots=slots, out_lens=lens)
    for got, before in zip((slots, lens), first, strict=True):
        assert torch.equal(got[: 5 * real], before[: 5 * real])
        assert bool((got[5 * real :] == GUARD).all())


def test_no_request(device: str) -> None:
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    slots = torch.full((3, 4), GUARD, dtype=torch.int32, device=device)
    with launches() as seen:
        compact_visible_slots(
            torch.zeros(0, dtype=torch.bool, device=device), torch.zeros(1, 4, dtype=torch.int32, device=device), empty, empty,
            num_draft_tokens=4, mask_layout="qlen_only", out_slots=slots, out_lens=slots[:, 0],
        )  # fmt: skip
    assert not seen and bool((slots == GUARD).all())


def test_mask_offsets_beyond_32_bits(device: str) -> None:
    """A mask whose second request starts past 2**31: as at low offsets. On a CPU untouched pages take no memory."""
    a = build(Case(seed=9, prefix_lens=(3, 4), layout="full_mask", mask_type=torch.uint8, guard=0))
    far = (1 << 31) + 12345
    low, high = a["mask_offsets"][1:].tolist()
    mask = torch.empty(far + high - low, dtype=torch.uint8)
    mask[:low], mask[far:] = a["mask"][:low], a["mask"][low:]
    offsets = torch.tensor([0, far, far + high - low])
    plain, moved = run(a, device, 10), run({**a, "mask": mask, "mask_offsets": offsets}, device, 10)
    assert all(map(torch.equal, plain, moved))


def test_table_and_output_strides_beyond_32_bits(device: str) -> None:
    """Row times stride passes 2**31 in the table and in the output."""
    a = to_device(build(Case(seed=10, prefix_lens=(2, 5), width=3)), device)
    stride = 1 << 29
    columns = a["table"].shape[1]
    table = torch.empty(5 * stride + columns, dtype=torch.int32, device=device).as_strided((6, columns), (stride, 1))
    slots = torch.empty(5 * stride + 3, dtype=torch.int32, device=device).as_strided((6, 3), (stride, 1))
    near = torch.empty(6, 3, dtype=torch.int32, device=device)
    lens = torch.empty(6, dtype=torch.int32, device=device)
    compact_visible_slots(**a, out_slots=near, out_lens=lens)
    table[4:6] = a["table"][a["row_ids"].long()]
    moved = {**a, "table": table, "row_ids": torch.tensor([4, 5], dtype=torch.int32, device=device)}
    compact_visible_slots(**moved, out_slots=slots, out_lens=lens)
    assert torch.equal(slots, near)
