"""Which class SGLang's own factories build in a scheduler process: for the target, the steps of a draft, and draft extend.

The server arguments come from SGLang's resolution on a machine that is not here, and the factories are SGLang's, patched
by the plugin. Only the classes' constructors are replaced, by one that records its arguments, because a runner with
pools needs a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_specverify.door import scheduler as door
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import BASES
from tests.door.machines import machine
from tests.door.resolve import CHAIN, PLUGIN, TREE, arguments, resolve

CLASSES = {
    "fa3": ("SpecverifyFlashAttentionBackend", "SpecverifyFlashAttentionDraftBackend"),
    "fa4": ("SpecverifyFlashAttention4Backend", "SpecverifyFlashAttention4DraftBackend"),
    "triton": ("SpecverifyTritonBackend", "SpecverifyTritonDraftBackend"),
    "aiter": ("SpecverifyAiterBackend", "SpecverifyAiterDraftBackend"),
}


@dataclass
class Stock:
    """What a built-in factory of SGLang was asked for."""

    base: str
    what: str
    attn_backends: list[Any] = field(default_factory=list)


@pytest.fixture
def scheduler_process(door: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process like SGLang's scheduler: the factories patched, those underneath replaced by records."""
    from sglang.srt.layers.attention import attention_registry, hybrid_attn_backend
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup
    from sglang.srt.model_loader import loader
    from sglang.srt.speculative import dflash_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_specverify.door import scheduler as ours

    for base in BASES:
        monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, base, _stock_target(base))
        for half, what in (("decode", "draft decode"), ("prefill", "draft extend")):
            monkeypatch.setattr(DraftBackendFactory, f"_create_{base}_{half}_backend", _stock_draft(base, what))
    for owner, name in (
        (KVCacheConfigurator, "config_from_budget"),
        (scheduler.Scheduler, "get_init_info"),
        (scheduler.Scheduler, "get_internal_state"),
        (scheduler, "get_exception_traceback"),
        (dflash_utils, "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS"),
        (loader, "_initialize_model"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(attention_backend_setup, "attn_backend_wrapper", lambda runner, backend: backend)
    monkeypatch.setattr(attention_registry, "attn_backend_wrapper_for_draft_decode", lambda runner, backend: backend)
    monkeypatch.setattr(attention_registry, "attn_backend_wrapper_for_draft_extend", lambda runner, backend: backend)
    monkeypatch.setattr(hybrid_attn_backend, "HybridAttnBackend", SimpleNamespace)
    monkeypatch.setattr(ours, "_built", {})
    for base, (module, *names, _) in ours._CLASSES.items():
        for name in names:
            cls = getattr(import_module(f"sglang_specverify.backends.{module}"), name)
            monkeypatch.setattr(cls, "__init__", _record)
        assert tuple(names) == CLASSES[base]
    ours.install()
    assert loader._initialize_model._specverify
    yield


def _stock_target(base: str) -> Callable[[Any], Stock]:
    # A plain function, since the plugin marks what it wraps.
    return lambda runner: Stock(base, "target")


def _stock_draft(base: str, what: str) -> Callable[[Any], tuple[str, Stock]]:
    return lambda factory: (base, Stock(base, what))


def _record(self: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    self.__dict__.update(runner=runner, given=(args, kwargs), attn_backends=[])


@dataclass
class Built:
    target: Any
    draft_decode: Any
    draft_extend: Any


def build(raw: Any, view: Any, monkeypatch: pytest.MonkeyPatch, **model: Any) -> Built:
    """Build all three as SGLang's workers do, for one server."""
    from sglang.srt.arg_groups.overrides import attention_backends_of
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup
    from sglang.srt.speculative import draft_utils

    pair = attention_backends_of(view)
    monkeypatch.setattr(attention_backend_setup, "attention_backends", lambda: pair)
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: pair)
    monkeypatch.setattr(draft_utils, "get_spec", lambda: view)
    common = {
        "server_args": raw,
        "model_config": SimpleNamespace(**{"is_encoder_decoder": False, "hf_config": None, **model}),
        "draft_attention_backend": view.speculative_draft_attention_backend,
    }
    target = attention_backend_setup.get_attention_backend(model_runner=SimpleNamespace(is_draft_worker=False, **common))
    draft_runner = SimpleNamespace(is_draft_worker=True, **common)
    factory = draft_utils.DraftBackendFactory(draft_runner, view.speculative_eagle_topk, view.speculative_num_steps)
    return Built(target, factory.create_decode_backend(), factory.create_draft_extend_backend())


def names_of(base: str) -> tuple[str, str, str]:
    backend, steps = CLASSES[base]
    return backend, steps, backend


def shown(built: Built) -> tuple[str, ...]:
    return tuple(type(part).__name__ for part in (built.target, built.draft_decode, built.draft_extend))


PLACES = {
    "fa3": ("SM90", f"{PLUGIN} {TREE}"),
    "fa4": ("SM103", f"{PLUGIN} {TREE}"),
    "aiter": ("gfx950", f"{PLUGIN} {CHAIN}"),
    "aiter, tree": ("gfx950", f"{PLUGIN} {TREE}"),
    "triton": ("SM100", f"{PLUGIN} {TREE} --page-size 16"),
    "triton, no GPU": ("none", f"{PLUGIN} {TREE}"),
    "fa3, chain": ("SM90", f"{PLUGIN} {CHAIN}"),
    "fa4, by flag": ("SM90", f"{PLUGIN} {TREE}"),
}


@pytest.mark.usefixtures("scheduler_process")
@pytest.mark.parametrize("case", PLACES)
def test_ours_for_each_base(case: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_specverify.door import resolution

    name, line = PLACES[case]
    if name.startswith("gfx"):
        monkeypatch.setattr(resolution, "find_spec", lambda _: object())
    if case == "fa4, by flag":
        monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", "fa4")
    raw, view = resolve(name, arguments(name, models, "qwen3", line))
    built = build(raw, view, monkeypatch)
    base = case.partition(",")[0]
    assert shown(built) == names_of(base)
    assert built.target.given[1] == {"part": "target", **_version(base)}
    assert built.draft_decode.given == ((view.speculative_eagle_topk, 3), _version(base))
    assert built.draft_extend.given[1] == {"part": "draft extend", **_version(base)}
    assert built.draft_decode.prefill_attention_backend_str == base, "SGLang's rules go by the built-in name"
    assert set(door._built) == {"target", "draft decode", "draft extend"}
    assert door._built["target"] == [built.target]


def _version(base: str) -> dict[str, int]:
    return {"fa3": {"fa_impl_ver": 3}, "fa4": {"fa_impl_ver": 4}}.get(base, {})


#: Line, and what is built: "ours" or SGLang's own, for the target's prefill and decode half, draft decode, draft extend.
SPLITS = {
    "all": (PLUGIN, "ours ours ours ours"),
    "prefill": ("--prefill-attention-backend specverify --decode-attention-backend triton", "ours triton triton ours"),
    "prefill, decode verifies not": (
        "--prefill-attention-backend triton --decode-attention-backend specverify --speculative-attention-mode decode",
        "triton ours ours ours",
    ),
    "draft": ("--attention-backend triton --speculative-draft-attention-backend specverify", "triton triton ours ours"),
    "target": (f"{PLUGIN} --speculative-draft-attention-backend triton", "ours ours triton triton"),
    "none": ("--attention-backend fa3", "fa3 fa3 fa3 fa3"),
}


@pytest.mark.usefixtures("scheduler_process")
@pytest.mark.parametrize("case", SPLITS)
def test_only_what_was_asked_for(case: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    line, wanted = SPLITS[case]
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", f"{line} {TREE}"))
    built = build(raw, view, monkeypatch)
    halves = [getattr(built.target, half, built.target) for half in ("prefill_backend", "decode_backend")]
    parts = [*halves, built.draft_decode, built.draft_extend]
    got = [part.base if isinstance(part, Stock) else "ours" for part in parts]
    assert " ".join(got) == wanted


@pytest.mark.usefixtures("scheduler_process")
def test_a_draft_runner_has_its_own_target_backend(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang also builds a plain backend for the draft's runner; its name in the record is "draft"."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    config = SimpleNamespace(is_encoder_decoder=False)
    runner = SimpleNamespace(server_args=raw, is_draft_worker=True, model_config=config)
    backend = ATTENTION_BACKENDS["fa3"](runner)
    assert type(backend).__name__ == "SpecverifyFlashAttentionBackend"
    assert backend.given[1]["part"] == "draft"
    assert set(door._built) == {"draft"}


@pytest.mark.usefixtures("scheduler_process")
def test_a_draft_with_a_built_in_name_is_stock_beside_our_target_of_that_base(models: dict[str, Path]) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    line = f"{PLUGIN} {TREE} --speculative-draft-attention-backend triton"
    raw, view = resolve("none", arguments("none", models, "qwen3", line))
    assert view.attention_backend == view.speculative_draft_attention_backend == "triton"
    config = SimpleNamespace(is_encoder_decoder=False)
    target, draft = (
        ATTENTION_BACKENDS["triton"](SimpleNamespace(server_args=raw, is_draft_worker=is_draft, model_config=config))
        for is_draft in (False, True)
    )
    assert type(target).__name__ == "SpecverifyTritonBackend"
    assert draft == Stock("triton", "target")


@pytest.mark.usefixtures("scheduler_process")
def test_one_step_has_no_draft_decode(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_specverify.door.request import Request, expected_parts

    one_step = f"{PLUGIN} {CHAIN}".replace("num-steps 3", "num-steps 1").replace("draft-tokens 4", "draft-tokens 2")
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", one_step))
    built = build(raw, view, monkeypatch)
    assert built.draft_decode is None
    assert set(door._built) == expected_parts(Request.of(raw), view) == {"target", "draft extend"}


@pytest.mark.usefixtures("scheduler_process")
@pytest.mark.parametrize("case", PLACES)
def test_the_handshake_expects_what_is_built(case: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_specverify.door.request import Request, expected_parts

    raw, view = resolve(PLACES[case][0], arguments(PLACES[case][0], models, "qwen3", PLACES[case][1]))
    build(raw, view, monkeypatch)
    assert set(door._built) == expected_parts(Request.of(raw), view)


@pytest.mark.usefixtures("scheduler_process")
def test_switched_off_everything_is_stock(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_DISABLE", "1")
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    built = build(raw, view, monkeypatch)
    assert (built.target.base, built.draft_decode.base, built.draft_extend.base) == ("fa3", "fa3", "fa3")
    assert door._built == {}


@pytest.mark.usefixtures("scheduler_process")
def test_cross_attention_over_triton_is_refused(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    raw, view = resolve("none", arguments("none", models, "qwen3", PLUGIN))
    with pytest.raises(SpecverifyError, match="cross attention is not supported"):
        build(raw, view, monkeypatch, is_encoder_decoder=True)


@pytest.mark.usefixtures("scheduler_process")
def test_installing_twice_patches_once() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.managers.scheduler import Scheduler

    before = (ATTENTION_BACKENDS["fa3"], Scheduler.get_init_info)
    door.install()
    assert (ATTENTION_BACKENDS["fa3"], Scheduler.get_init_info) == before


@pytest.mark.usefixtures("scheduler_process")
def test_dflash_masks_our_classes_as_it_does_their_parents() -> None:
    from sglang.srt.speculative import dflash_utils

    names = dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS
    for base, (module, name, *_) in door._CLASSES.items():
        cls = getattr(import_module(f"sglang_specverify.backends.{module}"), name)
        stock = next(parent for parent in cls.__mro__ if not parent.__module__.startswith("sglang_specverify"))
        assert (name in names) == (stock.__name__ in names), base


@pytest.mark.usefixtures("scheduler_process")
def test_a_scheduler_reports_our_errors_without_a_traceback() -> None:
    from sglang.srt.managers import scheduler

    try:
        raise SpecverifyError("what", "way out")
    except SpecverifyError:
        assert scheduler.get_exception_traceback() == "specverify: error: what\n  remedy: way out"
    try:
        raise ValueError("theirs")
    except ValueError:
        assert "Traceback" in scheduler.get_exception_traceback()


def test_the_platform_is_a_fake_only_while_it_is_asked_for() -> None:
    from sglang.srt.runtime_context import get_platform

    before = get_platform().device_sm
    with machine("SM107"):
        assert get_platform().device_sm == 107
    assert get_platform().device_sm == before


@pytest.mark.usefixtures("scheduler_process")
def test_a_stray_flag_does_not_touch_a_server_that_asks_for_another_backend(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", f"--attention-backend triton {TREE}"))
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", "nonsense")
    built = build(raw, view, monkeypatch)
    assert {type(part) for part in (built.target, built.draft_decode, built.draft_extend)} == {Stock}


def test_every_backend_of_a_part_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two-batch overlap and multiplexing build several for one part; their counts add up."""

    def backend(calls: int) -> SimpleNamespace:
        row = {"part": "target", "mode": "decode", "layer": "full attention", "kernel": "stock", "reason": "why", "calls": calls}
        return SimpleNamespace(routes=SimpleNamespace(report=lambda: [row]))

    monkeypatch.setattr(door, "_built", {"target": [backend(2), backend(0), backend(5)]})
    assert [row["calls"] for row in door.routes()] == [7]
