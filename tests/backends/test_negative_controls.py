"""The comparisons of this folder can fail: each fault, put between a backend and its kernel, turns one of them red.

Every fault is first absent and the same pass is green, so that what fails is the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_specverify.backends import calls as kernel_calls
from tests.backends import batches
from tests.backends.engine import Engine, Setup
from tests.backends.passes import PROBE, add, check, check_draft, drafter, target, verify_batch

Make = Callable[[Setup], Engine]
Fault = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]

TREE = {"topk": 4, "draft_tokens": 8}
#: Where `table`, `prefix_lens` and `draft_slots` stand among the positional arguments of a kernel call.
TABLE, LENS, SLOTS = 3, 5, 6


def replaced(args: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*args[:at], value, *args[at + 1 :])


def mask_shifted(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One row late: each draft sees what the one before it should."""
    return args, kw | {"mask": torch.roll(kw["mask"], kw["num_draft_tokens"])}


def stale_slot(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The last request's second entry is that of another request."""
    table = args[TABLE].clone()
    table[-1, 1] = table[0, 0]
    return replaced(args, TABLE, table), kw


def position_off_by_one(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = kw["positions"].clone()
    positions[1:] += 1
    return args, kw | {"positions": positions}


def length_off_by_one(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return replaced(args, LENS, (args[LENS] - 1).clamp(min=0)), kw


def without_its_own_key(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The length of the step before."""
    return args, kw | {"step": max(kw["step"] - 1, 0)}


def tail_once_per_branch(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Each branch's first page is read whole: its copy of the prefix's tail, beside the tail itself."""
    slots, page = args[SLOTS], kw["page_size"]
    # Only the last request: the copies are the slots of its branches' pages before their first tokens.
    tail = int(args[LENS][-1]) % page
    copies = slots[:, :, :1] - torch.arange(tail, 0, -1)
    copies[:-1] = slots[:-1, :, :1]
    return replaced(args, SLOTS, torch.cat([copies, slots], dim=2)), kw | {"step": kw["step"] + tail}


def poison(monkeypatch: pytest.MonkeyPatch, operation: str, fault: Fault) -> list[str]:
    """Put `fault` before the kernel; the list grows with each call that it changed."""
    kernel, calls = getattr(kernel_calls, operation), []

    def faulty(*args: Any, **kw: Any) -> Any:
        args, kw = fault(args, kw)
        calls.append(operation)
        return kernel(*args, **kw)

    monkeypatch.setattr(kernel_calls, operation, faulty)
    return calls


#: Each fault under random numbers, under the probe, or both.
VERIFY = {
    "mask shifted": (mask_shifted, Setup(**TREE)),
    "mask shifted, pages": (mask_shifted, PROBE.but(page_size=16, **TREE)),
    "stale slot": (stale_slot, Setup(**TREE)),
    "stale page": (stale_slot, PROBE.but(page_size=16, **TREE)),
    "stale slot, chain": (stale_slot, Setup()),
    "position off by one": (position_off_by_one, Setup(windows=(3,), **TREE)),
    "position off by one, probe": (position_off_by_one, PROBE.but(windows=(3,), **TREE)),
    "length off by one": (length_off_by_one, Setup(**TREE)),
    "length off by one, chain": (length_off_by_one, PROBE),
}


@pytest.mark.parametrize("name", VERIFY)
def test_verify_fault(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, setup = VERIFY[name]
    one, probe = engine(setup), setup.v_head_dim is not None
    add(one, (7, 40), one_hot=probe)
    backend = target(one)
    batch = verify_batch(one, backend)
    check(one, backend, batch, probe=probe)
    calls = poison(monkeypatch, "verify_attention", fault)
    with pytest.raises(AssertionError, match=r"elements off|the weights of slots"):
        check(one, backend, batch, probe=probe)
    assert calls


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_length_fault_in_other_modes(engine: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    one = engine(Setup())
    add(one, (7, 40))
    backend = target(one)
    batch = batches.extend(one, one.runner(), [2, 3]) if mode == "prefill" else batches.decode(one, one.runner())
    check(one, backend, batch)
    poison(monkeypatch, "verify_attention", length_off_by_one)
    with pytest.raises(AssertionError, match="elements off"):
        check(one, backend, batch)


DRAFT = {
    "without its own key": (without_its_own_key, Setup(**TREE)),
    "without its own key, chain": (without_its_own_key, PROBE.but(page_size=16)),
    "tail once per branch": (tail_once_per_branch, Setup(page_size=16, context=512, slots=2048, **TREE)),
    "tail once per branch, probe": (tail_once_per_branch, PROBE.but(page_size=16, **TREE)),
    "length off by one": (length_off_by_one, Setup(page_size=16, context=512, slots=2048, **TREE)),
    "stale slot": (stale_slot, Setup(**TREE)),
}


@pytest.mark.parametrize("name", DRAFT)
def test_draft_fault(engine: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, setup = DRAFT[name]
    one, probe = engine(setup), setup.v_head_dim is not None
    add(one, (7, 43), one_hot=probe)
    container, runner = drafter(one), one.runner(is_draft=True)
    check_draft(one, container, batches.draft(one, runner), probe=probe)
    calls = poison(monkeypatch, "draft_decode_attention", fault)
    with pytest.raises(AssertionError, match=r"elements off|the weights of slots"):
        check_draft(one, container, batches.draft(one, runner), probe=probe)
    assert calls


def test_row_reads_in_a_layer_are_seen(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that read `req_to_token` itself would fail `test_snapshot.py`."""
    one = engine(PROBE.but(**TREE))
    add(one, (7, 40), one_hot=True)
    backend = target(one)
    batch = verify_batch(one, backend)
    rows = batch.forward.req_pool_indices

    def live(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return replaced(args, TABLE, one.req_to_token_pool.req_to_token[rows]), kw

    poison(monkeypatch, "verify_attention", live)
    check(one, backend, batch, probe=True)
    one.req_to_token_pool.req_to_token.fill_(one.setup.slots - 1)
    with pytest.raises(AssertionError, match="the weights of slots"):
        check(one, backend, batch, prepared=True, probe=True)
