"""FlashInfer's masked prefill, called as SGLang 0.5.23's flashinfer backend calls it for a target verify in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.arms import Arm, Call, Unavailable
from benchmarks.inputs import Inputs
from benchmarks.stock import cumulative, full_mask, prefix_slots

#: What SGLang gives the models that need most.
WORKSPACE_BYTES = 512 << 20
#: FlashInfer counts the entries of all masks together in int32.
MOST_MASK_ENTRIES = 2**31 - 1


def flashinfer(inputs: Inputs) -> Call:
    """FlashInfer's paged prefill under a custom mask, slots as pages of one token, planned before.

    As for SGLang's graphs the wrapper owns its buffers and its plan is one for graphs: that always divides the keys and merges,
    and sizes its tiles for rows that could all be of one request.
    """
    point, device = inputs.point, inputs.q.device
    if inputs.sinks is not None or point.window >= 0:
        raise Unavailable("SGLang's flashinfer backend has no sinks, and divides windows over two wrappers")
    entries = [point.width * (length + point.width) for length in inputs.lengths]
    if sum(entries) > MOST_MASK_ENTRIES:
        raise Unavailable(f"FlashInfer counts mask entries in int32: {sum(entries)}")
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def integers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    indices = prefix_slots(inputs, extra=point.width).int()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True, backend="fa2",
        qo_indptr_buf=integers(point.batch + 1), paged_kv_indptr_buf=integers(point.batch + 1),
        paged_kv_indices_buf=torch.empty_like(indices), paged_kv_last_page_len_buf=integers(point.batch),
        custom_mask_buf=torch.empty(sum(-(-count // 8) for count in entries), dtype=torch.uint8, device=device),
        mask_indptr_buf=integers(point.batch + 1),
    )  # fmt: skip
    starts = torch.arange(0, point.batch * point.width + 1, point.width, dtype=torch.int32, device=device)
    wrapper.plan(
        starts, cumulative(inputs.prefix_lens + point.width), indices,
        torch.ones(point.batch, dtype=torch.int32, device=device), point.q_heads, point.kv_heads, point.head_dim, 1,
        custom_mask=full_mask(inputs), sm_scale=inputs.sm_scale, q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype,
    )  # fmt: skip
    out = torch.empty_like(inputs.q)
    # A factor of 1 would cost a launch.
    scales: dict[str, Any] = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale} if point.cache == "e4m3" else {}

    def call(layer: int) -> torch.Tensor:
        cache = (inputs.k[layer].unsqueeze(1), inputs.v[layer].unsqueeze(1))
        wrapper.run(inputs.q, cache, out=out, **scales)
        return out

    return call


FLASHINFER = Arm("flashinfer", "stock", flashinfer)
