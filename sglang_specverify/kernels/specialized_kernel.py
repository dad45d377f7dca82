"""Verify attention for Hopper with specialised warps: the same operation as `fused_kernel.py`, for many query rows.

One persistent program a multiprocessor. Two groups of four warps, the producers, bring Q and K, and V, into rings in shared
memory; two more, the consumers, each attend 64 query rows with wgmma, both over the same keys. While the consumers work on one
tile of rows the producers are already reading the next one's, so that the chain of dependent loads at the start of a tile
(length, slots, keys) and the end of it (normalise, write) cost no time of the tensor cores. That chain is most of the time of a
short prefix in a kernel whose programs are one tile each.

The arithmetic is that of `fused_kernel.py`: online softmax in base 2, FP32, tree masks as packed words.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_specverify.kernels.specialized_parts import CONSUMERS, ROWS, barrier, combine, finish, part_rows, store_part

#: Threads of the producer: all of them arrive when their copies have landed.
PRODUCERS = gl.constexpr(128)
#: Rows that a producer copies at a time: it has few registers, and the fewer it needs the more the consumers have.
CHUNK = gl.constexpr(32)


@gluon.jit
def _slots(table_row, seen_keys, n, prefix, stop, base, PAGE_SIZE: gl.constexpr, TREE: gl.constexpr):
    """int32 cache slots of the keys n, -1 where nobody looks."""
    exists = n < stop
    if PAGE_SIZE == 1:
        slot = gl.load(table_row + n, mask=exists, other=-1)
    else:
        page = gl.load(table_row + n // PAGE_SIZE, mask=exists, other=-1)
        slot = gl.where(page >= 0, page * PAGE_SIZE + n % PAGE_SIZE, -1)
    if TREE:
        # A draft that nobody sees is not read: what it holds may be NaN, and 0 * NaN is NaN.
        seen = gl.load(seen_keys + (n - base), mask=exists & (n >= prefix), other=1)
        slot = gl.where(seen != 0, slot, -1)
    return slot


@gluon.jit
def _copy(base, slots, stride, d, ring, full, empty, number, copies: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Bring the rows of a tile into the place of tile `number`, once it is free; zeros where there is no slot."""
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
    for n in gl.static_range(BLOCK_N // CHUNK):
        slot = slots.slice(n * CHUNK, CHUNK).load(gl.SliceLayout(1, copies))
        at = base + slot.to(gl.int64)[:, None] * stride + d[None, :]
        place = ring.index(stage).slice(n * CHUNK, CHUNK)
        async_copy.async_copy_global_to_shared(place, at, mask=(slot >= 0)[:, None])
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _items(plan, items, items_at, SPLIT: gl.constexpr):
    """How many items there are: the host's number, or for each part of a prefix that the plan has so many."""
    if SPLIT:
        items *= gl.load(plan + items_at)
    return items


@gluon.jit
def _produce(
    q, cache, table, row_ids, prefix_lens, tree_seen, plan, q_ring, ring, slot_ring, q_full, q_empty, full, empty,
    items, tiles, heads, queries, tree_words, q_row, q_head, slot_stride, head_stride, table_stride, items_at,
    KEYS: gl.constexpr, TREE: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Bring the keys, or the values, of every tile of this program into shared memory, as far ahead as the ring allows.

    The one that brings KEYS brings the query rows too.
    """
    ACROSS: gl.constexpr = D // 8
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, copies))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, copies))
    key = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
    filled = 0
    number = 0
    for item in range(gl.program_id(0), _items(plan, items, items_at, SPLIT), gl.num_programs(0)):
        tile = item % tiles
        head = item // tiles % heads
        first = tile * (ROWS * CONSUMERS)
        begin = 0
        if SPLIT:
            words = plan + item // (tiles * heads) * 8
            request = gl.load(words)
            begin = gl.load(words + 1)
            prefix = gl.load(words + 6)
            table_row = table + gl.load(words + 7).to(gl.int64) * table_stride
        else:
            request = item // (tiles * heads)
            prefix = gl.load(prefix_lens + request).to(gl.int32)
            table_row = table + gl.load(row_ids + request).to(gl.int64) * table_stride
        stop = prefix + queries
        if not TREE:
            # Rows of this tile look no further than its last row.
            stop = prefix + gl.minimum(queries, (first + ROWS * CONSUMERS - 1) // GROUP + 1)
        if SPLIT:
            # Only the last part has the drafts.
            stop = gl.where(gl.load(words + 3) < gl.load(words + 4) - 1, gl.load(words + 2), stop)
        base = prefix // 64 * 64
        seen_keys = table_row
        if TREE:
            seen_keys = tree_seen + request.to(gl.int64) * tree_words * 64

        if KEYS:
            buffer = number % Q_BUFFERS
            mbarrier.wait(q_empty.index(buffer), ((number // Q_BUFFERS) & 1) ^ 1)
            for n in gl.static_range(CONSUMERS * ROWS // CHUNK):
                packed = first + n * CHUNK + row
                i = packed // GROUP
                q_at = q + (request.to(gl.int64) * queries + i)[:, None] * q_row
                q_at += (head * GROUP + packed % GROUP).to(gl.int64)[:, None] * q_head + d[None, :]
                place = q_ring.index(buffer * CONSUMERS + n * CHUNK // ROWS).slice(n * CHUNK % ROWS, CHUNK)
                async_copy.async_copy_global_to_shared(place, q_at, mask=(i < queries)[:, None])
            async_copy.mbarrier_arrive(q_full.index(buffer), increment_count=False)

        at_head = cache + head.to(gl.int64) * head_stride
        # Slots come a tile ahead.
        following = _slots(table_row, seen_keys, key + begin, prefix, stop, base, PAGE_SIZE, TREE)
        for start in range(begin, stop, BLOCK_N):
            now = slot_ring.index(filled & 1)
            now.store(following)
            following = _slots(table_row, seen_keys, key + (start + BLOCK_N), prefix, stop, base, PAGE_SIZE, TREE)
            _copy(at_head, now, slot_stride, d, ring, full, empty, filled, copies, BLOCK_N, STAGES)
            filled += 1
        number += 1  # noqa: SIM113 - no enumerate in a kernel


@gluon.jit
def _word(words, word, count, is_row, TREE: gl.constexpr):
    """int64: the bits of 64 keys for each row. Words before word 0 are prefix, words from `count` on nothing."""
    if TREE:
        bits = gl.load(words + word, mask=is_row & (word >= 0) & (word < count), other=0)
        bits = gl.where(word < 0, -1, bits)
    else:
        bits = words
    return bits


@gluon.jit
def _visible(bits, bits_2, local, BLOCK_N: gl.constexpr):
    """bool [ROWS, BLOCK_N]: bit local % 64 of each row's word, of the second one from key 64 on."""
    if BLOCK_N > 64:
        second = ((local & 64) != 0)[None, :]
        low = gl.where(second, bits_2.to(gl.int32)[:, None], bits.to(gl.int32)[:, None])
        high = gl.where(second, (bits_2 >> 32).to(gl.int32)[:, None], (bits >> 32).to(gl.int32)[:, None])
    else:
        low = bits.to(gl.int32)[:, None]
        high = (bits >> 32).to(gl.int32)[:, None]
    half = gl.where(((local & 32) != 0)[None, :], high, low)
    return (half & (1 << (local & 31))[None, :]) != 0


@gluon.jit
def _masked(s, start, prefix, local, i, bits, bits_2, TREE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Scores with -inf where a row does not see a key."""
    if TREE:
        s = gl.where(_visible(bits, bits_2, local, BLOCK_N), s, float("-inf"))
    else:
        s = gl.where((start - prefix + local)[None, :] <= i[:, None], s, float("-inf"))
    return s


@gluon.jit
def _weigh(s, m, total, scale, rows_s: gl.constexpr, sums: gl.constexpr, BLOCK_N: gl.constexpr):
    """One step of online softmax: (weights, what earlier results are multiplied by, m, total).

    A thread's scores are reduced in several short chains: in one, each step would wait for the one before. `total` stays
    divided over the threads of a row, [ROWS, 8], until the end.
    """
    CHAIN: gl.constexpr = 4
    peak = gl.max(gl.max(s.reshape([ROWS, CHAIN, BLOCK_N // CHAIN // 8, 8]), 1), 1)
    peak = gl.convert_layout(gl.max(peak, 1), rows_s)
    m_new = gl.maximum(m, peak * scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    added = gl.sum(gl.sum(p.reshape([ROWS, CHAIN, BLOCK_N // CHAIN // 8, 8]), 1), 1)
    total = total * gl.convert_layout(alpha, gl.SliceLayout(1, sums))[:, None] + gl.convert_layout(added, sums)
    return p, alpha, m_new, total


@gluon.jit
def _consume(
    prefix_lens, tree_bits, sinks, out, lse, plan, partial_out, partial_lse,
    q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    items, tiles, heads, queries, tree_words, scale, out_scale, out_row, out_head, lse_row, lse_head, items_at, counters_at,
    HALF: gl.constexpr, TREE: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_BUFFERS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Attend the rows of one consumer in every tile of this program.

    Scores of a tile are computed before the values of the tile before are added, so that the tensor cores work on those
    while this group of warps is at its softmax; and the consumers take turns at the tensor cores, or both would be at their
    softmax at once (Shah et al., FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2).
    """
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    rows_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    kind: gl.constexpr = q_ring.dtype
    local = gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma_s))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, mma_s)
    taken = 0
    number = 0
    turn = 0
    items = _items(plan, items, items_at, SPLIT)
    if not SPLIT:
        # Lengths come an item ahead: everything of an item waits for its own.
        coming = gl.load(prefix_lens + gl.program_id(0) // (tiles * heads))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = item % tiles
        head = item // tiles % heads
        first = tile * (ROWS * CONSUMERS)
        begin = 0
        if SPLIT:
            words = plan + item // (tiles * heads) * 8
            request = gl.load(words)
            begin = gl.load(words + 1)
            prefix = gl.load(words + 6)
        else:
            request = item // (tiles * heads)
            prefix = coming.to(gl.int32)
            coming = gl.load(prefix_lens + gl.minimum(item + gl.num_programs(0), items - 1) // (tiles * heads))
        stop = prefix + queries
        if not TREE:
            # Rows of this tile look no further than its last row.
            stop = prefix + gl.minimum(queries, (first + ROWS * CONSUMERS - 1) // GROUP + 1)
        if SPLIT:
            stop = gl.where(gl.load(words + 3) < gl.load(words + 4) - 1, gl.load(words + 2), stop)
        base = prefix // 64 * 64
        packed = first + HALF * ROWS + gl.arange(0, ROWS, rows_s)
        i = packed // GROUP
        is_row = i < queries
        rows = request.to(gl.int64) * queries + i
        full = prefix // BLOCK_N * BLOCK_N

        m = gl.full([ROWS], float("-inf"), gl.float32, rows_s)
        total = gl.zeros([ROWS, 8], gl.float32, sums)
        row_words = rows
        if TREE:
            row_words = tree_bits + rows * tree_words
        bits = _word(row_words, (begin - base) >> 6, tree_words, is_row, TREE)
        bits_2 = bits
        if BLOCK_N > 64:
            bits_2 = _word(row_words, ((begin - base) >> 6) + 1, tree_words, is_row, TREE)
        buffer = number % Q_BUFFERS
        q_tile = q_ring.index(buffer * CONSUMERS + HALF)
        mbarrier.wait(q_full.index(buffer), (number // Q_BUFFERS) & 1)
        stage = taken % STAGES
        mbarrier.wait(k_full.index(stage), (taken // STAGES) & 1)
        # The copies are ordinary writes; wgmma reads through another path, which must see them.
        fence_async_shared()
        s = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(k_empty.index(stage), count=1)
        if begin >= full:
            s = _masked(s, begin, prefix, local, i, bits, bits_2, TREE, BLOCK_N)
        p, alpha, m, total = _weigh(s, m, total, scale, rows_s, sums, BLOCK_N)
        weights = gl.convert_layout(p.to(kind), operand)
        mbarrier.wait(v_full.index(stage), (taken // STAGES) & 1)
        o = gl.zeros([ROWS, D], gl.float32, mma_o)
        for start in range(begin + BLOCK_N, stop, BLOCK_N):
            before = taken % STAGES
            taken += 1
            stage = taken % STAGES
            mbarrier.wait(k_full.index(stage), (taken // STAGES) & 1)
            # For these keys, and for the values that were waited for at the end of the step before.
            fence_async_shared()
            # Words of a tile's masks are asked for before its scores are waited for. In the prefix there are none to read.
            bits = _word(row_words, (start - base) >> 6, tree_words, is_row, TREE)
            bits_2 = bits
            if BLOCK_N > 64:
                bits_2 = _word(row_words, ((start - base) >> 6) + 1, tree_words, is_row, TREE)
            if HALF == 0:
                mbarrier.wait(turns.index(0), (turn & 1) ^ 1)
            else:
                mbarrier.wait(turns.index(1), turn & 1)
            s_now = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            o_now = warpgroup_mma(weights, v_ring.index(before), o, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF), count=1)
            turn += 1
            s = warpgroup_mma_wait(1, deps=(s_now,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            if start >= full:
                s = _masked(s, start, prefix, local, i, bits, bits_2, TREE, BLOCK_N)
            p_next, alpha, m, total = _weigh(s, m, total, scale, rows_s, sums, BLOCK_N)
            # The wait for this tile's values stands here for the compiler: it would compute the weights behind the wait below.
            mbarrier.wait(v_full.index(stage), (taken // STAGES) & 1)
            o, p_now = warpgroup_mma_wait(0, deps=(o_now, p_next.to(kind)))
            mbarrier.arrive(v_empty.index(before), count=1)
            o = o * gl.convert_layout(alpha, rows_o)[:, None]
            weights = gl.convert_layout(p_now, operand)
        stage = taken % STAGES
        fence_async_shared()
        o = warpgroup_mma(weights, v_ring.index(stage), o)
        mbarrier.arrive(v_empty.index(stage), count=1)
        taken += 1

        weighed = gl.convert_layout(gl.sum(total, 1), rows_s)
        if SPLIT:
            # Read again: through the loop they would hold registers.
            words = plan + item // (tiles * heads) * 8
            part = gl.load(words + 3)
            parts = gl.load(words + 4)
            if parts > 1:
                partial = gl.load(words + 5)
                place = part_rows(partial, part, head, heads, tile, tiles, HALF)
                store_part(o, m, weighed, partial_out, partial_lse, place, D, rows_s, mma_o)
                if LAST:
                    # All threads' stores come before the count, which releases them to whoever counts after.
                    barrier()
                    # The halves count in halves of the counter.
                    counter = plan + counters_at + (request * heads + head) * tiles + tile
                    arrived = gl.atomic_add(counter, 1 << (16 * HALF), sem="acq_rel", scope="gpu")
                    if ((arrived >> (16 * HALF)) & 0xFFFF) == parts - 1:
                        gl.atomic_add(counter, -(parts << (16 * HALF)), sem="relaxed", scope="gpu")
                        combine(
                            partial_out, partial_lse, partial, parts, sinks, out, lse, request, head, heads, tile, tiles, first,
                            queries, out_scale, out_row, out_head, lse_row, lse_head, HALF, GROUP, D, HAS_SINKS, HAS_LSE,
                        )  # fmt: skip
            else:
                finish(
                    o, m, weighed, q_tile, sinks, out, lse, request, head, first, queries,
                    out_scale, out_row, out_head, lse_row, lse_head, HALF, GROUP, D, HAS_SINKS, HAS_LSE, rows_s, mma_o,
                )  # fmt: skip
        else:
            finish(
                o, m, weighed, q_tile, sinks, out, lse, request, head, first, queries,
                out_scale, out_row, out_head, lse_row, lse_head, HALF, GROUP, D, HAS_SINKS, HAS_LSE, rows_s, mma_o,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(buffer), count=1)
        number += 1  # noqa: SIM113 - no enumerate in a kernel


@gluon.jit(do_not_specialize=["items", "tiles", "queries", "tree_words", "items_at", "counters_at"])
def specialized_kernel(
    q, k, v, table, row_ids, prefix_lens, tree_bits, tree_seen, sinks, out, lse, plan, partial_out, partial_lse,
    items, tiles, heads, queries, tree_words, scale, out_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_stride, out_row, out_head, lse_row, lse_head, items_at, counters_at,
    TREE: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, LAST: gl.constexpr, PDL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Every program takes items pid, pid + programs, …; an item is 128 query rows of one KV head of one request.

    SPLIT: it is one part of that request's prefix, as the plan divides it, and the last part has the drafts. `items` is then
    what one part makes. LAST: the consumer that comes last to a row tile combines the parts, else a second launch does, as in
    `fused_kernel.py`; PDL: which may start early.

    q [bs * queries, Hq, D]; k, v [slots, Hkv, D]; out like q; lse FP32 [T, Hq]; the rest is documented at
    `verify_attention`. `scale` holds sm_scale, k_scale and the change to base 2; `out_scale` v_scale.
    """
    if PDL:
        # At once: whoever waits for this grid waits until all of it has ended, so nothing depends on where this stands.
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    kind: gl.constexpr = q.dtype.element_ty
    shared_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], kind)
    shared_kv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], kind)
    q_ring = gl.allocate_shared_memory(kind, [Q_BUFFERS * CONSUMERS, ROWS, D], shared_q)
    k_ring = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], shared_kv)
    v_ring = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], shared_kv)
    k_slots = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    v_slots = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(n), count=1)
    for n in gl.static_range(Q_BUFFERS):
        mbarrier.init(q_full.index(n), count=PRODUCERS)
        mbarrier.init(q_empty.index(n), count=CONSUMERS)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=PRODUCERS)
        mbarrier.init(k_empty.index(n), count=CONSUMERS)
        mbarrier.init(v_full.index(n), count=PRODUCERS)
        mbarrier.init(v_empty.index(n), count=CONSUMERS)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    prefix_lens, tree_bits, sinks, out, lse, plan, partial_out, partial_lse,
                    q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                    items, tiles, heads, queries, tree_words, scale, out_scale, out_row, out_head, lse_row, lse_head,
                    items_at, counters_at,
                    zero, TREE, GROUP, D, BLOCK_N, STAGES, Q_BUFFERS, HAS_SINKS, HAS_LSE, SPLIT, LAST,
                ),
            ),
            (
                _consume,
                (
                    prefix_lens, tree_bits, sinks, out, lse, plan, partial_out, partial_lse,
                    q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                    items, tiles, heads, queries, tree_words, scale, out_scale, out_row, out_head, lse_row, lse_head,
                    items_at, counters_at,
                    one, TREE, GROUP, D, BLOCK_N, STAGES, Q_BUFFERS, HAS_SINKS, HAS_LSE, SPLIT, LAST,
                ),
            ),
            (
                _produce,
                (
                    q, k, table, row_ids, prefix_lens, tree_seen, plan, q_ring, k_ring, k_slots, q_full, q_empty, k_full, k_empty,
                    items, tiles, heads, queries, tree_words, q_row, q_head, k_slot, k_head, table_stride,
                    items_at,
                    one, TREE, GROUP, D, PAGE_SIZE, BLOCK_N, STAGES, Q_BUFFERS, SPLIT,
                ),
            ),
            (
                _produce,
                (
                    q, v, table, row_ids, prefix_lens, tree_seen, plan, q_ring, v_ring, v_slots, q_full, q_empty, v_full, v_empty,
                    items, tiles, heads, queries, tree_words, q_row, q_head, v_slot, v_head, table_stride,
                    items_at,
                    zero, TREE, GROUP, D, PAGE_SIZE, BLOCK_N, STAGES, Q_BUFFERS, SPLIT,
                ),
            ),
        ],
        [4, 4, 4],
        [CONSUMER_REGISTERS, 256 - CONSUMER_REGISTERS, 256 - CONSUMER_REGISTERS],
    )  # fmt: skip
