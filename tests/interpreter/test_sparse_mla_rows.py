"""Rows of `tests.gpu.sparse_mla_cases` and calls of the sweep in the interpreter, and what a kernel that writes nothing gets."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_specverify.kernels.sparse_mla import decode
from tests.gpu import sparse_mla_rows, sparse_mla_soak
from tests.gpu.sparse_mla_calls import Checker
from tests.interpreter import sanitizers, sweep, sweep_sparse_mla


@pytest.fixture(autouse=True)
def interpreted(device: str) -> None:
    if device != "cpu":
        pytest.skip("run python -m tests.gpu.sparse_mla_cases itself")


def test_a_row_and_random_calls(device: str) -> None:
    c = Checker(device, "e4m3")
    with c.watching():
        sparse_mla_rows.beyond(c)
    assert (c.problems, c.checks, c.missing_kernel()) == ([], 2, None)
    seen: list[dict[str, Any]] = []
    sparse_mla_soak.soak(device, "bf16", 0, 0, 1, 1.0, seen.append, most=1, clock=lambda: 0.0)
    assert [(one["cases"], one["failures"]) for one in seen] == [(1, 0)] and seen[0]["checks"] == 4


def test_a_kernel_that_writes_nothing_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "decode_launches", lambda *_: ())
    c = Checker(device, "bf16")
    with c.watching():
        sparse_mla_rows.beyond(c)
    assert c.checks == 2 and {text.split(":")[0] for text in c.problems} == {"eager", "graph"}
    assert c.missing_kernel() is not None


def test_calls_of_the_sweep(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [sweep.Call(*call) for call in sweep_sparse_mla.calls(device)]
    chosen = sweep.some(every, 1)
    for call in chosen:
        call.run()
    # Each runs in one of the processes without a checker, and in one alone.
    names = [call.name for call in every]
    assert [sum(operation in name for operation in sanitizers.OPERATIONS) for name in names] == [1] * len(names)
    monkeypatch.setattr(decode, "decode_launches", lambda *_: ())
    with pytest.raises(AssertionError):
        chosen[0].run()
