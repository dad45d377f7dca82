"""Metadata under CUDA graphs: one set of addresses, replays of other lengths and of fewer requests, no later look at a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import verify_mask
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils, ngram_worker
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_specverify.backends import facts, routes
from sglang_specverify.backends.triton import SpecverifyTritonBackend
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.facts import Mode
from tests.backends import batches
from tests.backends.batches import Batch
from tests.backends.compare import inputs, run
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.passes import add, draft_extender, drafter, target, verify_batch
from tests.backends.test_snapshot import _Forgotten, hand_over

Make = Callable[[Setup], Engine]

TREE = Setup(topk=4, draft_tokens=8)
SETUPS = {
    "chain": Setup(),
    "chain in pages": Setup(page_size=16),
    "chain, window alone": Setup(page_size=16, windows=(4,)),
    "tree": TREE,
    "tree in pages, window": TREE.but(page_size=16, windows=(-1, 4)),
    "window pool": TREE.but(page_size=16, windows=(6, -1), window_pool=True),
    "sinks, cap": TREE.but(softcap=2.0, windows=(-1, 600)),
}
VERIFY, EXTEND, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DECODE


@pytest.fixture(autouse=True)
def strict(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")


def part(one: Engine, mode: ForwardMode) -> tuple[Any, Callable[[], Batch]]:
    """The backend that runs `mode`, and what makes a batch for it."""
    if mode is VERIFY:
        backend = target(one)
        return backend, lambda: verify_batch(one, backend)
    runner = one.runner(is_draft=True)
    if mode is EXTEND:
        return draft_extender(one), lambda: batches.draft_extend(one, runner)
    return drafter(one), lambda: batches.draft(one, runner)


@pytest.mark.parametrize("mode", [VERIFY, EXTEND, DRAFT], ids=["verify", "extend", "draft"])
@pytest.mark.parametrize("name", SETUPS)
def test_replays(engine: Make, name: str, mode: ForwardMode) -> None:
    """A graph of four requests replays four, other four that are longer, and two; then a graph of two over the same buffers."""
    one = engine(SETUPS[name])
    backend, make = part(one, mode)
    buffers = buffers_for(one, backend, mode, 4)
    graph = Graph(one, backend, buffers, mode, 4)
    small = Graph(one, backend, buffers, mode, 2)
    shared = graph.addresses()
    assert small.addresses()["table"] == shared["table"]
    how = {"sinks": "sinks" in name}
    for lengths, which in (((5, 0, 40, 17), graph), ((41, 3, 16, 60), graph), ((33, 7), graph), ((4, 50), small), ((1,), graph)):
        one.release()
        add(one, lengths)
        which.replay(make(), **how)
    assert graph.addresses() == shared


@pytest.mark.parametrize("mode", [VERIFY, EXTEND, DRAFT], ids=["verify", "extend", "draft"])
@pytest.mark.parametrize("name", ["tree", "chain"])
def test_more_requests_in_a_graph_than_in_the_pool(engine: Make, name: str, mode: ForwardMode) -> None:
    """SGLang captures whole groups of attention ranks: the largest batch may be past the pool's end."""
    one = engine(SETUPS[name].but(pool_rows=6))
    add(one, (5, 0, 40))
    backend, make = part(one, mode)
    graph = Graph(one, backend, buffers_for(one, backend, mode, 8), mode, 8)
    graph.replay(make())
    if mode is VERIFY:
        assert backend.verify_mask.fits(8)
        assert graph.bound().step.mask is None or graph.addresses()["mask"] == backend.verify_mask.buffer.data_ptr()


@pytest.mark.parametrize("mode", [VERIFY, EXTEND, DRAFT], ids=["verify", "extend", "draft"])
@pytest.mark.parametrize("name", ["tree", "window pool"])
def test_rows_handed_over_after_the_metadata(engine: Make, name: str, mode: ForwardMode) -> None:
    """What the layers of a replay read was copied by its first launch."""
    one = engine(SETUPS[name])
    add(one, (5, 0, 40))
    backend, make = part(one, mode)
    graph = Graph(one, backend, buffers_for(one, backend, mode, 4), mode, 4)
    batch = make()
    graph.load(batch)
    backend.init_forward_metadata_in_graph(graph.batch)
    mapping = one.pool.full_to_swa_index_mapping.clone() if one.is_window_pool else None
    hand_over(one)
    if mapping is None:
        graph.run(batch)
        return
    with _Forgotten(one, mapping):
        graph.run(batch)


@pytest.mark.parametrize("full_mask", [False, True])
def test_ngram(engine: Make, monkeypatch: pytest.MonkeyPatch, full_mask: bool) -> None:
    """NGRAM's mask is a tensor of each batch: its bits come to a fixed address before the replay."""
    monkeypatch.setattr(ngram_worker, "_is_cpu", not full_mask)
    one = engine(TREE.but(algorithm="NGRAM"))
    add(one, (5, 0, 40))
    backend = target(one)
    graph = Graph(one, backend, buffers_for(one, backend, VERIFY, 4), VERIFY, 4)
    for _ in range(2):
        batch = batches.ngram(one, one.runner(), batches.draw_parents(one), full_mask=full_mask)
        if not full_mask:
            # A worker that sends QLEN_ONLY is one that runs without graphs; the published buffer is what a graph reads.
            mask = batch.forward.spec_info.custom_mask
            backend.verify_mask.buffer[: len(mask)] = mask
        graph.replay(batch)


def test_an_idle_rank_replays_padded_requests(engine: Make) -> None:
    one = engine(TREE)
    add(one, (5, 0, 40))
    backend = target(one)
    graph = Graph(one, backend, buffers_for(one, backend, VERIFY, 4), VERIFY, 4)
    graph.replay(verify_batch(one, backend))
    idle = batches.idle(one, one.runner())
    idle.forward.spec_info = graph.batch.spec_info
    idle.forward.positions = torch.zeros(0, dtype=torch.int64)
    graph.load(idle)
    backend.init_forward_metadata_in_graph(graph.batch)
    x = inputs(one, graph.batch)
    assert run(backend, one.layers[0], graph.batch, x).isfinite().all(), "a padded request sees slot 0 and its own drafts there"


@pytest.fixture
def gpu_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own default on a GPU."""
    for module in (verify_mask, eagle_utils):
        monkeypatch.setattr(module, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK)


def test_the_mask_of_a_whole_context_is_not_allocated(engine: Make, gpu_masks: None) -> None:
    """Over stock it is max_bs * W * (context + W) bytes."""
    one = engine(TREE.but(context=4096, slots=4096))
    backend, stock = target(one), TritonAttnBackend(one.runner())
    for each in (backend, stock):
        each.init_cuda_graph_state(4, 32)
    assert stock.verify_mask.buffer.numel() == 4 * 8 * (4096 + 8)
    assert backend.verify_mask.buffer.numel() == one.setup.pool_rows * 8 * 8
    assert backend._verify_mask is None


@pytest.mark.parametrize("mode", [VERIFY, EXTEND, DRAFT], ids=["verify", "extend", "draft"])
@pytest.mark.parametrize("setup", [TREE, Setup(page_size=16)], ids=["tree", "chain"])
def test_one_request_is_divided_over_programs(engine: Make, setup: Setup, mode: ForwardMode) -> None:
    """A batch that would leave the device half empty: the prefix is split, by a plan that follows each replay's length."""
    one = engine(setup.but(context=1024, slots=2048, q_heads=2, kv_heads=1))
    backend, make = part(one, mode)
    graph = Graph(one, backend, buffers_for(one, backend, mode, 1), mode, 1)
    plans = graph.bound().step.plans
    assert all(plan.divides for plan in plans.by_layer.values())
    assert plans.workspace is not None
    for length in (40, 900, 300):
        one.release()
        add(one, (length,))
        graph.replay(make())


def test_a_batch_size_that_is_captured_twice(engine: Make) -> None:
    """With and without LoRA, say: the first graph's buffers live as long as the second's."""
    one = engine(TREE)
    add(one, (5, 0, 40))
    backend = target(one)
    buffers = buffers_for(one, backend, VERIFY, 4)
    first = Graph(one, backend, buffers, VERIFY, 4)
    step, kept = first.bound().step, first.addresses()
    second = Graph(one, backend, buffers, VERIFY, 4)
    assert any(bound.step is step for bound in backend._device._captured)
    plans = {name for name in kept if name.startswith("plan")}
    assert all(second.addresses()[name] != kept[name] for name in plans)
    second.replay(verify_batch(one, backend))


def test_an_eager_call_that_no_route_knows_leaves_the_graphs_alone(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "0")
    one = engine(TREE)
    add(one, (5, 0, 40))
    backend = target(one)
    graph = Graph(one, backend, buffers_for(one, backend, VERIFY, 4), VERIFY, 4)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    run(backend, one.layers[0], batch.forward, inputs(one, batch.forward), aux_tensors=[])
    assert backend.routes.leaves(Mode.TARGET_VERIFY)
    graph.replay(verify_batch(one, backend))


@pytest.mark.parametrize("mode", [VERIFY, EXTEND, DRAFT], ids=["verify", "extend", "draft"])
def test_the_comparison_can_fail(engine: Make, monkeypatch: pytest.MonkeyPatch, mode: ForwardMode) -> None:
    """A replay that reads the metadata of the one before."""
    one = engine(TREE)
    add(one, (5, 0, 40))
    backend, make = part(one, mode)
    graph = Graph(one, backend, buffers_for(one, backend, mode, 4), mode, 4)
    graph.replay(make())
    one.release()
    add(one, (9, 30, 40))
    monkeypatch.setattr(backend._device, "fill", lambda bound: None)
    with pytest.raises(AssertionError, match="elements off"):
        graph.replay(make())


def test_a_call_that_no_route_knows_fails_at_capture(engine: Make) -> None:
    """SGLang's metadata is not there, and a captured graph has no place to make it."""
    one = engine(TREE)
    add(one, (5, 0, 40))
    backend = target(one)
    graph = Graph(one, backend, buffers_for(one, backend, VERIFY, 4), VERIFY, 4)
    backend.routes.flags = replace(backend.routes.flags, strict=False)
    with pytest.raises(SpecverifyError, match="SGLANG_SPECVERIFY_TREE=0"):
        run(backend, one.layers[0], graph.batch, inputs(one, graph.batch), aux_tensors=[])


def test_a_layer_of_stock_in_a_captured_graph(engine: Make, gpu_masks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layer SGLang's, its FULL_MASK is what is published, and the others take their bits from there."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "0")
    one = engine(TREE.but(windows=(-1, -1)))
    add(one, (5, 0, 40))
    one.layers[0].use_irope = True
    runner, seen = one.runner(), facts.server_facts
    monkeypatch.setattr(routes, "server_facts", lambda *of: replace(seen(*of), cuda_graph=True))
    backend = SpecverifyTritonBackend(runner, part="target")
    assert {row["kernel"] for row in backend.routes.report() if row["mode"] == "target_verify"} == {"fused", "stock"}
    graph = Graph(one, backend, buffers_for(one, backend, VERIFY, 3), VERIFY, 3)
    for _ in range(2):
        batch = batches.verify(one, runner, backend, batches.draw_tree(one), mask_mode=backend.verify_mask.mode)
        backend.verify_mask.buffer[: len(batch.forward.spec_info.custom_mask)] = batch.forward.spec_info.custom_mask
        graph.replay(batch)
