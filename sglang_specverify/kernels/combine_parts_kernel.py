"""How the parts of a divided prefix become one result, and the Triton kernel that does so in a launch of its own.

    m = max_s lse_s,   w_s = 2^(lse_s - m),   out = v_scale * sum_s w_s out_s / (sum_s w_s + 2^(sink - m))

over the parts s of a request in their order, LSEs in base 2: the composition of attention states (FlashInfer, arXiv:2501.01005,
section 2.2). The maximum runs along, four parts at a time. `fused_kernel.py` and `specialized_kernel.py` write the parts, in one
layout; the program that comes last may combine them there itself, in the former by the same functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def read_part(lse_at, out_at, part, num_splits, is_lane, stride, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """(LSE [BLOCK_M, 1], output [BLOCK_M, BLOCK_DV]) of a request's part; -inf and 0 where there is none.

    Of one row: a scalar, and its columns. `stride`: partial tiles from one part to the next. From the L2 cache: other
    multiprocessors wrote them.
    """
    there = is_lane & (part < num_splits)
    lse = tl.load(lse_at + part * stride * BLOCK_M, mask=there, other=float("-inf"), cache_modifier=".cg")
    out = tl.load(out_at + part * stride * (BLOCK_M * BLOCK_DV), mask=there, other=0.0, cache_modifier=".cg")
    return lse, out


@triton.jit
def read_four(lse_at, out_at, part, num_splits, is_lane, stride, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """LSEs and outputs of four parts, as `read_part` reads them."""
    e0, o0 = read_part(lse_at, out_at, part, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV)
    e1, o1 = read_part(lse_at, out_at, part + 1, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV)
    e2, o2 = read_part(lse_at, out_at, part + 2, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV)
    e3, o3 = read_part(lse_at, out_at, part + 3, num_splits, is_lane, stride, BLOCK_M, BLOCK_DV)
    return e0, e1, e2, e3, o0, o1, o2, o3


@triton.jit
def add_four(peak, weights, acc, e0, e1, e2, e3, o0, o1, o2, o3):
    """Four parts more of a sum, always in their order; peak and weights [BLOCK_M, 1] in units of log 2."""
    new_peak = tl.maximum(peak, tl.maximum(tl.maximum(e0, e1), tl.maximum(e2, e3)))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    alpha = tl.exp2(peak - base)
    w0, w1, w2, w3 = tl.exp2(e0 - base), tl.exp2(e1 - base), tl.exp2(e2 - base), tl.exp2(e3 - base)
    acc = acc * alpha + o0 * w0 + o1 * w1 + o2 * w2 + o3 * w3
    return new_peak, weights * alpha + w0 + w1 + w2 + w3, acc


@triton.jit
def with_sink(m, total, sink):
    """(factor of what was summed, denominator) with one more term of 2^sink, of sums `total` relative to m; all in base 2.

    Relative to the larger of the two, so that neither exponential overflows.
    """
    m_new = tl.maximum(m, sink)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.where(m == m_new, 1.0, tl.exp2(m - base))
    # A sink of +inf takes all the weight; equal infinities must not be subtracted.
    sunk = tl.where(sink == m_new, 1.0, tl.exp2(sink - base))
    return alpha, total * alpha + sunk


@triton.jit(do_not_specialize=["queries", "tiles", "parts_at"])
def combine_parts_kernel(
    plan, partial_out, partial_lse, q_offsets, sinks, v_scale, out, lse,
    queries, tiles, out_scale, out_row, out_head, lse_row, lse_head, parts_at,
    RAGGED: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    V_SCALE: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: a packed row of one KV head of one request, COLUMNS of its columns, over all parts of its prefix.

    One row, so that its LSEs are scalars, which a thread reads once each, and not a column of a tile, which it reads for each
    of its elements. Arguments are those of `verify_attention_kernel`; `tiles`: row tiles of BLOCK_M. `parts_at`: where the plan
    has a request's first partial tile and number of parts. A request of one part has its result already.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    COLUMN_BLOCKS: tl.constexpr = BLOCK_DV // COLUMNS
    packed = tl.program_id(0) // COLUMN_BLOCKS
    column_block = tl.program_id(0) % COLUMN_BLOCKS
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    request = tl.program_id(2)
    # Up to the wait, what launches before the first one wrote: the plan, lengths, sinks, scales.
    words = plan + parts_at + 2 * request
    partial = tl.load(words)
    num_splits = tl.load(words + 1)
    i = packed // GROUP
    q_head = head * GROUP + packed % GROUP
    if RAGGED:
        first_row = tl.load(q_offsets + request).to(tl.int64)
        is_row = i < tl.load(q_offsets + request + 1) - first_row.to(tl.int32)
    else:
        first_row = request.to(tl.int64) * queries
        is_row = i < queries
    if V_SCALE == 1:
        out_scale *= tl.load(v_scale).to(tl.float32)
    elif V_SCALE == 2:
        out_scale *= tl.load(v_scale + head).to(tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + q_head).to(tl.float32) * LOG2_E
    if PDL:
        # Until the first launch has ended and its memory is visible. Also those wait that have nothing to do: were they all to
        # leave, this grid would be done before the first one, and whoever comes next waits for this one only.
        gdc_wait()
    if num_splits <= 1:
        return
    if not is_row:
        return

    dv = column_block * COLUMNS + tl.arange(0, COLUMNS)
    at = ((partial * heads + head).to(tl.int64) * tiles + packed // BLOCK_M) * BLOCK_M + packed % BLOCK_M
    lse_at = partial_lse + at
    out_at = partial_out + at * BLOCK_DV + dv
    peak = tl.full((), float("-inf"), tl.float32)
    weights = tl.full((), 0.0, tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    # Sixteen parts are on their way before the first is used; the loop carries them, or the compiler would move most loads down
    # to what uses them. In 32 bits: a request has 2 (programs / (heads tiles) + 1) parts at the most, or of 512 rows in all.
    stride = heads * tiles
    a = read_four(lse_at, out_at, 0, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
    b = read_four(lse_at, out_at, 4, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
    c = read_four(lse_at, out_at, 8, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
    d = read_four(lse_at, out_at, 12, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
    for following in tl.range(16, num_splits + 16, 16):
        peak, weights, acc = add_four(peak, weights, acc, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])
        peak, weights, acc = add_four(peak, weights, acc, b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7])
        peak, weights, acc = add_four(peak, weights, acc, c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
        peak, weights, acc = add_four(peak, weights, acc, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7])
        a = read_four(lse_at, out_at, following, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
        b = read_four(lse_at, out_at, following + 4, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
        c = read_four(lse_at, out_at, following + 8, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)
        d = read_four(lse_at, out_at, following + 12, num_splits, is_row, stride, BLOCK_M, BLOCK_DV)

    row = first_row + i
    empty = weights <= 0.0
    norm = tl.where(empty, 1.0, weights)
    if HAS_LSE:
        value = tl.where(empty, float("-inf"), (peak + tl.log2(norm)) * 0.6931471805599453)
        tl.store(lse + row * lse_row + q_head.to(tl.int64) * lse_head, value, mask=column_block == 0)
    factor = out_scale
    if HAS_SINKS:
        alpha, sunk = with_sink(peak, weights, sink)
        factor *= alpha
        norm = tl.where(empty, 1.0, sunk)
    result = acc * (tl.where(empty, 0.0, factor) / norm)
    place = out + row * out_row + q_head.to(tl.int64) * out_head + dv
    if DV == BLOCK_DV:
        tl.store(place, result.to(out.dtype.element_ty))
    else:
        tl.store(place, result.to(out.dtype.element_ty), mask=dv < DV)
