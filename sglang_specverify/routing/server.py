"""A server described by its command line alone. Pure; `options.py` reads the line, `draft.py` what it says of the draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_specverify import flags
from sglang_specverify.routing.draft import resolved_algorithm, resolved_tree
from sglang_specverify.routing.facts import LayerKind, ServerFacts
from sglang_specverify.routing.model import Description
from sglang_specverify.routing.options import ServerLine

#: What is in force with an option that no route knows, in the words of the running backends.
_STATES = {
    "--enable-kv-cache-sharding": "KV cache sharding",
    "--enable-unified-memory": "unified memory pool",
    "--enable-page-major-kv-layout": "cache pool PageMajorMHATokenToKVPool",
    "--enable-pdmux": "prefill-decode multiplexing",
}
#: Requests at once where the line sets no limit: SGLang's own for these algorithms. Elsewhere it goes by the memory.
_REQUESTS = dict.fromkeys(("EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP", "NGRAM", "DFLASH", "DSPARK"), 48)


def server_facts(
    line: ServerLine, model: Description, base: str, has_gpu: bool, draft: Mapping[str, Any] | None = None
) -> ServerFacts:
    """What the line means for `model`, with SGLang's own defaults where it says nothing.

    Args:
        base: the backend underneath; "" while it is being chosen.
        has_gpu: CUDA graphs exist only there.
        draft: the config of the draft's checkpoint; None where it is not at hand.

    Raises:
        SpecverifyError: a line for which SGLang resolves no draft.
    """
    algorithm = resolved_algorithm(line, draft or {})
    topk, steps, draft_tokens = resolved_tree(line, algorithm, model.architectures[0], draft or {})
    unified = _unified(model)
    graphs = not {"--disable-cuda-graph", "--disable-decode-cuda-graph"} & line.switches
    return ServerFacts(
        base=base,
        algorithm=algorithm,
        topk=topk,
        num_steps=steps,
        num_draft_tokens=draft_tokens,
        page_size=line.integers.get("--page-size", 1),
        dtype=_dtype(line.values.get("--dtype", "auto"), model),
        kv_cache_dtype=line.values.get("--kv-cache-dtype", "auto"),
        cuda_graph=has_gpu and graphs and line.values.get("--cuda-graph-backend-decode") != "disabled",
        # On-policy targets compute as a trainer does, and SGLang makes them deterministic.
        deterministic=bool({"--enable-deterministic-inference", "--rl-on-policy-target"} & line.named),
        context=line.integers.get("--context-length", model.context),
        requests=line.integers.get("--max-running-requests", _REQUESTS.get(algorithm or "", 0)),
        splitkv_verify=flags.switch("SGLANG_ENABLE_SPLITKV_VERIFY"),
        unified=unified,
        unified_verify=unified and flags.switch("SGLANG_AITER_UNIFIED_VERIFY"),
        unknown=frozenset(_states(line)) | model.states,
        two_batch_overlap="--enable-two-batch-overlap" in line.switches,
        plan_stream=flags.switch("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
    )


def _unified(model: Description) -> bool:
    """Whether SGLang's aiter backend would use its unified attention: where asked, and over a pool for window layers alone.

    SGLang has a list of architectures that get such a pool; here a model with window layers beside full ones counts as one.
    """
    kinds = {group.facts.kind for group in model.groups}
    return not model.facts.is_mla and (
        flags.switch("SGLANG_USE_AITER_UNIFIED_ATTN") or {LayerKind.FULL, LayerKind.WINDOW} <= kinds
    )


def _dtype(given: str, model: Description) -> str:
    name = {"half": "float16", "float": "float32"}.get(given, given)
    if name != "auto":
        return name
    if model.dtype == "float32":
        # SGLang's rule for "auto": no float32 on a server unless asked for.
        return "bfloat16" if "Gemma" in model.architectures[0] else "float16"
    return model.dtype


def _states(line: ServerLine) -> list[str]:
    found = [state for switch, state in _STATES.items() if switch in line.switches]
    if line.integers.get("--dcp-size", 1) > 1:
        found.append("decode context parallelism")
    if line.integers.get("--attn-cp-size", 1) > 1:
        found.append("prefill context parallelism")
    if "--dllm-algorithm" in line.values:
        found.append("diffusion language model")
    return found
