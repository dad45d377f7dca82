"""Models of which some layers are linear: the attention layers are the plugin's, inside SGLang's own wrapper and pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, PageMajorMHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends.flash import SpecverifyFlashAttentionBackend, SpecverifyFlashAttentionDraftBackend
from sglang_specverify.backends.routes import Routes
from sglang_specverify.backends.triton import SpecverifyTritonBackend, SpecverifyTritonDraftBackend
from sglang_specverify.errors import SpecverifyError
from tests.backends import batches, flash_stand_in
from tests.backends.compare import STOCK, assert_close, expected, inputs, kernels, run
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.hybrid import wrapped
from tests.backends.passes import add, assert_ran, check, check_draft, verify_batch
from tests.backends.test_graphs import hand_over

Make = Callable[[Setup], Engine]

LENGTHS = (5, 0, 18)
TREE = Setup(topk=4, draft_tokens=8, windows=(-1, -1), hybrid=True)
CHAIN = TREE.but(topk=1, draft_tokens=4)
DRAFT = Setup(topk=4, draft_tokens=8, hybrid_draft=True)
TARGETS = {"triton": SpecverifyTritonBackend, "flash": SpecverifyFlashAttentionBackend}
DRAFTS = {"triton": SpecverifyTritonDraftBackend, "flash": SpecverifyFlashAttentionDraftBackend}
VERIFY = ForwardMode.TARGET_VERIFY
#: base, SGLANG_SPECVERIFY_TREE_KERNEL, setup, the kernel that serves.
CASES = {
    "triton, tree": ("triton", "auto", TREE, "fused"),
    "triton, chain": ("triton", "auto", CHAIN, "fused"),
    "flash, tile": ("flash", "tile", TREE.but(page_size=16), "prefix_tile"),
    "flash, chain": ("flash", "auto", CHAIN.but(page_size=16), "fused"),
}


@pytest.fixture(autouse=True)
def strict(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    monkeypatch.setenv("SGLANG_SPECVERIFY_CHAIN_KERNEL", "fused")
    flash_stand_in.install(monkeypatch)


def target(one: Engine, base: str) -> Any:
    """The backend of the target, in SGLang's wrapper."""
    runner = one.runner()
    return wrapped(runner, TARGETS[base](runner, part="target"))


@pytest.mark.parametrize("name", CASES)
def test_verify(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Eager, and in a graph that replays other lengths, and whose rows belong to others once the metadata is made."""
    base, tree_kernel, setup, kernel = CASES[name]
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", tree_kernel)
    one = engine(setup)
    assert [layer.layer_id for layer in one.layers] == [1, 3]
    add(one, LENGTHS)
    whole = target(one, base)
    check(one, whole, verify_batch(one, whole))
    graph = Graph(one, whole, buffers_for(one, whole, VERIFY, 4), VERIFY, 4)
    graph.replay(verify_batch(one, whole))
    one.requests.pop()
    batch = verify_batch(one, whole)
    graph.load(batch)
    whole.init_forward_metadata_in_graph(graph.batch)
    hand_over(one)
    graph.run(batch)
    assert_ran(whole.full_attn_backend, target_verify=kernel)


@pytest.mark.parametrize("base", DRAFTS)
def test_drafts(engine: Make, base: str) -> None:
    """A hybrid's draft attends in all layers, and SGLang gives it a hybrid's pool all the same."""
    one = engine(DRAFT)
    assert type(one.pool) is HybridLinearKVPool
    add(one, LENGTHS)
    runner = one.runner(is_draft=True)
    container = DRAFTS[base](runner, one.setup.topk, one.setup.steps)
    check_draft(one, container, batches.draft(one, runner))
    mode = ForwardMode.DECODE
    Graph(one, container, buffers_for(one, container, mode, 4), mode, 4).replay(batches.draft(one, runner))
    assert_ran(container, draft_decode="fused")
    extender = TARGETS[base](runner, part="draft extend")
    check(one, extender, batches.draft_extend(one, runner))
    assert_ran(extender, draft_extend="fused")


@pytest.mark.parametrize("where", ["written and read", "read"])
def test_a_wrong_translation_of_a_layers_number_is_seen(engine: Make, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    whole = target(one, "triton")
    check(one, whole, verify_batch(one, whole))
    if where == "read":
        right = one.pool.get_key_buffer
        monkeypatch.setattr(one.pool, "get_key_buffer", lambda number: right(4 - number))
    else:
        one.pool.full_attention_layer_id_mapping = {1: 1, 3: 0}
    with pytest.raises(AssertionError, match="elements off"):
        check(one, whole, verify_batch(one, whole))


@pytest.mark.parametrize("base", TARGETS)
def test_the_plan_stream(engine: Make, base: str) -> None:
    """The wrapper asks both of its halves, by keyword; only the linear one has something to redo."""
    one = engine(TREE)
    add(one, LENGTHS)
    whole = target(one, base)
    whole.init_cuda_graph_state(4, 4 * one.setup.draft_tokens)
    spec = verify_batch(one, whole).forward.spec_info
    whole.update_verify_buffers_to_fill_after_draft(spec_info=spec, cuda_graph_bs=4)
    assert torch.equal(whole.linear_attn_backend.retrieve_next_token_list[3][:3], spec.retrieve_next_token.int())


def test_linear_layers_that_look_like_attention_are_not_counted(engine: Make) -> None:
    """Some models build them of `RadixAttention`; the wrapper sends them elsewhere, and no route is asked."""
    one = engine(TREE)
    linear = one._layer(0, -1)
    linear.xai_temperature_len = 8  # in an attention layer strict mode would stop for it
    runner = one.runner()
    runner.model = torch.nn.ModuleList([linear, *one.layers])
    routes = Routes(runner, "triton", "target")
    assert {row["kernel"] for row in routes.report() if row["mode"] == "target_verify"} == {"fused"}
    linear.layer_id = 1
    with pytest.raises(SpecverifyError, match="xai_temperature_len"):
        Routes(runner, "triton", "target")


class _Other(HybridLinearKVPool):
    """Another pool, as that of unified memory is."""


def test_pools_that_no_route_knows(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another wrapper, or keys in another order inside the known one: SGLang's own kernel, which reads them, serves."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "0")
    one = engine(TREE)
    one.pool.__class__ = _Other
    assert Routes(one.runner(), "triton", "target").server.unknown == {"cache pool _Other"}
    one.pool.__class__ = HybridLinearKVPool
    one.pool.full_kv_pool.__class__ = PageMajorMHATokenToKVPool
    assert Routes(one.runner(), "triton", "target").server.unknown == {"cache pool PageMajorMHATokenToKVPool"}


def test_a_layer_of_a_hybrid_that_is_stock(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One attention layer with what no route knows, beside one without, in SGLang's wrapper."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "0")
    one = engine(TREE.but(page_size=16))
    add(one, LENGTHS)
    whole = target(one, "triton")
    batch = verify_batch(one, whole)
    whole.init_forward_metadata(batch.forward)
    for layer, more in zip(one.layers, ({"aux_tensors": []}, {}), strict=True):
        x = inputs(one, batch.forward)
        assert_close(run(whole, layer, batch.forward, x, **more), expected(one, layer, batch, x), STOCK)
    assert kernels(whole.full_attn_backend.routes.report()) == {"target_verify": {"stock", "fused"}}


def test_mla_is_left_to_stock_and_said_so(
    engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where some layers are linear: no kernel reads a latent cache."""
    one = engine(TREE)
    runner = one.runner()
    runner.model_config.attention_arch = AttentionArch.MLA
    with pytest.raises(SpecverifyError, match="does not know layers of MLA"):
        Routes(runner, "fa3", "target")
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "0")
    caplog.set_level(logging.INFO, "sglang_specverify")
    assert {row["kernel"] for row in Routes(runner, "fa3", "target").report()} == {"stock"}
    said = [record.getMessage() for record in caplog.records if "target_verify of MLA runs on stock" in record.getMessage()]
    assert len(said) == 1 and "does not know layers of MLA" in said[0]
