"""What every backend of the plugin shares: its routes, their log lines and their counts."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify import flags
from sglang_specverify.backends.facts import hardware_facts, layer_facts, model_layers, server_facts, uses_mla
from sglang_specverify.backends.plans import Served
from sglang_specverify.routing.facts import CallFacts, LayerFacts, Mode
from sglang_specverify.routing.route import CLAIMED, STOCK, Decision, decide, require

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


#: What each part of a server runs.
_MODES = {
    "target": (Mode.PREFILL, Mode.DECODE, Mode.TARGET_VERIFY),
    "draft": (Mode.PREFILL, Mode.DRAFT_EXTEND),
    "draft extend": (Mode.PREFILL, Mode.DRAFT_EXTEND),
    "draft decode": (Mode.DRAFT_DECODE,),
}


class Routes:
    """The decisions of one backend: asked for each call, computed once for each kind of call.

    Every layer of the loaded model is decided at once, so that strict mode fails before a request comes.

    Args:
        runner: the model runner that the backend serves.
        base: the built-in backend underneath, such as "fa3".
        part: what the backend was built for: a key of `_MODES`.
    """

    def __init__(self, runner: ModelRunner, base: str, part: str) -> None:
        self.hardware = hardware_facts(runner.device)
        self.flags = flags.read()
        self.server = server_facts(runner, base)
        self.part = part
        self.is_mla = uses_mla(runner)
        self._decisions: dict[tuple[LayerFacts, Mode, frozenset[str]], Decision] = {}
        self._layers: dict[tuple[int, frozenset[str]], LayerFacts] = {}
        self._calls: Counter[tuple[Mode, str, str, str]] = Counter()
        modes = [mode for mode in _MODES[part] if self.server.algorithm is not None or mode not in CLAIMED]
        model = getattr(runner, "model", None)  # SGLang's own attention test kit has a runner without one
        for layer, given in () if model is None else model_layers(runner):
            for mode in modes:
                self._lookup(layer, mode, given)

    def route(self, layer: RadixAttention, mode: Mode, arguments: dict[str, Any], *, planned: bool = True) -> Decision:
        """Decide one call of a pass and count it (under a CUDA graph: the capture, not its replays).

        `arguments` are the call's keyword arguments beyond Q, K and V. A pass that was not `planned` for a kernel of the
        plugin, because no layer was known to need one in this mode, is stock's.
        """
        given = frozenset(name for name, value in arguments.items() if value is not None)
        facts, decision = self._lookup(layer, mode, given)
        if decision.served and not planned:
            decision = replace(decision, kernel=STOCK, reason="the pass was planned for SGLang's own kernel")
        # A count in a compiled graph would be a guard that fails at every call.
        if not torch.compiler.is_compiling():
            self._calls[mode, facts.kind.value, decision.kernel, decision.reason] += 1
        return decision

    def serves(self, mode: Mode) -> bool:
        """Whether a kernel of the plugin serves any layer seen so far in this mode."""
        return any(decision.served for (_, m, _), decision in self._decisions.items() if m is mode)

    @property
    def on_device(self) -> bool:
        """Whether Triton kernels serve what the plugin serves, from metadata on the device; else the reference does."""
        return self.hardware.has_gpu or self.flags.kernels == "triton"

    def served(self, mode: Mode) -> tuple[Served, ...]:
        """The layers seen so far that a kernel of the plugin serves in a pass of this mode, by what they share of a step."""
        found = [
            Served.of(facts.q_heads, facts.kv_heads, facts.head_dim, facts.v_head_dim, facts.window, decision.kernel)
            for (facts, m, _), decision in self._decisions.items()
            if m is mode and decision.served
        ]
        return tuple(dict.fromkeys(found))

    def leaves(self, mode: Mode) -> bool:
        """Whether SGLang's own code serves any layer seen so far in this mode."""
        return any(not decision.served for (_, m, _), decision in self._decisions.items() if m is mode)

    def _lookup(self, layer: RadixAttention, mode: Mode, given: frozenset[str]) -> tuple[LayerFacts, Decision]:
        facts = self._layers.get((layer.layer_id, given))
        if facts is None:
            facts = self._layers[layer.layer_id, given] = layer_facts(layer, is_mla=self.is_mla, given=given)
        decision = self._decisions.get((facts, mode, given))
        if decision is None:
            decision = decide(self.hardware, self.server, facts, mode, self.flags, CallFacts(given))
            require(decision, self.flags)
            self._decisions[facts, mode, given] = decision
            self._log(facts, mode, decision)
        return facts, decision

    def _log(self, facts: LayerFacts, mode: Mode, decision: Decision) -> None:
        row = (mode, facts.kind.value, decision.kernel, decision.reason)
        if row not in self._calls:
            self._calls[row] = 0
            text = "specverify: %s: %s of %s runs on %s: %s"
            logger.info(text, self.part, mode.value, facts.kind.value, decision.kernel, decision.reason)

    def report(self) -> list[dict[str, Any]]:
        """What was decided and how often it ran, for server info."""
        return [
            {"part": self.part, "mode": mode.value, "layer": kind, "kernel": kernel, "reason": reason, "calls": calls}
            for (mode, kind, kernel, reason), calls in sorted(self._calls.items(), key=str)
        ]
