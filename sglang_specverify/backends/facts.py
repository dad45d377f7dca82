"""Read routing facts off a live SGLang: one function for a layer, one for the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_specverify import flags
from sglang_specverify.hardware import Hardware, from_sglang_platform
from sglang_specverify.routing.facts import LayerFacts, LayerKind, ServerFacts

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


#: Under which names SGLang's models keep the sinks of their layers; None where a layer has none.
SINKS = ("sinks", "attention_sink_bias")


def hardware_facts(device: str) -> Hardware:
    """The hardware that serves on `device`, as SGLang sees it, overrides of its platform facts included."""
    from sglang.srt.runtime_context import get_platform

    return from_sglang_platform(get_platform(), device)


def layer_facts(layer: RadixAttention, *, is_mla: bool, given: frozenset[str] = frozenset()) -> LayerFacts:
    """What the router may know of one `RadixAttention` layer on this rank, whose calls are `given` this beyond Q, K and V."""
    from sglang.srt.layers.radix_attention import AttentionType

    window = layer.sliding_window_size
    window = -1 if window is None else window
    if is_mla:
        kind = LayerKind.MLA
    elif layer.is_cross_attention:
        kind = LayerKind.CROSS
    elif layer.attn_type != AttentionType.DECODER:
        kind = LayerKind.ENCODER
    else:
        kind = LayerKind.WINDOW if window > -1 else LayerKind.FULL
    unknown = set()
    if layer.xai_temperature_len is not None and layer.xai_temperature_len > 0:
        unknown.add("xai_temperature_len")
    if layer.use_irope:
        unknown.add("use_irope")
    if layer.pos_encoding_mode not in ("NONE", None):
        unknown.add("pos_encoding_mode")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        unknown.add("logit_capping_method")
    return LayerFacts(
        kind=kind,
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        window=window,
        softcap=float(layer.logit_cap or 0.0),
        has_sinks="sinks" in given,
        unknown=frozenset(unknown),
    )


def model_layers(runner: ModelRunner) -> Iterable[tuple[RadixAttention, frozenset[str]]]:
    """Every layer of the loaded model that this runner's attention backend serves, and what it will be given beyond Q, K and V.

    That is read from the module that owns the layer, which keeps the sinks and gives them in each call: a route may depend on
    them, and is decided before there is a call.

    Some hybrids build their linear layers of `RadixAttention` too. SGLang wraps the backend of a hybrid in one that sends those
    elsewhere, and its pool has no place for them.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    pool = runner.token_to_kv_pool
    places = pool.full_attention_layer_id_mapping if isinstance(pool, HybridLinearKVPool) else None
    for owner in runner.model.modules():
        given = frozenset({"sinks"} if any(getattr(owner, name, None) is not None for name in SINKS) else ())
        for layer in owner.children():
            if isinstance(layer, RadixAttention) and (places is None or layer.layer_id in places):
                yield layer, given


def padded(requests: int) -> int:
    """The most requests of a batch, with those that SGLang pads it by, where up to `requests` run at once.

    It pads to whole groups of attention ranks, past the end of the request pool: graphs where the ranks gather what they
    computed, and other batches too where they keep in step with one another.
    """
    from sglang.srt.utils.common import get_cuda_graph_batch_size_alignment, get_eager_max_batch_size

    group = get_cuda_graph_batch_size_alignment(gathered_buffer_required=True)
    return int(max(-(-requests // group) * group, get_eager_max_batch_size(requests)))


def uses_mla(runner: ModelRunner) -> bool:
    """Whether the runner's model attends through a latent cache."""
    from sglang.srt.configs.model_config import AttentionArch

    return bool(runner.model_config.attention_arch == AttentionArch.MLA)


def server_facts(runner: ModelRunner, base: str) -> ServerFacts:
    """What this process serves, read from SGLang's published configuration and from the runner."""
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
    from sglang.srt.runtime_context import get_exec, get_schedule, get_spec

    spec = get_spec()
    unified = base == "aiter" and not uses_mla(runner) and _aiter_unified(runner)
    return ServerFacts(
        base=base,
        algorithm=spec.speculative_algorithm,
        topk=spec.speculative_eagle_topk or 1,
        num_steps=spec.speculative_num_steps or 0,
        num_draft_tokens=spec.speculative_num_draft_tokens or 0,
        page_size=runner.page_size or 1,
        dtype=str(runner.dtype).removeprefix("torch."),
        kv_cache_dtype=_cache_name(runner),
        cuda_graph=runner.device == "cuda" and not cuda_graph_fully_disabled(),
        deterministic=bool(get_exec().deterministic.enable_deterministic_inference),
        context=int(runner.model_config.context_len or 0),
        requests=int(get_schedule().max_running_requests or 0),
        splitkv_verify=flags.switch("SGLANG_ENABLE_SPLITKV_VERIFY"),
        unified=unified,
        unified_verify=unified and flags.switch("SGLANG_AITER_UNIFIED_VERIFY"),
        two_batch_overlap=bool(get_exec().overlap.enable_two_batch_overlap),
        unknown=frozenset(_unknown_states(runner, is_mla=uses_mla(runner))),
    )


def _aiter_unified(runner: ModelRunner) -> bool:
    """Whether SGLang's aiter backend decodes by its unified attention: where asked, and over a pool for window layers."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = runner.token_to_kv_pool
    return flags.switch("SGLANG_USE_AITER_UNIFIED_ATTN") or (isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0)


def _cache_name(runner: ModelRunner) -> str:
    """The cache's type; by its option where that says more: an mxfp8 cache holds e4m3 under scales of blocks."""
    given = getattr(runner, "kv_cache_dtype_str", None)
    return given if given == "mxfp8" else str(runner.kv_cache_dtype).removeprefix("torch.")


def _unknown_states(runner: ModelRunner, *, is_mla: bool) -> Iterable[str]:
    """Backend states in force that no route knows. Each is a reason to leave a call to SGLang."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_parallel, get_spec
    from sglang.srt.speculative.spec_utils import resolve_draft_decode_window

    parallel = get_parallel()
    if parallel.attn_dcp_size > 1:
        yield "decode context parallelism"
    if parallel.attn_cp_size > 1:
        yield "prefill context parallelism"
    if parallel.enable_kv_cache_sharding:
        yield "KV cache sharding"
    if get_memory().enable_unified_memory:
        yield "unified memory pool"
    if get_disagg().enable_pdmux:
        yield "prefill-decode multiplexing"
    if get_exec().dllm.dllm_algorithm is not None:
        yield "diffusion language model"
    if getattr(runner, "attention_chunk_size", None) is not None:
        yield "local (chunked) attention"
    if getattr(runner, "prefill_aware_swa", False):
        yield "prefill-aware windows"
    if hasattr(getattr(runner, "model", None), "prepare_attn_masks"):
        # Such a model writes its mask into the built-in backend's metadata.
        yield "image attention ranges"
    if runner.model_config.is_encoder_decoder:
        yield "encoder-decoder model"
    algorithm = get_spec().speculative_algorithm
    if algorithm in ("DSPARK", "DFLASH") and envs.SGLANG_RAGGED_VERIFY_MODE.get() != "static":
        yield "ragged verify"
    if runner.is_draft_worker and resolve_draft_decode_window(runner) != (0, 0):
        yield "draft decode window (--speculative-draft-window-size)"
    for pool in () if is_mla else _pools_of_keys(runner.token_to_kv_pool):
        # Its subclasses lay keys out in other ways, in pages or under scales of blocks.
        if type(pool) is not MHATokenToKVPool:
            yield f"cache pool {type(pool).__name__}"
        elif pool.kv_cache_layout != "nhd":
            yield f"cache layout {pool.kv_cache_layout}"


def _pools_of_keys(pool: Any) -> tuple[Any, ...]:
    """The pools that hold the keys of `pool`: a hybrid's full-attention layers have one, those of sliding windows another.

    None of them while it is not made: `pool` is None.
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if pool is None:
        return ()
    if type(pool) is SWAKVPool:
        return pool.full_kv_pool, pool.swa_kv_pool
    return (pool.full_kv_pool,) if type(pool) is HybridLinearKVPool else (pool,)
