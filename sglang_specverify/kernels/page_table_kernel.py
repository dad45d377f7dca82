"""The Triton kernel of `page_table.py`, which says what it computes."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_table_kernel(
    source, starts, row_ids, lens, slot_map, table, window_table, row_lens,
    width, source_end, slot_count, extra,
    source_row, source_column, starts_stride, ids_stride, lens_stride, map_stride, table_row, window_row, row_lens_stride,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (request, b): blocks b, b + programs, ... of the request's row of both tables; the first also its length.

    source: int32 or int64, [n] where RAGGED, else [rows, context]; `source_end`: n, or the context. tables: int32, last
    stride 1, `width` columns. A block that holds a page is written to its end, with page 0 behind the last one.
    """
    request = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1)
    if RAGGED:
        begin = tl.load(starts + request * starts_stride).to(tl.int64)
        length = tl.load(starts + (request + 1) * starts_stride).to(tl.int64) - begin
        # Neither counts nor places that the host could not check may lead out of the source.
        begin = tl.minimum(tl.maximum(begin, 0), source_end)
        readable = source_end - begin
        source += begin * source_column
    else:
        length = tl.load(lens + request * lens_stride).to(tl.int64) + extra
        readable = (length * 0) + source_end
        source += tl.load(row_ids + request * ids_stride).to(tl.int64) * source_row
    capacity = (length * 0 + width) * PAGE_SIZE
    length = tl.maximum(tl.minimum(tl.minimum(length, readable), capacity), 0)
    if LENGTHS and at == 0:
        tl.store(row_lens + request * row_lens_stride, length)
    columns = tl.maximum((length + PAGE_SIZE - 1) // PAGE_SIZE, 1).to(tl.int32)
    table += request * table_row
    if WINDOW:
        window_table += request * window_row
    first = at * BLOCK
    while first < columns:
        column = first + tl.arange(0, BLOCK)
        position = column.to(tl.int64) * PAGE_SIZE
        there = position < length
        inside = column < width
        # A slot below 0 is nobody's; as a page it would lie before the pool.
        slot = tl.maximum(tl.load(source + position * source_column, mask=there, other=0).to(tl.int64), 0)
        tl.store(table + column, (slot // PAGE_SIZE).to(tl.int32), mask=inside)
        if WINDOW:
            slot = tl.minimum(slot, slot_count - 1)
            slot = tl.maximum(tl.load(slot_map + slot * map_stride, mask=there, other=0).to(tl.int64), 0)
            tl.store(window_table + column, (slot // PAGE_SIZE).to(tl.int32), mask=inside)
        first += tl.num_programs(1) * BLOCK
