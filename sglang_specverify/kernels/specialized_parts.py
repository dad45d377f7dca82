"""The end of an item in the kernel with specialised warps: its rows are written, or kept as a part of a prefix and combined."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Triton 3.6 has it under its first name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Query rows of a consumer, and consumers of a program.
ROWS, CONSUMERS = gl.constexpr(64), gl.constexpr(2)


@gluon.jit
def part_rows(partial, part, head, heads, tile, tiles, HALF: gl.constexpr):
    """int64: the first row of a consumer's part of a prefix in the scratch; `partial` is the prefix's first part there.

    The layout of `fused_kernel.py` with row tiles of ROWS * CONSUMERS, which `combine_parts_kernel.py` reads.
    """
    return (((partial + part) * heads + head).to(gl.int64) * tiles + tile) * (ROWS * CONSUMERS) + HALF * ROWS


@gluon.jit
def store_part(o, m, total, partial_out, partial_lse, at, D: gl.constexpr, rows_s: gl.constexpr, mma_o: gl.constexpr):
    """Write the normalised output and the LSE, in base 2, of a part of a prefix, for whoever combines them."""
    rows_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    norm = gl.where(total > 0.0, total, 1.0)
    gl.store(partial_lse + at + gl.arange(0, ROWS, rows_s), gl.where(total > 0.0, m + gl.log2(norm), float("-inf")))
    o_at = (at + gl.arange(0, ROWS, rows_o))[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, mma_o))[None, :]
    gl.store(partial_out + o_at, o * gl.convert_layout(1.0 / norm, rows_o)[:, None])


@gluon.jit
def combine(
    partial_out, partial_lse, partial, parts, sinks, out, lse, request, head, heads, tile, tiles, first, queries,
    out_scale, out_row, out_head, lse_row, lse_head,
    HALF: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Combine all parts of a prefix, in the order of the parts whoever came last, and write the rows of one consumer.

    What it reads was written by other multiprocessors and comes from the second cache, so many parts are asked for at once,
    a few columns of each.
    """
    COLUMNS: gl.constexpr = 32
    AT_ONCE: gl.constexpr = 4
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    row = gl.arange(0, ROWS, rows)
    peak = gl.full([ROWS], float("-inf"), gl.float32, rows)
    total = gl.zeros([ROWS], gl.float32, rows)
    for part in range(0, parts, 1):
        one = gl.load(partial_lse + part_rows(partial, part, head, heads, tile, tiles, HALF) + row, cache_modifier=".cg")
        new_peak = gl.maximum(peak, one)
        shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * gl.exp2(peak - shift) + gl.exp2(one - shift)
        peak = new_peak
    shift = gl.where(peak == float("-inf"), 0.0, peak)
    packed = first + HALF * ROWS + row
    factor = row_factor(peak, total, packed, sinks, lse, request, head, queries, out_scale, lse_row, lse_head,
                     GROUP, HAS_SINKS, HAS_LSE)  # fmt: skip
    is_row = packed // GROUP < queries
    own = (request.to(gl.int64) * queries + packed // GROUP) * out_row + (head * GROUP + packed % GROUP).to(gl.int64) * out_head
    for first_column in range(0, D, COLUMNS):
        column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, wide)
        for begin in range(0, parts, AT_ONCE):
            for u in gl.static_range(AT_ONCE):
                at = part_rows(partial, begin + u, head, heads, tile, tiles, HALF) + row
                there = (begin + u < parts) & is_row
                weight = gl.exp2(gl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg") - shift)
                at_columns = partial_out + at[:, None] * D + column[None, :]
                acc += gl.load(at_columns, mask=there[:, None], other=0.0, cache_modifier=".cg") * weight[:, None]
        result = (acc * factor[:, None]).to(out.dtype.element_ty)
        gl.store(out + own[:, None] + column[None, :], result, mask=is_row[:, None])


@gluon.jit
def row_factor(
    m, total, packed, sinks, lse, request, head, queries, out_scale, lse_row, lse_head,
    GROUP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """What the rows of an output are multiplied by in the end, [ROWS]; their LSE is written."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    is_row = packed // GROUP < queries
    q_heads = head * GROUP + packed % GROUP
    empty = total <= 0.0
    norm = gl.where(empty, 1.0, total)
    if HAS_LSE:
        lse_at = lse + (request.to(gl.int64) * queries + packed // GROUP) * lse_row + q_heads.to(gl.int64) * lse_head
        gl.store(lse_at, gl.where(empty, float("-inf"), (m + gl.log2(norm)) * 0.6931471805599453), mask=is_row)
    weight = gl.where(empty, 0.0, out_scale)
    if HAS_SINKS:
        sink = gl.load(sinks + q_heads, mask=is_row, other=float("-inf")).to(gl.float32) * LOG2_E
        m_new = gl.maximum(m, sink)
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.where(m == m_new, 1.0, gl.exp2(m - shift))
        sunk = gl.where(sink == m_new, 1.0, gl.exp2(sink - shift))
        weight *= alpha
        norm = gl.where(empty, 1.0, total * alpha + sunk)
    return weight / norm


@gluon.jit
def finish(
    o, m, total, q_tile, sinks, out, lse, request, head, first, queries, out_scale, out_row, out_head, lse_row, lse_head,
    HALF: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    rows_s: gl.constexpr, mma_o: gl.constexpr,
):  # fmt: skip
    """Normalise and write the rows of one consumer."""
    ACROSS: gl.constexpr = D // 8
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    packed = first + HALF * ROWS + gl.arange(0, ROWS, rows_s)
    factor = row_factor(m, total, packed, sinks, lse, request, head, queries, out_scale, lse_row, lse_head,
                     GROUP, HAS_SINKS, HAS_LSE)  # fmt: skip
    result = o * gl.convert_layout(factor, gl.SliceLayout(1, mma_o))[:, None]
    # Through the shared memory of this tile's own Q, for whole lines to be written.
    q_tile.store(result.to(q_tile.dtype))
    written = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, copies))
    token = written // GROUP
    out_at = out + (request.to(gl.int64) * queries + token)[:, None] * out_row
    out_at += (head * GROUP + written % GROUP).to(gl.int64)[:, None] * out_head
    out_at += gl.arange(0, D, gl.SliceLayout(0, copies))[None, :]
    gl.store(out_at, q_tile.load(copies), mask=(token < queries)[:, None])
