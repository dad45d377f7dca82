"""The Triton kernel of `snapshot.py`, which says what it computes."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _entry(slot, PAGE_SIZE: tl.constexpr):
    """A slot as the table holds it: itself, or its page."""
    if PAGE_SIZE > 1:
        # Triton's division rounds towards zero: without the choice a slot of -1 would name page 0.
        slot = tl.where(slot < 0, -1, slot // PAGE_SIZE)
    return slot.to(tl.int32)


@triton.jit
def copy_row_block(
    source, source_column, slot_map, map_stride, slot_count, plain, plain_column, mapped, mapped_column, columns, first,
    PAGE_SIZE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries `first` to `first + BLOCK - 1` of one row, those below `columns`; WHOLE: all of them are.

    source: int32 or int64, at the row's position 0. plain, mapped: int32, at the row's column 0, or None: the first receives
    the slots, the second what `slot_map` makes of them. `first` is int64.
    """
    column = first + tl.arange(0, BLOCK)
    # Without a mask where there need be none: a mask whose edge may lie anywhere keeps the accesses to 4 bytes a thread.
    wanted = None if WHOLE else column < columns
    slot = tl.load(source + column * PAGE_SIZE * source_column, mask=wanted).to(tl.int64)
    if mapped is not None:
        # An engine's table may hold garbage that only the host could refuse: it must not become a wild read.
        inside = tl.minimum(tl.maximum(slot, 0), slot_count - 1)
        other = tl.load(slot_map + inside * map_stride, mask=wanted).to(tl.int64)
        tl.store(mapped + column * mapped_column, _entry(other, PAGE_SIZE), mask=wanted)
    if plain is not None:
        tl.store(plain + column * plain_column, _entry(slot, PAGE_SIZE), mask=wanted)


@triton.jit
def copy_row(
    source, source_column, slot_map, map_stride, slot_count, plain, plain_column, mapped, mapped_column, columns, at, step,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The share of a row that falls to program `at` of `step`, in blocks; see `copy_row_block`. All counts are int32.

    Where every program has WIDE blocks or more, it takes as many at a time, so that they are read together.
    """
    first = at * BLOCK
    if WIDE > 1:
        begun = columns // (step * (WIDE * BLOCK)) * (step * (WIDE * BLOCK))
        first = at * (WIDE * BLOCK)
        while first < begun:
            copy_row_block(
                source, source_column, slot_map, map_stride, slot_count, plain, plain_column, mapped, mapped_column,
                columns, first.to(tl.int64), PAGE_SIZE, True, WIDE * BLOCK,
            )  # fmt: skip
            first += step * (WIDE * BLOCK)
        first = begun + at * BLOCK
    while first < columns:
        if first + BLOCK <= columns:
            copy_row_block(
                source, source_column, slot_map, map_stride, slot_count, plain, plain_column, mapped, mapped_column,
                columns, first.to(tl.int64), PAGE_SIZE, True, BLOCK,
            )  # fmt: skip
        else:
            copy_row_block(
                source, source_column, slot_map, map_stride, slot_count, plain, plain_column, mapped, mapped_column,
                columns, first.to(tl.int64), PAGE_SIZE, False, BLOCK,
            )  # fmt: skip
        first += step * BLOCK


@triton.jit
def snapshot_table_kernel(
    req_to_token, req_pool_indices, seq_lens, slot_map, out,
    width, slot_count,
    source_row, source_column, indices_stride, lens_stride, map_stride, out_row, out_column,
    PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs (request, b): the b-th share of the request's row; programs beyond its length leave at once.

    req_to_token int32 or int64 [rows, context]; out int32 [bs or more, columns]; `width`: columns that exist in both.
    """
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + request * lens_stride).to(tl.int64)
    columns = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, width).to(tl.int32)
    at = tl.program_id(1)
    if at * BLOCK >= columns:
        return
    source = req_to_token + tl.load(req_pool_indices + request * indices_stride).to(tl.int64) * source_row
    target = out + request * out_row
    step = tl.num_programs(1)
    if HAS_SLOT_MAP:
        copy_row(
            source, source_column, slot_map, map_stride, slot_count, None, 0, target, out_column, columns, at, step,
            PAGE_SIZE, BLOCK, WIDE,
        )  # fmt: skip
    else:
        copy_row(
            source, source_column, None, 0, 0, target, out_column, None, 0, columns, at, step, PAGE_SIZE, BLOCK, WIDE,
        )  # fmt: skip
