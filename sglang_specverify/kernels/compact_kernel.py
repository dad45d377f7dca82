"""The Triton kernel of `compact.py`, which says what it computes."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compact_visible_slots_kernel(
    mask, mask_offsets, table, row_ids, prefix_lens, slot_map, num_rows, out_slots, out_lens,
    queries, slot_count,
    offsets_stride, table_row, ids_stride, lens_stride, map_stride, slots_row, out_lens_stride,
    FULL_MASK: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr, HAS_NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: draft row i of request r = the W slots of out_slots[r * W + i]. BLOCK >= W = queries.

    mask uint8; mask_offsets int64 [bs + 1]; table int32 [rows, width]; num_rows int32 [1]; out_slots int32 [rows, W].
    """
    row = tl.program_id(0).to(tl.int64)
    if HAS_NUM_ROWS:  # noqa: SIM102 -- the outer one is decided when the kernel is compiled
        if row >= tl.load(num_rows):
            return
    request = row // queries
    i = row % queries
    prefix = tl.load(prefix_lens + request * lens_stride).to(tl.int64)
    j = tl.arange(0, BLOCK)
    is_draft = j < queries

    if FULL_MASK:
        bits = mask + tl.load(mask_offsets + request * offsets_stride) + i * (prefix + queries) + prefix
    else:
        bits = mask + row * queries
    visible = tl.load(bits + j, mask=is_draft, other=0) != 0
    seen = visible.to(tl.int32)
    # Of the visible ones: how many stand at or before j. The rest of j + 1 are invisible.
    rank = tl.cumsum(seen, 0)
    count = tl.sum(seen, 0)
    place = tl.where(visible, rank - 1, count + j - rank)

    position = prefix + j
    table_at = table + tl.load(row_ids + request * ids_stride).to(tl.int64) * table_row
    slot = tl.load(table_at + position // PAGE_SIZE, mask=is_draft, other=-1).to(tl.int64)
    if PAGE_SIZE > 1:
        slot = tl.where(slot >= 0, slot * PAGE_SIZE + position % PAGE_SIZE, -1)
    if HAS_SLOT_MAP:
        slot = tl.load(slot_map + slot * map_stride, mask=(slot >= 0) & (slot < slot_count), other=-1).to(tl.int64)
    tl.store(out_slots + row * slots_row + place, tl.maximum(slot, -1).to(tl.int32), mask=is_draft)
    tl.store(out_lens + row * out_lens_stride, count)
