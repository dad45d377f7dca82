"""The Triton kernel of `merge.py`, which has the formula."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse,
    rows, heads,
    a_row, a_head, b_row, b_head, out_row, out_head,
    lse_a_row, lse_a_head, lse_b_row, lse_b_head, lse_row, lse_head,
    DV: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS of the T * Hq pairs (row, head). out_a, out_b, out [T, Hq, DV]; LSEs FP32 [T, Hq]."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    pair = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = pair // heads
    head = pair % heads
    real = row < rows
    d = tl.arange(0, BLOCK_DV)
    inside = (d < DV)[None, :]

    first = tl.load(lse_a + row * lse_a_row + head * lse_a_head, mask=real, other=float("-inf"))
    second = tl.load(lse_b + row * lse_b_row + head * lse_b_head, mask=real, other=float("-inf"))
    first = tl.where(first == float("inf"), float("-inf"), first)
    second = tl.where(second == float("inf"), float("-inf"), second)
    peak = tl.maximum(first, second)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp2((first - base) * LOG2_E)
    weight_b = tl.exp2((second - base) * LOG2_E)
    total = weight_a + weight_b
    empty = total == 0.0

    # What an empty state's output holds is not read: a weight of 0 does not keep NaN out of a sum.
    has_a = (real & (first != float("-inf")))[:, None] & inside
    has_b = (real & (second != float("-inf")))[:, None] & inside
    at_a = out_a + (row * a_row + head * a_head)[:, None] + d[None, :]
    at_b = out_b + (row * b_row + head * b_head)[:, None] + d[None, :]
    values_a = tl.load(at_a, mask=has_a, other=0.0).to(tl.float32)
    values_b = tl.load(at_b, mask=has_b, other=0.0).to(tl.float32)
    norm = tl.where(empty, 1.0, total)
    merged = values_a * (weight_a / norm)[:, None] + values_b * (weight_b / norm)[:, None]
    # An LSE is read by every warp, and `lse` may be `lse_a`: none may write it before all have read.
    tl.debug_barrier()
    tl.store(lse + row * lse_row + head * lse_head, tl.where(empty, float("-inf"), base + tl.log(norm)), mask=real)
    at = out + (row * out_row + head * out_head)[:, None] + d[None, :]
    tl.store(at, merged.to(out.dtype.element_ty), mask=real[:, None] & inside)
