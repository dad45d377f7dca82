"""The plugin's fixed buffers are counted before SGLang sizes its KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_specverify import flags
from sglang_specverify.door.request import Request, expected_parts, wants_plugin

if TYPE_CHECKING:
    from sglang_specverify.backends.reserve import Built

logger = logging.getLogger(__name__)


def keep_reserve(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`KVCacheConfigurator.config_from_budget` with a budget less by what the plugin will hold.

    SGLang asks it twice where it sizes the pool after the graphs are captured: first for an upper bound, then with a cap and a
    budget that was measured with the plugin's buffers in place. Neither is made smaller.
    """

    def config_from_budget(self: Any, budget_bytes: int, *, cap_tokens: int | None = None) -> Any:
        if cap_tokens is None and not self.post_capture_kv_active and not self.is_draft_worker:
            reserve = _reserve(self)
            if reserve:
                text = "specverify: %.1f MB for page tables, tree masks and scratch are kept from the KV pool"
                logger.info(text, reserve / 1e6)
            budget_bytes = max(0, budget_bytes - reserve)
        return stock(self, budget_bytes, cap_tokens=cap_tokens)

    return config_from_budget


def _reserve(configurator: Any) -> int:
    from sglang.srt.arg_groups.overrides import resolved_view

    given = configurator.server_args
    view = resolved_view(given)
    request = Request.of(given)
    # The flags come second: a stray one must not stop a server that never asked for the plugin.
    if not request.any or view.speculative_algorithm is None or flags.read().disable:
        return 0
    from sglang_specverify.backends.reserve import reserve_of

    target = next((base for base in flags.BASES if wants_plugin(given, view, base, is_draft_runner=False)), None)
    return reserve_of(configurator, _built(request, view, target))


def _built(request: Request, view: Any, target: str | None) -> list[Built]:
    """Every backend of the plugin that SGLang will build over the bases `target` and the draft's.

    With --speculative-adaptive these are all parts for each number of steps that it may choose, and in multi-layer EAGLE a draft
    extend for each step.
    """
    from sglang.srt.arg_groups.overrides import ResolvedView

    from sglang_specverify.backends.reserve import Built

    draft = view.speculative_draft_attention_backend or target
    found = []
    for steps in _candidates(view):
        at = view if steps is None else ResolvedView(view, {"speculative_num_steps": steps})
        for part in sorted(expected_parts(request, at, pp_rank=view.pp_size - 1)):
            base = target if part == "target" else draft
            copies = view.speculative_num_steps if part == "draft extend" and view.enable_multi_layer_eagle else 1
            if base in flags.BASES:
                found.append(Built(part, base, steps, copies))
    return found


def _candidates(view: Any) -> list[int | None]:
    """The numbers of steps for which SGLang builds backends; None for the one that the server starts with."""
    if not view.speculative_adaptive:
        return [None]
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    return [*resolve_candidate_steps_from_config(cfg_path=view.speculative_adaptive_config)]
