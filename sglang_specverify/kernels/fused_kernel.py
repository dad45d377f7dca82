"""The one Triton kernel of verify attention, draft decode and the tree tile.

    s(i, n)  = cap(sm_scale * k_scale * q_i . k_n)
    m, l, o  = running maximum, sum of exp(s - m) and sum of exp(s - m) * v over the keys read so far
    lse(i)   = m + log(l),   out(i) = v_scale * o / (l + exp(sink - m))

which is online softmax (Milakov and Gimelshein, arXiv:1805.02867) in base 2, as FlashAttention orders it
(Dao et al., arXiv:2205.14135). Query rows are pairs (draft token, head of a KV group), so that all heads of a group share
the keys that a program reads. Keys are numbered by n: the prefix is n < L and draft j is n = L + j, so that the last, partly
filled tile of the prefix and the drafts are one masked loop, and the loop before it needs no mask unless there is a window.

The prefix of a request may be split over programs by a plan (`plan.py`). Then each writes its normalised output and its LSE,
and the program that arrives last combines them in the order of the splits, whoever it is, or a second launch does
(`combine_parts_kernel.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from sglang_specverify.kernels.combine_parts_kernel import add_four, read_four, read_part, with_sink
from sglang_specverify.kernels.widen_kernel import widened

#: Values of KIND. A tree comes as bits, whatever layout its mask has: `plan_kernel.py` packs them.
CHAIN, TREE, BRANCHES = 0, 1, 2


@triton.jit
def _tile_slots(table_row, start, slot_map, PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr, BLOCK_N: tl.constexpr):
    """int64 cache slots of the prefix keys start to start + BLOCK_N - 1, a multiple of BLOCK_N; all of them exist."""
    n = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 1:
        slot = tl.load(table_row + n).to(tl.int64)
    elif PAGE_SIZE % BLOCK_N == 0:
        # The tile lies in one page: its rows are neighbours, and one entry tells where.
        page = tl.load(table_row + start // PAGE_SIZE).to(tl.int64)
        slot = page * PAGE_SIZE + start % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        slot = tl.load(table_row + n // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + n % PAGE_SIZE
    if HAS_SLOT_MAP:
        slot = tl.load(slot_map + slot).to(tl.int64)
    return slot


@triton.jit
def _wanted_slots(table_row, n, exists, wanted, slot_map, PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr):
    """int64 cache slots of the keys n, -1 where not wanted or where nothing may look.

    The table is read wherever a key `exists`: what is `wanted` may itself be on its way from memory, and need not be waited for.
    """
    if PAGE_SIZE == 1:
        slot = tl.load(table_row + n, mask=exists, other=-1).to(tl.int64)
        slot = tl.where(wanted, slot, -1)
    else:
        page = tl.load(table_row + n // PAGE_SIZE, mask=exists, other=-1).to(tl.int64)
        slot = tl.where(wanted & (page >= 0), page * PAGE_SIZE + n % PAGE_SIZE, -1)
    if HAS_SLOT_MAP:
        slot = tl.load(slot_map + slot, mask=slot >= 0, other=-1).to(tl.int64)
    return slot


@triton.jit
def _tree_word(words, word, count, is_row, cut, MERGE: tl.constexpr):
    """int64 [BLOCK_M]: the bits of 64 keys for each row. Words before word 0 are prefix, words from `count` on nothing.

    With MERGE the prefix is attended elsewhere: its keys, the lowest `cut` of word 0 and all before, are cleared.
    """
    inside = is_row & (word >= 0) & (word < count)
    if MERGE:
        bits = tl.load(words + word, mask=inside, other=0)
        return tl.where(word == 0, bits & (tl.full([1], -1, tl.int64) << cut), bits)
    bits = tl.load(words + word, mask=inside, other=0)
    return tl.where(word < 0, -1, bits)


@triton.jit
def _spread(bits, local, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """bool [BLOCK_M, BLOCK_N]: bit local % 64 of each row's word.

    The word is broadcast before it is cut in halves, so that a change of layout moves one word a row and not a tile of flags.
    """
    wide = tl.broadcast_to(bits[:, None], [BLOCK_M, BLOCK_N])
    half = tl.where((local & 32)[None, :] != 0, (wide >> 32).to(tl.int32), wide.to(tl.int32))
    return (half & (1 << (local & 31))[None, :]) != 0


@triton.jit
def _tree_visible(bits, bits_2, start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """bool [BLOCK_M, BLOCK_N]: which of the keys from `start` on, a multiple of BLOCK_N, each row sees.

    `bits` is the word that holds key `start`; `bits_2` the next one, where a tile has 128 keys.
    """
    local = tl.arange(0, BLOCK_N)
    if BLOCK_N < 64:
        bits = bits >> (start & 63)
    visible = _spread(bits, local, BLOCK_M, BLOCK_N)
    if BLOCK_N > 64:
        visible = tl.where((local & 64)[None, :] != 0, _spread(bits_2, local, BLOCK_M, BLOCK_N), visible)
    return visible


@triton.jit
def _capped(s, scale, softcap):
    """softcap * tanh(s) in units of log 2, where `scale` holds 2 log2(e) / softcap: tanh through exp2, error softcap * 2^-23."""
    s = s * scale
    t = tl.exp2(-tl.abs(s))
    tanh = (1.0 - t) / (1.0 + t)
    return tl.where(s < 0.0, -tanh, tanh) * softcap


@triton.jit
def _accumulate(s, scale, v, m, total, acc):
    """One step of online softmax over scores s * scale, scale > 0, in units of log 2.

    A row that has seen no key yet has m = -inf and must not compute inf - inf.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - base[:, None])
    alpha = tl.exp2(m - base)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, total, acc


# Numbers that change with the batch, the step or the tree, and whose value or alignment helps no address: one compilation each.
@triton.jit(do_not_specialize=["queries", "tree_words", "branch_keys", "window", "counters_at"])
def verify_attention_kernel(
    q, k, v, table, row_ids, prefix_lens, q_offsets, slot_map, tree_bits, tree_seen, positions, draft_slots, sinks,
    k_scale, v_scale, out, lse, plan, partial_out, partial_lse,
    queries, tree_words, branch_keys, window, scale, softcap, out_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_stride, draft_row, draft_branch, draft_step,
    out_row, out_head, lse_row, lse_head, counters_at,
    KIND: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_SLOT_MAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    BY_FP16: tl.constexpr, SPLIT: tl.constexpr, MERGE: tl.constexpr, SIGNED: tl.constexpr, PEEL: tl.constexpr,
    AHEAD: tl.constexpr, COMBINE: tl.constexpr, PARTS_AHEAD: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one KV head of one request, over its prefix or a split of it, and its drafts.

    q [T, Hq, D]; k, v [slots, Hkv, D or DV]; out [T, Hq, DV]; lse FP32 [T, Hq]; the rest is documented at
    `verify_attention`. `scale` holds sm_scale, a number k_scale and the change to base 2; `out_scale` a number v_scale.
    K_SCALE and V_SCALE: 0 where that number is all, 1 for a tensor of one element, 2 for one of [Hkv].
    BY_FP16: as `widened` has it.
    MERGE: no prefix is read; `out` and `lse` hold the prefix's result and receive the merged one. SIGNED: the scale may be
    negative or zero. PEEL: full tiles of the prefix have a loop without masks. AHEAD: that loop reads slots a tile ahead.
    PARTS_AHEAD: four parts are read ahead of their combination; else COMBINE parts stand behind each other in the code.
    LAST: the last program of a divided prefix combines its parts, else a second launch does; PDL: which may start early.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    head = tl.program_id(1)
    item = tl.program_id(2)
    begin = 0
    split = 0
    num_splits = 1
    partial = 0
    if PDL:
        # At once: whoever waits for this grid waits until all of it has ended, so nothing depends on where this stands.
        gdc_launch_dependents()
    if SPLIT:
        words = plan + item * 8
        request = tl.load(words)
        if request < 0:
            return
        begin = tl.load(words + 1)
        prefix_stop = tl.load(words + 2)
        split = tl.load(words + 3)
        num_splits = tl.load(words + 4)
        partial = tl.load(words + 5)
        prefix = tl.load(words + 6)
        # Here and not through row_ids: one wait less before the first key can be read.
        table_index = tl.load(words + 7)
    else:
        request = item
        table_index = tl.load(row_ids + request)
        prefix = tl.load(prefix_lens + request).to(tl.int32)
        prefix_stop = prefix
    if RAGGED:
        first_row = tl.load(q_offsets + request).to(tl.int64)
        count = tl.load(q_offsets + request + 1) - first_row.to(tl.int32)
        if tile * BLOCK_M >= count * GROUP:
            return
    else:
        first_row = request.to(tl.int64) * queries
        count = queries

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i = packed // GROUP
    q_heads = head * GROUP + packed % GROUP
    is_row = i < count
    rows = first_row + i
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_tile = tl.load(
        q + rows[:, None] * q_row + q_heads[:, None].to(tl.int64) * q_head + d[None, :],
        mask=is_row[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if K_SCALE == 1:
        scale *= tl.load(k_scale).to(tl.float32)
    elif K_SCALE == 2:
        scale *= tl.load(k_scale + head).to(tl.float32)

    if SIGNED:
        # The loop multiplies after it has masked and looked for the maximum, so its factor must be positive.
        sign = tl.where(scale < 0.0, -1.0, tl.where(scale > 0.0, 1.0, 0.0))
        q_tile = (q_tile.to(tl.float32) * sign).to(q_tile.dtype)
        scale = tl.where(scale == 0.0, 1.0, tl.abs(scale))

    k_base = k + head.to(tl.int64) * k_head
    v_base = v + head.to(tl.int64) * v_head
    table_row = table + table_index.to(tl.int64) * table_stride
    if KIND == 0:
        # Rows of this program look no further than its last row.
        stop = prefix + tl.minimum(count, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    elif KIND == 1:
        stop = prefix + count
        base = prefix // 64 * 64
        row_words = tree_bits + rows * tree_words
        seen_keys = tree_seen + request.to(tl.int64) * tree_words * 64
    else:
        stop = prefix + queries * branch_keys
    if split < num_splits - 1:
        stop = prefix_stop

    if HAS_WINDOW:
        if KIND == 0:
            row_position = prefix + i
        elif KIND == 1:
            row_position = tl.load(positions + rows, mask=is_row, other=0).to(tl.int32)
        else:
            row_position = prefix + (branch_keys - 1) + tl.zeros_like(i)
        first_seen = row_position - window
        # Nobody in this program looks below it, and the table may hold -1 there.
        first_key = tl.min(tl.where(is_row, first_seen, 2147483647), 0)
        if not MERGE:
            # Not beyond the drafts: those are numbered by index, and one behind may stand at any depth.
            begin = tl.maximum(begin, tl.minimum(tl.maximum(first_key, 0), prefix) // BLOCK_N * BLOCK_N)
    if MERGE:
        begin = prefix // BLOCK_N * BLOCK_N
        # The prefix's result comes while the drafts' keys do: the loop is one to three tiles long and would hide nothing later.
        before = tl.load(lse + rows * lse_row + q_heads.to(tl.int64) * lse_head, mask=is_row, other=float("-inf")) * LOG2_E
        merged_at = out + rows[:, None] * out_row + q_heads[:, None].to(tl.int64) * out_head + dv[None, :]
        prefix_out = tl.load(merged_at, mask=is_row[:, None] & (dv < DV)[None, :], other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    local = tl.arange(0, BLOCK_N)

    if PEEL:
        # Full tiles of the prefix, every key of which every row sees.
        full_stop = begin + (prefix_stop - begin) // BLOCK_N * BLOCK_N
        if AHEAD:
            following = tl.full([BLOCK_N], 0, tl.int64)
            if begin < full_stop:
                following = _tile_slots(table_row, begin, slot_map, PAGE_SIZE, HAS_SLOT_MAP, BLOCK_N)
        for start in tl.range(begin, full_stop, BLOCK_N):
            if AHEAD:
                # A tile's keys do not wait for its slots; they cost registers, which few rows leave free.
                slot = following
                ahead = tl.minimum(start + BLOCK_N, full_stop - BLOCK_N)
                following = _tile_slots(table_row, ahead, slot_map, PAGE_SIZE, HAS_SLOT_MAP, BLOCK_N)
            else:
                slot = _tile_slots(table_row, start, slot_map, PAGE_SIZE, HAS_SLOT_MAP, BLOCK_N)
            if D == BLOCK_D:
                k_tile = tl.load(k_base + slot[None, :] * k_slot + d[:, None])
            else:
                k_tile = tl.load(k_base + slot[None, :] * k_slot + d[:, None], mask=(d < D)[:, None], other=0.0)
            s = tl.dot(q_tile, widened(k_tile, q_tile.dtype, BY_FP16), input_precision="ieee")
            if DV == BLOCK_DV:
                v_tile = tl.load(v_base + slot[:, None] * v_slot + dv[None, :])
            else:
                v_tile = tl.load(v_base + slot[:, None] * v_slot + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
            v_tile = widened(v_tile, q_tile.dtype, BY_FP16)
            if HAS_SOFTCAP:
                m, total, acc = _accumulate(_capped(s, scale, softcap), 1.0, v_tile, m, total, acc)
            else:
                m, total, acc = _accumulate(s, scale, v_tile, m, total, acc)
        begin = full_stop

    if KIND == 1:
        # Words come a tile ahead: they are all that a masked tile reads and no pipeline brings.
        word = (begin - base) >> 6
        bits = _tree_word(row_words, word, tree_words, is_row, prefix - base, MERGE)
        bits_2 = bits
        if BLOCK_N > 64:
            bits_2 = _tree_word(row_words, word + 1, tree_words, is_row, prefix - base, MERGE)

    for start in tl.range(begin, stop, BLOCK_N):
        n = start + local
        # A key that nobody sees is not read: what it holds may be NaN, and 0 * NaN is NaN.
        exists = n < stop
        if MERGE:
            exists = exists & (n >= prefix)
        wanted = exists
        if HAS_WINDOW:
            if KIND == 0:
                key_position = n
            elif KIND == 1:
                key_position = tl.load(positions + first_row + (n - prefix), mask=exists & (n >= prefix), other=0).to(tl.int32)
                key_position = tl.where(n < prefix, n, key_position)
            else:
                key_position = tl.where(n < prefix, n, prefix + (n - prefix) % branch_keys)
            wanted = wanted & (key_position >= first_key)
        if KIND == 1:
            wanted = wanted & (tl.load(seen_keys + (n - base), mask=exists & (n >= prefix), other=1) != 0)
            word = (start + BLOCK_N - base) >> 6
            bits_now = bits
            bits_2_now = bits_2
            bits = _tree_word(row_words, word, tree_words, is_row, prefix - base, MERGE)
            if BLOCK_N > 64:
                bits_2 = _tree_word(row_words, word + 1, tree_words, is_row, prefix - base, MERGE)
        if KIND == 2:
            j = n - prefix
            slot = _wanted_slots(table_row, n, exists & (j < 0), wanted & (j < 0), None, PAGE_SIZE, False)
            own = draft_slots + request.to(tl.int64) * draft_row + (j // branch_keys).to(tl.int64) * draft_branch
            drafted = tl.load(own + (j % branch_keys) * draft_step, mask=wanted & (j >= 0), other=-1).to(tl.int64)
            slot = tl.where(j < 0, slot, drafted)
            if HAS_SLOT_MAP:
                slot = tl.load(slot_map + slot, mask=slot >= 0, other=-1).to(tl.int64)
        else:
            slot = _wanted_slots(table_row, n, exists, wanted, slot_map, PAGE_SIZE, HAS_SLOT_MAP)
        is_k = (slot >= 0)[None, :]
        if D != BLOCK_D:
            is_k = is_k & (d < D)[:, None]
        k_tile = tl.load(k_base + slot[None, :] * k_slot + d[:, None], mask=is_k, other=0.0)
        s = tl.dot(q_tile, widened(k_tile, q_tile.dtype, BY_FP16), input_precision="ieee")
        is_v = (slot >= 0)[:, None]
        if DV != BLOCK_DV:
            is_v = is_v & (dv < DV)[None, :]
        v_tile = tl.load(v_base + slot[:, None] * v_slot + dv[None, :], mask=is_v, other=0.0)
        if HAS_SOFTCAP:
            s = _capped(s, scale, softcap)
        if KIND == 0:
            visible = (n - prefix)[None, :] <= i[:, None]
        elif KIND == 1:
            visible = _tree_visible(bits_now, bits_2_now, start, BLOCK_M, BLOCK_N)
        else:
            branch = tl.where(n < prefix, -1, (n - prefix) // branch_keys)
            visible = (n < stop)[None, :] & ((branch < 0)[None, :] | (branch[None, :] == i[:, None]))
        if MERGE and KIND != 1:
            visible = visible & (n >= prefix)[None, :]
        if HAS_WINDOW:
            visible = visible & (key_position[None, :] >= first_seen[:, None])
        s = tl.where(visible, s, float("-inf"))
        v_tile = widened(v_tile, q_tile.dtype, BY_FP16)
        if HAS_SOFTCAP:
            m, total, acc = _accumulate(s, 1.0, v_tile, m, total, acc)
        else:
            m, total, acc = _accumulate(s, scale, v_tile, m, total, acc)

    if SPLIT:
        if num_splits > 1:
            # This split's output and LSE, normalised, in a place of its own.
            tiles = tl.num_programs(0)
            heads = tl.num_programs(1)
            lane = tl.arange(0, BLOCK_M)
            at = ((partial + split) * heads + head).to(tl.int64) * tiles + tile
            norm = tl.where(total > 0.0, total, 1.0)
            tl.store(partial_lse + at * BLOCK_M + lane, tl.where(total > 0.0, m + tl.log2(norm), float("-inf")))
            o_at = partial_out + at * (BLOCK_M * BLOCK_DV) + lane[:, None] * BLOCK_DV + dv[None, :]
            tl.store(o_at, acc / norm[:, None])
            if LAST:
                # All threads' stores come before the count, which releases them to whoever counts after.
                tl.debug_barrier()
                counter = plan + counters_at + (request * heads + head) * tiles + tile
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < num_splits - 1:
                    return
                tl.store(counter, 0)
                at = (partial * heads + head).to(tl.int64) * tiles + tile
                # The LSE is a column and not a row, so that each thread reads what it multiplies with, in one layout.
                is_lane = (tile * BLOCK_M + lane < count * GROUP)[:, None]
                lse_at = partial_lse + at * BLOCK_M + lane[:, None]
                out_at = partial_out + at * (BLOCK_M * BLOCK_DV) + lane[:, None] * BLOCK_DV + dv[None, :]
                peak = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)
                weights = tl.zeros([BLOCK_M, 1], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                if PARTS_AHEAD:
                    # Four are on their way before the first is used, and four more as soon as these are added. The loop carries
                    # them because the compiler moves loads of one block down to what uses them, and few would stand together.
                    # In 32 bits: a request has 2 (programs / (heads tiles) + 1) parts at the most, or of 512 rows in all.
                    stride = heads * tiles
                    a0, a1, a2, a3, p0, p1, p2, p3 = read_four(lse_at, out_at, 0, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV)
                    for next_four in tl.range(4, num_splits + 4, 4):
                        peak, weights, acc = add_four(peak, weights, acc, a0, a1, a2, a3, p0, p1, p2, p3)
                        a0, a1, a2, a3, p0, p1, p2, p3 = read_four(
                            lse_at, out_at, next_four, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV
                        )
                else:
                    stride = heads.to(tl.int64) * tiles
                    for first in tl.range(0, num_splits, COMBINE):
                        for u in tl.static_range(COMBINE):
                            e0, o0 = read_part(lse_at, out_at, first + u, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV)
                            new_peak = tl.maximum(peak, e0)
                            base_1 = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                            alpha_1 = tl.exp2(peak - base_1)
                            weight_1 = tl.exp2(e0 - base_1)
                            weights = weights * alpha_1 + weight_1
                            acc = acc * alpha_1 + o0 * weight_1
                            peak = new_peak
                m = tl.max(peak, 1)
                total = tl.sum(weights, 1)
        if not LAST:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
            if num_splits > 1:
                return

    # Addresses are made here: before the loops they would hold registers throughout.
    if HAS_LSE:
        lse_at = lse + rows * lse_row + q_heads.to(tl.int64) * lse_head
    out_at = out + rows[:, None] * out_row + q_heads[:, None].to(tl.int64) * out_head + dv[None, :]
    is_out = is_row[:, None]
    if DV != BLOCK_DV:
        is_out = is_out & (dv < DV)[None, :]
    if V_SCALE == 1:
        out_scale *= tl.load(v_scale).to(tl.float32)
    elif V_SCALE == 2:
        out_scale *= tl.load(v_scale + head).to(tl.float32)
    # What the rows of acc, and of the prefix's result, are multiplied by in the end: once each, in place of divisions.
    factor = tl.full([BLOCK_M], 1.0, tl.float32) * out_scale
    if MERGE:
        # Some kernels mark a row without keys with +inf, and leave anything in its output.
        before = tl.where(before == float("inf"), float("-inf"), before)
        prefix_out = tl.where((before > float("-inf"))[:, None], prefix_out.to(tl.float32), 0.0)
        # The stores below are in place: every warp has read what it merges before any warp writes.
        tl.debug_barrier()
        m_new = tl.maximum(m, before)
        base_2 = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base_2)
        weight = tl.exp2(before - base_2)
        total = total * alpha + weight
        factor *= alpha
        m = m_new
    empty = total <= 0.0
    norm = tl.where(empty, 1.0, total)
    if HAS_LSE:
        tl.store(lse_at, tl.where(empty, float("-inf"), (m + tl.log2(norm)) * 0.6931471805599453), mask=is_row)
    if HAS_SINKS:
        sink = tl.load(sinks + q_heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2_E
        alpha, sunk = with_sink(m, total, sink)
        factor *= alpha
        if MERGE:
            weight *= alpha
        norm = tl.where(empty, 1.0, sunk)
    result = acc * (tl.where(empty, 0.0, factor) / norm)[:, None]
    if MERGE:
        result += prefix_out * (weight / norm)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_out)
