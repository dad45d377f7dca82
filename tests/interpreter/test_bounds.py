"""The bounds are what `bounds.py` says, by the key-by-key oracle of `tests/kernels`, and neither loose nor blind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels import oracle
from tests.kernels.cases import Config, build_draft, build_verify

from .bounds import ROUNDOFF, compare, expect, worst

BASE = Config(
    prefix_lens=(9, 0, 30), widths=5, kind="qlen_only", q_heads=4, kv_heads=2, head_dim=16, v_head_dim=8, page_size=4, window=12,
    sinks=True, k_scale="heads", v_scale="scalar", sm_scale=0.5, pad_rows=2,
)  # fmt: skip

CASES = {
    "tree": BASE,
    "capped": BASE.but(softcap=3.0, window=-1),
    "chain": BASE.but(kind="chain", sinks=False),
    "fp8": BASE.but(cache_dtype=torch.float8_e4m3fn),
    "branches": BASE.but(kind="branches"),
}


def build(c: Config, dtype: torch.dtype) -> tuple[dict[str, Any], oracle.Expected]:
    c = c.but(q_dtype=dtype, cache_dtype=dtype if c.cache_dtype == torch.float64 else c.cache_dtype)
    if c.kind == "branches":
        a = build_draft(c, topk=5, step=1, steps=2)
        return a, oracle.draft_decode(a)
    a = build_verify(c)
    return a, oracle.verify(a)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_same_as_key_by_key(name: str, dtype: torch.dtype) -> None:
    """Result and sensitivity are equal, and both bounds lie between the least that the formulas allow and little more."""
    a, exact = build(CASES[name], dtype)
    got = expect(a)
    assert torch.equal(got.lse.isnan(), exact.lse.isnan()) and got.lse[-2:].isnan().all()
    for ours, theirs in ((got.out, exact.out), (got.lse, exact.lse), (got.sensitivity, exact.sensitivity)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, equal_nan=True)
    seen = exact.lse > -math.inf
    delta = 1e-5 + 2.0**-21 * exact.score_size[seen]
    assert (got.lse_bound[seen] >= delta * (1 - 1e-9)).all()
    assert (got.lse_bound[seen] <= delta + 2.0**-21 * math.log(40) / 64).all()
    least = (ROUNDOFF[dtype][0] + 2 * delta)[:, None] * exact.sensitivity[seen]
    assert (got.out_bound[seen] >= least).all()
    # 40 keys: c(n) is 2**-14, what FP16 loses near 0 is 2**-25 * 40 of the mean |v|.
    most = least * 1.05 + 2.0**-13 * exact.sensitivity[seen] + 1e-5
    assert (got.out_bound[seen] <= most).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exact_results_pass_and_larger_errors_do_not(dtype: torch.dtype) -> None:
    a, _ = build(BASE, dtype)
    expected = expect(a)
    out, lse = expected.out.to(dtype), expected.lse.float()
    assert compare(a, out, lse, expected=expected) < 0.6, "the rounding to the output's type is about half of the bound"
    for row, element in ((0, 0), (7, 3), (14, 7)):
        off = out.clone()
        off[row, 1, element] += 1.1 * (2 * ROUNDOFF[dtype][0] * 4 * expected.sensitivity[row, 1, element]).to(dtype)
        with pytest.raises(AssertionError, match=rf"out\[{row}, 1, {element}\]"):
            compare(a, off, lse, expected=expected)
        off_lse = lse.clone()
        off_lse[row, 2] += 1.1 * float(expected.lse_bound[row, 2]) + 1e-6
        with pytest.raises(AssertionError, match=rf"lse\[{row}, 2\]"):
            compare(a, out, off_lse, expected=expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_no_number_is_never_within_a_bound(value: float) -> None:
    a, _ = build(BASE, torch.bfloat16)
    expected = expect(a)
    out, lse = expected.out.bfloat16(), expected.lse.float()
    out[3, 1, 2] = value
    assert worst(out, lse, expected)[0] == math.inf
    out[3, 1, 2], lse[3, 1] = expected.out[3, 1, 2], value
    assert worst(out, lse, expected)[0] == math.inf


def test_rows_that_see_nothing_must_be_exact() -> None:
    a, _ = build(BASE.but(prefix_lens=(0, 3, 5)), torch.bfloat16)
    a["mask"][0, 1] = False
    expected = expect(a)
    out, lse = expected.out.bfloat16(), expected.lse.float()
    assert not out[1].any() and (lse[1] == -math.inf).all()
    compare(a, out, lse, expected=expected)
    for wrong_out, wrong_lse in ((1e-30, -math.inf), (0.0, -1e30)):
        out[1, 0, 0], lse[1, 0] = wrong_out, wrong_lse
        assert worst(out, lse, expected)[0] == math.inf


def test_padding_rows_are_not_compared() -> None:
    a, _ = build(BASE, torch.bfloat16)
    expected = expect(a)
    out, lse = expected.out.bfloat16(), expected.lse.float()
    out[-2:], lse[-2:] = 77.0, 77.0
    compare(a, out, lse, expected=expected)
