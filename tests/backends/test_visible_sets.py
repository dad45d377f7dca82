"""Which slots each row reads, exactly: Q is 0, so all visible keys weigh the same, and V says its slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.backends import batches
from tests.backends.engine import Engine, Setup
from tests.backends.passes import (
    PROBE,
    add,
    assert_ran,
    check,
    check_draft,
    check_target,
    draft_extender,
    drafter,
    target,
    verify_batch,
)  # fmt: skip

Make = Callable[[Setup], Engine]

SHAPES = {"chain": {"topk": 1, "draft_tokens": 4}, "tree": {"topk": 4, "draft_tokens": 8}}
#: A window layer beside a full one, without and with a window pool of its own.
WINDOWS = {
    "full": {},
    "window": {"windows": (-1, 5)},
    "narrow": {"windows": (2,)},
    "window pool": {"windows": (-1, 5), "window_pool": True},
}


def probe_setup(page: int, shape: str, windows: str) -> Setup:
    # The branches of a tree take whole pages of their own.
    slots = 1536 if page == 64 else 832
    setup = PROBE.but(page_size=page, slots=slots, v_head_dim=slots + page, context=512, **SHAPES[shape], **WINDOWS[windows])
    return setup.but(slots=2 * setup.slots, v_head_dim=2 * setup.slots + page) if setup.window_pool else setup


def lengths(page: int) -> tuple[int, ...]:
    return (0, 6, 39) if page < 64 else (0, 6, 66)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_every_mode_sees_its_keys_once(engine: Make, page: int, shape: str, windows: str) -> None:
    one = engine(probe_setup(page, shape, windows))
    add(one, lengths(page), one_hot=True)
    check_target(one, [3, 1, 2], probe=True)
    runner = one.runner(is_draft=True)
    extender = draft_extender(one)
    check(one, extender, batches.draft_extend(one, runner), probe=True)
    assert_ran(extender, draft_extend="reference")
    container = drafter(one)
    check_draft(one, container, batches.draft(one, runner), probe=True)
    assert_ran(container, draft_decode="reference")


@pytest.mark.parametrize("page", [1, 16])
def test_draft_extend_ragged_and_widened(engine: Make, page: int) -> None:
    one = engine(probe_setup(page, "chain", "window"))
    add(one, (1, 6, 39), one_hot=True)
    extender = draft_extender(one)
    runner = one.runner(is_draft=True)
    check(one, extender, batches.draft_extend(one, runner, new=[4, 1, 2]), probe=True)
    # A front of two rows reaches below the start of the first request.
    check(one, extender, batches.draft_extend(one, runner, front=2), probe=True)
    assert_ran(extender, draft_extend="reference")


@pytest.mark.parametrize("page", [1, 16])
def test_shared_prefix(engine: Make, page: int) -> None:
    """A prefix that the radix cache holds once: three rows of `req_to_token` name the same slots."""
    one = engine(probe_setup(page, "tree", "full"))
    first = one.add(40, 64)
    one.add(37, 64, like=first, shared=32)
    one.add(32, 64, like=first, shared=32)
    one.fill(one_hot=True)
    backend = target(one)
    check(one, backend, batches.extend(one, one.runner(), [5, 1, 3]), probe=True)
    check(one, backend, verify_batch(one, backend), probe=True)
    check(one, backend, batches.decode(one, one.runner()), probe=True)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_sizes(engine: Make, shape: str, count: int) -> None:
    one = engine(PROBE.but(**SHAPES[shape]))
    add(one, (5, 0, 9, 1, 17, 2, 30, 3)[:count], one_hot=True)
    backend = target(one)
    check(one, backend, verify_batch(one, backend), probe=True)
    check(one, backend, batches.decode(one, one.runner()), probe=True)
    check_draft(one, drafter(one), batches.draft(one, one.runner(is_draft=True)), probe=True)


def test_mixed_batch(engine: Make) -> None:
    """Chunked prefill beside running requests: those come as extends of one token."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    one = engine(PROBE.but(algorithm=None, page_size=16))
    add(one, (0, 16, 21, 40), room=16, one_hot=True)
    backend = target(one)
    check(one, backend, batches.extend(one, one.runner(), [7, 1, 1, 3], mode=ForwardMode.MIXED), probe=True)
    assert_ran(backend, prefill="reference")
