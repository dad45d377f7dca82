"""The snapshot kernel: what it copies and what it leaves alone, in all integer types, in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import snapshot
from sglang_specverify.kernels.snapshot import snapshot_table
from tests.kernels.cases import generator

from .calls import launches, names, to_device

GUARD = 0x5A5A5A5A
INTS = [torch.int32, torch.int64]


def build(
    seed: int, lens: tuple[int, ...], page_size: int, *, context: int = 200, table_type: torch.dtype = torch.int32,
    index_type: torch.dtype = torch.int64, lens_type: torch.dtype = torch.int64, slot_map: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """An engine's table on shuffled pages, with garbage from each request's end on, and a map on pages."""
    gen = generator(seed)
    per_row = -(-context // page_size)
    pages = torch.randperm(len(lens) * per_row, generator=gen).view(len(lens), per_row)
    rows = torch.randperm(len(lens) + 3, generator=gen)[: len(lens)]
    table = torch.randint(-(2**31), 2**31, (len(lens) + 3, context), generator=gen)
    for r, n in enumerate(lens):
        table[rows[r], :n] = (pages[r, :, None] * page_size + torch.arange(page_size)).flatten()[:n]
    moved = torch.randperm(max(1, len(lens)) * per_row, generator=gen)[:, None] * page_size + torch.arange(page_size)
    return {
        "req_to_token": table.to(table_type), "req_pool_indices": rows.to(index_type),
        "seq_lens": torch.tensor(lens, dtype=lens_type), "page_size": page_size,
        "slot_map": moved.flatten().to(index_type) if slot_map else None,
    }  # fmt: skip


def expected(a: dict[str, Any], base: torch.Tensor, top: int, left: int, width: int) -> torch.Tensor:
    """`base` with the entries that the snapshot must write at [top, left], entry by entry, on Python numbers."""
    want = base.clone()
    for r, n in enumerate(a["seq_lens"].tolist()):
        for column, position in enumerate(range(0, n, a["page_size"])):
            slot = int(a["req_to_token"][int(a["req_pool_indices"][r]), position])
            slot = slot if a["slot_map"] is None else int(a["slot_map"][slot])
            assert column < width
            want[top + r, left + column] = slot // a["page_size"]
    return want


def assert_copied(a: dict[str, Any], device: str, *, spare: int = 1, width: int = 210, transposed: bool = False) -> None:
    bs = len(a["seq_lens"])
    shape = (bs + spare + 2, width + 4)
    base = torch.full(shape[::-1] if transposed else shape, GUARD, dtype=torch.int32)
    base = base.T if transposed else base
    target = to_device({"base": base.clone(memory_format=torch.preserve_format)}, device)["base"]
    out = target[1:-1, 2:-2]
    with launches() as seen:
        got = snapshot_table(**to_device(a, device), out=out)
    assert names(seen) == ["snapshot_table_kernel"], "one launch"
    assert got is out
    assert torch.equal(target.cpu(), expected(a, base, 1, 2, width))


@given(
    seed=st.integers(0, 10**6),
    lens=st.lists(st.sampled_from([0, 1, 5, 16, 17, 33, 64, 199, 200]), min_size=1, max_size=4).map(tuple),
    page_size=st.sampled_from([1, 2, 16, 64, 128]),
    types=st.tuples(st.sampled_from(INTS), st.sampled_from(INTS), st.sampled_from(INTS)),
    slot_map=st.booleans(),
    spare=st.integers(0, 2),
    transposed=st.booleans(),
)
def test_against_lists(
    device: str, seed: int, lens: tuple[int, ...], page_size: int, types: Any, slot_map: bool, spare: int, transposed: bool
) -> None:
    a = build(seed, lens, page_size, table_type=types[0], index_type=types[1], lens_type=types[2], slot_map=slot_map)
    assert_copied(a, device, spare=spare, transposed=transposed)


@pytest.mark.parametrize("table_type", INTS)
@pytest.mark.parametrize("lens_type", INTS)
@pytest.mark.parametrize("lens", [(0, 5), (5, 0), (1, 0, 2), (0,)])
def test_mixed_widths(device: str, table_type: torch.dtype, lens_type: torch.dtype, lens: tuple[int, ...]) -> None:
    """lens [0, 5] in int64 beside an int32 table, and the other way: every store has the width of `out`."""
    a = build(1, lens, 1, table_type=table_type, lens_type=lens_type, index_type=table_type)
    assert_copied(a, device)


@pytest.mark.parametrize("programs", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_longer_than_its_programs(device: str, programs: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes every n-th block: nothing is skipped or copied beyond the length, whatever the number of programs."""
    monkeypatch.setattr(snapshot, "_BLOCK", 16)
    monkeypatch.setattr(snapshot, "_PROGRAMS", 1)
    monkeypatch.setattr(snapshot, "_ROW_PROGRAMS", programs)
    a = build(2, (200, 0, 15, 16, 17, 48, 63), page_size)
    assert_copied(a, device)


@pytest.mark.parametrize(("batch", "context"), [(1, 1 << 20), (1024, 1 << 20), (32, 40960), (1, 1), (16384, 300)])
def test_programs_are_bounded(batch: int, context: int) -> None:
    """Short requests in a table for a long context: a bounded number of programs, all blocks within reach of them."""
    a = {"req_to_token": torch.empty(batch, context, dtype=torch.int32, device="meta")}
    lens = torch.empty(batch, dtype=torch.int64, device="meta")
    out = torch.empty(batch, context, dtype=torch.int32, device="meta")
    grid = snapshot.snapshot_table_launch(a["req_to_token"], lens, lens, 1, None, out, "sm_90").grid
    assert grid[0] == batch and 1 <= grid[1] <= 65535
    assert grid[0] * grid[1] <= max(2 * snapshot._PROGRAMS, snapshot._ROW_PROGRAMS * batch)
    assert grid[1] == -(-context // snapshot._BLOCK) or grid[0] * grid[1] >= snapshot._PROGRAMS


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("slot_map", [False, True])
def test_the_reference_agrees(device: str, page_size: int, slot_map: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a CPU without the interpreter computes the same."""
    a = build(3, (0, 5, 33, 200), page_size, slot_map=slot_map)
    out = torch.full((4, 200), GUARD, dtype=torch.int32)
    kernel = snapshot_table(**to_device(a, device), out=out.to(device, copy=True)).cpu()
    monkeypatch.setattr(snapshot, "uses_triton", lambda _: False)
    with launches() as seen:
        plain = snapshot_table(**a, out=out)
    assert not seen and torch.equal(kernel, plain) and torch.equal(plain, expected(a, torch.full_like(out, GUARD), 0, 0, 200))


def test_smaller_replays(device: str) -> None:
    """The same buffers with 4 requests and then 2: only the rows of the two are written."""
    a = to_device(build(4, (5, 33, 200, 16), 1), device)
    out = torch.full((4, 200), GUARD, dtype=torch.int32, device=device)
    snapshot_table(**a, out=out)
    first = out.clone()
    out.fill_(GUARD)
    part = {**a, "req_pool_indices": a["req_pool_indices"][:2], "seq_lens": a["seq_lens"][:2]}
    snapshot_table(**part, out=out)
    assert torch.equal(out[:2], first[:2].where(torch.arange(200, device=device) < a["seq_lens"][:2, None], GUARD))
    assert bool((out[2:] == GUARD).all())


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_snapshot_is_noticed(device: str, change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of `assert_copied`: a length that is one off, either way."""
    a = build(5, (5, 33), 1)
    wrong = {**a, "seq_lens": a["seq_lens"] + change}
    real = expected
    monkeypatch.setitem(globals(), "expected", lambda _, *rest: real(wrong, *rest))
    with pytest.raises(AssertionError):
        assert_copied(a, device)


@pytest.mark.parametrize("page_size", [1, 4])
def test_garbage_is_neither_followed_nor_turned_into_a_page(device: str, page_size: int) -> None:
    """Values that only the host could refuse, given to the launch itself: -1 stays -1, the map is not read beside its ends, and
    neither a context nor a row is exceeded."""
    context = 20
    table = torch.full((2, context), -1, dtype=torch.int32, device=device)
    table[1, ::2] = 1 << 30
    lens = torch.tensor([1 << 40, 1 << 20], device=device)
    width = -(-context // page_size)
    for slot_map in (None, torch.arange(8, device=device)):
        base = torch.full((4, width + 6), GUARD, dtype=torch.int32, device=device)
        rows = torch.tensor([0, 1], device=device)
        snapshot.snapshot_table_launch(table, rows, lens, page_size, slot_map, base[1:3, 2:-2], "none").run()
        untouched = base.clone()
        untouched[1:3, 2 : 2 + width] = GUARD
        assert bool((untouched == GUARD).all())
        first, second = base[1, 2 : 2 + width].tolist(), base[2, 2 : 2 + width].tolist()
        assert set(first) == ({-1} if slot_map is None else {0})
        assert second[0] == ((1 << 30) // page_size if slot_map is None else 7 // page_size)


def test_offsets_beyond_32_bits(device: str) -> None:
    """Row times stride passes 2**31 in the engine's table and in the copy. On a CPU untouched pages take no memory."""
    a = to_device(build(6, (5, 17, 9, 20, 3), 1, context=20, index_type=torch.int32), device)
    assert int(a["req_pool_indices"].max()) >= 4
    stride = 1 << 29
    source = torch.empty(7 * stride + 20, dtype=torch.int32, device=device).as_strided((8, 20), (stride, 1))
    copy = torch.empty(4 * stride + 24, dtype=torch.int32, device=device).as_strided((5, 24), (stride, 1))
    source.copy_(a["req_to_token"])
    copy.fill_(GUARD)
    near = torch.full((5, 24), GUARD, dtype=torch.int32, device=device)
    snapshot_table(**a, out=near)
    snapshot_table(**{**a, "req_to_token": source}, out=copy)
    assert torch.equal(copy, near)


def test_refusals_come_before_the_launch(device: str) -> None:
    """The checks of shapes hold everywhere, those of values on a CPU; `tests/kernels` has all of them."""
    good = to_device(build(7, (5, 13), 1, context=16), device)
    out = torch.full((2, 16), GUARD, dtype=torch.int32, device=device)
    changes: list[tuple[str, Any]] = [("out", out[:1]), ("seq_lens", good["seq_lens"][:1]), ("page_size", 0)]
    if device == "cpu":
        changes += [("seq_lens", torch.tensor([5, 17])), ("req_pool_indices", torch.tensor([0, 9]))]
        changes += [("slot_map", torch.arange(2)), ("req_to_token", torch.full((5, 16), -1, dtype=torch.int32))]
    for name, value in changes:
        with launches() as seen, pytest.raises(ArgumentError):
            snapshot_table(**{"out": out, **good, name: value})
        assert not seen and bool((out == GUARD).all())


def test_no_request(device: str) -> None:
    a = to_device(build(8, (), 1), device)
    out = torch.full((2, 200), GUARD, dtype=torch.int32, device=device)
    with launches() as seen:
        assert snapshot_table(**a, out=out) is out
    assert not seen and bool((out == GUARD).all())
