"""The Triton kernel that combines the parts of `decode_kernel.py`: out = sum_s 2^(lse_s - L) out_s, the sink in L, once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_specverify.kernels.sparse_mla.decode_kernel import sunk


@triton.jit
def combine_kernel(
    partial_out, partial_lse, sink, out, lse, queries, heads, out_scale,
    out_batch, out_row, out_head, lse_batch, lse_row, lse_head, head_blocks, blocks, splits,
    BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS packed rows of a tile and COLUMNS columns. SPLITS is `splits` rounded up to a power of two.

    partial_out [B, blocks, splits, BLOCK_M, 512], each part normalised; partial_lse FP32 [B, blocks, splits, BLOCK_M] in base 2,
    -inf for a part without a key, whose output is 0.
    """
    LN_2: tl.constexpr = 0.6931471805599453
    D: tl.constexpr = 512
    HEADS_M: tl.constexpr = BLOCK_M // TOKENS
    chunk = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(2).to(tl.int64)
    batch = tile // blocks
    block = (tile % blocks).to(tl.int32)
    r = chunk * ROWS + tl.arange(0, ROWS)
    token = block // head_blocks * TOKENS + r // HEADS_M
    head = block % head_blocks * HEADS_M + r % HEADS_M
    is_row = (token < queries) & (head < heads)
    s = tl.arange(0, SPLITS)
    rows = (tile * splits + s)[:, None] * BLOCK_M + r[None, :]
    there = (s < splits)[:, None] & is_row[None, :]
    sinks = tl.zeros([ROWS], tl.float32)
    if HAS_SINK:
        sinks = tl.load(sink + head, mask=is_row, other=float("-inf")).to(tl.float32)
    if PDL:
        gdc_wait()
    parts = tl.load(partial_lse + rows, mask=there, other=float("-inf"))
    values = tl.load(partial_out + rows[:, :, None] * D + column[None, None, :], mask=there[:, :, None], other=0.0)
    if PDL:
        gdc_launch_dependents()
    peak = tl.max(parts, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(parts - shift[None, :])
    total = tl.sum(share, 0)
    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    acc = tl.sum(values.to(tl.float32) * share[:, :, None], 0)
    weight = out_scale / norm
    if HAS_SINK:
        weight = sunk(weight, peak, total, sinks, out_scale)
    weight = tl.where(empty, 0.0, weight)
    place = batch * out_batch + token.to(tl.int64) * out_row + head.to(tl.int64) * out_head
    result = tl.where(weight[:, None] == 0.0, 0.0, acc * weight[:, None])
    tl.store(out + place[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None])
    if tl.program_id(1) == 0:
        place = batch * lse_batch + token.to(tl.int64) * lse_row + head.to(tl.int64) * lse_head
        tl.store(lse + place, tl.where(empty, float("-inf"), (peak + tl.log2(norm)) * LN_2), mask=is_row)
