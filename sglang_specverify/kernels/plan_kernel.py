"""The Triton kernel of a step's metadata: it divides the prefixes over programs and packs the tree masks into bits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divide(
    request, row, prefix_lens, plan, batch, capacity, window, slots, overhead, counters_at, counters,
    HAS_WINDOW: tl.constexpr, DETERMINISTIC: tl.constexpr, BY_LAUNCH: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr, ALIGN: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_ITEMS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write one request's work items and its counters as 0; the last request writes how many items there are.

    BY_LAUNCH: in place of the counters its first partial and its number of parts.

    See `plan.py` for the layout and the rule.

    `row`: of the table, what the calls read for this request.
    """
    r = tl.arange(0, BLOCK_BATCH)
    is_request = r < batch
    prefix = tl.load(prefix_lens + r, mask=is_request, other=0).to(tl.int32)
    if HAS_WINDOW:  # noqa: SIM108 - decided when the kernel is compiled
        first = tl.maximum(prefix - window, 0) // ALIGN * ALIGN
    else:
        first = tl.zeros_like(prefix)
    length = prefix - first

    if DETERMINISTIC:
        splits = tl.maximum(tl.minimum((length + MIN_CHUNK - 1) // MIN_CHUNK, MAX_SPLITS), 1)
    else:
        # Chunk lengths from an equal share of the work upwards, in steps of an eighth: the cheapest by this model wins.
        # None is shorter than the share, so that no candidate makes more than `capacity` items.
        total = tl.sum(length.to(tl.int64), 0)
        share = (total.to(tl.float32) / slots).to(tl.int64) + 1
        c = tl.arange(0, CANDIDATES)
        chunk = tl.minimum(tl.maximum(share * (8 + c) // 8, MIN_CHUNK), 1 << 24).to(tl.int32)
        chunk = (chunk + ALIGN - 1) // ALIGN * ALIGN
        pieces = tl.maximum((length[:, None] + chunk[None, :] - 1) // chunk[None, :], 1)
        longest = tl.max((length[:, None] + pieces - 1) // pieces, 0).to(tl.float32)
        items = tl.sum(tl.where(is_request[:, None], pieces, 0), 0).to(tl.float32)
        # Programs run in waves of `slots` items; an item takes the time of its keys and of `overhead` keys more.
        waves = tl.ceil(items / slots)
        cost = tl.maximum(waves * (total.to(tl.float32) / items + overhead), longest + overhead)
        chosen = tl.min(tl.where(cost == tl.min(cost, 0), chunk, 2147483647), 0)
        splits = tl.maximum((length + chosen - 1) // chosen, 1)
    # Even pieces; a short last one would only cost a program.
    chunk_of = ((length + splits - 1) // splits + ALIGN - 1) // ALIGN * ALIGN
    splits = tl.where(length > 0, (length + tl.maximum(chunk_of, 1) - 1) // tl.maximum(chunk_of, 1), 1)
    splits = tl.where(is_request, splits, 0)
    partials = tl.where(splits > 1, splits, 0)

    mine = r == request
    my_splits = tl.sum(tl.where(mine, splits, 0), 0)
    my_item = tl.sum(tl.where(r < request, splits, 0), 0)
    my_partial = tl.sum(tl.where(r < request, partials, 0), 0)
    my_first = tl.sum(tl.where(mine, first, 0), 0)
    my_prefix = tl.sum(tl.where(mine, prefix, 0), 0)
    my_chunk = tl.sum(tl.where(mine, chunk_of, 0), 0)

    for at in tl.range(0, my_splits, BLOCK_ITEMS):
        s = at + tl.arange(0, BLOCK_ITEMS)
        is_item = s < my_splits
        words = plan + (my_item + s) * 8
        begin = my_first + s * my_chunk
        tl.store(words, request + tl.zeros_like(s), mask=is_item)
        tl.store(words + 1, begin, mask=is_item)
        tl.store(words + 2, tl.minimum(begin + my_chunk, my_prefix), mask=is_item)
        tl.store(words + 3, s, mask=is_item)
        tl.store(words + 4, my_splits + tl.zeros_like(s), mask=is_item)
        tl.store(words + 5, my_partial + tl.zeros_like(s), mask=is_item)
        tl.store(words + 6, my_prefix + tl.zeros_like(s), mask=is_item)
        tl.store(words + 7, row + tl.zeros_like(s), mask=is_item)
    if request == batch - 1:
        for at in tl.range(my_item + my_splits, capacity, BLOCK_ITEMS):
            s = at + tl.arange(0, BLOCK_ITEMS)
            tl.store(plan + s * 8, tl.full([BLOCK_ITEMS], -1, tl.int32), mask=s < capacity)
        tl.store(plan + counters_at + batch * counters, my_item + my_splits)
    if BY_LAUNCH:
        tl.store(plan + counters_at + request * 2, my_partial)
        tl.store(plan + counters_at + request * 2 + 1, my_splits)
    else:
        for at in tl.range(0, counters, BLOCK_ITEMS):
            s = at + tl.arange(0, BLOCK_ITEMS)
            tl.store(plan + counters_at + request * counters + s, tl.zeros_like(s), mask=s < counters)


@triton.jit
def _visible(base, stride, i, j, count):
    """int32 [rows, keys], 0 or 1: whether row i sees draft j, as the byte at base + i * stride + j says; the prefix has j < 0."""
    inside = (i < count)[:, None] & ((j >= 0) & (j < count))[None, :]
    byte = tl.load(base + (i[:, None] * stride + j[None, :]), mask=inside, other=0)
    return ((j < 0)[None, :] | (byte != 0)).to(tl.int32)


@triton.jit
def pack(request, part, mask, mask_offsets, q_offsets, prefix_lens, bits, seen, queries, words,
          FULL_MASK: tl.constexpr, RAGGED: tl.constexpr, ROW_BLOCKS: tl.constexpr,
          SEEN_ROWS: tl.constexpr, SEEN_KEYS: tl.constexpr):  # fmt: skip
    """Write the bits of 64 keys for 32 rows of a request, or which of some keys any row sees.

    Parts are pairs (block, word), the words of a block behind each other. There are ROW_BLOCKS blocks of 32 rows, and after
    them those that look at all rows (at most SEEN_ROWS) for SEEN_KEYS keys of the word; a single block of rows does both.
    """
    word = part % words
    block = part // words
    if RAGGED:
        first_row = tl.load(q_offsets + request).to(tl.int64)
        count = tl.load(q_offsets + request + 1) - first_row.to(tl.int32)
    else:
        first_row = request.to(tl.int64) * queries
        count = queries
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    if FULL_MASK:
        base = mask + tl.load(mask_offsets + request) + prefix
        stride = prefix + count
    else:
        base = mask + first_row * queries
        stride = queries
    bit = tl.arange(0, 64)
    lane = tl.arange(0, 32)
    j = word * 64 + bit - prefix % 64
    seen += (request.to(tl.int64) * words + word) * 64
    if block < ROW_BLOCKS:
        i = block * 32 + lane
        # Threads lie along the keys, so to sum along them would be exchanges between threads for every row. So a key's 32 rows
        # become one integer within a thread, and those integers are turned. Distinct powers of two: a sum is their union.
        columns = tl.sum(_visible(base, stride, i, j, count) << lane[:, None], 0)
        turned = (columns[:, None] >> lane[None, :]) & 1
        word_bits = tl.sum(turned.to(tl.int64) << bit[:, None].to(tl.int64), 0)
        tl.store(bits + (first_row + i) * words + word, word_bits, mask=i < count)
        if ROW_BLOCKS == 1:
            tl.store(seen + bit, ((columns != 0) & (count > 0)).to(tl.int8))
    if ROW_BLOCKS > 1:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if block >= ROW_BLOCKS:
            key = (block - ROW_BLOCKS) * SEEN_KEYS + tl.arange(0, SEEN_KEYS)
            rows = tl.arange(0, SEEN_ROWS)
            some = tl.max(_visible(base, stride, rows, word * 64 + key - prefix % 64, count), 0)
            tl.store(seen + key, ((some != 0) & (count > 0)).to(tl.int8))


@triton.jit(do_not_specialize=["batch", "capacity", "window", "counters_at", "counters", "queries", "words"])
def plan_kernel(
    prefix_lens, row_ids, plan, batch, capacity, window, slots, overhead, counters_at, counters,
    mask, mask_offsets, q_offsets, bits, seen, queries, words,
    SPLIT: tl.constexpr, TREE: tl.constexpr, FULL_MASK: tl.constexpr, RAGGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, DETERMINISTIC: tl.constexpr, BY_LAUNCH: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr, ALIGN: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_ITEMS: tl.constexpr, CANDIDATES: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, SEEN_ROWS: tl.constexpr, SEEN_KEYS: tl.constexpr,
):  # fmt: skip
    """Programs (request, part): part 0 divides where there is a SPLIT, every other one packs words of the tree."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    if SPLIT:
        if part == 0:
            divide(
                request, tl.load(row_ids + request), prefix_lens, plan, batch, capacity, window, slots, overhead, counters_at,
                counters,
                HAS_WINDOW, DETERMINISTIC, BY_LAUNCH, MAX_SPLITS, MIN_CHUNK, ALIGN, BLOCK_BATCH, BLOCK_ITEMS, CANDIDATES,
            )  # fmt: skip
        part -= 1
    if TREE:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if part >= 0:
            pack(
                request, part, mask, mask_offsets, q_offsets, prefix_lens, bits, seen, queries, words,
                FULL_MASK, RAGGED, ROW_BLOCKS, SEEN_ROWS, SEEN_KEYS,
            )  # fmt: skip
