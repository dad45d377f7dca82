"""Whole steps through backends over aiter, the plugin's or SGLang's own, each layer compared with the independent sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_specverify.hardware import from_name
from tests.backends import batches
from tests.backends.batches import Batch
from tests.backends.compare import STOCK, Inputs, assert_close, cache_of, expected, inputs, run
from tests.backends.engine import Engine, Setup
from tests.backends.passes import draft_passes

#: V names a slot: as many as the slots that any row of a batch may see.
NAMES = 128

#: Changes the inputs of a layer.
Change = Callable[[Inputs], Inputs]


def target(one: Engine, **more: Any) -> Any:
    from sglang_specverify.backends.aiter import SpecverifyAiterBackend

    return SpecverifyAiterBackend(runner(one, **more), part="target")


def extender(one: Engine) -> Any:
    from sglang_specverify.backends.aiter import SpecverifyAiterBackend

    return SpecverifyAiterBackend(runner(one, is_draft=True), part="draft extend")


def drafter(one: Engine, **more: Any) -> Any:
    from sglang_specverify.backends.aiter import SpecverifyAiterDraftBackend

    return SpecverifyAiterDraftBackend(runner(one, is_draft=True, **more), one.setup.topk, one.setup.steps)


def runner(one: Engine, *, is_draft: bool = False, context: int | None = None) -> Any:
    """`context`: the model's, where it is shorter than the engine's rows, as SGLang has them."""
    made = one.runner(is_draft=is_draft)
    if context is not None:
        made.model_config.context_len = context
    return made


def name_slots(one: Engine) -> None:
    """From here on K is random and V says the slot, by its number among those of the requests."""
    s = one.setup
    used = sorted(
        {slot for request in one.requests for slot in request.slots[: request.length + s.draft_tokens]}
        | {slot for request in one.requests for branch in range(s.topk) for slot in batches.branch_slots(one, request, branch)}
    )
    number = {slot: i for i, slot in enumerate(used)}

    def fresh_kv(slots: torch.Tensor, *, one_hot: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        v = torch.zeros(len(slots), s.kv_heads, NAMES, dtype=s.dtype)
        for i, slot in enumerate(slots.tolist()):
            v[i, :, number[slot]] = 1
        return one.normal(len(slots), s.kv_heads, s.head_dim), v

    assert len(used) <= NAMES
    one.fresh_kv = fresh_kv  # type: ignore[method-assign]
    one.fill()


def eighths(one: Engine) -> None:
    """From here on every value is a multiple of 1/8 up to 1, which FP8 holds exactly, divided by a half or by 2 too.

    V is not negative: a rounding of the weights is then no larger, relative to the output, than relative to a weight.
    """

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randint(-8, 9, shape, generator=one.generator) / 8).to(one.setup.dtype)

    def fresh_kv(slots: torch.Tensor, *, one_hot: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = drawn(slots)
        return k, v.abs()

    drawn = one.fresh_kv
    one.normal, one.fresh_kv = normal, fresh_kv  # type: ignore[method-assign]
    one.fill()


def check(
    one: Engine,
    backend: Any,
    batch: Batch,
    *,
    prepared: bool = False,
    relative: float = STOCK,
    change: Change | None = None,
    **how: Any,
) -> None:
    """Every layer of one pass. `how` goes to `inputs`."""
    if not prepared:
        backend.init_forward_metadata(batch.forward)
    for layer in one.layers:
        x = inputs(one, batch.forward, **how)
        if change is None:
            out = run(backend, layer, batch.forward, x)
        else:
            x = change(x)
            with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
                # As it is: a copy would have strides of its own.
                out = layer(x.q, x.k, x.v, batch.forward, **x.more).view(-1, layer.tp_q_head_num, layer.v_head_dim)
        # The sum below reads the cache, so what was put there is looked at by itself: in float32, or exact in FP8.
        for cache, given in zip(cache_of(one, layer), (x.k, x.v), strict=True):
            assert torch.equal(cache[batch.forward.out_cache_loc], given.double()), (
                "the cache does not hold the K and V of the pass"
            )
        assert_close(out[: len(batch.keys)], expected(one, layer, batch, x), relative)


def check_draft(one: Engine, container: Any, batch: Batch, *, prepared: bool = False, **how: Any) -> None:
    """Every layer in every step of a draft."""
    if not prepared:
        container.init_forward_metadata(batch.forward)
    for step in draft_passes(one, batch):
        check(one, container.attn_backends[step], batch, prepared=True, **how)


def draft(one: Engine) -> Batch:
    return batches.draft(one, one.runner(is_draft=True))


def draft_extend(one: Engine) -> Batch:
    return batches.draft_extend(one, one.runner(is_draft=True))


def expanded(x: Inputs) -> Inputs:
    """One KV head that all of them are, as where there are fewer heads than ranks; what is read beside its end is zeros."""

    def one(y: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([y[:, :1], torch.zeros_like(y[:, :1])])
        return padded[: len(y)].expand(-1, y.shape[1], -1)

    return Inputs(x.q, one(x.k), one(x.v), x.more)


def on(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """The routes of backends from here on are those of this hardware; the kernels still run in the interpreter."""
    monkeypatch.setattr("sglang_specverify.backends.routes.hardware_facts", lambda _: from_name(arch))


def page_setup(page: int, topk: int = 1) -> Setup:
    """Requests whose slots `name_slots` can name."""
    return Setup(page_size=page, topk=topk, draft_tokens=4 if topk == 1 else 5, v_head_dim=NAMES, slots=1536, context=512)
