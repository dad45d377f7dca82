"""One layer's kernel call: SGLang's layer, pool and step become the arguments of `sglang_specverify.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify.backends.plans import Served
from sglang_specverify.backends.steps import Step, View
from sglang_specverify.kernels import (
    draft_decode_attention,
    gather_suffix_merge,
    merge_states,
    tree_suffix_merge,
    verify_attention,
)
from sglang_specverify.kernels.checks import FP8
from sglang_specverify.routing.route import Decision

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


#: q, K and V caches, page table, row ids, prefix lengths.
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    view = _view(step, layer, pool)
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    # The kernels write every real row, so only padding is worth a launch to clear.
    covered = step.q_offsets is None and step.num_draft_tokens is not None and q.shape[0] == step.rows * step.num_draft_tokens
    out = (q.new_empty if covered else q.new_zeros)((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
    options = _options(step, layer, pool, sinks)
    if step.plans is None:
        options["variant"] = decision.kernel
    else:
        served = _served(layer, decision)
        q = step.plans.query(q, served)
        options |= step.plans.options(served)
    tensors = _tensors(step, view, q, layer, pool)
    if view.draft_slots is not None:
        draft_decode_attention(*tensors, view.draft_slots, topk=step.topk, step=step.step, out=out, **options)
    else:
        options |= _drafts(step)
        verify_attention(*tensors, out=out, **options)
    return out.view(out.shape[0], -1)


def merge_tree(
    step: Step,
    decision: Decision,
    q: torch.Tensor,
    layer: RadixAttention,
    pool: Any,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The drafts of a tree merged into the prefix's result, in place: [T, Hq * Dv].

    `prefix_out` [T, Hq, Dv] and `prefix_lse` [T, Hq] are another kernel's, without sinks.
    """
    view = _view(step, layer, pool)
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    options = _options(step, layer, pool, sinks)
    if step.plans is not None:
        served = _served(layer, decision)
        q = step.plans.query(q, served)
        shared = step.plans.options(served)
        options |= {name: shared[name] for name in ("deterministic", "plan")}
    options |= _drafts(step)
    tree_suffix_merge(*_tensors(step, view, q, layer, pool), prefix_out, prefix_lse, **options)
    return prefix_out.view(prefix_out.shape[0], -1)


def merge_gathered(
    step: Step,
    q: torch.Tensor,
    layer: RadixAttention,
    pool: Any,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    *,
    depth: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `merge_tree`, with each row's own drafts gathered, of which there are `depth` at most."""
    assert step.plans is not None and step.plans.suffix is not None
    slots, lens = step.plans.suffix
    q, keys, values, *_ = _tensors(step, step.full, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), layer, pool)
    options = _options(step, layer, pool, sinks)
    known = {name: options[name] for name in ("softcap", "sinks", "k_scale", "v_scale", "sm_scale")}
    gather_suffix_merge(step.plans.query(q), keys, values, slots[:, :depth], lens, prefix_out, prefix_lse, **known)
    return prefix_out.view(prefix_out.shape[0], -1)


def merge_attended(
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    drafts_out: torch.Tensor,
    drafts_lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `merge_tree`, with drafts that another kernel attended, [N, Hq, Dv] and [N, Hq], of the N rows that are real."""
    rows = drafts_out.shape[0]
    out, lse = prefix_out[:rows], prefix_lse[:rows]
    merge_states(out, lse, drafts_out, drafts_lse, out=out, lse=lse)
    if sinks is not None:
        # A sink is a key of that score whose value is 0.
        value = out.new_zeros(out.shape[2]).expand_as(out)
        merge_states(out, lse, value, sinks.float().expand_as(lse), out=out, lse=lse)
    return prefix_out.view(prefix_out.shape[0], -1)


def _view(step: Step, layer: RadixAttention, pool: Any) -> View:
    if step.window is not None and pool.layers_mapping[layer.layer_id][1]:
        return step.window
    return step.full


def _tensors(step: Step, view: View, q: torch.Tensor, layer: RadixAttention, pool: Any) -> _Tensors:
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    return q, keys, values, view.table, step.row_ids, step.prefix_lens


def _drafts(step: Step) -> dict[str, Any]:
    return {
        "num_draft_tokens": step.num_draft_tokens,
        "q_offsets": step.q_offsets,
        "mask": step.mask,
        "mask_layout": step.mask_layout,
        "mask_offsets": step.mask_offsets,
        "positions": step.positions,
    }


def _options(step: Step, layer: RadixAttention, pool: Any, sinks: torch.Tensor | None) -> dict[str, Any]:
    window = layer.sliding_window_size
    # The pool divides K and V by the scales where it narrows them, and nowhere else.
    scaled = layer.k_scale is not None and (not step.scales_fp8_only or pool.get_key_buffer(layer.layer_id).dtype in FP8)
    return {
        "page_size": step.page_size,
        "window": -1 if window is None else window,
        "softcap": float(layer.logit_cap or 0.0),
        "sinks": sinks,
        "k_scale": layer.k_scale_float if scaled else 1.0,
        "v_scale": layer.v_scale_float if scaled else 1.0,
        "sm_scale": layer.scaling,
    }


def _served(layer: RadixAttention, decision: Decision) -> Served:
    window = layer.sliding_window_size
    dims = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
    return Served.of(*dims, -1 if window is None else window, decision.kernel)
