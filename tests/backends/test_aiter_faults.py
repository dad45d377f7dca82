"""SGLang's own aiter backend under the stand-in: each of its faults shows, and the same pass through the plugin's is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.aiter_backend import AiterAttnBackend, AiterMultiStepDraftBackend

from tests.backends import aiter_passes, aiter_stand_in
from tests.backends.aiter_passes import check, check_draft, draft, eighths, expanded, on, runner
from tests.backends.aiter_stand_in import IllegalAccess, unified_attention
from tests.backends.compare import STOCK, seen
from tests.backends.engine import Engine, Setup
from tests.backends.passes import add, verify_batch

Make = Callable[[Setup], Engine]

#: What a comparison says of a wrong number; a stand-in, of a wrong address.
WRONG, WRITTEN = "elements off", "the cache does not hold the K and V of the pass"
FP8 = Setup(cache_dtype=torch.float8_e4m3fn, scales=(0.5, 2.0))
WINDOW_POOL = Setup(windows=(-1, 6), window_pool=True, slots=2048)


@dataclass(frozen=True)
class Fault:
    """`mode`: "draft" or "verify". `older`: the verify that SGLang has where unified attention is not asked for."""

    mode: str
    setup: Setup
    says: str = WRONG
    unified: bool = True
    older: bool = False
    lengths: tuple[int, ...] = (5, 0, 39)
    #: The model's context, where the rows of requests are longer.
    context: int | None = None
    how: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "a draft step has the length of the prefix": Fault("draft", Setup()),
    "a draft step has the length of the prefix, pages": Fault("draft", Setup(page_size=16)),
    "a tree is verified as a chain": Fault("verify", Setup(topk=4, draft_tokens=8)),
    "the branches of a draft step have the lengths of requests": Fault("draft", Setup(topk=4, draft_tokens=8)),
    "a table ends at the context, pages": Fault("verify", Setup(page_size=16, context=128), r"by a row of 4 pages of 16",
                                                context=64, lengths=(63, 5)),
    "a table ends at the context": Fault("verify", Setup(context=128), r"67 positions by a row of 64 pages of 1", context=64,
                                         lengths=(63, 5)),
    "the partitions of paged attention end at the context": Fault(
        "draft", Setup(context=512), r"257 positions beyond the partitions", unified=False, context=256, lengths=(255, 5)),
    "the older verify has no scales": Fault("verify", FP8, unified=False, older=True),
    "the older verify has no window": Fault("verify", Setup(windows=(6,)), unified=False, older=True),
    "the older verify has no sinks": Fault("verify", Setup(), unified=False, older=True, how={"sinks": True}),
    "the older verify reads the full pool": Fault("verify", WINDOW_POOL, older=True),
    "the older verify reads K and V that the pool scaled": Fault("verify", FP8.but(v_head_dim=32), unified=False, older=True),
    "slots of a step do not lie side by side": Fault("draft", FP8, WRITTEN),
    "slots of a step do not lie side by side, window pool": Fault("draft", WINDOW_POOL, WRITTEN),
    "expanded KV heads are read beside their end": Fault("verify", FP8, WRITTEN, how={"change": expanded}),
    "expanded KV heads, window pool": Fault("verify", WINDOW_POOL, WRITTEN, how={"change": expanded}),
    "V is written with the head dim of K": Fault("verify", WINDOW_POOL.but(v_head_dim=32), WRITTEN),
}  # fmt: skip


@pytest.fixture(autouse=True)
def aiter(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    aiter_stand_in.install(monkeypatch)
    # SGLang's window for unified attention is one key shorter than the older verify's and than other backends'.
    monkeypatch.delenv("SGLANG_AITER_UNIFIED_VERIFY", raising=False)


def run(fault: Fault, one: Engine, monkeypatch: pytest.MonkeyPatch, *, ours: bool) -> None:
    """The pass of a fault, through SGLang's own classes or the plugin's."""
    monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", str(int(fault.unified)))
    monkeypatch.setenv("SGLANG_AITER_UNIFIED_VERIFY", str(int(not fault.older)))
    if fault.older:
        # The plugin's kernel verifies these chains on gfx95x; elsewhere SGLang's older verify does.
        on(monkeypatch, "gfx942")
    else:
        monkeypatch.setattr("tests.backends.compare.seen", lambda keys, at, w: seen(keys, at, w - 1 if w >= 0 else w))
    add(one, fault.lengths)
    eighths(one)
    s, more = one.setup, {"context": fault.context, "is_draft": fault.mode == "draft"}
    # The older verify rounds the weights of an FP8 prefix to three bits of mantissa, which the interpreter cuts off.
    how = {"relative": 2.0**-3 if fault.older and one.cache_dtype != one.setup.dtype else STOCK, **fault.how}
    if fault.mode == "draft":
        container = aiter_passes.drafter(one) if ours else AiterMultiStepDraftBackend(runner(one, **more), s.topk, s.steps)
        check_draft(one, container, draft(one), **how)
        return
    backend = aiter_passes.target(one, context=fault.context) if ours else AiterAttnBackend(runner(one, **more))
    if ours and fault.older:
        assert {row["kernel"] for row in backend.routes.report() if row["mode"] == "target_verify"} == {"stock"}
    batch = verify_batch(one, backend)
    if not ours:
        from sglang_specverify.backends.masks import with_full_mask

        batch.forward = with_full_mask(batch.forward)
    check(one, backend, batch, **how)


@pytest.mark.parametrize("name", FAULTS)
def test_sglang_is_caught(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(AssertionError, match=FAULTS[name].says):
        run(FAULTS[name], engine(FAULTS[name].setup), monkeypatch, ours=False)


@pytest.mark.parametrize("name", FAULTS)
def test_the_plugin_is_right(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run(FAULTS[name], engine(FAULTS[name].setup), monkeypatch, ours=True)


def shorter(length: torch.Tensor) -> torch.Tensor:
    return (length - 1).clamp(min=0)


def stale(table: torch.Tensor) -> torch.Tensor:
    table[-1, 0] = table[0, 0]
    return table


POISONS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "length": ("draft", lambda call: call.update(seqused_k=shorter(call["seqused_k"]))),
    "length of verify": ("verify", lambda call: call.update(seqused_k=shorter(call["seqused_k"]))),
    "table": ("draft", lambda call: stale(call["block_table"])),
    "table of verify": ("verify", lambda call: stale(call["block_table"])),
    "scale": ("verify", lambda call: call.update(k_descale=call["k_descale"] * 2)),
    "another scale": ("draft", lambda call: call.update(v_descale=call["v_descale"] * 2)),
}


@pytest.mark.parametrize("name", POISONS)
def test_a_wrong_argument_shows_as_a_wrong_number(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Put between the plugin's backend and the stand-in: whoever hands aiter this is found out."""
    from sglang.srt.layers.attention import aiter_backend

    mode, poison = POISONS[name]

    def poisoned(**call: Any) -> torch.Tensor:
        poison(call)
        return unified_attention(**call)

    fault = Fault(mode, FP8.but(page_size=16))
    run(fault, engine(fault.setup), monkeypatch, ours=True)
    monkeypatch.setattr(aiter_backend, "unified_attention", poisoned)
    with pytest.raises(AssertionError, match=WRONG):
        run(fault, engine(fault.setup), monkeypatch, ours=True)


def unified_call() -> dict[str, Any]:
    """Two requests of a row and of two, pages of 2, a cache in FP8."""
    fp8 = torch.float8_e4m3fn
    return {
        "q": torch.randn(3, 4, 8), "k": torch.randn(6, 2, 2, 8).to(fp8), "v": torch.randn(6, 2, 2, 16).to(fp8),
        "out": torch.zeros(3, 4, 16), "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32), "max_seqlen_q": 2,
        "seqused_k": torch.tensor([3, 4]), "max_seqlen_k": 6, "softmax_scale": 0.5, "causal": True, "window_size": (-1, -1),
        "block_table": torch.tensor([[1, 2, 0], [5, 3, 0]], dtype=torch.int32), "softcap": 0.0, "q_descale": None,
        "k_descale": torch.tensor([0.5]), "v_descale": torch.tensor([2.0]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"causal": False}, "not causal"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"seqused_k": torch.tensor([3, 4], dtype=torch.int32)}, "not 64-bit"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 3])}, "not 32-bit"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, "not 32-bit"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32).T}, "side by side"),
        ({"k_descale": None}, "scales"),
        ({"q_descale": torch.tensor([1.0])}, "not quantised"),
        ({"q": torch.zeros(3, 4, 8).to(torch.float8_e4m3fn)}, "without a scale"),
        ({"q": torch.zeros(3, 3, 8), "out": torch.zeros(3, 3, 16)}, "whole ratio"),
        ({"out": torch.zeros(3, 4, 8)}, "head dims"),
        ({"max_seqlen_k": 8}, "longest length"),
        ({"cu_seqlens_q": torch.tensor([0, 0, 3], dtype=torch.int32)}, "more rows"),
        ({"seqused_k": torch.tensor([3, 7])}, "7 positions by a row of 3 pages of 2"),
        ({"block_table": torch.tensor([[1, 2, 0], [5, 6, 0]], dtype=torch.int32)}, "page 6 of 6"),
        ({"block_table": torch.tensor([[1, 2, 0], [5, 3, -1]], dtype=torch.int32)}, "page -1 of 6"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "fewer rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_stand_in_refuses(change: dict[str, Any], error: str) -> None:
    unified_attention(**unified_call())
    with pytest.raises((ValueError, IllegalAccess), match=error):
        unified_attention(**{**unified_call(), **change})


def test_what_the_stand_in_computes() -> None:
    """Rows and keys one by one: the last rows of each request, a window, a cap and sinks; rows of nobody stay as they were."""
    call = {**unified_call(), "window_size": (1, 0), "softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}
    call |= {"q": torch.randn(4, 4, 8), "out": torch.full((4, 4, 16), 9.0)}
    out = unified_attention(**call)
    k, v = call["k"].float().flatten(0, 1) * 0.5, call["v"].float().flatten(0, 1) * 2.0
    for row, slots in ((0, [3, 4]), (1, [11, 6]), (2, [6, 7])):
        for head in range(4):
            scores = torch.tanh(k[slots, head // 2] @ call["q"][row, head] * 0.5 / 3.0) * 3.0
            weights = torch.cat([scores, call["sinks"][head : head + 1]]).softmax(0)[:-1]
            torch.testing.assert_close(out[row, head], weights @ v[slots, head // 2], rtol=1e-5, atol=1e-5)
    assert bool((out[3] == 9.0).all())
