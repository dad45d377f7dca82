"""What a server line asks of the plugin, read from SGLang's record of the raw and the resolved arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_specverify.flags import BASES
from sglang_specverify.routing.base import PLUGIN

#: The server arguments that may name the plugin.
FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)

#: Algorithms whose draft model runs through SGLang's draft backend factory.
_FACTORY_DRAFTS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


@dataclass(frozen=True)
class Request:
    """Which parts of a server the user wants from the plugin.

    `prefill` and `decode` are the target's two halves, `draft_decode` and `draft_extend` the draft's. A draft
    without a backend of its own follows the target, as in SGLang.
    """

    prefill: bool = False
    decode: bool = False
    draft_decode: bool = False
    draft_extend: bool = False

    @property
    def target(self) -> bool:
        return self.prefill or self.decode

    @property
    def any(self) -> bool:
        return self.target or self.draft_decode or self.draft_extend

    @classmethod
    def of(cls, server_args: Any) -> Request:
        """Read the names as the user gave them; resolution leaves those on the record."""
        both = server_args.attention_backend
        prefill = (server_args.prefill_attention_backend or both) == PLUGIN
        decode = (server_args.decode_attention_backend or both) == PLUGIN
        draft = server_args.speculative_draft_attention_backend
        if draft is not None:
            return cls(prefill, decode, draft == PLUGIN, draft == PLUGIN)
        extend = decode if server_args.speculative_attention_mode == "decode" else prefill
        return cls(prefill, decode, decode, extend)


def options_of(server_args: Any, fields: Sequence[str]) -> list[str]:
    """Those of `fields` that name the plugin, as a command line spells them."""
    return [f"--{field.replace('_', '-')}" for field in fields if getattr(server_args, field) == PLUGIN]


def expected_parts(request: Request, resolved: Any, pp_rank: int = 0) -> frozenset[str]:
    """The parts that a scheduler process must have built from the plugin's classes.

    Args:
        resolved: the resolved view of the server arguments.
        pp_rank: the process's pipeline stage: the last one alone hosts the draft.
    """
    parts = set()
    if request.target:
        parts.add("target")
    if resolved.speculative_algorithm in _FACTORY_DRAFTS and pp_rank == resolved.pp_size - 1:
        multi_step = (resolved.speculative_num_steps or 0) > 1 and not resolved.enable_multi_layer_eagle
        if request.draft_decode and multi_step:
            parts.add("draft decode")
        if request.draft_extend:
            parts.add("draft extend")
    return frozenset(parts)


def wants_plugin(server_args: Any, resolved: Any, base: str, *, is_draft_runner: bool) -> bool:
    """Whether the backend that SGLang builds under the built-in name `base` is to be the plugin's.

    A split pair may name the plugin for one half and a built-in backend for the other: only the half whose
    name resolved to `base` from the plugin's is ours.
    """
    request = Request.of(server_args)
    draft = server_args.speculative_draft_attention_backend
    if is_draft_runner and draft is not None:
        return bool(draft == PLUGIN and resolved.speculative_draft_attention_backend == base)
    prefill = resolved.prefill_attention_backend or resolved.attention_backend
    decode = resolved.decode_attention_backend or resolved.attention_backend
    return (request.prefill and prefill == base) or (request.decode and decode == base)


def stray_names(server_args: Any, resolved: Any) -> dict[str, str]:
    """Fields that named the plugin and were resolved to a backend that the plugin has no subclass of."""
    return {
        field: getattr(resolved, field)
        for field in FIELDS
        if getattr(server_args, field) == PLUGIN and getattr(resolved, field) not in BASES
    }
