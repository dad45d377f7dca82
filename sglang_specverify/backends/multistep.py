"""The mixin that turns a built-in container of a multi-step draft into the plugin's: all children share one step's metadata."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_specverify.backends.device_steps import Bound, DeviceSteps
from sglang_specverify.backends.routed import RoutedBackend, unplanned
from sglang_specverify.backends.routes import Routes
from sglang_specverify.backends.steps import Step, draft_step, read_pools
from sglang_specverify.routing.facts import Mode

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_MODE = Mode.DRAFT_DECODE


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
        self._device = DeviceSteps(model_runner, self.pools, routes.server, topk=topk, num_steps=speculative_num_steps)
        self._bound: dict[int, Bound] = {}
        self.attn_backends: list[Any] = [
            self.child(model_runner, part="draft decode", routes=routes, **self.child_arguments(step, **kwargs))
            for step in range(speculative_num_steps - 1)
        ]

    def child_arguments(self, step: int, **kwargs: Any) -> dict[str, Any]:
        """The arguments that the built-in container gives its child of this step."""
        raise NotImplementedError

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        stock: Callable[[ForwardBatch], None] = super().init_forward_metadata  # type: ignore[misc]
        if not self.routes.serves(_MODE):
            stock(forward_batch)
            return
        if self.routes.on_device:
            shared = self._device.eager(forward_batch, _MODE, self.routes.served(_MODE), None)
        else:
            shared = draft_step(self.pools, forward_batch, topk=self.topk, num_steps=self.speculative_num_steps)
        # Between the steps SGLang narrows the batch's write slots and advances its positions in place; the built-in
        # metadata, which is made for all steps at once, needs them as they are now.
        whole = copy.copy(forward_batch)
        whole.positions = forward_batch.positions.clone()
        self._hand_out(shared, functools.cache(lambda: stock(whole)))

    def _hand_out(self, shared: Step, prepare: Callable[[], None] | None) -> None:
        for step, child in enumerate(self.attn_backends):
            child.take_step(shared.at(step), prepare)

    @property
    def _in_graph(self) -> bool:
        return self.routes.on_device and self.routes.serves(_MODE)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        if self.routes.on_device:
            self._device.reserve(max_bs, max_bs * self.topk * self.speculative_num_steps)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        stock: Callable[..., None] = super().init_forward_metadata_out_graph  # type: ignore[misc]
        if not self._in_graph:
            stock(forward_batch, in_capture=in_capture)
            return
        if in_capture:
            served, leaves = self.routes.served(_MODE), self.routes.leaves(_MODE)
            self._bound[forward_batch.batch_size] = self._device.bind(forward_batch, _MODE, served, None, stock_too=leaves)
        bound = self._bound.get(forward_batch.batch_size)
        if bound is None or bound.stock_too:
            stock(forward_batch, in_capture=in_capture)
        if bound is not None:
            self._hand_out(bound.step, None if bound.stock_too else unplanned)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        bound = self._bound.get(forward_batch.batch_size) if self._in_graph else None
        if bound is None or bound.stock_too:
            super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        if bound is not None:
            self._device.fill(bound)
