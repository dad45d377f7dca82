"""SGLang's Triton kernels, called as SGLang 0.5.23's backend calls them, and the list of all stock arms."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.arms import Arm, Call, Unavailable
from benchmarks.inputs import Inputs
from benchmarks.points import DRAFT_STEP
from benchmarks.stock import FLASH_ATTENTION, MOST_MASK_BYTES, cumulative, full_mask, prefix_slots
from benchmarks.stock_flashinfer import FLASHINFER

#: `triton_attention_num_kv_splits` of SGLang's arguments.
KV_SPLITS = 8


def extend(inputs: Inputs, *, split_kv: bool = False) -> Call:
    """Target verify through `extend_attention_fwd`: the drafts as new tokens under the mask, the prefix from the cache.

    With `split_kv`, through the kernel that SGLang uses for chains on gfx95x only.
    """
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.attention.verify_splitkv import verify_splitkv_fwd

    point, device = inputs.point, inputs.q.device
    windowed = point.window >= 0
    starts = [max(0, length - point.window) if windowed else 0 for length in inputs.lengths]
    first = torch.tensor(starts, dtype=torch.int32, device=device)
    indices = prefix_slots(inputs, starts)
    kv_indptr = cumulative(inputs.prefix_lens - first)
    qo_indptr = torch.arange(0, point.batch * point.width + 1, point.width, dtype=torch.int32, device=device)
    mask_indptr = torch.nn.functional.pad((point.width * (inputs.prefix_lens.long() + point.width)).cumsum(0), (1, 0))
    columns = inputs.prefix_lens.long()[:, None] + torch.arange(point.width, device=device)
    drafts = inputs.slots.gather(1, columns).flatten()
    # The model's new K and V, from before the cache rounded and scaled them; here what the cache holds, so that both agree.
    new = [
        ((cache[0][drafts].float() * scale).to(inputs.q.dtype))
        for cache, scale in ((inputs.k, inputs.k_scale), (inputs.v, inputs.v_scale))
    ]
    mask, out = full_mask(inputs), torch.empty_like(inputs.q)
    options: dict[str, Any] = {"sliding_window_size": point.window, "sinks": inputs.sinks}
    options["window_kv_offsets"] = first if windowed else None
    run = verify_splitkv_fwd if split_kv else extend_attention_fwd
    options |= {"max_bs": point.batch} if split_kv else {"page_size": point.page_size}

    def call(layer: int) -> torch.Tensor:
        done = run(
            inputs.q, *new, out, inputs.k[layer], inputs.v[layer], qo_indptr, kv_indptr, indices, mask, True, mask_indptr,
            point.width, inputs.k_scale, inputs.v_scale, inputs.sm_scale, logit_cap=0.0, **options,
        )  # fmt: skip
        if split_kv and not done:
            raise Unavailable("upstream's split-KV kernel declines this call")
        return out

    return call


def split_kv(inputs: Inputs) -> Call:
    return extend(inputs, split_kv=True)


def decode(inputs: Inputs) -> Call:
    """A draft step: every branch a sequence of its own, prefix and branch in one list of slots."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    point, device = inputs.point, inputs.q.device
    if inputs.sinks is not None or point.window >= 0:
        raise Unavailable("not arranged for sinks and windows")
    assert inputs.draft_slots is not None
    tokens, steps = point.batch * point.width, DRAFT_STEP + 1
    if sum(inputs.lengths) * point.width * 8 > MOST_MASK_BYTES:
        raise Unavailable("an index list beyond 16 GB")
    parts = []
    for request, length in enumerate(inputs.lengths):
        prefix = inputs.slots[request, :length].expand(point.width, -1)
        parts.append(torch.cat([prefix, inputs.draft_slots[request].long()], 1).flatten())
    indices = torch.cat(parts)
    kv_indptr = cumulative((inputs.prefix_lens + steps).repeat_interleave(point.width))
    logits = torch.empty(tokens, point.q_heads, KV_SPLITS, point.head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(tokens, point.q_heads, KV_SPLITS, dtype=torch.float32, device=device)
    splits = torch.full((tokens,), KV_SPLITS, dtype=torch.int32, device=device)
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        get_num_kv_splits_triton[(1,)](
            splits, inputs.prefix_lens, point.batch, point.width, point.q_heads, point.kv_heads, KV_SPLITS, cores,
            MAX_NUM_SEQ=256,
        )  # fmt: skip
    out = torch.empty_like(inputs.q)

    def call(layer: int) -> torch.Tensor:
        decode_attention_fwd(
            inputs.q, inputs.k[layer], inputs.v[layer], out, kv_indptr, indices, logits, lse, splits, KV_SPLITS,
            inputs.sm_scale, inputs.k_scale, inputs.v_scale, page_size=point.page_size,
        )  # fmt: skip
        return out

    return call


def triton(inputs: Inputs) -> Call:
    return decode(inputs) if inputs.point.kind == "draft" else extend(inputs)


STOCK = (
    *FLASH_ATTENTION,
    # With an FP8 cache upstream's Triton kernels round Q and P to FP8 before their products with the prefix.
    Arm("triton", "stock", triton, ("tree", "chain", "draft"), fp8_products=True),
    Arm("upstream_splitkv", "yardstick", split_kv, ("chain",), fp8_products=True),
    FLASHINFER,
)
