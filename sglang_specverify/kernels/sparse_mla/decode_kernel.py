"""The Triton kernel of `decode.py`, which has the formula."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_specverify.kernels.sparse_mla.rows_kernel import main_rows, window_rows

#: Weights are at most 1, and E4M3 numbers at most this: so fewest of them are below its range.
P_SCALE = tl.constexpr(448.0)


@triton.jit
def _attend(q, keys, sees, m, total, scale):
    """One step of online softmax, in base 2: (weights, what earlier sums are multiplied by, m, total)."""
    s = tl.dot(q, tl.trans(keys)) * scale
    s = tl.where(sees, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    return p, alpha, m_new, total * alpha + tl.sum(p, 1)


@triton.jit
def _weights(p, CONVERSION: tl.constexpr):
    """Weights as the products with values take them: bf16, or P_SCALE times as large in E4M3, rounded to nearest."""
    if CONVERSION == "":
        return p.to(tl.bfloat16)
    else:
        return (p * P_SCALE).to(tl.float8e4nv)


@triton.jit
def _valid(slot, listed, capacity):
    """Entries of an index list that name a row of the pool."""
    return listed & (slot >= 0) & (slot < capacity)


@triton.jit
def decode_kernel(
    q, swa, swa_indices, swa_starts, swa_lens, main, main_indices, main_lens, sink, out, lse, partial_out, partial_lse,
    queries, heads, swa_width, main_width, swa_capacity, main_capacity, swa_page, main_page, scale, out_scale,
    q_batch, q_row, q_head, swa_index_batch, swa_index_row, main_index_batch, main_index_row,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row,
    out_batch, out_row, out_head, lse_batch, lse_row, lse_head, head_blocks, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, VALUE_PARTS: tl.constexpr,
    SHARED_SWA: tl.constexpr, HAS_STARTS: tl.constexpr, SHARED_MAIN: tl.constexpr,
    HAS_SWA_LENS: tl.constexpr, HAS_MAIN_LENS: tl.constexpr,
    HAS_MAIN: tl.constexpr, HAS_SINK: tl.constexpr, SPLIT: tl.constexpr,
    SWA_GROUP: tl.constexpr, SWA_PAGE_ROWS: tl.constexpr,
    SWA_ROW: tl.constexpr, SWA_S_BASE: tl.constexpr, SWA_S_ROW: tl.constexpr,
    MAIN_PAGE_ROWS: tl.constexpr, MAIN_ROW: tl.constexpr, MAIN_S_BASE: tl.constexpr, MAIN_S_ROW: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, CONVERSION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M packed rows (TOKENS query rows times their heads) of a request, one part of its keys, and
    512 / VALUE_PARTS columns of the output. With a CONVERSION, q, rows and weights are multiplied in E4M3, else in bf16.

    The keys are tiles of BLOCK_N list entries: those of the window, then those of the main lists. Part s of S gets tiles
    s*T//S to (s+1)*T//S, so that the window lies with part 0, and with the next only where a part is less than it.
    """
    D: tl.constexpr = 512
    DV: tl.constexpr = D // VALUE_PARTS
    HEADS_M: tl.constexpr = BLOCK_M // TOKENS
    part = tl.program_id(0) // VALUE_PARTS
    first_value = tl.program_id(0) % VALUE_PARTS * DV
    block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    if PDL:
        # Every input may be the output of the kernel before.
        gdc_wait()

    r = tl.arange(0, BLOCK_M)
    first_token = block // head_blocks * TOKENS
    token = first_token + r // HEADS_M
    head = block % head_blocks * HEADS_M + r % HEADS_M
    is_row = (token < queries) & (head < heads)
    d = tl.arange(0, D)
    q_at = q + (batch * q_batch + token.to(tl.int64) * q_row + head.to(tl.int64) * q_head)[:, None] + d[None, :]
    q_tile = tl.load(q_at, mask=is_row[:, None], other=0.0)
    if CONVERSION == "":
        q_tile = q_tile.to(tl.bfloat16)

    # Where each row's entries of the window's list begin and end; the list may be one for all rows.
    swa_end = tl.zeros([BLOCK_M], tl.int32) + swa_width
    swa_begin = tl.zeros([BLOCK_M], tl.int32)
    if HAS_STARTS:
        swa_begin = tl.load(swa_starts + batch * swa_start_batch + token * swa_start_row, mask=token < queries, other=0)
        swa_begin = tl.maximum(swa_begin, 0)
    if HAS_SWA_LENS:
        length = tl.load(swa_lens + batch * swa_len_batch + token * swa_len_row, mask=token < queries, other=0)
        # A length beyond the list reads no further than it; the sum must not overflow.
        swa_end = tl.minimum(swa_begin + tl.minimum(tl.maximum(length, 0), swa_width), swa_width)
    swa_end = tl.where(token < queries, swa_end, 0)
    swa_tiles = tl.cdiv(swa_width, BLOCK_N)
    lists: tl.constexpr = 1 if SHARED_MAIN else TOKENS
    main_tiles = tl.cdiv(main_width, BLOCK_N)
    tiles = swa_tiles
    if HAS_MAIN:
        tiles += main_tiles * lists
    begin = part * tiles // splits
    end = (part + 1) * tiles // splits

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    n = tl.arange(0, BLOCK_N)

    swa_list = swa_indices + batch * swa_index_batch
    if not SHARED_SWA:
        swa_list += first_token.to(tl.int64) * swa_index_row
    longest = tl.max(swa_end, 0)
    for tile in tl.range(begin, tl.minimum(end, tl.cdiv(longest, BLOCK_N)), num_stages=STAGES):
        at = tile * BLOCK_N + n
        if TOKENS > 1:
            # What no row sees is not read: it may hold NaN, and 0 * NaN is NaN.
            ranges = (at[None, :] >= swa_begin[:, None]) & (at[None, :] < swa_end[:, None])
            listed = tl.max(ranges.to(tl.int32), 0) > 0
        else:
            listed = (at >= tl.max(swa_begin, 0)) & (at < longest)
        slot = tl.load(swa_list + at, mask=at < swa_width, other=-1)
        valid = _valid(slot, listed, swa_capacity)
        keys = window_rows(
            swa, slot, valid, swa_page, 0,
            D, BLOCK_N, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW, CONVERSION,
        )  # fmt: skip
        sees = valid[None, :] & (at[None, :] >= swa_begin[:, None]) & (at[None, :] < swa_end[:, None])
        p, alpha, m, total = _attend(q_tile, keys, sees, m, total, scale)
        values = keys
        if VALUE_PARTS > 1:
            values = window_rows(
                swa, slot, valid, swa_page, first_value,
                DV, BLOCK_N, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW, CONVERSION,
            )  # fmt: skip
        acc = tl.dot(_weights(p, CONVERSION), values, acc * alpha[:, None])

    if HAS_MAIN:
        main_end = tl.zeros([BLOCK_M], tl.int32) + main_width
        if HAS_MAIN_LENS:
            limit = tl.load(main_lens + batch * main_len_batch + token * main_len_row, mask=token < queries, other=0)
            main_end = tl.minimum(limit, main_width)
        main_end = tl.where(token < queries, main_end, 0)
        longest = tl.max(main_end, 0)
        stop = end - swa_tiles
        if lists == 1:
            stop = tl.minimum(stop, tl.cdiv(longest, BLOCK_N))
        main_list = main_indices + batch * main_index_batch
        if not SHARED_MAIN:
            main_list += first_token.to(tl.int64) * main_index_row
        for tile in tl.range(tl.maximum(begin - swa_tiles, 0), stop, num_stages=STAGES):
            at = tile * BLOCK_N + n
            own = is_row
            place = main_list
            ends = main_end
            if lists > 1:
                # The tokens' lists one after the other: a tile is of one token, and the other tokens' rows do not see it.
                mine = tile // main_tiles
                at = (tile % main_tiles) * BLOCK_N + n
                place = main_list + mine.to(tl.int64) * main_index_row
                own = r // HEADS_M == mine
                ends = tl.where(own, main_end, 0)
                longest = tl.max(ends, 0)
            main_slot = tl.load(place + at, mask=at < longest, other=-1)
            main_valid = _valid(main_slot, at < longest, main_capacity)
            main_keys = main_rows(
                main, main_slot, main_valid, main_page, 0,
                D // 16, BLOCK_N, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW, CONVERSION,
            )  # fmt: skip
            main_sees = main_valid[None, :] & (at[None, :] < ends[:, None])
            p, alpha, m, total = _attend(q_tile, main_keys, main_sees, m, total, scale)
            main_values = main_keys
            if VALUE_PARTS > 1:
                main_values = main_rows(
                    main, main_slot, main_valid, main_page, first_value // 16,
                    DV // 16, BLOCK_N, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW, CONVERSION,
                )  # fmt: skip
            acc = tl.dot(_weights(p, CONVERSION), main_values, acc * alpha[:, None])

    if PDL:
        gdc_launch_dependents()
    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    column = first_value + tl.arange(0, DV)
    if SPLIT:
        rows = ((batch * tl.num_programs(1) + block) * splits + part) * BLOCK_M + r
        weight = tl.where(empty, 0.0, 1.0 / norm)
        at_out = partial_out + rows[:, None] * D + column[None, :]
        tl.store(at_out, (acc * weight[:, None]).to(partial_out.dtype.element_ty))
        if first_value == 0:
            tl.store(partial_lse + rows, tl.where(empty, float("-inf"), m + tl.log2(norm)))
    else:
        LN_2: tl.constexpr = 0.6931471805599453
        at_lse = lse + batch * lse_batch + token.to(tl.int64) * lse_row + head.to(tl.int64) * lse_head
        if first_value == 0:
            tl.store(at_lse, tl.where(empty, float("-inf"), (m + tl.log2(norm)) * LN_2), mask=is_row)
        weight = out_scale / norm
        if HAS_SINK:
            weight = sunk(weight, m, total, tl.load(sink + head, mask=is_row, other=float("-inf")), out_scale)
        weight = tl.where(empty, 0.0, weight)
        result = tl.where(weight[:, None] == 0.0, 0.0, acc * weight[:, None])
        at_out = out + batch * out_batch + token.to(tl.int64) * out_row + head.to(tl.int64) * out_head
        tl.store(at_out[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def sunk(weight, m, total, sink, out_scale):
    """What the sum of a row's weighed values is multiplied by where it has a sink: out_scale / (total + 2^(sink - m)).

    The larger of the two exponents is taken out first. A sink of +inf leaves nothing, one of -inf changes nothing.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    sink = sink.to(tl.float32) * LOG2_E
    peak = tl.maximum(m, sink)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    alpha = tl.exp2(m - shift)
    with_sink = out_scale * alpha / (total * alpha + tl.exp2(sink - shift))
    with_sink = tl.where(sink == float("inf"), 0.0, with_sink)
    return tl.where(sink == float("-inf"), weight, with_sink)
