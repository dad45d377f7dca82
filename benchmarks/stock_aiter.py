"""aiter's unified attention, called as SGLang 0.5.23's aiter backend calls it for the verify of a chain."""

from __future__ import annotations

import torch

from benchmarks.arms import Arm, Call, Unavailable
from benchmarks.inputs import Inputs
from benchmarks.stock import page_table, paged


def unified(inputs: Inputs) -> Call:
    """Causal over the pages of prefix and drafts; lengths are 64-bit, since its addresses have their type."""
    try:
        from aiter.ops.triton.attention.unified_attention import unified_attention
    except ImportError as missing:
        raise Unavailable(f"aiter does not import: {missing}") from None
    point, device = inputs.point, inputs.q.device
    table = page_table(inputs, point.width)
    scales = [torch.full((1,), scale, device=device) for scale in (inputs.k_scale, inputs.v_scale)]
    offsets = torch.arange(0, (point.batch + 1) * point.width, point.width, dtype=torch.int32, device=device)
    lens, out = inputs.prefix_lens.long() + point.width, torch.empty_like(inputs.q)

    def call(layer: int) -> torch.Tensor:
        unified_attention(
            q=inputs.q, k=paged(inputs.k[layer], point.page_size), v=paged(inputs.v[layer], point.page_size), out=out,
            cu_seqlens_q=offsets, seqused_k=lens, max_seqlen_q=point.width, max_seqlen_k=table.shape[1] * point.page_size,
            softmax_scale=inputs.sm_scale, causal=True,
            # It counts a row's own key: one more than this project's window.
            window_size=(point.window, 0) if point.window >= 0 else (-1, -1),
            block_table=table, softcap=0.0, q_descale=None,
            k_descale=scales[0] if point.cache == "e4m3" else None, v_descale=scales[1] if point.cache == "e4m3" else None,
            sinks=inputs.sinks,
        )  # fmt: skip
        return out

    return call


#: It takes a chain alone: a tree has no argument in it.
AITER = (Arm("aiter_unified", "stock", unified, ("chain",)),)
