"""The page-table kernel: both sources, padding, the last partial page, the window pool, the limits, 64-bit offsets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import page_table
from sglang_specverify.kernels.page_table import (
    PageTableArguments,
    page_table_launch,
    page_table_of_ragged,
    page_table_of_rows,
)
from tests.kernels.cases import generator

from .calls import launches, names, to_device

GUARD = 0x5A5A5A5A
CONTEXT = 80


def build(
    seed: int, lens: tuple[int, ...], page_size: int, *, ragged: bool, window: bool, extra: int = 0,
    kind: torch.dtype = torch.int32, lens_type: torch.dtype = torch.int64,
) -> dict[str, Any]:  # fmt: skip
    """Slots on shuffled pages from page 1 on; `lens` are what is read in all, with garbage behind them."""
    gen, bs = generator(seed), len(lens)
    per_row = -(-CONTEXT // page_size)
    pages = torch.randperm(bs * per_row, generator=gen).view(bs, per_row) + 1
    slots = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1)[:, :CONTEXT]
    count = int((pages.max() + 1) * page_size)
    found: dict[str, Any] = {"page_size": page_size}
    if window:
        moved = torch.randperm(count // page_size, generator=gen)[:, None] * page_size + torch.arange(page_size)
        found["slot_map"] = moved.flatten()
    if ragged:
        starts = [7]
        for n in lens:
            starts.append(starts[-1] + n)
        flat = torch.full((starts[-1] + 5,), -9, dtype=torch.int64)
        for r, n in enumerate(lens):
            flat[starts[r] : starts[r + 1]] = slots[r, :n]
        return found | {"slots": flat.to(kind), "starts": torch.tensor(starts, dtype=lens_type)}
    rows = torch.randperm(bs + 3, generator=gen)[:bs]
    table = torch.full((bs + 3, CONTEXT), -9, dtype=torch.int64)
    for r, n in enumerate(lens):
        table[rows[r], :n] = slots[r, :n]
    lengths = torch.tensor([n - extra for n in lens], dtype=lens_type)
    return found | {"req_to_token": table.to(kind), "req_pool_indices": rows, "seq_lens": lengths, "extra": extra}


def lists(a: dict[str, Any]) -> list[list[int]]:
    """Each row's slots, as Python numbers."""
    if "starts" in a:
        starts = a["starts"].tolist()
        return [a["slots"][one:two].tolist() for one, two in itertools.pairwise(starts)]
    ends = (a["seq_lens"] + a["extra"]).tolist()
    return [a["req_to_token"][row, :end].tolist() for row, end in zip(a["req_pool_indices"].tolist(), ends, strict=True)]


def run(a: dict[str, Any], device: str, width: int, *, spare: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Table, window table and lengths, each with a guard around what may be written; one launch."""
    bs = len(lists(a))
    bases = [torch.full((bs + spare + 2, width + 8), GUARD, dtype=torch.int32, device=device) for _ in range(2)]
    lens = torch.full((bs + spare + 2,), GUARD, dtype=torch.int64, device=device)
    outs = [base[1:-1, 4:-4] for base in bases]
    more = {"table": outs[0], "row_lens": lens[1:-1]} | ({"window_table": outs[1]} if "slot_map" in a else {})
    operation = page_table_of_ragged if "starts" in a else page_table_of_rows
    with launches() as seen:
        got = operation(**to_device(a, device), **more)
    assert names(seen) == ["page_table_kernel"] and got is outs[0]
    return bases[0].cpu(), bases[1].cpu(), lens.cpu()


def check(a: dict[str, Any], device: str, width: int) -> None:
    page, rows = a["page_size"], lists(a)
    table, window, lens = run(a, device, width)
    want = [torch.full_like(table, GUARD) for _ in range(2)]
    want_lens = torch.full_like(lens, GUARD)
    for r, slots in enumerate(rows):
        want[0][1 + r, 4:-4] = want[1][1 + r, 4:-4] = 0
        want_lens[1 + r] = len(slots)
        for column, slot in enumerate(slots[::page]):
            want[0][1 + r, 4 + column] = slot // page
            want[1][1 + r, 4 + column] = int(a["slot_map"][slot]) // page if "slot_map" in a else 0
    assert torch.equal(table, want[0])
    assert torch.equal(lens, want_lens)
    assert torch.equal(window, want[1]) if "slot_map" in a else bool((window == GUARD).all())


@pytest.mark.parametrize(
    ("page_size", "ragged", "window", "kind", "lens_type"),
    [
        (1, True, False, torch.int32, torch.int32),
        (1, False, True, torch.int64, torch.int64),
        (16, True, True, torch.int32, torch.int64),
        (16, False, False, torch.int32, torch.int32),
        (64, True, False, torch.int64, torch.int32),
        (64, False, True, torch.int32, torch.int64),
    ],
)
def test_against_lists(
    device: str, page_size: int, ragged: bool, window: bool, kind: torch.dtype, lens_type: torch.dtype
) -> None:
    """A row of nothing, a partly filled last page, whole pages, the context's last position; a table of a fixed width."""
    a = build(1, (5, 16, CONTEXT, 33, 4), page_size, ragged=ragged, window=window, extra=0 if ragged else 4, kind=kind,
              lens_type=lens_type)  # fmt: skip
    check(a, device, -(-CONTEXT // page_size) + 3)


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_entry_lies_inside_the_pool(device: str, page_size: int) -> None:
    """Also where a row is empty, and where a map answers -1, which at page size 16 is page 0 by the division alone."""
    a = build(2, (40, 0, 17), page_size, ragged=True, window=True)
    a["slot_map"][a["slots"][7]] = -1
    for table in run(a, device, 40)[:2]:
        inside = table[1:4, 4:-4]
        assert bool(((inside >= 0) & (inside < len(a["slot_map"]) // page_size)).all())


@pytest.mark.parametrize("ragged", [False, True])
def test_sources_with_strides_of_their_own(device: str, ragged: bool) -> None:
    """Every list as a column of a wider tensor, what lies between its entries being of nobody."""
    a = to_device(build(9, (5, 33, 16), 1, ragged=ragged, window=True), device)
    near = [torch.zeros(3, 40, dtype=torch.int32, device=device) for _ in range(2)]
    far = [torch.zeros(3, 40, dtype=torch.int32, device=device) for _ in range(2)]
    lens, wide = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)

    def spread(x: Any) -> Any:
        return torch.stack([x, torch.full_like(x, 3)], dim=-1)[..., 0] if isinstance(x, torch.Tensor) else x

    operation = page_table_of_ragged if ragged else page_table_of_rows
    operation(**a, table=near[0], window_table=near[1], row_lens=lens)
    operation(**{name: spread(x) for name, x in a.items()}, table=far[0], window_table=far[1], row_lens=wide[:, 0])
    assert all(torch.equal(one, two) for one, two in zip(near, far, strict=True))
    assert wide.tolist() == [[n, 0] for n in lens.tolist()] and lens.tolist() == [5, 33, 16]


def test_a_shorter_step_leaves_pages_of_the_pool_behind_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two entries: the rest of the last block is page 0, and the blocks behind it hold what they held."""
    monkeypatch.setattr(page_table, "_BLOCK", 2)
    table = torch.zeros(1, 6, dtype=torch.int32, device=device)
    slots = torch.arange(6, 12, dtype=torch.int32, device=device)
    for n, want in ((6, [6, 7, 8, 9, 10, 11]), (3, [6, 7, 8, 0, 10, 11]), (0, [0, 0, 8, 0, 10, 11])):
        page_table_of_ragged(slots, torch.tensor([0, n], device=device), page_size=1, table=table)
        assert table[0].tolist() == want


@pytest.mark.parametrize("programs", [1, 2])
def test_rows_longer_than_its_programs(device: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_BLOCK", 16), ("_PROGRAMS", 1), ("_ROW_PROGRAMS", programs)):
        monkeypatch.setattr(page_table, name, value)
    a = build(3, (CONTEXT, 15, 48), 1, ragged=False, window=False)
    table, _, _ = run(a, device, CONTEXT)
    for r, slots in enumerate(lists(a)):
        assert table[1 + r, 4 : 4 + len(slots)].tolist() == slots


@pytest.mark.parametrize("page_size", [1, 16])
def test_at_the_context_limit(device: str, page_size: int) -> None:
    """Context 64 and 4 drafts behind a prefix of 63: 67 positions need five pages of 16, and a table of four is refused."""
    a = build(4, (67, 5), page_size, ragged=False, window=False, extra=4)
    wide = -(-67 // page_size)
    check(a, device, wide)
    if device == "cpu":
        with pytest.raises(ArgumentError, match=rf"table.*{wide - 1} columns.*{wide} or more: row 0 has 67 positions"):
            run(a, device, wide - 1)


def test_garbage_on_the_device_stays_inside(device: str) -> None:
    """Values that only the host could refuse, given to the launch itself: nothing is read or written beside its tensors."""
    guard = torch.full((4, 12), GUARD, dtype=torch.int32, device=device)
    source = torch.full((2, 20), -1, dtype=torch.int32, device=device)
    lens = torch.zeros(2, dtype=torch.int64, device=device)
    long = torch.tensor([1 << 40, -5], device=device)
    rows = torch.tensor([0, 1], device=device)
    ragged = {"starts": torch.tensor([3, 1 << 40, 5], device=device)}
    for form in ({"row_ids": rows, "lens": long}, ragged):
        guard.fill_(GUARD)
        one = source if "lens" in form else source.flatten()
        maps = {"slot_map": torch.arange(8, device=device), "window_table": torch.zeros(2, 8, dtype=torch.int32, device=device)}
        a = PageTableArguments(one, 2, guard[1:3, 2:-2], row_lens=lens, **maps, **form)
        page_table_launch(a, "none").run()
        assert guard[1, 2:-2].tolist() == [0] * 8 and guard[2, 2:-2].tolist() == [0] * 8
        guard[1:3, 2:-2] = GUARD
        assert bool((guard == GUARD).all())
        assert lens.tolist() == [16, 0], "cut at the table, and no length below 0"


@pytest.mark.parametrize("ragged", [False, True])
def test_offsets_beyond_32_bits(device: str, ragged: bool) -> None:
    """Row times stride and the place of a ragged row pass 2**31. On a CPU untouched pages take no memory."""
    stride = 1 << 29
    a = to_device(build(5, (5, 17, 9, 20, 3), 1, ragged=ragged, window=False), device)
    near = torch.zeros(5, 24, dtype=torch.int32, device=device)
    far = torch.empty(4 * stride + 24, dtype=torch.int32, device=device).as_strided((5, 24), (stride, 1))
    far.zero_()
    if ragged:
        page_table_of_ragged(**a, table=near)
        flat = torch.empty((1 << 31) + 100, dtype=torch.int32, device=device)
        flat[-len(a["slots"]) :] = a["slots"]
        moved = {"slots": flat, "starts": a["starts"].long() + len(flat) - len(a["slots"])}
        page_table_of_ragged(**{**a, **moved}, table=far)
    else:
        page_table_of_rows(**a, table=near)
        source = torch.empty(7 * stride + CONTEXT, dtype=torch.int32, device=device).as_strided((8, CONTEXT), (stride, 1))
        source.copy_(a["req_to_token"])
        page_table_of_rows(**{**a, "req_to_token": source, "req_pool_indices": a["req_pool_indices"].int()}, table=far)
    assert torch.equal(near, far) and bool(near.any())


def test_a_slot_beyond_the_map_reads_its_last_entry(device: str) -> None:
    """Given to the launch itself, as a GPU takes it: what lies behind the map is not read."""
    whole = torch.full((12,), GUARD, dtype=torch.int32, device=device)
    whole[:8] = torch.arange(8, device=device)
    tables = [torch.zeros(1, 4, dtype=torch.int32, device=device) for _ in range(2)]
    slots = torch.tensor([2, 9, 11], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3], device=device)
    page_table_launch(PageTableArguments(slots, 1, tables[0], tables[1], whole[:8], None, starts=starts), "none").run()
    assert tables[1].tolist() == [[2, 7, 7, 0]]


@pytest.mark.parametrize("ragged", [False, True])
def test_the_reference_agrees(device: str, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a CPU without the interpreter computes the same, in blocks that some rows do not reach."""
    monkeypatch.setattr(page_table, "_BLOCK", 16)
    a = build(6, (0, 5, 33, CONTEXT), 1, ragged=ragged, window=True)
    kernel = run(a, device, CONTEXT)
    monkeypatch.setattr(page_table, "uses_triton", lambda _: False)
    monkeypatch.setattr("tests.interpreter.test_page_table.names", lambda seen: ["page_table_kernel"] if not seen else [])
    plain = run(a, "cpu", CONTEXT)
    assert all(torch.equal(one, two) for one, two in zip(kernel, plain, strict=True))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_table_is_noticed(device: str, change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of `check`: a length that is one off, either way."""
    a = build(7, (33, 6), 1, ragged=False, window=False)
    right = lists(a)
    wrong = {**a, "seq_lens": a["seq_lens"] + change, "req_to_token": a["req_to_token"].clamp(min=0)}
    monkeypatch.setattr("tests.interpreter.test_page_table.lists", lambda _: right)
    check(a, device, CONTEXT)
    with pytest.raises(AssertionError):
        check(wrong, device, CONTEXT)


def test_refusals_come_before_the_launch(device: str) -> None:
    rows = to_device(build(8, (5, 13), 4, ragged=False, window=True), device)
    ragged = to_device(build(8, (5, 13), 4, ragged=True, window=True), device)
    out = torch.full((2, 8), GUARD, dtype=torch.int32, device=device)
    outs = {"table": out, "window_table": out.clone(), "row_lens": torch.zeros(2, dtype=torch.int64, device=device)}
    changes: list[tuple[dict[str, Any], str, Any]] = [
        (rows, "table", out[:1]), (rows, "table", out.long()), (rows, "table", out.T[:2]), (rows, "page_size", 0),
        (rows, "extra", -1), (rows, "seq_lens", rows["seq_lens"][:1]), (rows, "slot_map", None), (rows, "window_table", None),
        (rows, "window_table", out[:, :4]), (rows, "row_lens", outs["row_lens"].int()),
        (ragged, "row_lens", outs["row_lens"][:1]),
        (rows, "slot_map", rows["slot_map"][:0]), (ragged, "starts", ragged["starts"][:0]), (ragged, "slots", out),
    ]  # fmt: skip
    if device == "cpu":
        changes += [
            (rows, "seq_lens", torch.tensor([5, CONTEXT + 1])), (rows, "seq_lens", torch.tensor([-1, 5])),
            (rows, "req_pool_indices", torch.tensor([0, 9])), (rows, "slot_map", torch.arange(2)),
            (rows, "req_to_token", rows["req_to_token"] + 1), (ragged, "starts", torch.tensor([7, 5, 9])),
            (ragged, "starts", torch.tensor([0, 5, 99])), (ragged, "slots", torch.full((30,), -1)),
        ]  # fmt: skip
    for good, name, value in changes:
        operation = page_table_of_ragged if good is ragged else page_table_of_rows
        with launches() as seen, pytest.raises(ArgumentError):
            operation(**{**outs, **good, name: value})
        assert not seen and bool((out == GUARD).all())


def test_no_row(device: str) -> None:
    out = torch.full((2, 8), GUARD, dtype=torch.int32, device=device)
    with launches() as seen:
        page_table_of_ragged(out.flatten()[:0], torch.zeros(1, dtype=torch.int32, device=device), page_size=1, table=out)
    assert not seen and bool((out == GUARD).all())
