"""The mixin that turns a built-in backend of SGLang into the plugin's.

It asks the routes for each call and either translates it for a kernel of the plugin or leaves it to the built-in backend.
Everything that is not overridden here is SGLang's own, inherited. `multistep.py` has its sibling for a multi-step draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify.backends.calls import attend, write_kv
from sglang_specverify.backends.device_steps import Bound, DeviceSteps
from sglang_specverify.backends.masks import mask_layout, own_columns, tree_mask, widened, with_full_mask
from sglang_specverify.backends.routes import Routes
from sglang_specverify.backends.steps import Step, decode_step, extend_step, is_tree, mode_of, read_pools, verify_step
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.facts import Mode
from sglang_specverify.routing.route import Decision

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
else:
    # A mixin: the built-in backend comes after it in the order of resolution. Importing SGLang's is for the subclasses.
    AttentionBackend = object


def unplanned() -> None:
    """Stands for SGLang's metadata in a captured graph that was planned without."""
    raise SpecverifyError(
        "a layer of a captured graph passes what no route knows, and the graph was planned for kernels of the plugin alone",
        "leave the mode to SGLang: SGLANG_SPECVERIFY_TREE=0, SGLANG_SPECVERIFY_CHAIN=0 or SGLANG_SPECVERIFY_DRAFT_DECODE=0",
    )


class RoutedBackend(AttentionBackend):
    """Mixed in before a built-in backend class, whose name SGLang knows it by is `base`."""

    base: str
    #: Set by the built-in backend.
    is_draft_runner: bool

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
        self._device = DeviceSteps(model_runner, self.pools, self.routes.server)
        self._bound: dict[tuple[Mode, int], Bound] = {}
        #: Where a graph reads its trees, QLEN_ONLY.
        self._graph_mask: torch.Tensor | None = None
        if part == "target" and self._publishes_mask():
            self._tree_mask = tree_mask(model_runner, self.routes.server.num_draft_tokens)

    def _publishes_mask(self) -> bool:
        """Built-in backends know FULL_MASK alone, and a captured graph has no time to make one out of another."""
        mixed = self.routes.server.cuda_graph and self.routes.leaves(Mode.TARGET_VERIFY)
        return self.routes.serves(Mode.TARGET_VERIFY) and not mixed

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
        self.take_step(self._read_step(forward_batch, mode), lambda: stock(self._for_stock(forward_batch, mode)))

    def _for_stock(self, forward_batch: ForwardBatch, mode: Mode | None) -> ForwardBatch:
        """The batch as built-in backends read it: of the layouts of a tree mask they know FULL_MASK alone."""
        published = self.verify_mask
        if mode is not Mode.TARGET_VERIFY or (published is not None and not published.is_read):
            return forward_batch
        if getattr(forward_batch.spec_info, "custom_mask", None) is None or mask_layout(forward_batch, published) == "full_mask":
            return forward_batch
        return with_full_mask(forward_batch)

    def _read_step(self, forward_batch: ForwardBatch, mode: Mode) -> Step:
        if self.routes.on_device:
            return self._device.eager(forward_batch, mode, self.routes.served(mode), self._mask(forward_batch, mode, None))
        if mode is Mode.TARGET_VERIFY:
            layout = mask_layout(forward_batch, self.verify_mask)
            return verify_step(self.pools, forward_batch, topk=self.routes.server.topk, mask_layout=layout)
        if mode is Mode.DECODE:
            return decode_step(self.pools, forward_batch)
        return extend_step(self.pools, forward_batch, mode)

    def _mask(self, forward_batch: ForwardBatch, mode: Mode, fixed: torch.Tensor | None) -> torch.Tensor | None:
        """The QLEN_ONLY mask of a batch, None for chains; out of a FULL_MASK it is made in `fixed`, or in a new tensor."""
        spec, rows = forward_batch.spec_info, len(forward_batch.req_pool_indices)
        if mode is not Mode.TARGET_VERIFY or spec is None or not is_tree(forward_batch, self.routes.server.topk):
            return None
        entries = rows * spec.draft_token_num**2
        if mask_layout(forward_batch, self.verify_mask) == "qlen_only":
            bits: torch.Tensor = (spec.custom_mask if fixed is None else fixed)[:entries]
            return bits
        bits = torch.empty(entries, dtype=torch.bool, device=self._device.device) if fixed is None else fixed[:entries]
        if spec.custom_mask is not None and spec.custom_mask.numel() > 0:
            own_columns(spec.custom_mask, forward_batch.seq_lens[:rows], spec.draft_token_num, bits)
        return bits

    def _in_graph(self, forward_batch: ForwardBatch) -> Mode | None:
        """The mode of a captured batch whose metadata the plugin makes, or None."""
        mode = mode_of(forward_batch, is_draft_step=self.part == "draft decode")
        ours = mode is not None and mode is not Mode.DRAFT_DECODE and self.routes.on_device and self.routes.serves(mode)
        return mode if ours else None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        if self._tree_mask is not None:
            # Who fills it asks for it anew at each batch, so that nobody keeps a smaller one.
            self._tree_mask = widened(self._tree_mask, max_bs)
        with self._without_full_mask():
            super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        if self.part == "draft decode" or not self.routes.on_device:
            return
        self._device.reserve(max_bs, max_num_tokens)
        if self._tree_mask is not None:
            self._graph_mask = self._tree_mask.buffer
        elif self.part == "target" and self.routes.serves(Mode.TARGET_VERIFY):
            entries = max_bs * self.routes.server.num_draft_tokens**2
            self._graph_mask = torch.zeros(entries, dtype=torch.bool, device=self._device.device)

    @contextmanager
    def _without_full_mask(self) -> Iterator[None]:
        """SGLang allocates a FULL_MASK over the whole context unless it takes this for the backend of a draft."""
        if self._tree_mask is None:
            yield
            return
        is_draft = self.is_draft_runner
        self.is_draft_runner = True
        try:
            yield
        finally:
            self.is_draft_runner = is_draft

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        mode, stock = self._in_graph(forward_batch), super().init_forward_metadata_out_graph
        self.step, self._prepare_stock = None, None
        if mode is None:
            stock(forward_batch, in_capture=in_capture)
            return
        mask = self._mask(forward_batch, mode, self._graph_mask)
        key = (mode, forward_batch.batch_size)
        if in_capture:
            leaves = self.routes.leaves(mode)
            if leaves and mask is not None and self._tree_mask is not None:
                # What is published is no mask that SGLang's own kernels read.
                unplanned()
            self._bound[key] = self._device.bind(forward_batch, mode, self.routes.served(mode), mask, stock_too=leaves)
        bound = self._bound.get(key)
        if bound is None or bound.stock_too:
            stock(forward_batch, in_capture=in_capture)
        if bound is not None:
            self.take_step(bound.step, None if bound.stock_too else unplanned)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        mode = self._in_graph(forward_batch)
        bound = None if mode is None else self._bound.get((mode, forward_batch.batch_size))
        if bound is None or bound.stock_too:
            super().init_forward_metadata_in_graph(forward_batch)
        if bound is not None:
            self._device.fill(bound)

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        """SGLang's staging reads metadata of its own, which the plugin does not make."""
        return bool(super().supports_draft_extend_metadata_staging) and not self.routes.serves(Mode.DRAFT_EXTEND)

    def take_step(self, step: Step, prepare_stock: Callable[[], None] | None) -> None:
        """The step that the next layers belong to, and what makes SGLang's own metadata of it; None where that is made.

        Called by the container of a multi-step draft with this child's own step.
        """
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
        return self.attend(self.step, decision, q, layer, kwargs.get("sinks"))

    def attend(
        self, step: Step, decision: Decision, q: torch.Tensor, layer: RadixAttention, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One layer through the kernel that was decided."""
        return attend(step, decision, q, layer, self.token_to_kv_pool, sinks=sinks)
