"""Captured graphs over aiter, with the stand-in: lengths and tables written in place, padded requests, what is not allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.layers.attention.aiter_backend import AiterMultiStepDraftBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.errors import ArgumentError
from tests.backends import aiter_stand_in
from tests.backends.aiter_passes import check, draft, drafter, target
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.passes import add, verify_batch

Make = Callable[[Setup], Engine]


@pytest.fixture(autouse=True)
def aiter(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", "1")
    aiter_stand_in.install(monkeypatch)


def replays(one: Engine, backend: Any, mode: ForwardMode, make: Callable[[], Any]) -> list[dict[str, Any]]:
    """A graph of four requests replayed with three and then with two others: the calls of both replays."""
    add(one, (5, 0, 39))
    graph = Graph(one, backend, buffers_for(one, backend, mode, 4), mode, 4)
    aiter_stand_in.calls.clear()
    for _ in range(2):
        batch = make()
        graph.load(batch)
        backend.init_forward_metadata_in_graph(graph.batch)
        graph.run(batch)
        one.requests.pop(0)
    return [arguments for _, arguments in aiter_stand_in.calls]


@pytest.mark.parametrize("page", [1, 16])
def test_draft_steps_of_a_chain(engine: Make, page: int) -> None:
    """The lengths of a replay lie where those of the capture lay, for each step; padded requests have their own."""
    one = engine(Setup(page_size=page))
    container = drafter(one)
    seen = replays(one, container, ForwardMode.DECODE, lambda: draft(one))
    # A padded request is at position 0.
    assert [call["lens"] for call in seen] == [
        [n + step + 1 for n in lengths] for lengths in ((5, 0, 39, 0), (0, 39, 0, 0)) for step in (0, 1)
    ]
    assert seen[0]["address"] == seen[2]["address"] != seen[1]["address"] == seen[3]["address"]
    assert all(call["width"] * page >= one.setup.context + one.setup.steps for call in seen)


def test_draft_steps_over_a_window_pool(engine: Make) -> None:
    """A replay of all requests that the buffers are for translates the write slots of every step; SGLang has room for one's."""
    setup = Setup(page_size=16, windows=(-1, 255), window_pool=True, slots=2048)
    one = engine(setup)
    stock = AiterMultiStepDraftBackend(one.runner(is_draft=True), setup.topk, setup.steps)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(4\) must match the size of tensor b \(12\)"):
        replays(one, stock, ForwardMode.DECODE, lambda: draft(one))
    one = engine(setup)
    container = drafter(one)
    seen = replays(one, container, ForwardMode.DECODE, lambda: draft(one))
    assert [call["lens"] for call in seen[::2]] == [
        [n + step + 1 for n in lengths] for lengths in ((5, 0, 39, 0), (0, 39, 0, 0)) for step in (0, 1)
    ]


def test_more_requests_in_a_graph_than_in_the_pool(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged attention's workspace and the steps' offsets hold them all, where SGLang has room for the pool's."""
    monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", "0")
    one = engine(Setup(pool_rows=6))
    stock = AiterMultiStepDraftBackend(one.runner(is_draft=True), 1, one.setup.steps)
    stock.init_cuda_graph_state(8, 8)
    assert stock.kv_indptr.shape[1] == 6 + 1
    add(one, (5, 0, 39))
    container = drafter(one)
    buffers = buffers_for(one, container, ForwardMode.DECODE, 8)
    assert container.kv_indptr.shape[1] == 8 + 1
    for child, theirs in zip(container.attn_backends, stock.attn_backends, strict=True):
        of_a_request = one.setup.q_heads * child.max_num_partitions * (one.setup.head_dim + 2) * 4
        assert theirs.workspace_buffer.numel() < 8 * of_a_request == child.workspace_buffer.numel()
    graph = Graph(one, container, buffers, ForwardMode.DECODE, 8)
    aiter_stand_in.calls.clear()
    batch = draft(one)
    graph.load(batch)
    container.init_forward_metadata_in_graph(graph.batch)
    graph.run(batch)
    assert aiter_stand_in.lens_of("paged_attention_ragged") == [
        [n + step + 1 for n in (5, 0, 39, 0, 0, 0, 0, 0)] for step in (0, 1)
    ]


@pytest.mark.parametrize("windows", [{}, {"windows": (-1, 255), "window_pool": True, "slots": 2048}], ids=["full", "window pool"])
def test_verify_of_a_chain(engine: Make, windows: dict[str, Any]) -> None:
    one = engine(Setup(page_size=16, **windows))
    backend = target(one)
    seen = replays(one, backend, ForwardMode.TARGET_VERIFY, lambda: verify_batch(one, backend))
    fill = backend.get_cuda_graph_seq_len_fill_value()
    layers = len(one.layers)
    assert [call["lens"] for call in seen[::layers]] == [[9, 4, 43, fill + 4], [4, 43, fill + 4, fill + 4]]
    assert not any(bool((call["table"] < 0).any()) for call in seen)


def test_a_tree(engine: Make) -> None:
    """The plugin's kernel in a graph, and none of SGLang's masks of a byte for each token of a row and each of the context."""
    one = engine(Setup(topk=4, draft_tokens=8))
    backend = target(one)
    assert not replays(one, backend, ForwardMode.TARGET_VERIFY, lambda: verify_batch(one, backend))
    assert not hasattr(backend, "cuda_graph_custom_mask") and not backend.skip_prefill


def test_rows_that_were_handed_over(engine: Make) -> None:
    """Layers read the table of their step, and not the rows of requests."""
    one = engine(Setup(page_size=16))
    add(one, (5, 39))
    backend = target(one)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    one.req_to_token_pool.req_to_token.fill_(one.setup.slots - 16)
    check(one, backend, batch, prepared=True)


def test_a_length_beyond_the_table_is_an_error_before_any_launch(engine: Make) -> None:
    one = engine(Setup(page_size=16))
    add(one, (5, 39))
    backend = target(one)
    batch = verify_batch(one, backend)
    batch.forward.seq_lens[1] = one.setup.context
    with pytest.raises(ArgumentError, match=r"seq_lens.*260 positions of request 1"):
        backend.init_forward_metadata(batch.forward)
