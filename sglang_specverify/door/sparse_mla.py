"""The door into SGLang's dsv4 backend: no backend name asks for it but a flag, since SGLang chooses `dsv4` for the model itself.

Hooked in a scheduler process, and only where the environment asks: the factories that build the backend, for the target and,
called directly, for drafts; the choice of a pool's rows, which two modules import under its name; and the architecture check of
the dequantiser in front of sparse prefill.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_specverify import flags, upstream
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing.route import Decision, require
from sglang_specverify.routing.sparse_mla import PoolRequest, SparseCall, decide_fp4_pool, decide_sparse_mla

logger = logging.getLogger(__name__)

Patch = Callable[[Any, str, Callable[[Any], Any]], None]

#: Backends that this process built, for reports.
_built: list[Any] = []
#: Reasons that were logged.
_said: set[str] = set()


def install(patch: Patch) -> None:
    """Hook what the environment asks for, and nothing else. `patch(owner, name, wrap)` wraps once.

    Upstream points: `deepseek_v4_trtllm_backend.create_deepseek_v4_{attn,multistep}_backend`; for the pool
    `deepseek_v4_memory_pool.select_dsv4_kv_layout`, `kv_cache_configurator.select_dsv4_kv_layout` and
    `dequant_k_cache.get_jit_cuda_arch`.
    """
    if flags.asked("disable", malformed=False):
        return
    if flags.asked("sparse_mla"):
        from sglang.srt.layers.attention import deepseek_v4_trtllm_backend as factories

        patch(factories, "create_deepseek_v4_attn_backend", _target_factory)
        patch(factories, "create_deepseek_v4_multistep_backend", _multistep_factory)
    if flags.asked("fp4_pool"):
        from sglang.kernels.ops.attention.dsv4 import dequant_k_cache
        from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

        patch(deepseek_v4_memory_pool, "select_dsv4_kv_layout", _pool_choice)
        patch(kv_cache_configurator, "select_dsv4_kv_layout", _pool_choice)
        patch(dequant_k_cache, "get_jit_cuda_arch", _architecture)


def report() -> list[dict[str, Any]]:
    """What ran where and why, for all dsv4 backends of this process; empty where none was built."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for backend in _built for calls in _calls_of(backend) for row in calls.report()):
        key = tuple(row[name] for name in ("part", "layer", "kernel", "reason"))
        rows[key] = {**row, "calls": row["calls"] + rows.get(key, {"calls": 0})["calls"]}
    return list(rows.values())


def _calls_of(backend: Any) -> list[Any]:
    return [one.specverify_sparse_mla for one in getattr(backend, "attn_backends", (backend,))]


def _target_factory(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_deepseek_v4_attn_backend(model_runner: Any, **kwargs: Any) -> Any:
        if not _takes(model_runner):
            return stock(model_runner, **kwargs)
        from sglang_specverify.backends.dsv4 import SpecverifyDeepseekV4Backend

        return _note(SpecverifyDeepseekV4Backend(model_runner, **kwargs))

    return create_deepseek_v4_attn_backend


def _multistep_factory(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_deepseek_v4_multistep_backend(model_runner: Any, topk: int, speculative_num_steps: int) -> Any:
        if not _takes(model_runner):
            return stock(model_runner, topk, speculative_num_steps)
        from sglang_specverify.backends.dsv4 import SpecverifyDeepseekV4MultiStepBackend

        return _note(SpecverifyDeepseekV4MultiStepBackend(model_runner, topk=topk, speculative_num_steps=speculative_num_steps))

    return create_deepseek_v4_multistep_backend


def _note(backend: Any) -> Any:
    _built.append(backend)
    return backend


def _takes(runner: Any) -> bool:
    """Whether this process's dsv4 backend is to be the plugin's; one with a path of its own past the seam is not."""
    current = flags.read()
    if current.disable or not current.sparse_mla:
        return False
    kind = _attention_kind()
    if kind not in ("trtllm", "flashmla_mega"):
        return True
    # Its layers' rows do not matter: the backend is refused before them.
    decision = decide_sparse_mla(_hardware(runner.device), SparseCall(window="v41", backend=kind), current)
    require(decision, current)
    _say(decision)
    return False


def _hardware(device: str) -> Hardware:
    # Late: a process that loads the plugin must not pay for the backends.
    from sglang_specverify.backends.facts import hardware_facts

    return hardware_facts(device)


def _attention_kind() -> str:
    from sglang.srt.runtime_context import get_exec

    return str(get_exec().kernel.dsv4_attn_backend)


def decide_pool() -> Decision:
    """Whether the pools of this process get the rows of V4.1 on Hopper.

    Raises:
        SpecverifyError: strict mode and they do not; or the flag that reads them is off.
    """
    current = flags.read()
    request = PoolRequest(
        layout=flags.setting("SGLANG_DSV4_KV_LAYOUT"),
        compressed=flags.setting("SGLANG_DSV4_COMPRESSED_KV_LAYOUT") or "auto",
        # SGLang resolves "auto" before a pool is made; what is neither of its own two takes FlashMLA.
        backend=kind if (kind := _attention_kind()) in ("trtllm", "flashmla_mega") else "flashmla",
        q8_prefill=_q8_prefill(),
        seam=upstream.has_dsv4_seam(upstream.installed_version()),
    )
    decision = decide_fp4_pool(_hardware("cuda"), request, current)
    require(decision, current)
    _say(decision)
    return decision


def _q8_prefill() -> bool:
    from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import use_dsv4_q8kv8_sparse_prefill
    from sglang.srt.runtime_context import get_exec

    return bool(use_dsv4_q8kv8_sparse_prefill(getattr(get_exec().kernel, "dsv4_prefill_backend", "auto")))


def _pool_choice(stock: Callable[[], Any]) -> Callable[[], Any]:
    def select_dsv4_kv_layout() -> Any:
        if not decide_pool().served:
            return stock()
        from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

        interleaved = flags.setting("SGLANG_DSV4_KV_LAYOUT") == "v41_new"
        option = flags.setting("SGLANG_DSV4_COMPRESSED_KV_LAYOUT") or "auto"
        return (KVLayout.V41_NEW if interleaved else KVLayout.V41), option

    return select_dsv4_kv_layout


def _architecture(stock: Callable[[], Any]) -> Callable[[], Any]:
    """What the dequantiser takes for the architecture: its kernels are plain Triton, and its check is of SGLang's own pools."""

    # Asked for every layer of a prefill.
    served = functools.cache(lambda: decide_pool().served)

    def get_jit_cuda_arch() -> Any:
        return SimpleNamespace(major=10, minor=0) if served() else stock()

    return get_jit_cuda_arch


def _say(decision: Decision) -> None:
    text = f"{decision.kernel}: {decision.reason}"
    if text not in _said:
        _said.add(text)
        logger.info("specverify: dsv4: %s", text)
