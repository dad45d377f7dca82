"""The backends over FlashAttention, with a stand-in for its paged call: which kernel runs, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends.flash import SpecverifyFlashAttentionBackend, SpecverifyFlashAttentionDraftBackend
from sglang_specverify.routing import chain
from tests.backends import batches, flash_stand_in
from tests.backends.compare import kernels
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.passes import add, assert_ran, check, check_draft, padded, verify_batch
from tests.backends.test_graphs import hand_over

Make = Callable[[Setup], Engine]

LENGTHS = (5, 0, 40)
TREE = Setup(topk=4, draft_tokens=8)
CHAIN = Setup(page_size=16)
SETUPS = {
    "page 1": TREE,
    "pages": TREE.but(page_size=16),
    "window": TREE.but(windows=(-1, 6), page_size=16),
    "window pool": TREE.but(windows=(-1, 6), page_size=16, window_pool=True),
    "cap": TREE.but(softcap=2.0),
    "group 3": TREE.but(q_heads=6),
}


@pytest.fixture(autouse=True)
def flash(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    flash_stand_in.install(monkeypatch)
    return flash_stand_in.calls


def target(one: Engine) -> SpecverifyFlashAttentionBackend:
    return SpecverifyFlashAttentionBackend(one.runner(), part="target")


def drafter(one: Engine) -> SpecverifyFlashAttentionDraftBackend:
    return SpecverifyFlashAttentionDraftBackend(one.runner(is_draft=True), one.setup.topk, one.setup.steps)


@pytest.mark.parametrize("kernel", ["tile", "gather", "fused"])
@pytest.mark.parametrize("name", SETUPS)
def test_trees(engine: Make, monkeypatch: pytest.MonkeyPatch, flash: list[Any], name: str, kernel: str) -> None:
    """Full layers by FlashAttention's prefix pass and the tile, or all in one kernel; window layers always in one kernel."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", kernel)
    one = engine(SETUPS[name])
    add(one, LENGTHS)
    backend = target(one)
    for _ in range(2):
        check(one, backend, verify_batch(one, backend), sinks=True)
    full = sum(layer.sliding_window_size == -1 for layer in one.layers)
    assert len(flash) == (2 * full if kernel != "fused" else 0)
    for call in flash:
        assert call["lse"] and not call["causal"] and not call["sinks"] and call["window"] == (-1, -1)
        assert call["softcap"] == one.setup.softcap
    ran = {"fused" if kernel == "fused" else f"prefix_{kernel}"}
    assert kernels(backend.routes.report()) == {"target_verify": ran | ({"fused"} if len(one.layers) > full else set())}


@pytest.mark.parametrize("kernel", ["tile", "gather", "flash", "fused"])
def test_an_fp8_cache(engine: Make, monkeypatch: pytest.MonkeyPatch, flash: list[Any], kernel: str) -> None:
    """FlashAttention takes Q in FP8 there, in decode too: both halves of a verify must see the same Q."""
    from tests.interpreter import repair

    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", kernel)
    one = engine(TREE.but(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, scales=(0.5, 2.0), page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    seen: list[torch.Tensor] = []
    represent = backend.prepare_paged_mha_query
    monkeypatch.setattr(backend, "prepare_paged_mha_query", lambda q, *a, **k: seen.append(q) or represent(q, *a, **k))
    from tests.backends import compare

    whole = compare.expected

    def rounded(engine: Engine, layer: Any, batch: Any, x: Any) -> torch.Tensor:
        x.q = x.q.to(torch.float8_e4m3fn).to(torch.bfloat16)
        return whole(engine, layer, batch, x)

    monkeypatch.setattr("tests.backends.passes.expected", rounded)
    repair.apply()
    try:
        check(one, backend, batch, sinks=True)
    finally:
        repair.remove()
    assert [call["q"] for call in flash] == [torch.float8_e4m3fn] * {"fused": 0, "flash": 2}.get(kernel, 1)
    assert all(call["scales"] for call in flash)
    assert len(seen) == min(1, len(flash)), "both passes take the Q that decode takes"


@pytest.mark.parametrize("kernel", ["tile", "gather", "flash", "fused"])
def test_scales_of_a_cache_that_is_not_fp8(engine: Make, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A checkpoint may bring them for any cache. What is stored is not divided by them, and FlashAttention applies none."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", kernel)
    one = engine(TREE.but(scales=(0.5, 2.0), page_size=16))
    add(one, LENGTHS)

    def stored(engine: Engine, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = engine.pool.get_kv_buffer(layer.layer_id)
        return k.double(), v.double()

    monkeypatch.setattr("tests.backends.compare.cache_of", stored)
    backend = target(one)
    check(one, backend, verify_batch(one, backend))
    container = drafter(one)
    check_draft(one, container, batches.draft(one, one.runner(is_draft=True)))


@pytest.mark.parametrize("name", ["page 1", "pages", "window pool", "cap"])
def test_draft_steps_of_a_tree(engine: Make, flash: list[Any], name: str) -> None:
    one = engine(SETUPS[name])
    add(one, LENGTHS)
    container = drafter(one)
    check_draft(one, container, batches.draft(one, one.runner(is_draft=True)))
    assert_ran(container, draft_decode="fused")
    assert not flash


def test_chains_stay_with_flash_attention(engine: Make, flash: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify, draft steps and draft extend of a chain, and the draft extend of a tree; not an error in strict mode."""
    one = engine(CHAIN)
    add(one, LENGTHS)
    backend, container = target(one), drafter(one)
    check_stock(one, backend, verify_batch(one, backend))
    extender = SpecverifyFlashAttentionBackend(one.runner(is_draft=True), part="draft extend")
    check_stock(one, extender, batches.draft_extend(one, one.runner(is_draft=True)))
    assert len(flash) == 2 and all(call["causal"] for call in flash)
    ran = [kernels(each.routes.report()) for each in (backend, extender)]
    assert ran == [{"target_verify": {"stock"}}, {"draft_extend": {"stock"}}]
    reasons = {row["reason"] for each in (backend, container, extender) for row in each.routes.report()}
    assert any("SGLANG_SPECVERIFY_CHAIN_KERNEL=fused" in reason for reason in reasons)


def test_chains_where_a_flag_asks(engine: Make, flash: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_CHAIN_KERNEL", "fused")
    one = engine(CHAIN)
    add(one, LENGTHS)
    backend, container = target(one), drafter(one)
    check(one, backend, verify_batch(one, backend))
    check_draft(one, container, batches.draft(one, one.runner(is_draft=True)))
    extender = SpecverifyFlashAttentionBackend(one.runner(is_draft=True), part="draft extend")
    check(one, extender, batches.draft_extend(one, one.runner(is_draft=True)))
    assert_ran(backend, target_verify="fused")
    assert_ran(container, draft_decode="fused")
    assert_ran(extender, draft_extend="fused")
    assert not flash
    assert not extender.supports_draft_extend_metadata_staging


def test_verify_of_a_chain_where_few_requests_run_at_once(
    engine: Make, flash: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plugin's kernel, beside drafts and draft extend that FlashAttention keeps."""
    monkeypatch.setattr(chain, "ARCH", "none")
    monkeypatch.setattr(chain, "HEAD_DIM", CHAIN.head_dim)
    one = engine(CHAIN.but(requests=4))
    add(one, LENGTHS)
    backend = target(one)
    check(one, backend, verify_batch(one, backend))
    assert_ran(backend, target_verify="fused")
    assert not flash
    extender = SpecverifyFlashAttentionBackend(one.runner(is_draft=True), part="draft extend")
    check_stock(one, extender, batches.draft_extend(one, one.runner(is_draft=True)))
    assert kernels(extender.routes.report()) == {"draft_extend": {"stock"}} and len(flash) == 1


def check_stock(one: Engine, backend: Any, batch: Any) -> None:
    """As `check`, where SGLang's own code leaves padding as it is."""
    backend.init_forward_metadata(batch.forward)
    from tests.backends.compare import STOCK, assert_close, expected, inputs, run

    for layer in one.layers:
        x = inputs(one, batch.forward)
        assert_close(run(backend, layer, batch.forward, x), expected(one, layer, batch, x), STOCK)


@pytest.mark.parametrize("kernel", ["tile", "gather", "fused"])
@pytest.mark.parametrize("name", ["page 1", "window pool", "cap"])
def test_captured_trees(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str, kernel: str) -> None:
    """Replays of other lengths and of fewer requests; the rows belong to others once the metadata is made."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", kernel)
    one = engine(SETUPS[name])
    add(one, LENGTHS)
    backend = target(one)
    stock_metadata = stock_calls(monkeypatch)
    graph = Graph(one, backend, buffers_for(one, backend, ForwardMode.TARGET_VERIFY, 4), ForwardMode.TARGET_VERIFY, 4)
    addresses = graph.addresses()
    graph.replay(verify_batch(one, backend), sinks=True)
    one.requests.pop()
    graph.replay(verify_batch(one, backend), sinks=True)
    assert graph.addresses() == addresses
    if not one.is_window_pool:
        batch = verify_batch(one, backend)
        graph.load(batch)
        backend.init_forward_metadata_in_graph(graph.batch)
        hand_over(one)
        graph.run(batch)
    assert not stock_metadata, "SGLang's own metadata is not made"
    assert backend._verify_mask is None


@pytest.mark.parametrize("kernel", ["tile", "gather", "flash", "fused"])
def test_more_requests_in_a_graph_than_in_the_pool(engine: Make, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """SGLang captures whole groups of attention ranks: the largest batch may be past the pool's end."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", kernel)
    one = engine(TREE.but(pool_rows=6))
    add(one, LENGTHS)
    backend = target(one)
    graph = Graph(one, backend, buffers_for(one, backend, ForwardMode.TARGET_VERIFY, 8), ForwardMode.TARGET_VERIFY, 8)
    for _ in range(2):
        graph.replay(verify_batch(one, backend))
        one.requests.pop()
    assert graph.addresses()["mask"] == backend.verify_mask.buffer.data_ptr()


@pytest.mark.parametrize("name", ["page 1", "window pool"])
def test_captured_draft_steps(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = engine(SETUPS[name])
    add(one, LENGTHS)
    container = drafter(one)
    stock_metadata = stock_calls(monkeypatch)
    graph = Graph(one, container, buffers_for(one, container, ForwardMode.DECODE, 4), ForwardMode.DECODE, 4)
    for _ in range(2):
        graph.replay(batches.draft(one, one.runner(is_draft=True)))
        one.requests.pop()
    assert not stock_metadata


def stock_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang's own metadata methods that ran."""
    found: list[str] = []
    for name in ("init_forward_metadata", "_init_full_cg_decode_metadata"):
        stock = getattr(FlashAttentionBackend, name)

        def spy(self: Any, *args: Any, _stock: Any = stock, _name: str = name, **kwargs: Any) -> Any:
            found.append(_name)
            return _stock(self, *args, **kwargs)

        monkeypatch.setattr(FlashAttentionBackend, name, spy)
    return found


@pytest.mark.parametrize("name", ["page 1", "window pool"])
def test_a_model_that_writes_its_own_keys(engine: Make, name: str) -> None:
    """It asks the backend where, before the layer is called."""
    one = engine(SETUPS[name].but(dtype=torch.bfloat16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    for layer in one.layers:
        keys, _, slots = backend.get_fused_kv_write_buffers(layer, batch.forward)
        assert keys.data_ptr() == one.pool.get_key_buffer(layer.layer_id).data_ptr()
        own = batch.forward.out_cache_loc
        window = one.is_window_pool and layer.sliding_window_size >= 0
        assert slots.tolist() == (one.pool.full_to_swa_index_mapping[own] if window else own).tolist()


@pytest.mark.parametrize("served", [True, False])
def test_no_table_for_trees_in_window_layers(engine: Make, monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    """SGLang's holds a row of the whole context for each draft token, for each backend of a draft too."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE", str(int(served)))
    one = engine(SETUPS["window"].but(page_size=1))
    backend, container = target(one), drafter(one)
    for each in (backend, container):
        each.init_cuda_graph_state(4, 32)
    assert hasattr(backend, "target_verify_metadata_topk_swa") != served
    assert not any(hasattr(child, "target_verify_metadata_topk_swa") for child in container.attn_backends)
    assert backend.has_swa


def test_the_plan_stream_has_nothing_to_redo(engine: Make) -> None:
    one = engine(TREE)
    target(one).update_verify_buffers_to_fill_after_draft(None, None)  # type: ignore[arg-type]


def test_padded_rows_of_a_tile(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", "tile")
    one = engine(TREE)
    add(one, LENGTHS)
    assert len(padded(one, target(one), 4)) == 3 * 8 + 4
