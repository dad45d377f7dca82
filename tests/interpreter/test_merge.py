"""Merging two attention states: against FP64, empty states of both marks, in place, far apart, at far offsets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.merge import merge_states, merge_states_reference
from tests.kernels.cases import generator
from tests.kernels.oracle import rounding

from .calls import guarded, guarded_lse, launches, names, to_device

TYPES = [torch.bfloat16, torch.float16, torch.float32]
EMPTY = [-math.inf, math.inf]
State = tuple[torch.Tensor, torch.Tensor]


def states(
    seed: int, shape: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], device: str, *, spread: float = 2.0,
    empty: float = 0.0, strided: bool = False,
) -> tuple[State, State]:  # fmt: skip
    """Two states of `shape`, a share of `empty` of their rows without keys: LSE of either mark and NaN in the output."""
    gen = generator(seed)
    rows, heads, dim = shape
    made = []
    for kind in types:
        out = torch.randn(rows + 1, heads + strided, dim + 3 * strided, generator=gen).to(kind)[:rows, :heads, :dim]
        lse = (
            (torch.randn(heads, rows, generator=gen) * spread).T if strided else torch.randn(rows, heads, generator=gen) * spread
        )
        marks = torch.tensor(EMPTY)[torch.randint(0, 2, (rows, heads), generator=gen)]
        none = torch.rand(rows, heads, generator=gen) < empty
        lse[none], out[none] = marks[none], math.nan
        made.append((out.to(device), lse.to(device)))
    return made[0], made[1]


def exact(a: State, b: State) -> State:
    """FP64, through log-add-exp and shares, each state's values only where it has keys."""
    lses = [state[1].double().masked_fill(state[1] == math.inf, -math.inf) for state in (a, b)]
    lse = torch.logaddexp(*lses)
    shares = [(one - lse).exp().nan_to_num(0.0)[..., None] for one in lses]
    values = [state[0].double().masked_fill(one[..., None] == -math.inf, 0.0) for state, one in zip((a, b), lses, strict=True)]
    return shares[0] * values[0] + shares[1] * values[1], lse


def bounds(a: State, b: State, out_type: torch.dtype) -> State:
    """What FP32 may be off by.

    The difference of the LSEs is rounded and scaled to base 2: off by 2**-22 of itself, and so is the exponential,
    relatively. The exponential, sum, quotient, products and sum of products add a few 2**-22. The logarithm of a number
    between 1 and 2 is off by at most 2**-22, and its sum with m by half a unit in the last place.
    """
    out, lse = exact(a, b)
    distance = (a[1].double() - b[1].double()).abs().nan_to_num(0.0, posinf=0.0)
    size, _ = exact((a[0].double().abs(), a[1]), (b[0].double().abs(), b[1]))
    weights = (2.0**-19 + 2.0**-22 * distance)[..., None] * size
    return weights + rounding(out.abs() + weights, out_type), 2.0**-21 + 2.0**-23 * lse.abs().nan_to_num(0.0, posinf=0.0)


def assert_merged(got: State, a: State, b: State) -> None:
    (out, lse), want, (out_bound, lse_bound) = got, exact(a, b), bounds(a, b, got[0].dtype)
    empty = want[1] == -math.inf
    assert torch.equal(lse == -math.inf, empty), "rows without keys"
    assert bool((out[empty] == 0).all()), "rows without keys must be 0"
    assert bool(((out.double() - want[0]).abs() <= out_bound).all()), "out is off"
    assert bool(((lse.double() - want[1]).abs() <= lse_bound)[~empty].all()), "lse is off"


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(0, 9), st.integers(1, 5), st.sampled_from([1, 16, 24, 64, 80, 96, 128, 192, 256])),
    types=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    empty=st.sampled_from([0.0, 0.4]),
    strided=st.booleans(),
    layout=st.sampled_from(["rows", "heads", "column"]),
)
def test_against_fp64(
    device: str, seed: int, shape: Any, types: Any, spread: float, empty: float, strided: bool, layout: str
) -> None:
    a, b = states(seed, shape, types, device, spread=spread, empty=empty, strided=strided)
    out = guarded(*shape, types[0], device, strided=strided)
    lse = guarded_lse(shape[0], shape[1], device, layout=layout)
    with launches() as seen:
        got = merge_states(*a, *b, out=out.view, lse=lse.view)
    assert names(seen) == ["merge_states_kernel"]
    assert got[0] is out.view and got[1] is lse.view
    assert_merged(got, a, b)
    everything = torch.ones(shape[0], dtype=torch.bool, device=device)
    assert out.untouched(everything) and lse.untouched(everything), "written beside the outputs"


@pytest.mark.parametrize("first", EMPTY)
@pytest.mark.parametrize("second", EMPTY)
@pytest.mark.parametrize("operation", [merge_states, merge_states_reference])
@pytest.mark.parametrize("kind", TYPES)
def test_two_empty_states(device: str, first: float, second: float, operation: Any, kind: torch.dtype) -> None:
    """Both marks of an empty state, outputs undefined: 0 and -inf, never NaN."""
    nothing = torch.full((3, 2, 40), math.nan, dtype=kind, device=device)
    lses = [torch.full((3, 2), mark, device=device) for mark in (first, second)]
    out, lse = operation(nothing, lses[0], nothing, lses[1])
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("mark", EMPTY)
@pytest.mark.parametrize("empty_first", [True, False])
@pytest.mark.parametrize("operation", [merge_states, merge_states_reference])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("level", [0.0, -76800.0, 1e30])
def test_an_empty_state_changes_nothing(
    device: str, mark: float, empty_first: bool, operation: Any, kind: torch.dtype, level: float
) -> None:
    (out, lse), _ = states(1, (4, 3, 24), (kind, kind), device)
    lse += level
    nothing = (torch.full_like(out, math.nan), torch.full_like(lse, mark))
    pair = (*nothing, out, lse) if empty_first else (out, lse, *nothing)
    got = operation(*pair)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize("operation", [merge_states, merge_states_reference])
def test_a_nan_is_not_hidden(device: str, operation: Any) -> None:
    """An LSE that is NaN is a fault elsewhere, and must not come out as a number."""
    a, b = states(2, (4, 2, 16), (torch.bfloat16, torch.bfloat16), device)
    a[1][1, 0] = math.nan
    a[0][3, 1, 5] = math.nan
    out, lse = operation(*a, *b)
    assert bool(lse[1, 0].isnan()) and bool(out[1, 0].isnan().all())
    assert bool(out[3, 1, 5].isnan()) and int(out.isnan().sum()) == 16 + 1 and int(lse.isnan().sum()) == 1


@pytest.mark.parametrize("distance", [0.0, 1.0, 87.0, 89.0, 104.0, 1e4, 1e38])
@pytest.mark.parametrize("level", [0.0, -76800.0, 3e4])
def test_states_far_apart(device: str, distance: float, level: float) -> None:
    a, b = states(3, (3, 2, 16), (torch.float32, torch.float32), device)
    a[1].fill_(level)
    b[1].fill_(level - distance)
    assert_merged(merge_states(*a, *b), a, b)
    assert_merged(merge_states(*b, *a), a, b)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 24), (130, 8, 128), (1, 1, 1)])
def test_in_place(device: str, kind: torch.dtype, strided: bool, shape: tuple[int, int, int]) -> None:
    """`out` and `lse` may be those of the first state."""
    a, b = states(4, shape, (kind, kind), device, empty=0.2, strided=strided)
    want = merge_states(*a, *b)
    got = merge_states(*a, *b, out=a[0], lse=a[1])
    assert got[0] is a[0] and got[1] is a[1]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_of_a_softmax(device: str, parts: int) -> None:
    """States over parts of the keys merge to the state over all, which nothing here computes by merging."""
    gen = generator(5)
    scores, values = torch.randn(6, 2, 20, generator=gen).double() * 4, torch.randn(20, 16, generator=gen).double()
    state: State = (torch.full((6, 2, 16), math.nan, device=device), torch.full((6, 2), -math.inf, device=device))
    for part in range(parts):
        mine = scores[..., part::parts]
        out = (mine.softmax(dim=-1) @ values[part::parts]).float().to(device)
        state = merge_states(*state, out, mine.logsumexp(dim=-1).float().to(device))
    torch.testing.assert_close(state[0].cpu(), (scores.softmax(dim=-1) @ values).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1].cpu(), scores.logsumexp(dim=-1).float(), rtol=1e-6, atol=1e-6)


def test_the_bound_rejects_wrong_weights(device: str) -> None:
    """Negative controls: equal weights, swapped weights, a state counted twice, an LSE that is the larger of the two."""
    a, b = states(6, (6, 3, 32), (torch.bfloat16, torch.bfloat16), device)
    out, lse = merge_states(*a, *b)
    assert_merged((out, lse), a, b)
    half = ((a[0].float() + b[0].float()) / 2).bfloat16()
    twice = merge_states(out, lse, *b)
    wrong = [(half, lse), (merge_states(a[0], b[1], b[0], a[1])[0], lse), (twice[0], lse), (out, torch.maximum(a[1], b[1]))]
    for state in wrong:
        with pytest.raises(AssertionError, match="is off"):
            assert_merged(state, a, b)


@pytest.mark.parametrize(("rows", "stride"), [(18, 1 << 27), (3, (1 << 31) + 64)])
def test_offsets_beyond_32_bits(device: str, rows: int, stride: int) -> None:
    """Row times stride passes 2**31 elements: bit for bit the same as at low offsets. Only touched pages take memory on a CPU."""
    (out_a, lse_a), b = states(7, (rows, 2, 16), (torch.bfloat16, torch.bfloat16), device)
    far = torch.empty((rows - 1) * stride + 64, dtype=torch.bfloat16, device=device).as_strided((rows, 2, 16), (stride, 16, 1))
    far.copy_(out_a)
    want = merge_states(out_a, lse_a, *b)
    got = merge_states(far, lse_a, *b, out=far)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"out_a": torch.zeros(4, 2, 16, dtype=torch.float64)}, "out_a", "float64"),
    "rank": ({"out_a": torch.zeros(4, 16)}, "out_a", "shape [4, 16]"),
    "other shape": ({"out_b": torch.zeros(4, 2, 17)}, "out_b", "[4, 2, 17]"),
    "lse shape": ({"lse_a": torch.zeros(2, 4)}, "lse_a", "[2, 4]"),
    "lse type": ({"lse_b": torch.zeros(4, 2, dtype=torch.bfloat16)}, "lse_b", "bfloat16"),
    "last stride": ({"out_b": torch.zeros(4, 2, 32)[:, :, ::2]}, "out_b", "last stride 1"),
    "out shape": ({"out": torch.zeros(5, 2, 16)}, "out", "[5, 2, 16]"),
    "out overlaps itself": ({"out": torch.zeros(1, 2, 16).expand(4, 2, 16)}, "out", "no stride 0"),
    "lse overlaps itself": ({"lse": torch.zeros(4, 1).expand(4, 2)}, "lse", "no stride 0"),
    "no tensor": ({"lse_a": 0.0}, "lse_a", "float"),
    "device": ({"out_b": torch.zeros(4, 2, 16, device="meta")}, "out_b", "meta"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(device: str, name: str) -> None:
    changes, argument, text = REFUSALS[name]
    good: dict[str, Any] = {
        "out_a": torch.ones(4, 2, 16, device=device), "lse_a": torch.zeros(4, 2, device=device),
        "out_b": torch.zeros(4, 2, 16, device=device), "lse_b": torch.zeros(4, 2, device=device),
    }  # fmt: skip
    assert bool((merge_states(**good)[0] == 0.5).all())
    with launches() as seen, pytest.raises(ArgumentError) as raised:
        merge_states(**{**good, **(changes if name == "device" else to_device(changes, device))})
    assert raised.value.argument == argument and text in str(raised.value), str(raised.value)
    assert not seen
