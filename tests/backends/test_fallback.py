"""What the plugin does not serve goes to SGLang's own code: it really runs, with the right tokens, said once and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sglang_specverify.backends import routes
from sglang_specverify.backends.triton import SpecverifyTritonBackend
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import from_name
from sglang_specverify.routing.facts import Mode
from tests.backends import batches
from tests.backends.compare import STOCK, assert_close, expected, inputs, kernels, run
from tests.backends.engine import Engine, Setup
from tests.backends.passes import add, check, draft_extender, draft_passes, drafter, target, verify_batch

Make = Callable[[Setup], Engine]

LENGTHS = (5, 0, 21)
TREE = Setup(topk=4, draft_tokens=8)
CHAIN = Setup()
#: A call argument that no route knows and that SGLang's Triton backend takes without effect where there is no score_mod.
UNKNOWN = {"aux_tensors": []}


@pytest.fixture
def stock_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of SGLang's own forward methods, one for each time that one ran."""
    calls: list[str] = []
    for name in ("forward_extend", "forward_decode"):
        stock = getattr(TritonAttnBackend, name)

        def spy(self: Any, *args: Any, _stock: Any = stock, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _stock(self, *args, **kwargs)

        monkeypatch.setattr(TritonAttnBackend, name, spy)
    return calls


def stock_pass(one: Engine, backend: Any, batch: Any, **more: Any) -> None:
    """One pass that SGLang's own code serves, and that gives the right numbers."""
    backend.init_forward_metadata(batch.forward)
    layer, x = one.layers[0], inputs(one, batch.forward)
    assert_close(run(backend, layer, batch.forward, x, **more), expected(one, layer, batch, x), STOCK)


@pytest.mark.parametrize("mode", ["verify tree", "verify chain", "verify NGRAM", "prefill", "decode"])
def test_unknown_argument(engine: Make, stock_calls: list[str], caplog: pytest.LogCaptureFixture, mode: str) -> None:
    setup = {"verify chain": CHAIN, "verify NGRAM": TREE.but(algorithm="NGRAM")}.get(mode, TREE)
    one = engine(setup)
    add(one, LENGTHS)
    caplog.set_level(logging.INFO, "sglang_specverify")
    backend, runner = target(one), one.runner()
    makes = {"prefill": lambda: batches.extend(one, runner, [3, 1, 2]), "decode": lambda: batches.decode(one, runner)}
    make = makes.get(mode, lambda: verify_batch(one, backend))
    for _ in range(2):
        stock_pass(one, backend, make(), **UNKNOWN)
    assert stock_calls == ["forward_decode" if mode == "decode" else "forward_extend"] * 2
    name = mode if mode in makes else "target_verify"
    rows = [row for row in backend.routes.report() if row["calls"]]
    assert [(row["mode"], row["kernel"], row["calls"]) for row in rows] == [(name, "stock", 2)]
    assert "aux_tensors" in rows[0]["reason"]
    assert sum("aux_tensors" in record.getMessage() for record in caplog.records) == 1
    # The next call that is known is ours again.
    check(one, backend, make())
    assert kernels(backend.routes.report()) == {name: {"stock", "reference"}}


def test_one_layer_of_a_pass(engine: Make, stock_calls: list[str]) -> None:
    """A layer with an unknown argument between two without: each gets its own, from one plan."""
    one = engine(TREE.but(windows=(-1, -1, -1), page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    for layer, more in zip(one.layers, ({}, UNKNOWN, {}), strict=True):
        x = inputs(one, batch.forward)
        assert_close(run(backend, layer, batch.forward, x, **more), expected(one, layer, batch, x), STOCK)
    assert stock_calls == ["forward_extend"]
    assert [row["calls"] for row in backend.routes.report() if row["calls"]] == [2, 1]


@pytest.mark.parametrize("odd_step", [0, 1])
def test_one_layer_of_a_draft_step(engine: Make, stock_calls: list[str], odd_step: int) -> None:
    """SGLang's metadata is made for all steps when the first call needs it, also after the first step has moved on."""
    one = engine(TREE.but(windows=(-1, -1)))
    add(one, LENGTHS)
    container = drafter(one)
    batch = batches.draft(one, one.runner(is_draft=True))
    container.init_forward_metadata(batch.forward)
    for step in draft_passes(one, batch):
        for layer in one.layers:
            more = UNKNOWN if (step, layer.layer_id) == (odd_step, 0) else {}
            x = inputs(one, batch.forward)
            out = run(container.attn_backends[step], layer, batch.forward, x, **more)
            assert_close(out, expected(one, layer, batch, x), STOCK)
    assert stock_calls == ["forward_decode"]
    assert {row["kernel"]: row["calls"] for row in container.routes.report() if row["calls"]} == {"reference": 3, "stock": 1}


def test_a_mode_that_nobody_planned_is_counted_as_what_ran(engine: Make, stock_calls: list[str]) -> None:
    """Plain decode on a draft runner: its first pass is planned before any of its layers asked for a route."""
    one = engine(CHAIN)
    add(one, LENGTHS)
    backend = draft_extender(one)
    stock_pass(one, backend, batches.decode(one, one.runner(is_draft=True)))
    assert stock_calls == ["forward_decode"]
    assert kernels(backend.routes.report()) == {"decode": {"stock"}}
    check(one, backend, batches.decode(one, one.runner(is_draft=True)))
    assert kernels(backend.routes.report()) == {"decode": {"stock", "reference"}}


def test_strict_refuses_a_call(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    one = engine(TREE)
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    check(one, backend, batch)
    with pytest.raises(SpecverifyError, match="does not know what the call passes: score_mod"):
        run(backend, one.layers[0], batch.forward, inputs(one, batch.forward), score_mod=lambda score: score)


def test_strict_refuses_a_layer_when_the_backend_is_built(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    one = engine(TREE)
    one.layers[0].xai_temperature_len = 8
    with pytest.raises(SpecverifyError, match="xai_temperature_len"):
        target(one)


def test_strict_refuses_a_draft_window(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--speculative-draft-window-size` narrows what SGLang's draft decode sees; no route knows that."""
    one = engine(TREE.but(draft_window=4))
    assert drafter(one).routes.server.unknown == {"draft decode window (--speculative-draft-window-size)"}
    assert not target(one).routes.server.unknown, "the target sees everything as before"
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    with pytest.raises(SpecverifyError, match="draft decode window"):
        drafter(one)


def test_states_of_the_model_that_no_route_knows(engine: Make, stock_calls: list[str]) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    runner = one.runner()
    runner.prefill_aware_swa = True
    runner.model.prepare_attn_masks = lambda *_: None
    backend = SpecverifyTritonBackend(runner, part="target")
    assert backend.routes.server.unknown == {"prefill-aware windows", "image attention ranges"}
    stock_pass(one, backend, batches.extend(one, runner, [3, 1, 4]))
    assert stock_calls == ["forward_extend"]
    assert kernels(backend.routes.report())["prefill"] == {"stock"}


def test_strict_asks_for_no_verify_where_nobody_speculates(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without a launch table the plugin does not serve what it claims; a server without speculation never verifies."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    monkeypatch.setattr(routes, "hardware_facts", lambda device: from_name("sm_120"))
    one = engine(Setup(algorithm=None))
    assert {row["mode"] for row in target(one).routes.report()} == {"prefill", "decode"}
    with pytest.raises(SpecverifyError, match="no launch table for sm_120"):
        target(engine(TREE))


def test_counting_does_not_break_a_compiled_model(engine: Make) -> None:
    one = engine(TREE)
    book = target(one).routes
    compilations: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        compilations.append(1)
        return graph.forward

    def call(x: torch.Tensor) -> torch.Tensor:
        return x + int(book.route(one.layers[0], Mode.PREFILL, {}).served)

    compiled = torch.compile(call, backend=count)
    for _ in range(4):
        compiled(torch.zeros(2))
    assert len(compilations) <= 1


OPT_OUTS = {
    "SGLANG_SPECVERIFY_TREE": (TREE, {"target_verify"}),
    "SGLANG_SPECVERIFY_CHAIN": (CHAIN, {"target_verify", "draft_extend"}),
    "SGLANG_SPECVERIFY_DRAFT_DECODE": (TREE, {"draft_decode"}),
    "SGLANG_SPECVERIFY_DISABLE": (TREE, {"target_verify", "draft_extend", "draft_decode", "prefill", "decode"}),
    "SGLANG_SPECVERIFY_KERNELS": (TREE, {"prefill", "decode"}),
}


@pytest.mark.parametrize("flag", OPT_OUTS)
def test_opt_out_leaves_its_modes_to_stock(
    engine: Make, monkeypatch: pytest.MonkeyPatch, stock_calls: list[str], flag: str
) -> None:
    """And they give the right numbers there: a tree's mask then comes in the layout that SGLang's Triton backend reads."""
    monkeypatch.setenv(flag, {"SGLANG_SPECVERIFY_DISABLE": "1", "SGLANG_SPECVERIFY_KERNELS": "triton"}.get(flag, "0"))
    setup, to_stock = OPT_OUTS[flag]
    one = engine(setup)
    add(one, LENGTHS)
    runner, draft_runner = one.runner(), one.runner(is_draft=True)
    backend, extender, container = target(one), draft_extender(one), drafter(one)
    passes = {
        "target_verify": (backend, lambda: verify_batch(one, backend)),
        "prefill": (backend, lambda: batches.extend(one, runner, [2, 1, 3])),
        "decode": (backend, lambda: batches.decode(one, runner)),
        "draft_extend": (extender, lambda: batches.draft_extend(one, draft_runner)),
    }
    for mode, (one_backend, make) in passes.items():
        (stock_pass if mode in to_stock else check)(one, one_backend, make())
    batch = batches.draft(one, draft_runner)
    container.init_forward_metadata(batch.forward)
    for step in draft_passes(one, batch):
        x = inputs(one, batch.forward)
        out = run(container.attn_backends[step], one.layers[0], batch.forward, x)
        assert_close(out, expected(one, one.layers[0], batch, x), STOCK)
    ran = {**kernels(backend.routes.report()), **kernels(extender.routes.report()), **kernels(container.routes.report())}
    kernel = "fused" if flag == "SGLANG_SPECVERIFY_KERNELS" else "reference"
    assert ran == {mode: {"stock" if mode in to_stock else kernel} for mode in (*passes, "draft_decode")}
    assert len(stock_calls) == len(to_stock) + ("draft_decode" in to_stock), "a draft of three steps runs two passes"


def test_no_mask_is_published_where_stock_verifies(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE", "0")
    assert target(engine(TREE)).verify_mask is None


def test_draft_window_is_left_to_stock(engine: Make, stock_calls: list[str]) -> None:
    one = engine(TREE.but(draft_window=4))
    add(one, (9, 0, 21))
    container = drafter(one)
    batch = batches.draft(one, one.runner(is_draft=True))
    container.init_forward_metadata(batch.forward)
    layer = one.layers[0]
    for step in draft_passes(one, batch):
        x = inputs(one, batch.forward)
        out = run(container.attn_backends[step], layer, batch.forward, x)
        # The four newest of the prefix, and the branch's own tokens: all of them, however many.
        for t, keys in enumerate(batch.keys):
            length = one.requests[t // one.setup.topk].length
            batch.keys[t] = [key for key in keys if key[0] >= length - 4]
        assert_close(out, expected(one, layer, batch, x), STOCK)
    assert len(stock_calls) == 2
    assert kernels(container.routes.report()) == {"draft_decode": {"stock"}}
