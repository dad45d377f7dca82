"""The Triton kernel of `step.py`: the copies of the page table, the division of the prefixes and the packed masks, at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from sglang_specverify.kernels.plan_kernel import divide, pack
from sglang_specverify.kernels.snapshot_kernel import copy_row


@triton.jit(do_not_specialize=["width", "extra", "slot_count", "batch", "capacity", "window", "counters_at", "counters",
                               "queries", "words"])  # fmt: skip
def prepare_step_kernel(
    req_to_token, req_pool_indices, prefix_lens, table, slot_map, window_table,
    width, extra, slot_count, source_row, source_column, map_stride, table_row, window_row,
    plan, batch, capacity, window, slots, overhead, counters_at, counters,
    mask, mask_offsets, q_offsets, bits, seen, queries, words,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    SPLIT: tl.constexpr, TREE: tl.constexpr, FULL_MASK: tl.constexpr, RAGGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, DETERMINISTIC: tl.constexpr, BY_LAUNCH: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr, ALIGN: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_ITEMS: tl.constexpr, CANDIDATES: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, SEEN_ROWS: tl.constexpr, SEEN_KEYS: tl.constexpr, PACKERS: tl.constexpr,
):  # fmt: skip
    """Programs (request, part): one divides where there is a SPLIT, one packs each word of a TREE, and the rest copy.

    Those that compute come first and are started first; none waits for another, so a step takes as long as its slowest.
    `width`: columns that the engine's table and the copies have in common. Row r of a copy is request r, and so the plan says.
    """
    request = tl.program_id(0)
    part = tl.program_id(1)
    copies = tl.num_programs(1)
    if SPLIT:
        if part == 0:
            divide(
                request, request, prefix_lens, plan, batch, capacity, window, slots, overhead, counters_at, counters,
                HAS_WINDOW, DETERMINISTIC, BY_LAUNCH, MAX_SPLITS, MIN_CHUNK, ALIGN, BLOCK_BATCH, BLOCK_ITEMS, CANDIDATES,
            )  # fmt: skip
        part -= 1
        copies -= 1
    if TREE:
        if part >= 0 and part < words * PACKERS:
            pack(
                request, part, mask, mask_offsets, q_offsets, prefix_lens, bits, seen, queries, words,
                FULL_MASK, RAGGED, ROW_BLOCKS, SEEN_ROWS, SEEN_KEYS,
            )  # fmt: skip
        part -= words * PACKERS
        copies -= words * PACKERS
    if part >= 0:
        positions = tl.load(prefix_lens + request).to(tl.int64)
        pool_row = tl.load(req_pool_indices + request).to(tl.int64)
        if RAGGED:
            positions += tl.load(q_offsets + request + 1) - tl.load(q_offsets + request)
        else:
            positions += extra
        columns = tl.minimum((positions + PAGE_SIZE - 1) // PAGE_SIZE, width).to(tl.int32)
        row = request.to(tl.int64)
        copy_row(
            req_to_token + pool_row * source_row, source_column, slot_map, map_stride, slot_count,
            table + row * table_row, 1, None if window_table is None else window_table + row * window_row, 1,
            columns, part, copies, PAGE_SIZE, BLOCK, WIDE,
        )  # fmt: skip
