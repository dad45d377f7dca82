"""The Triton kernel of `gather_suffix.py`, which has the formula."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from sglang_specverify.kernels.widen_kernel import widened


@triton.jit
def gather_suffix_merge_kernel(
    q, k, v, suffix_slots, suffix_lens, prefix_out, prefix_lse, sinks, k_scale, v_scale,
    kv_heads, depth, scale, softcap, out_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, slots_row, slots_column, lens_stride,
    out_row, out_head, lse_row, lse_head, sinks_stride, k_scale_stride, v_scale_stride,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    BY_FP16: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one row that share a KV head. Programs of a row are neighbours, as its slots' heads are.

    q [T, Hq, D]; k [slots, Hkv, D], v [slots, Hkv, DV]; suffix_slots int32 [N, depth]; suffix_lens int32 [N]; prefix_out
    [T, Hq, DV] and prefix_lse FP32 [T, Hq] are read and written. `scale` holds sm_scale and a number k_scale, `out_scale`
    a number v_scale; tensors of scales come on top. BY_FP16: as `widened` has it.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    program = tl.program_id(0)
    row = (program // kv_heads).to(tl.int64)
    head = (program % kv_heads).to(tl.int64)
    length = tl.load(suffix_lens + row * lens_stride)
    if length < 0:
        return
    length = tl.minimum(length, depth)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    is_head = g < GROUP
    q_heads = head * GROUP + g
    lse_at = prefix_lse + row * lse_row + q_heads * lse_head
    before = tl.load(lse_at, mask=is_head, other=float("-inf"))
    before = tl.where(before == float("inf"), float("-inf"), before)
    q_at = q + row * q_row + (q_heads * q_head)[:, None] + d[None, :]
    q_tile = tl.load(q_at, mask=is_head[:, None] & (d < D)[None, :], other=0.0)
    if HAS_K_SCALE:
        scale *= tl.load(k_scale + head * k_scale_stride).to(tl.float32)
    if HAS_V_SCALE:
        out_scale *= tl.load(v_scale + head * v_scale_stride).to(tl.float32)

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for start in range(0, length, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        slot = tl.load(suffix_slots + row * slots_row + n * slots_column, mask=n < length, other=-1).to(tl.int64)
        seen = slot >= 0
        # Both before the first product, so that their latencies overlap.
        k_at = k + head * k_head + (slot * k_slot)[None, :] + d[:, None]
        k_tile = tl.load(k_at, mask=seen[None, :] & (d < D)[:, None], other=0.0)
        v_at = v + head * v_head + (slot * v_slot)[:, None] + dv[None, :]
        v_tile = tl.load(v_at, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        s = tl.dot(q_tile, widened(k_tile, q_tile.dtype, BY_FP16), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            t = tl.exp2(tl.abs(s) * (-2.0 * LOG2_E / softcap))
            tanh = (1.0 - t) / (1.0 + t)
            s = softcap * tl.where(s < 0.0, -tanh, tanh)
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s - base[:, None]) * LOG2_E)
        alpha = tl.exp2((m - base) * LOG2_E)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q_tile.dtype), widened(v_tile, q_tile.dtype, BY_FP16), acc * alpha[:, None], input_precision="ieee")
        m = m_new

    peak = tl.maximum(m, before)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    alpha = tl.exp2((m - base) * LOG2_E)
    weight = tl.exp2((before - base) * LOG2_E)
    total = total * alpha + weight
    empty = total == 0.0
    denominator = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), base + tl.log(denominator))
    if HAS_SINKS:
        sink = tl.load(sinks + q_heads * sinks_stride, mask=is_head, other=float("-inf")).to(tl.float32)
        denominator += tl.exp2((sink - base) * LOG2_E)
    out_at = prefix_out + row * out_row + (q_heads * out_head)[:, None] + dv[None, :]
    is_out = is_head[:, None] & (dv < DV)[None, :]
    # An empty prefix's output may hold anything and is not read: a weight of 0 does not keep NaN out of a sum.
    held = tl.load(out_at, mask=is_out & (before != float("-inf"))[:, None], other=0.0).to(tl.float32)
    acc = acc * (alpha * out_scale / denominator)[:, None] + held * (weight / denominator)[:, None]
    # Several warps may have read the same LSE, or padded rows the same output: none may write before all have read.
    tl.debug_barrier()
    tl.store(lse_at, lse, mask=is_head)
    tl.store(out_at, acc.to(prefix_out.dtype.element_ty), mask=is_out)
