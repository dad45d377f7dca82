"""The plugin's backends over SGLang's FlashAttention backend (fa3 and fa4). Import only in a scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMultiStepBackend,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.spec_info import SpecInput

from sglang_specverify.backends.calls import merge_attended, merge_gathered, merge_tree
from sglang_specverify.backends.flash_calls import Scales, attend_own_drafts, attend_prefix
from sglang_specverify.backends.multistep import RoutedDraftBackend
from sglang_specverify.backends.plans import AFTER_PREFIX_PASS
from sglang_specverify.backends.routed import RoutedBackend
from sglang_specverify.backends.steps import Step
from sglang_specverify.routing.facts import Mode
from sglang_specverify.routing.route import Decision
from sglang_specverify.routing.tree import depth


class SpecverifyFlashAttentionBackend(RoutedBackend, FlashAttentionBackend):
    """Target, draft extend, or one step of a draft, over FA3."""

    base = "fa3"
    #: Set by the built-in backend.
    has_swa: bool

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInput, cuda_graph_bs: int | None) -> None:
        """Nothing to redo for a chain, whose metadata reads no mask and no position, nor for a tree of the plugin, whose
        metadata reads them when the graph is replayed.

        SGLang's class does not define this and raises under `SGLANG_ENABLE_OVERLAP_PLAN_STREAM`, for chains too.
        """
        if self.routes.server.topk > 1 and (not self.routes.serves(Mode.TARGET_VERIFY) or self.routes.leaves(Mode.TARGET_VERIFY)):
            super().update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Without SGLang's table for trees in window layers, [max_bs * W, context + W], where none of them is SGLang's."""
        has_swa = self.has_swa
        self.has_swa = has_swa and self._tree_mask is None and self.part not in ("draft decode", "draft extend")
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.has_swa = has_swa

    def take_step(self, step: Step, prepare_stock: Callable[[], None] | None) -> None:
        super().take_step(step, prepare_stock)
        if prepare_stock is not None:
            # Models that write K and V themselves ask SGLang's metadata for the places, and it is not made.
            self.forward_metadata = FlashAttentionMetadata()
            self.forward_metadata.swa_out_cache_loc = None if step.window is None else step.window.write_slots

    def attend(
        self, step: Step, decision: Decision, q: torch.Tensor, layer: RadixAttention, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if decision.kernel not in AFTER_PREFIX_PASS:
            return super().attend(step, decision, q, layer, sinks)
        pool, server, drafts = self.token_to_kv_pool, self.routes.server, step.num_draft_tokens or 0
        represented, scales = self._represent(step, q, layer)
        keys, values = self.get_paged_mha_kv_cache(layer)
        version, splits = self.fa_impl_ver, self.num_splits
        out, lse = attend_prefix(step, layer, represented, keys, values, scales, version=version, num_splits=splits)
        seen = depth(server.algorithm, server.num_steps, drafts)
        if decision.kernel == "prefix_flash":
            own = attend_own_drafts(step, layer, represented, pool, scales, depth=seen, version=version)
            return merge_attended(out, lse, *own, sinks=sinks)
        if decision.kernel == "prefix_gather":
            return merge_gathered(step, q, layer, pool, out, lse, depth=seen, sinks=sinks)
        return merge_tree(step, decision, q, layer, pool, out, lse, sinks=sinks)

    def _represent(self, step: Step, q: torch.Tensor, layer: RadixAttention) -> tuple[torch.Tensor, Scales]:
        """Q as FlashAttention takes it with this cache, [T, Hq, D], and scales for as many sequences as real rows."""
        rows = step.rows * (step.num_draft_tokens or 0)
        represented, _, _, k_descale, v_descale = self.prepare_paged_mha_query(
            q.view(-1, layer.tp_q_head_num, layer.head_dim).contiguous(), None, None, layer,
            logical_batch_size=rows, kv_head_num=layer.tp_k_head_num, is_prefill=True,
        )  # fmt: skip
        return represented, None if k_descale is None else (k_descale, v_descale)


class SpecverifyFlashAttention4Backend(SpecverifyFlashAttentionBackend):
    """The same over FA4."""

    base = "fa4"


class SpecverifyFlashAttentionDraftBackend(RoutedDraftBackend, FlashAttentionMultiStepBackend):
    """All steps of a draft, over FA3."""

    child = SpecverifyFlashAttentionBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # SGLang keeps a second name for the list of children.
        self.attn_backend_list = self.attn_backends

    def child_arguments(self, step: int, **kwargs: Any) -> dict[str, Any]:
        return {
            "speculative_step_id": step,
            "topk": self.topk,
            "speculative_num_steps": self.speculative_num_steps,
            **kwargs,
        }


class SpecverifyFlashAttention4DraftBackend(SpecverifyFlashAttentionDraftBackend):
    """The same over FA4."""

    child = SpecverifyFlashAttention4Backend
