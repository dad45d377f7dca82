"""One speculative iteration of every combination: prefill, draft, verify, draft extend, and a plain decode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.backends import batches
from tests.backends.cover import COMBINATIONS, setup_of
from tests.backends.engine import Engine, Setup
from tests.backends.passes import add, assert_ran, check, check_draft, draft_extender, drafter, target, verify_batch


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c)))
def test_iteration(engine: Callable[[Setup], Engine], combination: tuple[str, str, int, str]) -> None:
    algorithm = combination[0]
    one = engine(setup_of(*combination))
    # Within a page, nothing at all, one token short of the larger page and one past two of the smaller.
    add(one, (5, 0, 63, 33))
    backend = target(one)
    check(one, backend, batches.extend(one, one.runner(), [3, 4, 1, 2]))
    check(one, backend, verify_batch(one, backend))
    check(one, backend, batches.decode(one, one.runner()))
    assert_ran(backend, prefill="reference", target_verify="reference", decode="reference")
    if algorithm == "NGRAM":
        return
    runner = one.runner(is_draft=True)
    container = drafter(one)
    check_draft(one, container, batches.draft(one, runner))
    assert_ran(container, draft_decode="reference")
    extender = draft_extender(one)
    check(one, extender, batches.draft_extend(one, runner))
    assert_ran(extender, draft_extend="reference")
