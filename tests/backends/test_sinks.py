"""Sinks are known when a server is planned: what its layers run on is the same before the first call, in it and after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.models
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends import reserve
from sglang_specverify.backends.facts import SINKS, model_layers
from sglang_specverify.backends.flash import SpecverifyFlashAttentionBackend
from sglang_specverify.backends.reserve import Built, reserve_of
from sglang_specverify.hardware import from_name
from sglang_specverify.routing import chain
from sglang_specverify.routing.facts import Mode
from tests.backends import aiter_passes, aiter_stand_in, flash_stand_in
from tests.backends.batches import Batch
from tests.backends.compare import STOCK, assert_close, expected, inputs, kernels, run
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.passes import add, verify_batch
from tests.backends.test_reserve import configurator

Make = Callable[[Setup], Engine]

VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
#: A chain, which FlashAttention keeps where its layers have sinks, and the plugin serves where they have none.
FEW = Setup(page_size=16, requests=4)


@pytest.fixture(autouse=True)
def strict(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    for name in ("SGLANG_USE_AITER_UNIFIED_ATTN", "SGLANG_AITER_UNIFIED_VERIFY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers for few requests, on a machine and with a head dim for which the two kernels are taken to be compared."""
    flash_stand_in.install(monkeypatch)
    monkeypatch.setattr(chain, "ARCH", "none")
    monkeypatch.setattr(chain, "HEAD_DIM", FEW.head_dim)


def test_every_name_that_a_model_keeps_sinks_under() -> None:
    """As SGLang's models pass them to a layer, in the arguments of its call."""
    models = Path(sglang.srt.models.__path__[0])
    passed = {name for path in models.rglob("*.py") for name in re.findall(r"\bsinks=([\w.]+)", path.read_text())}
    assert passed == {f"self.{name}" for name in SINKS}


@pytest.mark.parametrize("name", [None, *SINKS])
def test_what_the_calls_of_a_model_give(engine: Make, name: str | None) -> None:
    one = engine(Setup(windows=(-1, 6), sinks=name))
    runner = one.runner()
    found = list(model_layers(runner))
    assert [layer for layer, _ in found] == one.layers
    assert {given for _, given in found} == {frozenset({"sinks"} if name else ())}
    for owner in runner.model:
        setattr(owner, name or "sinks", None)
    assert {given for _, given in model_layers(runner)} == {frozenset()}, "a layer without, of a model that has some"


@pytest.mark.parametrize("name", SINKS)
def test_a_chain_that_flash_attention_keeps(engine: Make, few: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the start: the graph that was planned is the one that the layers run in."""
    one = engine(FEW.but(sinks=name))
    add(one, (5, 0, 40))
    backend = SpecverifyFlashAttentionBackend(one.runner(), part="target")
    assert backend.routes.leaves(Mode.TARGET_VERIFY) and not backend.routes.serves(Mode.TARGET_VERIFY)
    graph = Graph(one, backend, buffers_for(one, backend, VERIFY, 4), VERIFY, 4)
    flash_stand_in.calls.clear()
    batch = verify_batch(one, backend)
    graph.load(batch)
    backend.init_forward_metadata_in_graph(graph.batch)
    stock_rows(one, backend, graph, batch)
    assert [call["sinks"] for call in flash_stand_in.calls] == [True]
    assert kernels(backend.routes.report()) == {"target_verify": {"stock"}}
    plain = SpecverifyFlashAttentionBackend(engine(FEW).runner(), part="target")
    assert plain.routes.serves(Mode.TARGET_VERIFY), "without sinks the plugin's kernel takes it"


def stock_rows(one: Engine, backend: Any, graph: Graph, batch: Batch) -> None:
    """The layers of a captured batch on SGLang's own kernel, whose padded rows are anything: the real rows are right."""
    x = inputs(one, graph.batch)
    rows = len(batch.keys)
    for layer in one.layers:
        out = run(backend, layer, graph.batch, x)
        assert_close(out[:rows], expected(one, layer, batch, x.of(rows)), STOCK)


def test_nothing_is_kept_for_it(engine: Make, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of the plugin's buffers is decided as the backends are."""
    monkeypatch.setattr(reserve, "hardware_facts", lambda device: replace(from_name("H200"), arch="none"))
    monkeypatch.setattr(reserve, "verify_attention_workspace_size", lambda *_, **__: 1)
    setup = FEW.but(dtype=torch.bfloat16)
    kept = [reserve_of(configurator(engine(one)), [Built("target", "fa3")]) for one in (setup, setup.but(sinks="sinks"))]
    assert kept[0] > 0 == kept[1]


@pytest.mark.parametrize("windows", [(-1,), (-1, 6)])
def test_draft_steps_over_aiter(engine: Make, monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...]) -> None:
    """Paged attention has no sinks: the plugin's kernel takes the steps, eager from the first and in graphs of every size."""
    aiter_stand_in.install(monkeypatch)
    one = engine(Setup(windows=windows, sinks="sinks"))
    add(one, (5, 0, 39))
    container = aiter_passes.drafter(one)
    for _ in range(2):
        aiter_passes.check_draft(one, container, aiter_passes.draft(one))
    buffers = buffers_for(one, container, DRAFT, 4)
    for graph in [Graph(one, container, buffers, DRAFT, requests) for requests in (4, 3)]:
        graph.replay(aiter_passes.draft(one))
    assert not aiter_stand_in.calls
    assert kernels(container.routes.report()) == {"draft_decode": {"fused"}}


def test_a_model_that_keeps_them_elsewhere(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call tells. The graph that is captured then stays SGLang's, and those after it are the plugin's."""
    aiter_stand_in.install(monkeypatch)
    one = engine(Setup())
    add(one, (5, 0, 39))
    container = aiter_passes.drafter(one)
    buffers = buffers_for(one, container, DRAFT, 4)
    first = Graph(one, container, buffers, DRAFT, 4)
    assert not container._bound and container._device._fixed is None, "nothing is held for what is not served"
    # As the draft worker does: the write slots of one step.
    first.batch.out_cache_loc = first.batch.out_cache_loc[:4]
    run(container.attn_backends[0], one.layers[0], first.batch, inputs(one, first.batch, sinks=True))
    assert kernels(container.routes.report()) == {"draft_decode": {"stock"}}
    Graph(one, container, buffers, DRAFT, 3).replay(aiter_passes.draft(one), sinks=True)
    assert kernels(container.routes.report()) == {"draft_decode": {"stock", "fused"}}
