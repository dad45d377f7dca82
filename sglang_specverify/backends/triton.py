"""The plugin's backends over SGLang's Triton backend. Import only in a scheduler process."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, TritonMultiStepDraftBackend

from sglang_specverify.backends.multistep import RoutedDraftBackend
from sglang_specverify.backends.routed import RoutedBackend


class SpecverifyTritonBackend(RoutedBackend, TritonAttnBackend):
    """Target, draft extend, or one step of a draft."""

    base = "triton"


class SpecverifyTritonDraftBackend(RoutedDraftBackend, TritonMultiStepDraftBackend):
    """All steps of a draft."""

    child = SpecverifyTritonBackend

    def child_arguments(self, step: int, **kwargs: Any) -> dict[str, Any]:
        return {"skip_prefill": True, "kv_indptr_buf": self.kv_indptr[step]}
