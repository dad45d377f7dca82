"""The step's own copy of slots or pages: what it holds, what it leaves alone, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import snapshot_table, verify_attention

from .cases import Config, build_verify, generator

GUARD = 0x5A5A5A5A


def engine_table(seed: int, lens: list[int], page_size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A req_to_token on shuffled pages with garbage past each request's end, and the requests' rows."""
    gen = generator(seed)
    per_row = -(-context // page_size)
    rows = torch.randperm(len(lens) + 3, generator=gen)[: len(lens)]
    pages = torch.randperm(len(lens) * per_row, generator=gen).view(len(lens), per_row)
    table = torch.randint(-(2**31), 2**31, (len(lens) + 3, context), generator=gen).int()
    for r, n in enumerate(lens):
        slots = pages[r, :, None] * page_size + torch.arange(page_size)
        table[rows[r], :n] = slots.flatten()[:n].int()
    return table, rows


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("lens", [[5, 17, 64], [0, 1], [16, 15, 33, 0], []])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("spare", [0, 2])
def test_copies_what_is_needed_and_nothing_else(lens: list[int], page_size: int, index_type: torch.dtype, spare: int) -> None:
    table, rows = engine_table(1, lens, page_size, 64)
    buffer = torch.full((len(lens) + spare + 2, 70 + 4), GUARD, dtype=torch.int32)
    out = buffer[1:-1, 2:-2]
    got = snapshot_table(table, rows.to(index_type), torch.tensor(lens, dtype=index_type), page_size=page_size, out=out)
    assert got is out
    want = torch.full_like(buffer, GUARD)
    for r, n in enumerate(lens):
        for column, position in enumerate(range(0, n, page_size)):
            want[1 + r, 2 + column] = int(table[rows[r], position]) // page_size
    assert torch.equal(buffer, want)


@pytest.mark.parametrize("page_size", [1, 4])
def test_slot_map_comes_before_paging(page_size: int) -> None:
    lens = [6, 13]
    table, rows = engine_table(2, lens, page_size, 16)
    count = 32 // page_size
    pages = torch.randperm(count, generator=generator(3))
    slot_map = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    out = torch.full((2, 16), -1, dtype=torch.int32)
    snapshot_table(table, rows, torch.tensor(lens), page_size=page_size, slot_map=slot_map, out=out)
    for r, n in enumerate(lens):
        want = [int(slot_map[table[rows[r], p]]) // page_size for p in range(0, n, page_size)]
        assert out[r].tolist() == want + [-1] * (16 - len(want))


@pytest.mark.parametrize(("steps", "decode_length", "page_size"), [(5, 1, 2), (5, 2, 2), (5, 5, 1), (4, 3, 4)])
def test_guard_around_a_small_table(steps: int, decode_length: int, page_size: int) -> None:
    """Slot row [6, 7, ...], decode length 1, table [2, 2] in a guard: only the needed entries are written."""
    row = torch.arange(8, 8 + steps, dtype=torch.int32)[None].repeat(2, 1)
    width = -(-decode_length // page_size)
    buffer = torch.full((4, width + 2), GUARD, dtype=torch.int32)
    lens = torch.full((2,), decode_length)
    snapshot_table(row, torch.tensor([0, 1]), lens, page_size=page_size, out=buffer[1:3, 1 : 1 + width])
    want = torch.full_like(buffer, GUARD)
    want[1:3, 1 : 1 + width] = row[:, :decode_length:page_size] // page_size
    assert torch.equal(buffer, want)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_snapshot_outlives_the_engine_row(page_size: int) -> None:
    """Verify reads the copy: overwriting the engine's rows afterwards changes nothing."""
    a = build_verify(Config(seed=4, prefix_lens=(5, 9), widths=4, page_size=page_size))
    want = verify_attention(**a)
    lens = a["prefix_lens"] + 4
    pages = a["table"][a["row_ids"]].repeat_interleave(page_size, dim=1)
    req_to_token = pages * page_size + torch.arange(pages.shape[1], dtype=torch.int32) % page_size
    copy = torch.full((2, 16), -1, dtype=torch.int32)
    snapshot_table(req_to_token, torch.tensor([0, 1]), lens, page_size=page_size, out=copy)
    req_to_token.fill_(GUARD)
    got = verify_attention(**{**a, "table": copy, "row_ids": torch.arange(2, dtype=torch.int32)})
    assert torch.equal(got, want)


def test_needs_no_value_off_the_cpu() -> None:
    """Meta tensors hold no values: a look at one would fail here, and wait on a GPU."""
    table, rows = engine_table(5, [3, 4], 4, 16)
    out = torch.zeros(2, 4, dtype=torch.int32, device="meta")
    lens, slot_map = torch.tensor([3, 4], device="meta"), torch.zeros(64, dtype=torch.int64, device="meta")
    assert snapshot_table(table.to("meta"), rows.to("meta"), lens, page_size=4, slot_map=slot_map, out=out) is out


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "req_to_token type": ({"req_to_token": torch.zeros(4, 16)}, "req_to_token", "float32"),
    "rows length": ({"req_pool_indices": torch.tensor([0])}, "seq_lens", "[1]"),
    "rows beyond": ({"req_pool_indices": torch.tensor([0, 9])}, "req_pool_indices", "9 for request 1"),
    "rows negative": ({"req_pool_indices": torch.tensor([-1, 0])}, "req_pool_indices", "-1 for request 0"),
    "seq_lens negative": ({"seq_lens": torch.tensor([2, -1])}, "seq_lens", "-1 for request 1"),
    "seq_lens beyond the context": ({"seq_lens": torch.tensor([2, 17])}, "seq_lens", "17 for request 1"),
    "page_size": ({"page_size": 0}, "page_size", "at least 1"),
    "out type": ({"out": torch.zeros(2, 16, dtype=torch.int64)}, "out", "int64"),
    "out rows": ({"out": torch.zeros(1, 16, dtype=torch.int32)}, "out", "2 or more"),
    "out narrow": ({"out": torch.zeros(2, 3, dtype=torch.int32), "page_size": 4}, "out", "4 or more: request 1 has 13 tokens"),
    "out overlaps itself": ({"out": torch.zeros(1, 16, dtype=torch.int32).expand(2, 16)}, "out", "no stride 0"),
    "slot_map type": ({"slot_map": torch.zeros(64)}, "slot_map", "float32"),
    "slot_map short": ({"slot_map": torch.arange(3)}, "req_to_token", "0 to 2"),
    "slot_map without an entry": ({"slot_map": torch.full((64,), -1)}, "slot_map", "slot -1"),
    "page not aligned": ({"req_to_token": torch.arange(1, 65).view(4, 16), "page_size": 4}, "req_to_token", "a multiple of 4"),
    "negative slot": ({"req_to_token": torch.full((4, 16), -1)}, "req_to_token", "slot -1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, argument, text = REFUSALS[name]
    good = {
        "req_to_token": torch.arange(64, dtype=torch.int32).view(4, 16),
        "req_pool_indices": torch.tensor([0, 2]),
        "seq_lens": torch.tensor([5, 13]),
        "page_size": 1,
        "out": torch.full((2, 16), 77, dtype=torch.int32),
    }
    snapshot_table(**{**good, "out": good["out"].clone()})
    with pytest.raises(ArgumentError) as raised:
        snapshot_table(**{**good, **changes})
    assert raised.value.argument == argument and text in str(raised.value), str(raised.value)
    assert (good["out"] == 77).all()


@pytest.mark.parametrize("topk", [1, 2, 8])
def test_capacity_counts_every_branch(topk: int) -> None:
    """bs 2, topk 8, L 60: a table with a row for each request instead of each branch is refused, not overrun."""
    table, rows = engine_table(6, [60, 60], 1, 64)
    branches = rows.repeat_interleave(topk)
    lens = torch.full((2 * topk,), 60)
    out = torch.full((2 * topk, 64), -1, dtype=torch.int32)
    snapshot_table(table, branches, lens, page_size=1, out=out)
    assert all(out[i, :60].tolist() == table[branches[i], :60].tolist() for i in range(2 * topk))
    with pytest.raises(ArgumentError, match=f"out: got {2 * topk - 1} rows"):
        snapshot_table(table, branches, lens, page_size=1, out=out[:-1])
