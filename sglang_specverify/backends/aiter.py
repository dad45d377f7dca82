"""The plugin's backends over SGLang's aiter backend (AMD). Import only in a scheduler process.

Trees and the steps of their drafts run on the plugin's kernel; chains stay with aiter's unified attention, with what it is given
corrected (`aiter_corrected.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.aiter_backend import AiterMultiStepDraftBackend

from sglang_specverify.backends.aiter_corrected import CorrectedAiterBackend
from sglang_specverify.backends.multistep import RoutedDraftBackend
from sglang_specverify.backends.routed import RoutedBackend
from sglang_specverify.backends.routes import Routes
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.facts import Mode

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner


class SpecverifyAiterBackend(RoutedBackend, CorrectedAiterBackend):
    """Target, draft extend, or one step of a draft."""

    base = "aiter"
    #: Set by the built-in backend.
    skip_prefill: bool
    kv_cache_is_vectorized_5d: bool

    def __init__(self, model_runner: ModelRunner, *args: Any, part: str = "target", **kwargs: Any) -> None:
        if part == "target":
            from sglang.srt.runtime_context import get_spec

            # SGLang leaves it at 1, with which a tree that got to its own kernels would be verified as a chain.
            kwargs.setdefault("topk", get_spec().speculative_eagle_topk or 1)
        super().__init__(model_runner, *args, part=part, **kwargs)
        refuse_left_trees(self.routes)
        if self.kv_cache_is_vectorized_5d and part != "draft decode":
            refuse_left_verify_of_another_layout(self.routes)

    @contextmanager
    def _without_full_mask(self) -> Iterator[None]:
        """SGLang allocates a mask over the whole context, [tokens * context], for every backend that may prefill."""
        skips = self.skip_prefill
        self.skip_prefill = skips or self._tree_mask is not None
        try:
            yield
        finally:
            self.skip_prefill = skips


class SpecverifyAiterDraftBackend(RoutedDraftBackend, AiterMultiStepDraftBackend):
    """All steps of a draft."""

    child = SpecverifyAiterBackend
    #: Set by the built-in container: offsets of each step's slots.
    kv_indptr: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_left_trees(self.routes)
        # The lists of slots, too, hold the drafts of a request that is at the context's end.
        self.max_context_len = self.attn_backends[0].max_context_len

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        rows = max_bs * self.topk
        if rows >= self.kv_indptr.shape[1]:
            # SGLang makes a row's offsets for the request pool, and a graph may hold more. Its kernel writes them unasked.
            self.kv_indptr = self.kv_indptr.new_zeros(len(self.kv_indptr), rows + 1)
        super().init_cuda_graph_state(max_bs, max_num_tokens)

    def child_arguments(self, step: int, **kwargs: Any) -> dict[str, Any]:
        return {"skip_prefill": True, "kv_indptr_buf": self.kv_indptr[step], "topk": self.topk}


def refuse_left_trees(routes: Routes) -> None:
    """Refuse at start-up a tree, or a step of its draft, that would be left to SGLang's aiter backend.

    Raises:
        SpecverifyError: it would verify the tree as a chain, or give all branches the lengths of their requests.
    """
    server = routes.server
    if server.topk <= 1 and server.algorithm != "NGRAM":
        return
    for mode in (Mode.TARGET_VERIFY, Mode.DRAFT_DECODE):
        if routes.leaves(mode):
            reason = next(row["reason"] for row in routes.report() if row["mode"] == mode.value and row["kernel"] == "stock")
            raise SpecverifyError(
                f"{mode.value} of a tree, and SGLang's aiter backend knows chains alone: {reason}",
                "set SGLANG_SPECVERIFY_BASE=triton, or change what the reason names",
            )


def refuse_left_verify_of_another_layout(routes: Routes) -> None:
    """Refuse at start-up speculation over a cache of aiter's shuffled layout, where verify would be left to SGLang.

    SGLang's prefill and decode know that layout, and its verify and unified draft extend view the same memory as a plain cache.

    Raises:
        SpecverifyError: as said.
    """
    if routes.server.algorithm is not None and (routes.leaves(Mode.TARGET_VERIFY) or routes.leaves(Mode.DRAFT_EXTEND)):
        raise SpecverifyError(
            "cache layout vectorized_5d, which SGLang's aiter backend does not know in verify and draft extend",
            "unset SGLANG_AITER_KV_CACHE_LAYOUT, or switch speculation off",
        )
