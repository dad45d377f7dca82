"""The scheduler process's half of the door: build the plugin's backends, and report that they were built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from sglang_specverify import __version__, flags
from sglang_specverify.door import sparse_mla
from sglang_specverify.door.handshake import write_record
from sglang_specverify.door.memory import keep_reserve
from sglang_specverify.door.request import Request, wants_plugin
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp import install as mtp

logger = logging.getLogger(__name__)

#: base -> (module, backend class, class of the multi-step draft, arguments beyond the runner)
_CLASSES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "triton": ("triton", "SpecverifyTritonBackend", "SpecverifyTritonDraftBackend", {}),
    "fa3": ("flash", "SpecverifyFlashAttentionBackend", "SpecverifyFlashAttentionDraftBackend", {"fa_impl_ver": 3}),
    "fa4": ("flash", "SpecverifyFlashAttention4Backend", "SpecverifyFlashAttention4DraftBackend", {"fa_impl_ver": 4}),
    "aiter": ("aiter", "SpecverifyAiterBackend", "SpecverifyAiterDraftBackend", {}),
}

#: What this process built, by part: one backend as a rule, several under two-batch overlap or multiplexing. Draft parts
#: appear once a draft model is there.
_built: dict[str, list[Any]] = {}


def install() -> None:
    """Patch SGLang in this process. Idempotent; each patch does nothing for a server that asks for another backend.

    Upstream points (SGLang 0.5.22 and 0.5.23; the drift guard in the tests watches them):
    `attention_registry.ATTENTION_BACKENDS`, `DraftBackendFactory._create_{fa3,fa4,triton,aiter}_{decode,prefill}_backend`,
    `Scheduler.get_init_info`, `Scheduler.get_internal_state`, `scheduler.get_exception_traceback`,
    `KVCacheConfigurator.config_from_budget`, `dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS`, and
    `loader._initialize_model`, which `mtp.install` wraps. `sparse_mla.install` names those that a flag asks for.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    for base in flags.BASES:
        ATTENTION_BACKENDS[base] = _once(ATTENTION_BACKENDS[base], partial(_target_factory, base))
        for half, build in (("decode", _build_draft_decode), ("prefill", _build_draft_extend)):
            _patch(DraftBackendFactory, f"_create_{base}_{half}_backend", _draft_factory(base, build))
    _patch(KVCacheConfigurator, "config_from_budget", keep_reserve)
    _patch(scheduler.Scheduler, "get_init_info", _with_record)
    _patch(scheduler.Scheduler, "get_internal_state", _with_routes)
    _patch(scheduler, "get_exception_traceback", _without_traceback)
    _keep_dflash_mask_rule()
    mtp.install()
    sparse_mla.install(_patch)


def _once(stock: Callable[..., Any], wrap: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    if getattr(stock, "_specverify", False):
        return stock
    wrapper = wrap(stock)
    wrapper._specverify = True  # type: ignore[attr-defined]
    return wrapper


def _patch(owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    setattr(owner, name, _once(getattr(owner, name), wrap))


def _is_ours(runner: Any, base: str) -> bool:
    from sglang.srt.arg_groups.overrides import resolved_view

    # The flags come second: a stray one must not stop a server that never asked for the plugin.
    view = resolved_view(runner.server_args)
    return wants_plugin(runner.server_args, view, base, is_draft_runner=runner.is_draft_worker) and not flags.read().disable


def _class(base: str, index: int) -> Any:
    module, *names, _ = _CLASSES[base]
    return getattr(import_module(f"sglang_specverify.backends.{module}"), names[index])


def _target_factory(base: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def create(runner: Any) -> Any:
        if not _is_ours(runner, base):
            return stock(runner)
        if base == "triton" and runner.model_config.is_encoder_decoder:
            raise SpecverifyError(
                "cross attention is not supported over SGLang's Triton backend", "use --attention-backend flashinfer"
            )
        part = "draft" if runner.is_draft_worker else "target"
        return _note(part, _class(base, 0)(runner, part=part, **_CLASSES[base][3]))

    return create


def _draft_factory(base: str, build: Callable[[str, Any], Any]) -> Callable[[Any], Callable[[Any], Any]]:
    def wrap(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def create(factory: Any) -> Any:
            half = "draft_decode" if build is _build_draft_decode else "draft_extend"
            runner = factory.draft_model_runner
            if not getattr(Request.of(runner.server_args), half) or flags.read().disable:
                return stock(factory)
            # SGLang stamps the built-in name on what it gets, for rules that are keyed on it.
            return base, build(base, factory)

        return create

    return wrap


def _build_draft_decode(base: str, factory: Any) -> Any:
    runner, topk, steps = factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    return _note("draft decode", _class(base, 1)(runner, topk, steps, **_CLASSES[base][3]))


def _build_draft_extend(base: str, factory: Any) -> Any:
    part = "draft extend"
    return _note(part, _class(base, 0)(factory.draft_model_runner, part=part, **_CLASSES[base][3]))


def _note(part: str, backend: Any) -> Any:
    _built.setdefault(part, []).append(backend)
    return backend


def record() -> dict[str, Any]:
    """What this scheduler process runs, which has built something: for init info, server info and the log."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    mine: dict[str, Any] = {"version": __version__}
    if _built:
        any_part = (_built.get("target") or next(iter(_built.values())))[0]
        mine |= {"base": any_part.routes.server.base, "hardware": any_part.routes.hardware.display}
    mine |= {
        "parts": {part: type(backends[0]).__name__ for part, backends in _built.items()},
        "rank": {name: getattr(parallel, name) for name in ("dp_rank", "pp_rank", "tp_rank")},
        "routes": routes(),
    }
    return {**mine, "sparse_mla": rows} if (rows := sparse_mla.report()) else mine


def routes() -> list[dict[str, Any]]:
    """What ran on which kernel and why, for all parts of this process."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for backends in _built.values() for backend in backends for row in backend.routes.report()):
        key = tuple(row[name] for name in ("part", "mode", "layer", "kernel", "reason"))
        rows[key] = {**row, "calls": row["calls"] + rows.get(key, {"calls": 0})["calls"]}
    return list(rows.values())


def _with_record(stock: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    def get_init_info(self: Any) -> dict[str, Any]:
        info = stock(self)
        if sparse_mla.report():
            info["specverify"] = record()
        if _built:
            info["specverify"] = mine = record()
            write_record(mine)
            kernels = sorted({f"{row['mode']}: {row['kernel']}" for row in mine["routes"]})
            text = "specverify %s serves on base %s, %s; parts: %s; routes: %s"
            logger.info(text, __version__, mine["base"], mine["hardware"], mine["parts"], "; ".join(kernels))
            _publish_metric(mine)
        return info

    return get_init_info


def _publish_metric(mine: dict[str, Any]) -> None:
    """With `--enable-metrics`, say in `/metrics` what serves, as SGLang's own labels name the base alone."""
    from sglang.srt.runtime_context import get_observability

    if not get_observability().enable_metrics:
        return
    # SGLang imports it late too: its multi-process directory must be set first.
    from prometheus_client import Gauge

    labels = {name: str(mine[name]) for name in ("version", "base", "hardware")}
    gauge = Gauge("sglang:specverify_info", "The plugin that serves attention, by version and base", list(labels),
                  multiprocess_mode="mostrecent")  # fmt: skip
    gauge.labels(**labels).set(1)


def _with_routes(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def get_internal_state(self: Any, request: Any) -> Any:
        output = stock(self, request)
        if _built or sparse_mla.report():
            output.internal_state["specverify"] = record()
        return output

    return get_internal_state


def _without_traceback(stock: Callable[[], str]) -> Callable[[], str]:
    def get_exception_traceback() -> str:
        import sys

        error = sys.exc_info()[1]
        return f"specverify: error: {error}" if isinstance(error, SpecverifyError) else stock()

    return get_exception_traceback


def _keep_dflash_mask_rule() -> None:
    """DFLASH asks a backend's class name whether verify needs a mask; a subclass must answer as its parent does."""
    from sglang.srt.speculative import dflash_utils

    names = dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS
    ours = {_CLASSES[base][1] for base in ("fa3", "fa4", "triton")}
    dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS = names | ours
