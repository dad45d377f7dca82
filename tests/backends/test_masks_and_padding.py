"""Masks by their producer, padded and idle batches, and layers that do more than attend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPVerifyInput

from tests.backends import batches
from tests.backends.batches import Batch
from tests.backends.compare import assert_close, expected, inputs, limit, run
from tests.backends.engine import Engine, Setup
from tests.backends.passes import (
    PROBE,
    add,
    assert_ran,
    check,
    check_draft,
    check_target,
    compare,
    draft_extender,
    drafter,
    target,
    verify_batch,
)  # fmt: skip

Make = Callable[[Setup], Engine]

TREE = Setup(topk=4, draft_tokens=8)
LENGTHS = (5, 0, 21)


def lengthen(batch: Batch, by: int) -> None:
    """Garbage past the mask, as in a buffer that is made for the largest batch."""
    spec = batch.forward.spec_info
    garbage = torch.rand(by, generator=torch.Generator().manual_seed(1)) < 0.5
    spec.custom_mask = torch.cat([spec.custom_mask, garbage.to(spec.custom_mask.dtype)])


@pytest.mark.parametrize("by", [0, 1000])
def test_eagle_follows_the_published_mask(engine: Make, by: int) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    backend = target(one)
    published = backend.verify_mask
    assert published.mode == TreeMaskMode.QLEN_ONLY and published.max_bs == one.setup.pool_rows and published.is_read
    batch = verify_batch(one, backend)
    assert batch.forward.spec_info.custom_mask.data_ptr() == published.buffer.data_ptr(), "written in place"
    lengthen(batch, by)
    check(one, backend, batch)


@pytest.mark.parametrize("by", [0, 1000])
@pytest.mark.parametrize("full_mask", [False, True])
def test_ngram_mask(engine: Make, monkeypatch: pytest.MonkeyPatch, full_mask: bool, by: int) -> None:
    """NGRAM's worker sends QLEN_ONLY on a CPU and FULL_MASK elsewhere, whatever the target publishes."""
    monkeypatch.setattr(ngram_worker, "_is_cpu", not full_mask)
    one = engine(TREE.but(algorithm="NGRAM"))
    add(one, LENGTHS)
    backend = target(one)
    batch = batches.ngram(one, one.runner(), batches.draw_parents(one), full_mask=full_mask)
    lengthen(batch, by)
    check(one, backend, batch)
    assert_ran(backend, target_verify="reference")


@pytest.mark.usefixtures("triton_alone")
def test_a_batch_that_is_padded_past_the_pool(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks keep in step, SGLang pads an eager verify of a hybrid to whole groups of them."""
    monkeypatch.setattr("sglang.srt.utils.common.get_eager_max_batch_size", lambda requests: -(-requests // 8) * 8)
    monkeypatch.setattr("sglang.srt.model_executor.forward_batch_info._is_cpu", False)
    one = engine(TREE.but(pool_rows=6))
    add(one, LENGTHS)
    backend, runner = target(one), one.runner()
    batch = verify_batch(one, backend)
    runner.attn_backend = backend
    batch.forward._pad_inputs_to_size(runner, 8 * one.setup.draft_tokens, 8)
    batch.forward.batch_size = 8
    backend.init_forward_metadata(batch.forward)
    x = inputs(one, batch.forward)
    out = run(backend, one.layers[0], batch.forward, x)
    assert len(out) == 8 * one.setup.draft_tokens
    rows = len(batch.keys)
    assert_close(out[:rows], expected(one, one.layers[0], batch, x.of(rows)), limit(backend, out.dtype))


def test_other_producers_send_full_masks(engine: Make) -> None:
    one = engine(TREE.but(page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = batches.verify(one, one.runner(), backend, batches.draw_tree(one), mask_mode=TreeMaskMode.FULL_MASK)
    spec = batch.forward.spec_info
    batch.forward.spec_info = FrozenKVMTPVerifyInput(**{name: getattr(spec, name) for name in spec.__dataclass_fields__})
    lengthen(batch, 100)
    check(one, backend, batch)


def test_ngram_of_breadth_one_is_still_a_tree(engine: Make) -> None:
    """A match shorter than the draft is filled up with children of the root, also where breadth is 1."""
    one = engine(PROBE.but(algorithm="NGRAM", topk=1, draft_tokens=5))
    add(one, LENGTHS, one_hot=True)
    backend = target(one)
    batch = batches.ngram(one, one.runner(), [[-1, 0, 1, 0, 0], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]])
    check(one, backend, batch, probe=True)
    assert_ran(backend, target_verify="reference")


@pytest.mark.parametrize("windows", [(-1,), (4,)])
@pytest.mark.parametrize("topk", [1, 4])
def test_padded_verify(engine: Make, topk: int, windows: tuple[int, ...]) -> None:
    """More rows than requests times W, and no multiple of it: the tail is left alone, and says so by being 0."""
    one = engine(Setup(topk=topk, steps=5, draft_tokens=6, windows=windows, page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    forward = batch.forward
    backend.init_forward_metadata(forward)
    x = inputs(one, forward, pad=4)
    forward.out_cache_loc = torch.cat([forward.out_cache_loc, torch.zeros(4, dtype=torch.int64)])
    out = compare(one, one.layers[0], batch, x, backend, probe=False)
    assert len(out) == 3 * 6 + 4


@pytest.mark.parametrize("narrowed", [False, True])
def test_padded_extend(engine: Make, narrowed: bool) -> None:
    """SGLang hands an extend's real rows alone where it knows their number."""
    one = engine(Setup())
    add(one, LENGTHS)
    backend = target(one)
    batch = batches.extend(one, one.runner(), [3, 1, 2])
    forward = batch.forward
    assert forward.global_num_token_non_padded_cpu == 6
    backend.init_forward_metadata(forward)
    x = inputs(one, forward, pad=2)
    forward.out_cache_loc = torch.cat([forward.out_cache_loc, torch.zeros(2, dtype=torch.int64)])
    if not narrowed:
        forward.global_num_token_non_padded_cpu = None
    compare(one, one.layers[0], batch, x, backend, probe=False)


@pytest.mark.parametrize("padding", [0, 2])
def test_idle_batch_launches_nothing(engine: Make, padding: int) -> None:
    """SGLang plans an idle batch only where it was padded."""
    one = engine(TREE)
    add(one, LENGTHS)
    backend = target(one)
    check(one, backend, verify_batch(one, backend))
    before = backend.routes.report()
    batch = batches.idle(one, one.runner(), padding=padding)
    if padding:
        backend.init_forward_metadata(batch.forward)
        assert backend.step is None
    else:
        backend.forward_metadata = None
    out = run(backend, one.layers[0], batch.forward, inputs(one, batch.forward))
    assert out.shape == (padding, 4, 16)
    assert backend.routes.report() == before


@pytest.mark.parametrize(
    "setup",
    [
        TREE.but(softcap=3.0),
        TREE.but(page_size=16, windows=(6, -1), softcap=2.0),
        TREE.but(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, scales=(0.25, 4.0), windows=(3,)),
        TREE.but(head_dim=32, v_head_dim=8, q_heads=6, kv_heads=2),
        TREE.but(q_heads=8, kv_heads=1, page_size=16, windows=(-1, 4), window_pool=True),
    ],
    ids=["cap", "cap-window", "fp8-window", "dims", "window-pool"],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_sinks_cap_scales_dims(engine: Make, setup: Setup, sinks: bool) -> None:
    one = engine(setup)
    add(one, LENGTHS)
    check_target(one, [2, 4, 1], sinks=sinks)
    runner = one.runner(is_draft=True)
    container = drafter(one)
    check_draft(one, container, batches.draft(one, runner), sinks=sinks)
    assert_ran(container, draft_decode="reference")
    check(one, draft_extender(one), batches.draft_extend(one, runner), sinks=sinks)
