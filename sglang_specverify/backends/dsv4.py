"""SGLang's dsv4 backend with its call of FlashMLA given to `deepseek_v41_decode`: target, draft, decode, verify, draft extend.

All of these pass through one attribute, `_flash_mla_with_kvcache`, with the same arguments, so that it alone is replaced.
A call that the route leaves goes to what was there before, logged once with its reason, or is an error in strict mode or where
nothing of SGLang's reads the pool. Sparse prefill, SGLang's default, does not come this way: SGLang converts rows for it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend

from sglang_specverify import flags
from sglang_specverify.backends.dsv4_calls import kernel_arguments, read_call
from sglang_specverify.backends.facts import hardware_facts
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import Hardware
from sglang_specverify.kernels.sparse_mla import deepseek_v41_decode
from sglang_specverify.routing.route import Decision, require
from sglang_specverify.routing.sparse_mla import SparseCall, decide_sparse_mla, stock_serves

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, torch.Tensor]
_SEAM = "_flash_mla_with_kvcache"


class SparseMlaCalls:
    """The callable in the place of `_flash_mla_with_kvcache`: decides each kind of call once, and counts.

    Args:
        stock: what was there; None where this SGLang has no such attribute.
        interleaved: whether a row's scales follow its values, in both caches.
        part: "target" or "draft", for the log.
    """

    def __init__(self, stock: Callable[..., Outputs] | None, hardware: Hardware, *, interleaved: bool, part: str) -> None:
        self.stock, self.hardware, self.interleaved, self.part = stock, hardware, interleaved, part
        self.flags = flags.read()
        self._decisions: dict[SparseCall, Decision] = {}
        self._calls: Counter[tuple[str, str, str]] = Counter()

    def decide(self, call: SparseCall) -> Decision:
        """The decision for one kind of call.

        Raises:
            SpecverifyError: it is not served, and strict mode is on or nothing of SGLang's could serve it.
        """
        decision = self._decisions.get(call)
        if decision is None:
            decision = decide_sparse_mla(self.hardware, call, self.flags)
            require(decision, self.flags)
            if not decision.served and not stock_serves(self.hardware, call):
                raise SpecverifyError(
                    f"the pool holds rows that no other kernel reads on {self.hardware.display}: {decision.reason}",
                    "change what the reason names, or unset SGLANG_SPECVERIFY_FP4_POOL",
                )
            self._decisions[call] = decision
            row = (_layers(call), decision.kernel, decision.reason)
            if row not in self._calls:
                self._calls[row] = 0
                logger.info("specverify: %s: %s run on %s: %s", self.part, *row)
        return decision

    def __call__(self, **arguments: Any) -> Outputs:
        """Attend as `flash_mla_with_kvcache` does: (out bf16 [T, 1, H, 512], lse FP32 [T, H, 1], natural, without the sink)."""
        call = replace(read_call(arguments), seam=self.stock is not None)
        decision = self.decide(call)
        if not torch.compiler.is_compiling():
            self._calls[_layers(call), decision.kernel, decision.reason] += 1
        if not decision.served:
            assert self.stock is not None
            return self.stock(**arguments)
        out, lse = deepseek_v41_decode(**kernel_arguments(arguments, interleaved=self.interleaved))
        return out, lse.transpose(1, 2)

    def report(self) -> list[dict[str, Any]]:
        """What was decided and how often it ran (under a CUDA graph: its capture), for server info."""
        return [
            {"part": self.part, "layer": layers, "kernel": kernel, "reason": reason, "calls": calls}
            for (layers, kernel, reason), calls in sorted(self._calls.items())
        ]


class SpecverifyDeepseekV4Backend(DeepseekV4AttnBackend):
    """SGLang's backend; every compress ratio of the pool is decided before the first call."""

    def __init__(self, model_runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        take_seam(self)


class SpecverifyDeepseekV4MultiStepBackend(DeepseekV4MultiStepBackend):
    """All steps of a draft; what SGLang builds for each is replaced, and the container itself attends nothing."""

    def _make_step_backend(self, model_runner: ModelRunner, step_id: int) -> SpecverifyDeepseekV4Backend:
        return SpecverifyDeepseekV4Backend(
            model_runner,
            speculative_step_id=step_id,
            topk=self.topk,
            speculative_num_steps=self.speculative_num_steps,
        )


def take_seam(backend: Any) -> SparseMlaCalls:
    """Put `SparseMlaCalls` in the place of a backend's call of FlashMLA; without such an attribute decide and log alone."""
    stock, pool = getattr(backend, _SEAM, None), backend.token_to_kv_pool
    layout = pool.get_swa_key_layout()
    part = "draft" if backend.is_draft_runner else "target"
    interleaved = bool(getattr(layout, "is_interleaved", False))
    calls = SparseMlaCalls(stock, hardware_facts(backend.device.type), interleaved=interleaved, part=part)
    backend.specverify_sparse_mla = calls
    for ratio in (0, *backend.present_ratios):
        extra = _encoding(pool.compressed_kv_layout(ratio)) if ratio else None
        calls.decide(SparseCall(_encoding(layout), extra, seam=stock is not None))
    if stock is not None:
        setattr(backend, _SEAM, calls)
    return calls


def _encoding(layout: Any) -> str:
    """A `KVLayout`'s bytes by name, however they are arranged; 0.5.22 knows one arrangement alone."""
    return str(getattr(layout, "encoding", layout).value)


def _layers(call: SparseCall) -> str:
    return "layers with a window alone" if call.extra is None else f"layers with selected rows ({call.extra})"
