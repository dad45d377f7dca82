"""The plugin's backends over SGLang's FlashAttention backend (fa3 and fa4). Import only in a scheduler process."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend, FlashAttentionMultiStepBackend
from sglang.srt.speculative.spec_info import SpecInput

from sglang_specverify.backends.routed import RoutedBackend, RoutedDraftBackend


class SpecverifyFlashBackend(RoutedBackend, FlashAttentionBackend):
    """Target, draft extend, or one step of a draft, over FA3."""

    base = "fa3"

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInput, cuda_graph_bs: int | None) -> None:
        """Nothing to redo for a chain, whose metadata reads no mask and no position.

        SGLang's class does not define this and raises under `SGLANG_ENABLE_OVERLAP_PLAN_STREAM`, for chains too.
        """
        if self.routes.server.topk > 1:
            super().update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)


class SpecverifyFlash4Backend(SpecverifyFlashBackend):
    """The same over FA4."""

    base = "fa4"


class SpecverifyFlashDraftBackend(RoutedDraftBackend, FlashAttentionMultiStepBackend):
    """All steps of a draft, over FA3."""

    child = SpecverifyFlashBackend

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


class SpecverifyFlash4DraftBackend(SpecverifyFlashDraftBackend):
    """The same over FA4."""

    child = SpecverifyFlash4Backend
