"""What a layer reads is fixed when the step's metadata is made: SGLang may hand the rows to other requests after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.backends import batches
from tests.backends.engine import Engine, Setup
from tests.backends.passes import PROBE, add, check, check_draft, draft_extender, drafter, target, verify_batch

Make = Callable[[Setup], Engine]

SETUPS = {
    "tree": PROBE.but(topk=4, draft_tokens=8),
    "tree in pages": PROBE.but(topk=4, draft_tokens=8, page_size=16),
    "chain": PROBE.but(page_size=16),
    "window pool": PROBE.but(
        topk=2, draft_tokens=5, windows=(-1, 4), window_pool=True, slots=1664, v_head_dim=1664 + 16, page_size=16
    ),
}


def hand_over(one: Engine) -> None:
    """Every row is somebody else's now, and the window pool's map forgets their slots."""
    table = one.req_to_token_pool.req_to_token
    spare = one.setup.slots - one.setup.page_size
    table.fill_(spare)
    if one.is_window_pool:
        one.pool.full_to_swa_index_mapping.fill_(0)


def modes(one: Engine) -> dict[str, tuple[Any, Any]]:
    backend, extender = target(one), draft_extender(one)
    runner, draft_runner = one.runner(), one.runner(is_draft=True)
    return {
        "verify": (backend, lambda: verify_batch(one, backend)),
        "prefill": (backend, lambda: batches.extend(one, runner, [3, 1, 2])),
        "decode": (backend, lambda: batches.decode(one, runner)),
        "draft extend": (extender, lambda: batches.draft_extend(one, draft_runner)),
        "draft decode": (drafter(one), lambda: batches.draft(one, draft_runner)),
    }


@pytest.mark.parametrize("mode", ["verify", "prefill", "decode", "draft extend", "draft decode"])
@pytest.mark.parametrize("name", SETUPS)
def test_rows_handed_over_after_the_metadata(engine: Make, name: str, mode: str) -> None:
    one = engine(SETUPS[name])
    add(one, (6, 0, 39), one_hot=True)
    backend, make = modes(one)[mode]
    batch = make()
    backend.init_forward_metadata(batch.forward)
    mapping = one.pool.full_to_swa_index_mapping.clone() if one.is_window_pool else None
    hand_over(one)
    if mapping is None:
        _check(one, backend, batch, mode)
        return
    # The comparison needs the map as it was; the pass must not.
    with _Forgotten(one, mapping):
        _check(one, backend, batch, mode)


def _check(one: Engine, backend: Any, batch: Any, mode: str) -> None:
    (check_draft if mode == "draft decode" else check)(one, backend, batch, prepared=True, probe=True)


class _Forgotten:
    """`compare` sees the old map; SGLang's pool answers with the new one."""

    def __init__(self, one: Engine, mapping: Any) -> None:
        self.one, self.mapping = one, mapping

    def __enter__(self) -> None:
        pool = self.one.pool
        emptied = pool.full_to_swa_index_mapping
        pool.translate_loc_from_full_to_swa = lambda slots: emptied[slots]
        pool.full_to_swa_index_mapping = self.mapping

    def __exit__(self, *_: object) -> None:
        del self.one.pool.translate_loc_from_full_to_swa
