"""What the plugin's fixed buffers take, worked out from what the server knows before SGLang sizes its KV pool.

An upper bound: the routes are decided as for the real backends, but the number of requests and the pools are not known yet, and a
draft's layers are taken to be like the target's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang_specverify import flags
from sglang_specverify.backends.facts import hardware_facts, layer_facts, model_layers, padded, server_facts
from sglang_specverify.backends.plans import OWN_DRAFTS, WHOLE
from sglang_specverify.kernels import verify_attention_workspace_size
from sglang_specverify.routing.facts import LayerFacts, Mode, ServerFacts
from sglang_specverify.routing.route import decide

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

#: The mode of each part of a server that has buffers of its own.
MODES = {"target": Mode.TARGET_VERIFY, "draft decode": Mode.DRAFT_DECODE, "draft extend": Mode.DRAFT_EXTEND}

#: The most requests that SGLang makes room for unasked.
MOST_REQUESTS = 4096

#: Of a plan: an item's bytes, the most items beside the requests' own, the most of a request, and the smallest row tile.
_ITEM, _ITEMS, _ITEMS_OF_A_REQUEST, _ROWS_OF_A_TILE = 32, 1024, 16, 16


@dataclass(frozen=True)
class Built:
    """Backends that SGLang builds alike.

    Attributes:
        part: a key of `MODES`.
        base: the built-in backend underneath.
        steps: of the draft, where it is another number than the server starts with; each verifies one token more.
        copies: how many.
    """

    part: str
    base: str
    steps: int | None = None
    copies: int = 1


@dataclass(frozen=True)
class Part:
    """A backend with buffers of its own.

    Attributes:
        name: a key of `MODES`.
        width: rows of a request.
        slots: its write slots: of all steps of a draft.
        kernels: that serve its layers.
        kinds: how many kinds of layers these are, each of which may need a plan.
        group, kv_heads, v_head_dim: the largest of them.
    """

    name: str
    width: int
    slots: int
    kernels: frozenset[str]
    kinds: int
    group: int
    kv_heads: int
    v_head_dim: int


@dataclass(frozen=True)
class Sizes:
    """What all parts share.

    Attributes:
        requests: the most of a batch, those that pad it among them.
        batches: the batch sizes that are captured; none without graphs.
        positions: of a row of `req_to_token`.
        page_size: tokens of a page.
        tables: 2 where window layers have a pool of their own, else 1.
        deterministic: as the server runs.
        multiprocessors: of the device; this machine's where None.
        captures: graphs of each batch size of the target, whose steps do not share plans and lists: 2 where SGLang may capture
            one with adapters and one without.
    """

    requests: int
    batches: tuple[int, ...]
    positions: int
    page_size: int = 1
    tables: int = 1
    deterministic: bool = False
    multiprocessors: int | None = None
    captures: int = 1


def bytes_of(part: Part, sizes: Sizes) -> int:
    """Bytes that `part` holds on to from start-up, at most. Pure arithmetic."""
    w, tree = part.width, part.name == "target"
    total = sizes.requests * w * w if tree else 0
    batches = tuple(sorted({min(batch, sizes.requests) for batch in sizes.batches}))
    if not batches:
        return total
    captured = batches * (sizes.captures if tree else 1)
    most, rows = batches[-1], sum(captured) * w
    # Rows of a table begin at multiples of 16 entries; a row id, a length and an offset stand beside each, and beside those of a
    # window pool its write slots, in two orders.
    entries = -(-sizes.positions // (16 * sizes.page_size)) * 16
    total += sizes.tables * most * entries * 4 + (3 * most + 1) * 4 + (sizes.tables - 1) * 2 * most * part.slots * 8
    items = (len(captured) * _ITEMS + sum(captured) * _ITEMS_OF_A_REQUEST) * _ITEM
    # Two entries of a request where a second launch combines its parts.
    counters = sum(captured) * max(2, part.kv_heads * -(-w * part.group // _ROWS_OF_A_TILE)) * 4
    masks = (2 * rows + 16 * sum(captured)) * (w // 64 + 2) * 4 if tree else 0
    total += part.kinds * (items + counters + masks)
    if part.kernels & set(OWN_DRAFTS):
        total += rows * (w + 2) * 4
    if part.kernels & set(WHOLE):
        total += verify_attention_workspace_size(
            most, num_draft_tokens=w, q_heads=part.group * part.kv_heads, kv_heads=part.kv_heads, v_head_dim=part.v_head_dim,
            deterministic=sizes.deterministic, multiprocessors=sizes.multiprocessors,
        )  # fmt: skip
    return total


def reserve_of(configurator: KVCacheConfigurator, built: Iterable[Built]) -> int:
    """Bytes that the plugin's backends of this server will hold, at most.

    Args:
        configurator: SGLang's, of the target, before it makes a pool.
        built: every backend that is the plugin's.
    """
    c = configurator
    runner: Any = SimpleNamespace(
        device=c.device, dtype=c.model_dtype, kv_cache_dtype=c.kv_cache_dtype, kv_cache_dtype_str=c.kv_cache_dtype_str,
        page_size=c.page_size, model=c.model, model_config=c.model_config, is_draft_worker=False, token_to_kv_pool=None,
        attention_chunk_size=c.model_config.attention_chunk_size, prefill_aware_swa=False,
    )  # fmt: skip
    layers = [layer_facts(layer, is_mla=c.use_mla_backend, given=given) for layer, given in model_layers(runner)]
    total = 0
    for one in built:
        server = server_facts(runner, one.base)
        if one.steps is not None:
            server = replace(server, num_steps=one.steps, num_draft_tokens=one.steps + 1)
        part = _part(one.part, server, layers, hardware_facts(c.device))
        if part is not None:
            total += one.copies * bytes_of(part, _sizes(c, server))
    return total


def _part(name: str, server: ServerFacts, layers: Iterable[LayerFacts], hardware: Any) -> Part | None:
    """The part as it will be built; None where no layer of it is the plugin's."""
    asked, served, kernels = flags.read(), [], set()
    for facts in dict.fromkeys(layers):
        decision = decide(hardware, server, facts, MODES[name], asked)
        if decision.served:
            served.append(facts)
            kernels.add(decision.kernel)
    if server.algorithm is None or not served:
        return None
    drafting, width = name == "draft decode", server.num_draft_tokens
    return Part(
        name=name,
        width=server.topk if drafting else width,
        slots=server.topk * server.num_steps if drafting else width,
        kernels=frozenset(kernels),
        kinds=len(served),
        group=max(one.q_heads // one.kv_heads for one in served),
        kv_heads=max(one.kv_heads for one in served),
        v_head_dim=max(one.v_head_dim for one in served),
    )


def _sizes(c: KVCacheConfigurator, server: ServerFacts) -> Sizes:
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
    from sglang.srt.runtime_context import get_exec, get_lora, get_schedule

    asked = get_schedule().max_running_requests
    graphs = get_exec().graph.cuda_graph_config.decode.bs if server.cuda_graph else ()
    return Sizes(
        requests=padded(MOST_REQUESTS if asked is None else max(1, asked // c.attn_dp_size)),
        batches=tuple(graphs or ()),
        positions=c.model_config.context_len + get_req_to_token_extra_context_len(),
        page_size=server.page_size,
        tables=2 if c.is_hybrid_swa else 1,
        deterministic=server.deterministic,
        captures=2 if get_lora().enable_lora else 1,
    )
