"""What is kept from the KV pool is at least what the backends then hold on to, and not several times as much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context

from sglang_specverify.backends import facts, reserve
from sglang_specverify.backends.flash import SpecverifyFlashAttentionBackend
from sglang_specverify.backends.plans import OWN_DRAFTS
from sglang_specverify.backends.reserve import MODES, Built, Part, Sizes, bytes_of, reserve_of
from sglang_specverify.hardware import from_name
from tests.backends import flash_stand_in
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.passes import draft_extender, drafter, target

Make = Callable[[Setup], Engine]

#: A context whose tables are more than the rest.
TREE = Setup(topk=4, draft_tokens=8, context=2048, slots=2048)
BATCHES = (2, 4)
#: Part, setup.
CASES = {
    "tree, group 8, two kinds": ("target", TREE.but(q_heads=8, kv_heads=1, windows=(-1, 600))),
    "chain": ("target", TREE.but(topk=1, draft_tokens=4)),
    "window pool": ("target", TREE.but(page_size=16, windows=(6, -1), window_pool=True)),
    "draft": ("draft decode", TREE.but(page_size=16, windows=(6, -1), window_pool=True)),
    "extend": ("draft extend", TREE),
}

#: Each part of a server, over fa3.
ALL = [Built(part, "fa3") for part in MODES]


def held(backend: Any) -> int:
    """Bytes of every tensor that the backend made for its graphs, each memory counted once."""
    device, mask = backend._device, getattr(backend, "_tree_mask", None)
    tensors = [getattr(device._fixed, one.name) for one in fields(device._fixed)] + [device.scratch._buffer]
    tensors += [] if mask is None else [mask.buffer]
    for bound in device._captured:
        step = bound.step
        tensors += [*step.plans.buffers, *(step.plans.suffix or ()), step.flash_offsets, step.own_offsets, step.plans.workspace]
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if one is not None}
    return sum(kept.values())


def configurator(one: Engine, device: str = "cpu") -> Any:
    """What `reserve_of` reads of SGLang's, of this engine."""
    runner = one.runner()
    runner.model_config.attention_chunk_size = None
    return SimpleNamespace(
        device=device, model_dtype=runner.dtype, kv_cache_dtype=runner.kv_cache_dtype, page_size=runner.page_size,
        kv_cache_dtype_str=runner.kv_cache_dtype_str, model=runner.model, model_config=runner.model_config,
        use_mla_backend=False, is_hybrid_swa=one.is_window_pool, attn_dp_size=1,
    )  # fmt: skip


def reserved(one: Engine, monkeypatch: pytest.MonkeyPatch, *built: Built) -> list[tuple[Part, Sizes]]:
    """The parts as they are worked out, with graphs of `BATCHES` and this engine's rows; each as often as it is counted."""
    found: list[tuple[Part, Sizes]] = []

    def note(part: Part, sizes: Sizes) -> int:
        positions = one.req_to_token_pool.req_to_token.shape[1]
        sizes = replace(sizes, requests=one.setup.pool_rows, batches=BATCHES, positions=positions, multiprocessors=1)
        found.append((part, sizes))
        return bytes_of(part, sizes)

    monkeypatch.setattr(reserve, "bytes_of", note)
    total = reserve_of(configurator(one), built)
    found = [each for each, kind in zip(found, built, strict=True) for _ in range(kind.copies)]
    assert total == sum(bytes_of(*each) for each in found)
    return found


@pytest.mark.usefixtures("triton_alone")
@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    part, setup = CASES[name]
    one = engine(setup)
    backend = {"target": target, "draft decode": drafter, "draft extend": draft_extender}[part](one)
    check(one, monkeypatch, backend, part, "triton")


@pytest.mark.usefixtures("triton_alone")
def test_the_bound_holds_over_flash_attention(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", "flash")
    flash_stand_in.install(monkeypatch)
    one = engine(TREE)
    check(one, monkeypatch, SpecverifyFlashAttentionBackend(one.runner(), part="target"), "target", "fa3")


def check(one: Engine, monkeypatch: pytest.MonkeyPatch, backend: Any, part: str, base: str) -> None:
    mode = {"target": ForwardMode.TARGET_VERIFY, "draft decode": ForwardMode.DECODE, "draft extend": ForwardMode.DRAFT_EXTEND_V2}
    buffers = buffers_for(one, backend, mode[part], max(BATCHES))
    for batch in reversed(BATCHES):
        Graph(one, backend, buffers, mode[part], batch)
    (found,) = reserved(one, monkeypatch, Built(part, base))
    of, sizes = found
    assert backend._device.scratch.size <= bytes_of(of, sizes) - bytes_of(replace(of, kernels=frozenset()), sizes)
    assert held(backend) <= bytes_of(of, sizes)
    # Without the scratch, whose bound is for any launch configuration, and without the plans, which small graphs need little of.
    tables = replace(of, kernels=of.kernels & set(OWN_DRAFTS), kinds=0)
    assert bytes_of(tables, sizes) <= 1.1 * held(backend)
    assert bytes_of(tables, replace(sizes, positions=sizes.positions // 2)) < held(backend), "half a table would not do"


def captured(one: Engine, backend: Any, mode: ForwardMode) -> int:
    """Bytes that the backend holds with graphs of `BATCHES`."""
    buffers = buffers_for(one, backend, mode, max(BATCHES))
    for batch in reversed(BATCHES):
        Graph(one, backend, buffers, mode, batch)
    return held(backend)


@pytest.mark.usefixtures("triton_alone")
def test_a_draft_extend_for_each_step_of_multi_layer_eagle(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(TREE.but(topk=1, draft_tokens=4, context=65536))
    total = sum(captured(one, draft_extender(one), ForwardMode.DRAFT_EXTEND_V2) for _ in range(3))
    found = reserved(one, monkeypatch, Built("draft extend", "triton", copies=3))
    assert bytes_of(*found[0]) < total <= sum(bytes_of(*each) for each in found)


@pytest.mark.usefixtures("triton_alone")
def test_every_part_for_each_number_of_adaptive_steps(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify of one token more than there are steps, and no backend of many steps where there is one."""
    one = engine(TREE.but(topk=1, draft_tokens=4, context=65536))
    total, built = 0, []
    for steps in (1, 3):
        one.setup = one.setup.but(steps=steps, draft_tokens=steps + 1)
        get_context().override("test", speculative_num_steps=steps, speculative_num_draft_tokens=steps + 1)
        total += captured(one, target(one), ForwardMode.TARGET_VERIFY)
        total += captured(one, draft_extender(one), ForwardMode.DRAFT_EXTEND_V2)
        total += captured(one, drafter(one), ForwardMode.DECODE) if steps > 1 else 0
        built += [Built(part, "triton", steps) for part in MODES if steps > 1 or part != "draft decode"]
    found = reserved(one, monkeypatch, *built)
    assert [(part.name, part.width, part.slots) for part, _ in found] == [
        ("target", 2, 2), ("draft extend", 2, 2), ("target", 4, 4), ("draft decode", 1, 3), ("draft extend", 4, 4),
    ]  # fmt: skip
    assert sum(bytes_of(*each) for each in found[2:]) < total <= sum(bytes_of(*each) for each in found)


@pytest.mark.usefixtures("triton_alone")
def test_graphs_with_and_without_adapters(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang may capture each batch size of the target twice, and each graph has plans and lists of its own."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", "flash")
    flash_stand_in.install(monkeypatch)
    one = engine(TREE)
    backend = SpecverifyFlashAttentionBackend(one.runner(), part="target")
    buffers = buffers_for(one, backend, ForwardMode.TARGET_VERIFY, max(BATCHES))
    for batch in reversed(BATCHES):
        for _ in ("lora", "nolora"):
            Graph(one, backend, buffers, ForwardMode.TARGET_VERIFY, batch)
    lists = sum(each.untyped_storage().nbytes() for bound in backend._device._captured for each in bound.step.plans.suffix)
    ((plain, sizes),) = reserved(one, monkeypatch, Built("target", "fa3"))
    get_context().override("test", enable_lora=True)
    ((part, double),) = reserved(one, monkeypatch, Built("target", "fa3"))
    assert (plain, sizes.captures, double.captures) == (part, 1, 2)

    def of_lists(sizes: Sizes) -> int:
        return bytes_of(part, sizes) - bytes_of(replace(part, kernels=part.kernels - set(OWN_DRAFTS)), sizes)

    assert of_lists(sizes) < lists <= of_lists(double)
    assert held(backend) <= bytes_of(part, double)
    for of_the_draft in ("draft decode", "draft extend"):
        other = replace(part, name=of_the_draft)
        assert bytes_of(other, double) == bytes_of(other, sizes), "the graphs of a draft are captured once"


def test_what_is_not_served_takes_nothing(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains over FlashAttention are its own, and modes that a flag leaves to SGLang."""
    one = engine(TREE.but(topk=1, draft_tokens=4, dtype=torch.bfloat16))
    monkeypatch.setattr(reserve, "hardware_facts", lambda device: from_name("H200"))
    assert reserve_of(configurator(one), ALL) == 0
    monkeypatch.setenv("SGLANG_SPECVERIFY_CHAIN_KERNEL", "fused")
    assert reserve_of(configurator(one), ALL) > 0
    monkeypatch.setenv("SGLANG_SPECVERIFY_CHAIN", "0")
    monkeypatch.setenv("SGLANG_SPECVERIFY_DRAFT_DECODE", "0")
    assert reserve_of(configurator(one), ALL) == 0


def test_sizes_of_a_server(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's own request pool and graphs take them; a server without graphs holds the mask alone."""
    one = engine(TREE.but(page_size=16))
    made = configurator(one)
    server = facts.server_facts(SimpleNamespace(**vars(one.runner())), "triton")
    graphs = CudaGraphConfig(decode=PhaseConfig(bs=[1, 2, 4], max_bs=4))
    seen = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs))
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: seen)
    sizes = reserve._sizes(made, replace(server, cuda_graph=True))
    assert sizes.captures == 1
    assert sizes.positions == 2048 + get_req_to_token_extra_context_len()
    assert sizes.requests == reserve.MOST_REQUESTS and sizes.page_size == 16
    assert sizes.batches == (1, 2, 4)
    part = Part("target", 8, 8, frozenset({"fused"}), 1, 4, 2, 16)
    none = reserve._sizes(made, server)
    assert none.batches == () and bytes_of(part, none) == reserve.MOST_REQUESTS * 64
    few = configurator(engine(TREE.but(requests=6)))
    assert reserve._sizes(few, server).requests == 6
    monkeypatch.setattr("sglang.srt.utils.common.get_cuda_graph_batch_size_alignment", lambda **_: 4)
    assert reserve._sizes(few, server).requests == 8, "whole groups of attention ranks"


@pytest.mark.parametrize("width", [64, 128])
def test_the_scratch_of_a_server_is_at_most_256_mb_by_default(width: int) -> None:
    """32 query heads on 8 KV heads of 128 on an H200's 132 multiprocessors: all three parts that may divide prefixes."""
    sizes = Sizes(requests=64, batches=(64,), positions=131072, multiprocessors=132)
    parts = [Part(name, width, width, frozenset({"fused"}), 1, 4, 8, 128) for name in MODES]
    scratch = sum(bytes_of(part, sizes) - bytes_of(replace(part, kernels=frozenset()), sizes) for part in parts)
    assert 0 < scratch <= 256e6
