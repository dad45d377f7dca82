"""One layer's kernel call: SGLang's layer, pool and step become the arguments of `sglang_specverify.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify.backends.steps import Step
from sglang_specverify.kernels import draft_decode_attention, verify_attention
from sglang_specverify.routing.route import Decision

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def write_kv(step: Step, layer: RadixAttention, forward_batch: ForwardBatch, pool: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write this pass's K and V to its cache slots, through SGLang's own pool."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    where = KVWriteLoc.for_batch(forward_batch, swa_loc=None if step.window is None else step.window.write_slots)
    if layer.k_scale is None:
        pool.set_kv_buffer(layer, where, k, v)
    else:
        # The pool divides by the scales in place, and the model may read K and V again.
        pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)


def attend(
    step: Step, decision: Decision, q: torch.Tensor, layer: RadixAttention, pool: Any, *, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One layer's attention through a kernel of the plugin: [T, Hq * Dv], rows past the real ones are 0."""
    is_window_layer = step.window is not None and pool.layers_mapping[layer.layer_id][1]
    view = step.window if step.window is not None and is_window_layer else step.full
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out = q.new_zeros((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
    tensors = (
        q,
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        view.table,
        step.row_ids,
        step.prefix_lens,
    )
    window = layer.sliding_window_size
    options: dict[str, Any] = {
        "page_size": step.page_size,
        "window": -1 if window is None else window,
        "softcap": float(layer.logit_cap or 0.0),
        "sinks": None if sinks is None else sinks.float(),
        "k_scale": 1.0 if layer.k_scale is None else layer.k_scale_float,
        "v_scale": 1.0 if layer.v_scale is None else layer.v_scale_float,
        "sm_scale": layer.scaling,
        "variant": decision.kernel,
        "out": out,
    }
    if view.draft_slots is not None:
        draft_decode_attention(*tensors, view.draft_slots, topk=step.topk, step=step.step, **options)
    else:
        verify_attention(
            *tensors,
            num_draft_tokens=step.num_draft_tokens,
            q_offsets=step.q_offsets,
            mask=step.mask,
            mask_layout=step.mask_layout,
            mask_offsets=step.mask_offsets,
            positions=step.positions,
            **options,
        )
    return out.view(out.shape[0], -1)
