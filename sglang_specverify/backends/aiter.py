"""The plugin's backends over SGLang's aiter backend (AMD). Import only in a scheduler process."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.aiter_backend import AiterAttnBackend, AiterMultiStepDraftBackend

from sglang_specverify.backends.multistep import RoutedDraftBackend
from sglang_specverify.backends.routed import RoutedBackend


class SpecverifyAiterBackend(RoutedBackend, AiterAttnBackend):
    """Target, draft extend, or one step of a draft."""

    base = "aiter"


class SpecverifyAiterDraftBackend(RoutedDraftBackend, AiterMultiStepDraftBackend):
    """All steps of a draft."""

    child = SpecverifyAiterBackend

    def child_arguments(self, step: int, **kwargs: Any) -> dict[str, Any]:
        return {"skip_prefill": True, "kv_indptr_buf": self.kv_indptr[step], "topk": self.topk}
