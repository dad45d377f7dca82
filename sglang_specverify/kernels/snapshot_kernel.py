"""The Triton kernel of `snapshot.py`, which says what it computes."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_row_block(
    source, source_column, slot_map, map_stride, slot_count, target, target_column, columns, first,
    PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries `first` to `first + BLOCK - 1` of one row, those below `columns`.

    source: int32 or int64, at the row's position 0; target: int32, at the row's column 0. `first` is int64.
    """
    column = first + tl.arange(0, BLOCK)
    wanted = column < columns
    slot = tl.load(source + column * PAGE_SIZE * source_column, mask=wanted, other=0).to(tl.int64)
    if HAS_SLOT_MAP:
        # An engine's table may hold garbage that only the host could refuse: it must not become a wild read.
        slot = tl.minimum(tl.maximum(slot, 0), slot_count - 1)
        slot = tl.load(slot_map + slot * map_stride, mask=wanted, other=0).to(tl.int64)
    if PAGE_SIZE > 1:
        # Triton's division rounds towards zero: without the choice a slot of -1 would name page 0.
        slot = tl.where(slot < 0, -1, slot // PAGE_SIZE)
    tl.store(target + column * target_column, slot.to(tl.int32), mask=wanted)


@triton.jit
def snapshot_table_kernel(
    req_to_token, req_pool_indices, seq_lens, slot_map, out,
    width, slot_count,
    source_row, source_column, indices_stride, lens_stride, map_stride, out_row, out_column,
    PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (request, b): every num_programs(1)-th block of the request's row from the b-th on; none beyond its length.

    req_to_token int32 or int64 [rows, context]; out int32 [bs or more, columns]; `width`: columns that exist in both.
    """
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + request * lens_stride).to(tl.int64)
    columns = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, width)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    if first >= columns:
        return
    source = req_to_token + tl.load(req_pool_indices + request * indices_stride).to(tl.int64) * source_row
    target = out + request * out_row
    step = BLOCK * tl.num_programs(1).to(tl.int64)
    while first < columns:
        copy_row_block(
            source, source_column, slot_map, map_stride, slot_count, target, out_column, columns, first,
            PAGE_SIZE, HAS_SLOT_MAP, BLOCK,
        )  # fmt: skip
        first += step
