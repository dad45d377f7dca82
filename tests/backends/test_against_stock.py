"""The plugin's backends beside SGLang's own Triton backends, on the same pools in FP32.

SGLang's kernels run in the interpreter (about a second a pass), so this is a choice of the shapes that
`test_visible_sets.py` and `test_cover.py` run in full. Only FP32: the interpreter computes 16-bit types wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, TritonMultiStepDraftBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from tests.backends import batches
from tests.backends.batches import Batch
from tests.backends.compare import STOCK, assert_close, expected, inputs, run
from tests.backends.engine import Engine, Setup
from tests.backends.passes import add, assert_ran, draft_extender, draft_passes, drafter, target

Make = Callable[[Setup], Engine]

LENGTHS = (5, 0, 40)
TREE = {"topk": 4, "draft_tokens": 8}
NO_WINDOW_IN_DRAFTS = pytest.mark.skipif(
    not hasattr(spec_utils, "generate_draft_decode_window_kv_indices"),
    reason="SGLang 0.5.22: the Triton backend's draft steps have no index list for window layers",
)


def same(one: Engine, ours: tuple[Any, Batch], stock: tuple[Any, Batch], **how: Any) -> None:
    """All layers of one pass through both, with the same Q, K and V."""
    for backend, batch in (ours, stock):
        backend.init_forward_metadata(batch.forward)
    for layer in one.layers:
        x = inputs(one, ours[1].forward, **how)
        out, want = (run(backend, layer, batch.forward, x) for backend, batch in (ours, stock))
        assert_close(out, want.double(), STOCK)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(page_size=64),
        Setup(**TREE),
        Setup(page_size=16, **TREE),
        Setup(page_size=64, **TREE),
        # Chains: in a tree SGLang's kernel takes a draft's number for its position, ours its depth.
        Setup(windows=(4,), steps=6, draft_tokens=7),
        Setup(windows=(-1, 6), window_pool=True, page_size=16, steps=6, draft_tokens=7),
        Setup(softcap=2.0, **TREE),
    ],
    ids=["chain-1", "chain-64", "tree-1", "tree-16", "tree-64", "window", "window-pool", "cap"],
)
def test_verify(engine: Make, setup: Setup) -> None:
    """Each side has the mask it wants: ours the QLEN_ONLY one that it publishes, SGLang's Triton backend FULL_MASK."""
    one = engine(setup)
    add(one, LENGTHS)
    runner, backend, tree = one.runner(), target(one), batches.draw_tree(one)
    stock = TritonAttnBackend(runner)
    batch = batches.verify(one, runner, backend, tree)
    whole = batches.verify(one, runner, stock, tree, mask_mode=TreeMaskMode.FULL_MASK)
    # Sinks on one of them, to have them once.
    same(one, (backend, batch), (stock, whole), sinks=setup.softcap > 0)
    assert_ran(backend, target_verify="reference")


@pytest.mark.parametrize(
    "setup", [Setup(), Setup(page_size=16, windows=(-1, 6), window_pool=True)], ids=["page-1", "window-pool"]
)
def test_prefill_decode_and_mixed(engine: Make, setup: Setup) -> None:
    one = engine(setup.but(algorithm=None))
    first = one.add(40, 16)
    one.add(33, 16, like=first, shared=32)
    one.add(0, 16)
    one.fill()
    backend, runner = target(one), one.runner()
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        batch = batches.extend(one, runner, [3, 1, 6], mode=mode)
        same(one, (backend, batch), (TritonAttnBackend(runner), batch))
    batch = batches.decode(one, runner)
    wider = TritonAttnBackend(one.runner(stock_decode_window=True))
    same(one, (backend, batch), (wider, batch))
    assert_ran(backend, prefill="reference", decode="reference")


@pytest.mark.parametrize("front", [0, 2])
def test_draft_extend(engine: Make, front: int) -> None:
    one = engine(Setup(page_size=16))
    add(one, LENGTHS)
    backend, runner = draft_extender(one), one.runner(is_draft=True)
    batch = batches.draft_extend(one, runner, front=front)
    same(one, (backend, batch), (TritonAttnBackend(runner), batch))
    assert_ran(backend, draft_extend="reference")


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(page_size=16, steps=4, draft_tokens=5),
        Setup(**TREE),
        Setup(page_size=16, context=512, slots=2048, **TREE),
        pytest.param(Setup(windows=(4,), page_size=16, context=512, slots=2048, **TREE), marks=NO_WINDOW_IN_DRAFTS),
    ],
    ids=["chain-1", "chain-16", "tree-1", "tree-16", "window-16"],
)
def test_every_draft_step(engine: Make, setup: Setup) -> None:
    one = engine(setup)
    add(one, LENGTHS)
    container = drafter(one)
    runner = one.runner(is_draft=True, stock_decode_window=True)
    stock = TritonMultiStepDraftBackend(runner, setup.topk, setup.steps)
    batch, other = batches.draft(one, runner), batches.draft(one, runner)
    container.init_forward_metadata(batch.forward)
    stock.init_forward_metadata(other.forward)
    for step, _ in zip(draft_passes(one, batch), draft_passes(one, other), strict=True):
        x = inputs(one, batch.forward)
        out = run(container.attn_backends[step], one.layers[0], batch.forward, x)
        want = run(stock.attn_backends[step], one.layers[0], other.forward, x)
        assert_close(out, want.double(), STOCK)
    assert_ran(container, draft_decode="reference")


def test_stock_decode_window_is_one_key_short(engine: Make) -> None:
    """Why `stock_decode_window` exists: should SGLang's decode come to see window + 1 keys, as its extend does, it can go."""
    one = engine(Setup(algorithm=None, windows=(4,)))
    add(one, (20,), room=4)
    runner, layer = one.runner(), one.layers[0]
    stock, batch = TritonAttnBackend(runner), batches.decode(one, runner)
    x = inputs(one, batch.forward)
    stock.init_forward_metadata(batch.forward)
    out = run(stock, layer, batch.forward, x)
    with pytest.raises(AssertionError, match="elements off"):
        assert_close(out, expected(one, layer, batch, x), STOCK)
    layer.sliding_window_size = 3
    assert_close(out, expected(one, layer, batch, x), STOCK)
