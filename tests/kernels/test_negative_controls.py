"""The comparison rejects faulty kernels: each fault below, put into the second computation, must break the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_specverify.kernels import verify_attention

from . import oracle
from .cases import Config, build_verify
from .oracle import Key

#: Prefixes of a tile and more; a window that cuts inside prefix and tree; sinks; page size 4.
BASE = Config(prefix_lens=(70, 33), widths=8, kind="qlen_only", q_heads=4, kv_heads=2, window=20, sinks=True, page_size=4,
              head_dim=16, v_head_dim=8, sm_scale=0.25)  # fmt: skip


def dropped_prefix_key(a: dict[str, Any], r: int, i: int) -> list[Key]:
    keys = oracle.verify_keys(a, r, i)
    return [key for key in keys if key[0] != int(a["prefix_lens"][r]) - 1]


def dropped_self(a: dict[str, Any], r: int, i: int) -> list[Key]:
    own = oracle.slot_of(a, r, int(a["prefix_lens"][r]) + i)
    return [key for key in oracle.verify_keys(a, r, i) if key[1] != own]


def counted_padding_key(a: dict[str, Any], r: int, i: int) -> list[Key]:
    """A padding column of a key tile, all zeros, that the mask forgot: slot `zero` of the enlarged cache."""
    return [*oracle.verify_keys(a, r, i), (0, a["zero_slot"])]


def window_by_index(a: dict[str, Any], r: int, i: int) -> list[Key]:
    w, n = a["num_draft_tokens"], int(a["prefix_lens"][r])
    index = {oracle.slot_of(a, r, p): p for p in range(n + w)}
    everything = oracle.verify_keys({**a, "window": -1}, r, i)
    return [key for key in everything if index[key[1]] >= n + i - a["window"]]


def window_of_last_row(a: dict[str, Any], r: int, i: int) -> list[Key]:
    w, n = a["num_draft_tokens"], int(a["prefix_lens"][r])
    last = int(a["positions"][r * w : (r + 1) * w].max())
    return [key for key in oracle.verify_keys(a, r, i) if key[0] >= last - a["window"] or key[0] >= n]


def position_off_by_one(a: dict[str, Any], r: int, i: int) -> list[Key]:
    """The query taken to stand one position later than it does."""
    return oracle.verify_keys({**a, "window": a["window"] - 1}, r, i)


def stale_slot(a: dict[str, Any], r: int, i: int) -> list[Key]:
    """The first draft is read from where the request's first token lies: the slot of an earlier step."""
    keys = oracle.verify_keys(a, r, i)
    first = oracle.slot_of(a, r, int(a["prefix_lens"][r]))
    return [(p, oracle.slot_of(a, r, 0) if slot == first else slot) for p, slot in keys]


def shifted_mask(a: dict[str, Any], r: int, i: int) -> list[Key]:
    return oracle.verify_keys({**a, "mask": a["mask"].roll(1, dims=2)}, r, i)


def transposed_mask(a: dict[str, Any], r: int, i: int) -> list[Key]:
    return oracle.verify_keys({**a, "mask": a["mask"].transpose(1, 2).contiguous()}, r, i)


def chain_instead_of_tree(a: dict[str, Any], r: int, i: int) -> list[Key]:
    return oracle.verify_keys({**a, "mask": None, "window": -1}, r, i)


def drafts_counted_in_length(a: dict[str, Any], r: int, i: int) -> list[Key]:
    """prefix_lens taken to include the drafts: the last W prefix tokens are missing."""
    n, w = int(a["prefix_lens"][r]), a["num_draft_tokens"]
    return [key for key in oracle.verify_keys(a, r, i) if not n - w <= key[0] < n]


FAULTS = [
    dropped_prefix_key,
    dropped_self,
    counted_padding_key,
    window_by_index,
    window_of_last_row,
    position_off_by_one,
    stale_slot,
    shifted_mask,
    transposed_mask,
    chain_instead_of_tree,
    drafts_counted_in_length,
]


def case(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    a = build_verify(BASE.but(seed=seed, q_dtype=dtype, cache_dtype=dtype))
    zero = torch.zeros(1, *a["k_cache"].shape[1:], dtype=dtype), torch.zeros(1, *a["v_cache"].shape[1:], dtype=dtype)
    a["k_cache"], a["v_cache"] = torch.cat([a["k_cache"], zero[0]]), torch.cat([a["v_cache"], zero[1]])
    return a


def compare(a: dict[str, Any], expected: oracle.Expected, relative: float) -> None:
    lse_dtype = torch.float32 if relative else torch.float64
    lse = torch.empty(len(a["q"]), a["q"].shape[1], dtype=lse_dtype)
    oracle.assert_matches(verify_attention(**a, lse=lse), lse, expected, relative=relative)


#: FP64, as the reference has it, and bf16 under the bound of a kernel that rounds its weights to bf16.
BOUNDS = [(torch.float64, 0.0), (torch.bfloat16, 2.0**-8)]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "relative"), BOUNDS, ids=["fp64", "bf16"])
def test_without_a_fault_it_passes(seed: int, dtype: torch.dtype, relative: float) -> None:
    a = case(seed, dtype)
    compare(a, oracle.verify(a), relative)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "relative"), BOUNDS, ids=["fp64", "bf16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_rejected(fault: Callable[..., list[Key]], dtype: torch.dtype, relative: float, seed: int) -> None:
    a = case(seed, dtype)
    faulty = oracle.verify({**a, "zero_slot": len(a["k_cache"]) - 1}, fault)
    with pytest.raises(AssertionError, match=r"elements off|without a visible key"):
        compare(a, faulty, relative)


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize(("dtype", "relative"), BOUNDS, ids=["fp64", "bf16"])
def test_missing_or_doubled_sink_is_rejected(dtype: torch.dtype, relative: float, times: int) -> None:
    a = case(4, dtype)
    with pytest.raises(AssertionError, match=r"out: .* elements off"):
        compare(a, oracle.verify(a, sink_times=times), relative)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "softcap", "sm_scale"])
@pytest.mark.parametrize(("dtype", "relative"), BOUNDS, ids=["fp64", "bf16"])
def test_ignored_factor_is_rejected(dtype: torch.dtype, relative: float, name: str) -> None:
    a = {**case(5, dtype), "k_scale": 0.5, "v_scale": 2.0, "softcap": 1.5, "sm_scale": 1.0}
    ignored = {"k_scale": 1.0, "v_scale": 1.0, "softcap": 0.0, "sm_scale": None}
    compare(a, oracle.verify(a), relative)
    with pytest.raises(AssertionError, match="elements off"):
        compare(a, oracle.verify({**a, name: ignored[name]}), relative)


def test_every_fault_changes_a_visible_set() -> None:
    """A control that alters nothing would pass or fail for another reason."""
    a = {**case(1, torch.float64), "zero_slot": 0}
    for fault in FAULTS:
        assert any(fault(a, r, i) != oracle.verify_keys(a, r, i) for r in range(2) for i in range(8)), fault.__name__
