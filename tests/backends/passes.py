"""Forward passes of the plugin's backends, each compared with the independent sum, or key by key where it is a probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

from sglang_specverify.backends.triton import SpecverifyTritonBackend, SpecverifyTritonDraftBackend
from tests.backends import batches
from tests.backends.batches import Batch
from tests.backends.compare import Inputs, assert_close, assert_sees, expected, inputs, kernels, limit, run
from tests.backends.engine import Engine, Setup

#: A setup whose V can name every slot: `compare.assert_sees` needs it.
PROBE = Setup(q_heads=1, kv_heads=1, slots=832, v_head_dim=832 + 64)


def target(engine: Engine, **more: Any) -> SpecverifyTritonBackend:
    return SpecverifyTritonBackend(engine.runner(), part="target", **more)


def draft_extender(engine: Engine) -> SpecverifyTritonBackend:
    return SpecverifyTritonBackend(engine.runner(is_draft=True), part="draft extend")


def drafter(engine: Engine) -> SpecverifyTritonDraftBackend:
    return SpecverifyTritonDraftBackend(engine.runner(is_draft=True), engine.setup.topk, engine.setup.steps)


def add(engine: Engine, lengths: tuple[int, ...], *, room: int = 0, one_hot: bool = False) -> None:
    """Requests of these lengths, with slots for a draft of any kind and for `room` more, and a filled cache."""
    for length in lengths:
        engine.add(length, max(batches.draft_room(engine.setup, length), engine.setup.draft_tokens, room))
    engine.fill(one_hot=one_hot)


def verify_batch(engine: Engine, backend: Any) -> Batch:
    """The batch that this engine's algorithm verifies."""
    if engine.setup.algorithm == "NGRAM":
        return batches.ngram(engine, engine.runner(), batches.draw_parents(engine))
    return batches.verify(engine, engine.runner(), backend, batches.draw_tree(engine))


def check(engine: Engine, backend: Any, batch: Batch, *, prepared: bool = False, **how: Any) -> None:
    """Every layer of one pass, with random Q, K and V. `how` goes to `inputs`."""
    if not prepared:
        backend.init_forward_metadata(batch.forward)
    for layer in engine.layers:
        compare(engine, layer, batch, inputs(engine, batch.forward, **how), backend, probe=how.get("probe", False))


def padded(engine: Engine, backend: Any, rows: int) -> torch.Tensor:
    """A verify with so many rows of NaN past the real ones, compared on its first layer: that layer's output, padding and all."""
    batch = verify_batch(engine, backend)
    backend.init_forward_metadata(batch.forward)
    x = inputs(engine, batch.forward, pad=rows)
    batch.forward.out_cache_loc = torch.cat([batch.forward.out_cache_loc, torch.zeros(rows, dtype=torch.int64)])
    return compare(engine, engine.layers[0], batch, x, backend, probe=False)


def compare(engine: Engine, layer: Any, batch: Batch, x: Inputs, backend: Any, *, probe: bool) -> torch.Tensor:
    out = run(backend, layer, batch.forward, x)
    if probe:
        assert_sees(engine, layer, batch, out, limit(backend, out.dtype))
    else:
        assert_close(out[: len(batch.keys)], expected(engine, layer, batch, x), limit(backend, out.dtype))
    assert not out[len(batch.keys) :].any(), "rows past the real ones must be 0"
    return out


def draft_passes(engine: Engine, batch: Batch) -> Iterator[int]:
    """Narrow `batch` to one step of the draft after the other, as the draft worker does."""
    s = engine.setup
    slots = per_step_draft_out_cache_loc(batch.forward.out_cache_loc, len(engine.requests), s.topk, s.steps)
    for step in range(s.steps - 1):
        batch.forward.out_cache_loc = slots[step]
        batch.keys, batch.positions = batches.draft_keys(engine, step)
        yield step
        batch.forward.positions.add_(1)


def check_draft(engine: Engine, container: Any, batch: Batch, *, prepared: bool = False, **how: Any) -> None:
    """Every layer in every step of a draft."""
    if not prepared:
        container.init_forward_metadata(batch.forward)
    for step in draft_passes(engine, batch):
        for layer in engine.layers:
            x = inputs(engine, batch.forward, **how)
            compare(engine, layer, batch, x, container.attn_backends[step], probe=how.get("probe", False))


def check_target(engine: Engine, new: list[int], **how: Any) -> None:
    """The three passes of a target: verify, a prefill of `new[r]` tokens, decode; each ran on the reference."""
    backend = target(engine)
    check(engine, backend, verify_batch(engine, backend), **how)
    check(engine, backend, batches.extend(engine, engine.runner(), new), **how)
    check(engine, backend, batches.decode(engine, engine.runner()), **how)
    assert_ran(backend, target_verify="reference", prefill="reference", decode="reference")


def assert_ran(backend: Any, **modes: str) -> None:
    """`mode="kernel"`: that kernel and no other ran in that mode, and no other mode ran."""
    assert kernels(backend.routes.report()) == {mode: {kernel} for mode, kernel in modes.items()}
