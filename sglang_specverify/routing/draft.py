"""Which algorithm speculates and in which tree, by a server line and the draft's config, as SGLang resolves them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.options import ServerLine

#: Drafts that read the target's cache: SGLang runs them by an algorithm of their own.
_FROZEN_KV_DRAFTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
#: Algorithms for which SGLang chooses steps, topk and draft tokens where the line gives none of them.
_CHOSEN = ("EAGLE", "EAGLE3", "STANDALONE")
#: Targets for which it chooses a tree, (topk, steps, draft tokens); a chain for the others.
_AUTO_TREE = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
_TREE, _CHAIN = (4, 5, 8), (1, 3, 4)
#: Targets whose draft is a chain of as many steps as its config says, and how many where it is silent.
_MTP_CHAINS, _MTP_STEPS = ("IQuestQ1ForCausalLM",), 7
#: Targets that SGLang drafts for by several layers where the line says EAGLE, in capitals.
_MULTI_LAYER = (
    "GigaChat35ForCausalLM",
    "GigaChat35ForCausalLMNextN",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration",
)
#: What SGLang has no adaptive steps with.
_NEVER_ADAPTIVE = {"--enable-multi-layer-eagle", "--enable-two-batch-overlap", "--enable-pdmux"}
_ADAPTIVE_STEPS = (0, 1, 3, 5, 7)
_NGRAM_BREADTH, _NGRAM_DRAFT_TOKENS = 10, 12

_STEPS, _TOPK, _TOKENS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"


def resolved_algorithm(line: ServerLine, draft: Mapping[str, Any]) -> str | None:
    """The algorithm that SGLang runs for `line` with the draft whose config is `draft`, empty where it is not known.

    Raises:
        SpecverifyError: an algorithm that SGLang refuses for this draft.
    """
    frozen = [name for name in draft.get("architectures") or () if name in _FROZEN_KV_DRAFTS]
    if frozen and line.algorithm == "EAGLE3":
        raise SpecverifyError(
            f"--speculative-algorithm EAGLE3 came with the draft {frozen[0]}, which SGLang takes for EAGLE or NEXTN alone",
            "use --speculative-algorithm NEXTN",
        )
    return "FROZEN_KV_MTP" if frozen and line.algorithm == "EAGLE" else line.algorithm


def resolved_tree(line: ServerLine, algorithm: str | None, target: str, draft: Mapping[str, Any]) -> tuple[int, int, int]:
    """(topk, steps, draft tokens) as SGLang resolves them.

    Args:
        algorithm: `resolved_algorithm`'s.
        target: the target's architecture.
        draft: the draft's config, empty where it is not known.

    Raises:
        SpecverifyError: a line for which SGLang resolves none.
    """
    get = line.integers.get
    steps, topk, tokens = get(_STEPS), get(_TOPK), get(_TOKENS)
    if algorithm is None:
        return 1, 0, 0
    if algorithm == "NGRAM":
        breadth = get("--speculative-ngram-max-bfs-breadth", _NGRAM_BREADTH)
        tokens = _NGRAM_DRAFT_TOKENS if tokens is None else tokens
        return breadth, tokens // breadth if steps is None else steps, tokens
    if algorithm in ("DFLASH", "DSPARK"):
        return 1, 1, tokens or get("--speculative-dflash-block-size") or 0
    if algorithm == "UNO":
        return topk or 1, 1 if topk in (None, 1) else steps or 0, tokens or 0
    if algorithm not in (*_CHOSEN, "FROZEN_KV_MTP"):
        # Somebody's own, registered with SGLang: it resolves its tree itself.
        return topk or 1, steps or 0, tokens or 0
    if algorithm in _CHOSEN:
        if _is_adaptive(line, algorithm, target):
            steps = _adaptive_steps(line, steps)
            return 1, steps, steps + 1
        if target in _MTP_CHAINS:
            steps = int(draft.get("num_draft_slots") or _MTP_STEPS) if steps is None else steps
            return 1, steps, steps + 1
        if steps is topk is tokens is None:
            return _TREE if algorithm != "STANDALONE" and target in _AUTO_TREE else _CHAIN
        if topk == 1 and steps is not None:
            # A chain has no choice: SGLang sets its length to the steps and the root.
            return topk, steps, steps + 1
    if steps is None or topk is None or tokens is None:
        raise _incomplete(algorithm, {_STEPS: steps, _TOPK: topk, _TOKENS: tokens})
    return topk, steps, tokens


def _incomplete(algorithm: str, options: Mapping[str, int | None]) -> SpecverifyError:
    given = " ".join(f"{option} {value}" for option, value in options.items() if value is not None)
    missing = " and ".join(option for option, value in options.items() if value is None)
    chosen = algorithm in _CHOSEN
    return SpecverifyError(
        f"{given or f'--speculative-algorithm {algorithm}'} came without {missing}, and SGLang "
        + ("chooses all three or none of them" if chosen else f"chooses none of them for {algorithm}"),
        f"add {missing}" + (f", or leave all three out; with {_TOPK} 1 the draft tokens follow from the steps" if chosen else ""),
    )


def _is_adaptive(line: ServerLine, algorithm: str, target: str) -> bool:
    """Whether SGLang adapts the steps: it drops the option, with a warning, where it cannot."""
    layered = line.values.get("--speculative-algorithm") == "EAGLE" and any(name in target for name in _MULTI_LAYER)
    return (
        "--speculative-adaptive" in line.switches
        and algorithm in ("EAGLE", "EAGLE3")
        and line.integers.get(_TOPK, 1) == 1
        and line.attention_dp == 1
        and not layered
        and not _NEVER_ADAPTIVE & line.switches
    )


def _adaptive_steps(line: ServerLine, given: int | None) -> int:
    """The steps that an adaptive server starts with."""
    path = line.values.get("--speculative-adaptive-config")
    candidates = _ADAPTIVE_STEPS if path is None else _candidates(path)
    if given is None:
        return candidates[len(candidates) // 2]
    if given not in candidates:
        allowed = ", ".join(map(str, candidates))
        raise SpecverifyError(
            f"{_STEPS} {given} came with --speculative-adaptive, which starts with {allowed}",
            f"choose one of them, or leave {_STEPS} out",
        )
    return given


def _candidates(path: str) -> tuple[int, ...]:
    """The steps that the file of --speculative-adaptive-config names for any batch size."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        steps = {step for size, entry in read.items() if size.isdigit() for step in entry["candidate_steps"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SpecverifyError(f"--speculative-adaptive-config {path} cannot be read: {error!r}", _ADAPTIVE_REMEDY) from None
    if not steps or not all(isinstance(step, int) and step >= 0 for step in steps):
        raise SpecverifyError(f"--speculative-adaptive-config {path} names no steps, or some that are none", _ADAPTIVE_REMEDY)
    return tuple(sorted(steps))


_ADAPTIVE_REMEDY = 'name a JSON file such as {"1": {"candidate_steps": [1, 3, 7]}}, or leave the option out'
