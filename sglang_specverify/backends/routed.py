"""The two mixins that turn a built-in backend of SGLang into the plugin's.

`RoutedBackend` asks the routes for each call and either translates it for a kernel of the plugin or
leaves it to the built-in backend; `RoutedDraftBackend` does the same for the container of a
multi-step draft. Everything that is not overridden here is SGLang's own, inherited.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify.backends.calls import attend, write_kv
from sglang_specverify.backends.masks import mask_layout, tree_mask, with_full_mask
from sglang_specverify.backends.routes import Routes
from sglang_specverify.backends.steps import Step, decode_step, draft_step, extend_step, mode_of, read_pools, verify_step
from sglang_specverify.routing.facts import Mode

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
else:
    # A mixin: the built-in backend comes after it in the order of resolution. Importing SGLang's is for the subclasses.
    AttentionBackend = object


class RoutedBackend(AttentionBackend):
    """Mixed in before a built-in backend class, whose name SGLang knows it by is `base`."""

    base: str

    def __init__(
        self, model_runner: ModelRunner, *args: Any, part: str = "target", routes: Routes | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model_runner, *args, **kwargs)
        self.part = part
        self.routes = routes or Routes(model_runner, self.base, part)
        self.pools = read_pools(model_runner)
        self.step: Step | None = None
        self._prepare_stock: Callable[[], None] | None = None
        self._tree_mask = None
        if part == "target" and self.routes.serves(Mode.TARGET_VERIFY):
            self._tree_mask = tree_mask(model_runner, self.routes.server.num_draft_tokens)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The [W, W] mask that the draft stage fills in place, also where no CUDA graph is captured."""
        return super().verify_mask if self._tree_mask is None else self._tree_mask

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = mode_of(forward_batch, is_draft_step=self.part == "draft decode")
        stock = super().init_forward_metadata
        if mode is Mode.DRAFT_DECODE:
            # The container asks for the built-in half alone; it has given this child its step, or none.
            stock(forward_batch)
            return
        self.step, self._prepare_stock = None, None
        if mode is None or not self.routes.serves(mode):
            stock(self._for_stock(forward_batch, mode))
            return
        self.step = self._read_step(forward_batch, mode)
        self._prepare_stock = lambda: stock(self._for_stock(forward_batch, mode))

    def _for_stock(self, forward_batch: ForwardBatch, mode: Mode | None) -> ForwardBatch:
        """The batch as built-in backends read it: of the layouts of a tree mask they know FULL_MASK alone."""
        published = self.verify_mask
        if mode is not Mode.TARGET_VERIFY or (published is not None and not published.is_read):
            return forward_batch
        if getattr(forward_batch.spec_info, "custom_mask", None) is None or mask_layout(forward_batch, published) == "full_mask":
            return forward_batch
        return with_full_mask(forward_batch)

    def _read_step(self, forward_batch: ForwardBatch, mode: Mode) -> Step:
        if mode is Mode.TARGET_VERIFY:
            layout = mask_layout(forward_batch, self.verify_mask)
            return verify_step(self.pools, forward_batch, topk=self.routes.server.topk, mask_layout=layout)
        if mode is Mode.DECODE:
            return decode_step(self.pools, forward_batch)
        return extend_step(self.pools, forward_batch, mode)

    def take_step(self, step: Step, prepare_stock: Callable[[], None]) -> None:
        """Called by the container of a multi-step draft with this child's own step."""
        self.step, self._prepare_stock = step, prepare_stock

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):  # type: ignore[no-untyped-def]
        return self._forward(super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):  # type: ignore[no-untyped-def]
        return self._forward(super().forward_extend, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(
        self,
        stock: Callable[..., Any],
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> Any:
        mode = mode_of(forward_batch, is_draft_step=self.part == "draft decode")
        if mode is None:
            return stock(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        decision = self.routes.route(layer, mode, kwargs, planned=self.step is not None)
        if not decision.served or self.step is None:
            if self._prepare_stock is not None:
                # The step was read for our kernel, and this call is the first that is not its own.
                self._prepare_stock()
                self._prepare_stock = None
            return stock(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        if k is not None and v is not None and save_kv_cache:
            write_kv(self.step, layer, forward_batch, self.token_to_kv_pool, k, v)
        return attend(self.step, decision, q, layer, self.token_to_kv_pool, sinks=kwargs.get("sinks"))


class RoutedDraftBackend:
    """Mixed in before the built-in container of a multi-step draft. `child` is the backend of one step."""

    child: type[RoutedBackend]
    #: Set by the built-in container.
    topk: int
    speculative_num_steps: int

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int, **kwargs: Any) -> None:
        super().__init__(model_runner, topk, speculative_num_steps, **kwargs)  # type: ignore[call-arg]
        self.routes = routes = Routes(model_runner, self.child.base, "draft decode")
        self.pools = read_pools(model_runner)
        self.attn_backends: list[Any] = [
            self.child(model_runner, part="draft decode", routes=routes, **self.child_arguments(step, **kwargs))
            for step in range(speculative_num_steps - 1)
        ]

    def child_arguments(self, step: int, **kwargs: Any) -> dict[str, Any]:
        """The arguments that the built-in container gives its child of this step."""
        raise NotImplementedError

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        stock: Callable[[ForwardBatch], None] = super().init_forward_metadata  # type: ignore[misc]
        if not self.routes.serves(Mode.DRAFT_DECODE):
            stock(forward_batch)
            return
        shared = draft_step(self.pools, forward_batch, topk=self.topk, num_steps=self.speculative_num_steps)
        # Between the steps SGLang narrows the batch's write slots and advances its positions in place; the built-in
        # metadata, which is made for all steps at once, needs them as they are now.
        whole = copy.copy(forward_batch)
        whole.positions = forward_batch.positions.clone()
        prepare = functools.cache(lambda: stock(whole))
        for step, child in enumerate(self.attn_backends):
            child.take_step(shared.at(step), prepare)
