"""The comparison rejects faulty kernels. Each fault is put into what a right kernel is given, or into what it gave back.

The first group alters a call so that the kernel computes what a faulty one would have computed from the unaltered call,
and compares with the unaltered call. The second alters plans, partial results and merges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels import oracle
from tests.kernels.cases import Config

from .bounds import compare, expect, expect_merged
from .calls import call, copy_of, one_table, prefix_state, suffix_arguments, to_device
from .plans import divided, items, partial_states
from .strategies import verify_call

Arguments = dict[str, Any]

#: Prefixes of several blocks, windows that cut inside prefix and tree, sinks, pages.
BASE = Config(
    prefix_lens=(70, 33), widths=8, kind="qlen_only", q_heads=4, kv_heads=2, window=20, sinks=True, page_size=4, head_dim=16,
    v_head_dim=16, sm_scale=0.25,
)  # fmt: skip

DTYPES = [torch.bfloat16, torch.float16]


def base(seed: int, dtype: torch.dtype, device: str) -> Arguments:
    a = verify_call(BASE.but(seed=seed, q_dtype=dtype, cache_dtype=dtype))
    zeros = {name: torch.zeros(8, *a[name].shape[1:], dtype=dtype) for name in ("k_cache", "v_cache")}
    a |= {name: torch.cat([a[name], zero]) for name, zero in zeros.items()}
    return to_device(a, device)


def zero_page(a: Arguments) -> int:
    """A page of the cache that is all zeros, as a padded tile is."""
    return len(a["k_cache"]) // a["page_size"] - 1


def dropped_prefix_key(a: Arguments) -> Arguments:
    """The last token of a prefix is left out: a shorter length whose drafts come from the same slots."""
    full = one_table(a)
    for r, n in enumerate(a["prefix_lens"].tolist()):
        row = full["table"][r]
        row[n - 1 : -1] = row[n:].clone()
    return {**full, "prefix_lens": a["prefix_lens"] - 1, "positions": a["positions"] - 1}


def counted_padding_key(a: Arguments) -> Arguments:
    """One column past a prefix, all zeros, takes part."""
    full = one_table(a)
    for r, n in enumerate(a["prefix_lens"].tolist()):
        row = full["table"][r]
        row[n + 1 :] = row[n:-1].clone()
        row[n] = zero_page(a) * a["page_size"]
    return {**full, "prefix_lens": a["prefix_lens"] + 1, "positions": a["positions"] + 1, "window": a["window"] + 1}


def window_by_index(a: Arguments) -> Arguments:
    positions = copy_of(a, "positions")
    w = a["num_draft_tokens"]
    for r, n in enumerate(a["prefix_lens"].tolist()):
        positions[r * w : (r + 1) * w] = torch.arange(n, n + w)
    return a


def window_of_last_row(a: Arguments) -> Arguments:
    positions, w = copy_of(a, "positions"), a["num_draft_tokens"]
    for r in range(len(a["prefix_lens"])):
        positions[r * w : (r + 1) * w] = positions[r * w : (r + 1) * w].max()
    return a


def window_off_by_one(a: Arguments) -> Arguments:
    return {**a, "window": a["window"] - 1}


def stale_slot(a: Arguments) -> Arguments:
    """The first draft is read from the slot of the request's last token but one of an earlier step."""
    full = one_table(a)
    for r, n in enumerate(a["prefix_lens"].tolist()):
        full["table"][r, n] = full["table"][r, n - 2]
    return full


def missing_sink(a: Arguments) -> Arguments:
    return {**a, "sinks": None}


def doubled_sink(a: Arguments) -> Arguments:
    """As when each of two splits adds it: exp(sink) twice."""
    return {**a, "sinks": a["sinks"] + torch.log(torch.tensor(2.0))}


def sink_scaled(a: Arguments) -> Arguments:
    """The sink scaled as if it were a score before scaling."""
    return {**a, "sinks": a["sinks"] * a["sm_scale"]}


def transposed_mask(a: Arguments) -> Arguments:
    return {**a, "mask": a["mask"].transpose(1, 2).contiguous()}


def shifted_mask(a: Arguments) -> Arguments:
    return {**a, "mask": a["mask"].roll(1, 2)}


def chain_instead_of_tree(a: Arguments) -> Arguments:
    return {**a, "mask": None, "positions": None}


def head_of_the_next_group(a: Arguments) -> Arguments:
    return {**a, "q": a["q"].roll(1, 1)}


FAULTS = [
    dropped_prefix_key, counted_padding_key, window_by_index, window_of_last_row, window_off_by_one, stale_slot, missing_sink,
    doubled_sink, sink_scaled, transposed_mask, shifted_mask, chain_instead_of_tree, head_of_the_next_group,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_fault_it_passes(device: str, seed: int, dtype: torch.dtype) -> None:
    a = base(seed, dtype, device)
    compare(a, *call(a))
    full = one_table(a)
    compare(a, *call(full))


@pytest.mark.parametrize(("seed", "dtype"), list(enumerate(DTYPES, 1)))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_in_a_call_is_rejected(device: str, fault: Callable[[Arguments], Arguments], seed: int, dtype: torch.dtype) -> None:
    a = base(seed, dtype, device)
    faulty = fault(dict(a))
    out, lse = call(faulty)
    compare(faulty, out, lse)  # the kernel did what it was given
    with pytest.raises(AssertionError, match="times its bound"):
        compare(a, out, lse)


def test_oracle_agrees_that_the_faults_are_faults(device: str) -> None:
    """Independently of the package: each fault moves a result by more than rounding."""
    a = to_device(base(1, torch.bfloat16, device), "cpu")
    want = oracle.verify(a)
    for fault in FAULTS:
        got = oracle.verify(fault(dict(a)))
        assert (got.out - want.out).abs().max() > 0.01, fault.__name__


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "softcap", "sm_scale"])
def test_ignored_factor_is_rejected(device: str, name: str) -> None:
    a = {**base(5, torch.bfloat16, device), "k_scale": 0.5, "v_scale": 2.0, "softcap": 1.5, "sm_scale": 1.0}
    compare(a, *call(a))
    ignored = {"k_scale": 1.0, "v_scale": 1.0, "softcap": 0.0, "sm_scale": None}
    with pytest.raises(AssertionError, match="times its bound"):
        compare(a, *call({**a, name: ignored[name]}))


LONG = BASE.but(prefix_lens=(300, 140), window=-1, sinks=False)


def split_call(device: str) -> Arguments:
    return to_device(verify_call(LONG.but(seed=1, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)), device)


def skipped_split(words: torch.Tensor) -> None:
    """A part in the middle that reads nothing."""
    words[1, 2] = words[1, 1]


def split_counted_twice(words: torch.Tensor) -> None:
    """A part that reads the keys of the part before it."""
    words[1, 1:3] = words[0, 1:3]


def split_that_overlaps(words: torch.Tensor) -> None:
    words[1, 1] -= 128


def split_that_starts_late(words: torch.Tensor) -> None:
    words[1, 1] += 1


@pytest.mark.parametrize("fault", [skipped_split, split_counted_twice, split_that_overlaps, split_that_starts_late])
def test_fault_in_a_plan_is_rejected(device: str, fault: Callable[[torch.Tensor], None]) -> None:
    a = split_call(device)
    good = divided(a, [[0, 128, 256], [0, 128]])
    compare(a, *call(a, variant="fused_split", plan=good), splits=3)
    bad = divided(a, [[0, 128, 256], [0, 128]])
    fault(items(bad))
    with pytest.raises(AssertionError, match=r"times its bound: (out|lse)\[[0-7], "):
        compare(a, *call(a, variant="fused_split", plan=bad), splits=3)


def equal_weights(weights: torch.Tensor) -> torch.Tensor:
    return torch.full_like(weights, 1 / len(weights))


def swapped_weights(weights: torch.Tensor) -> torch.Tensor:
    return weights.flip(0)


def weights_in_the_wrong_base(weights: torch.Tensor) -> torch.Tensor:
    """exp2 of natural logarithms."""
    powers = weights ** float(torch.log(torch.tensor(2.0)))
    return powers / powers.sum(0)


@pytest.mark.parametrize("fault", [None, equal_weights, swapped_weights, weights_in_the_wrong_base])
def test_wrong_weights_of_a_combination_are_rejected(device: str, fault: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """The results of three splits put together here: right passes, each wrong weighting does not."""
    a = split_call(device)
    expected = expect(a, splits=3)
    outs, lses = partial_states(a, [0, 100, 290])
    weights = (lses - torch.logsumexp(lses, 0)).exp()
    weights = weights if fault is None else fault(weights)
    out = (weights[..., None] * outs).sum(0).to(torch.bfloat16)
    lse = torch.logsumexp(lses, 0).float()
    if fault is None:
        compare(a, out, lse, expected=expected)
        return
    with pytest.raises(AssertionError, match="times its bound: out"):
        compare(a, out, lse, expected=expected)


def suffix_only(new: Arguments, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return call(new)


def prefix_only(new: Arguments, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out, lse


def sum_of_both(new: Arguments, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    other, other_lse = call(new)
    return out + other, torch.logaddexp(lse, other_lse)


def mean_of_both(new: Arguments, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    other, other_lse = call(new)
    return (out + other) / 2, torch.logaddexp(lse, other_lse)


@pytest.mark.parametrize("fault", [suffix_only, prefix_only, sum_of_both, mean_of_both])
def test_wrong_merge_is_rejected(device: str, fault: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    a = to_device(verify_call(replace(BASE, window=-1, seed=3, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)), device)
    prefix = prefix_state(a, torch.bfloat16)
    suffix = suffix_arguments(a)
    expected = expect_merged(a, suffix, *prefix)
    with pytest.raises(AssertionError, match="times its bound"):
        compare(a, *fault(suffix, *prefix), expected=expected)
