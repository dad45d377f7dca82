"""`tree_suffix_merge` equals the prefix's result, as represented, merged exactly with the drafts' exact attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.kernels import tree_suffix_merge
from sglang_specverify.kernels.plan import Plan
from tests.kernels.cases import Config

from .bounds import call_reference, compare, expect_merged
from .calls import (
    copy_of,
    guarded,
    guarded_lse,
    launches,
    names,
    own_rows,
    prefix_arguments,
    prefix_state,
    suffix_arguments,
    to_device,
)
from .strategies import FP8, LSE_LAYOUTS, configs, verify_call

BASE = Config(
    prefix_lens=(37, 0, 5), widths=6, kind="qlen_only", q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32, page_size=4,
    sinks=True, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16, pad_rows=2,
)  # fmt: skip


def merge(a: dict[str, Any], out: torch.Tensor, lse: torch.Tensor, plan: Plan | None = None) -> None:
    tensors = [a[name] for name in ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")]
    ours = ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")
    tree_suffix_merge(*tensors, out, lse, **{name: value for name, value in a.items() if name not in ours}, plan=plan)


def check_merge(
    a: dict[str, Any], *, out_dtype: torch.dtype | None = None, strided: bool = False, lse_layout: str = "rows",
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Merge into guarded buffers that hold the prefix's state, or `state`; padding rows keep their poison."""
    rows, heads, _ = a["q"].shape
    device, real = a["q"].device.type, own_rows(a)
    before = state or prefix_state(a, out_dtype or a["q"].dtype)
    out = guarded(rows, heads, a["v_cache"].shape[2], before[0].dtype, device, strided=strided)
    lse = guarded_lse(rows, heads, device, layout=lse_layout)
    out.view[real], lse.view[real] = before[0][real], before[1][real]
    merge(a, out.view, lse.view)
    compare(a, out.view, lse.view, expected=expect_merged(a, suffix_arguments(a), *before))
    assert out.untouched(real) and lse.untouched(real)


@given(
    c=configs(),
    strided=st.booleans(),
    lse_layout=st.sampled_from(LSE_LAYOUTS),
    out_dtype=st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32]),
)
def test_merge(device: str, c: Config, strided: bool, lse_layout: str, out_dtype: torch.dtype | None) -> None:
    check_merge(to_device(verify_call(c), device), out_dtype=out_dtype, strided=strided, lse_layout=lse_layout)


@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
@pytest.mark.parametrize("window", [-1, 0, 3, 20])
def test_prefix_and_drafts_are_the_whole(device: str, kind: str, window: int) -> None:
    """The two parts that these tests are built of, merged in FP64, are the undivided reference: no key is in both or none."""
    a = to_device(verify_call(BASE.but(kind=kind, window=window, sinks=False, seed=1)), device)
    parts = [call_reference(prefix_arguments(a)), call_reference(suffix_arguments(a))]
    want = call_reference(a)
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum((part[1] - lse).exp()[..., None] * part[0] for part in parts)
    real = own_rows(a)
    torch.testing.assert_close(out[real], want[0][real], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[real], want[1][real], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cache", FP8, ids=str)
@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
def test_fp8(device: str, kind: str, cache: torch.dtype) -> None:
    check_merge(to_device(verify_call(BASE.but(kind=kind, cache_dtype=cache, k_scale=0.5, v_scale="heads")), device))


@pytest.mark.parametrize("w", [1, 16, 17, 64])
@pytest.mark.parametrize("group", [1, 5])
def test_widths(device: str, group: int, w: int) -> None:
    check_merge(to_device(verify_call(BASE.but(widths=w, prefix_lens=(9,), q_heads=group, kv_heads=1)), device))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["chain", "qlen_only"])
def test_rows_whose_prefix_is_empty(device: str, kind: str, sinks: bool) -> None:
    """LSE -inf: whatever stands in the output is not read, NaN too."""
    a = to_device(verify_call(BASE.but(kind=kind, sinks=sinks, prefix_lens=(0, 0, 0))), device)
    out, lse = prefix_state(a, torch.bfloat16)
    assert (lse[own_rows(a)] == -math.inf).all()
    check_merge(a, state=(torch.full_like(out, torch.nan), lse))


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_no_draft(device: str, sinks: bool) -> None:
    """The prefix's result stays, but for the sink; without prefix too the result is 0 and -inf."""
    a = to_device(verify_call(BASE.but(sinks=sinks)), device)
    mask = copy_of(a, "mask")
    mask[0, 1], mask[1] = 0, 0
    before = prefix_state(a, torch.bfloat16)
    check_merge(a)
    out, lse = before[0].clone(), before[1].clone()
    merge(a, out, lse)
    assert not out[6:12].any() and (lse[6:12] == -math.inf).all()
    if not sinks:
        # Through base 2 and back, and a division: not always the same bit.
        torch.testing.assert_close(out[1], before[0][1], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("blind", [False, True])
def test_prefix_lse_of_plus_infinity_marks_an_empty_prefix(device: str, blind: bool, sinks: bool) -> None:
    """FlashAttention 2 marks a row without keys with +inf: it weighs nothing, as in `merge_states`, and is not read."""
    a = to_device(verify_call(BASE.but(sinks=sinks)), device)
    if blind:
        copy_of(a, "mask")[0] = 0
    out, lse = prefix_state(a, torch.bfloat16)
    out[:6], lse[:6] = torch.nan, -math.inf
    expected = expect_merged(a, suffix_arguments(a), out, lse)
    lse[:6] = math.inf
    merge(a, out, lse)
    compare(a, out, lse, expected=expected)


@pytest.mark.parametrize("size", [80.0, -80.0, 1e4, -1e4])
def test_parts_of_very_different_weight(device: str, size: float) -> None:
    """A prefix whose LSE is far above or far below the drafts'."""
    a = to_device(verify_call(BASE), device)
    out, lse = prefix_state(a, torch.bfloat16)
    check_merge(a, state=(out, lse + size))


def test_one_launch_and_one_for_the_mask(device: str) -> None:
    for kind, wanted in (("chain", []), ("qlen_only", ["plan_kernel"]), ("full_mask", ["plan_kernel"])):
        a = to_device(verify_call(BASE.but(kind=kind)), device)
        with launches() as seen:
            check_merge(a)
        assert names(seen) == [*wanted, "verify_attention_kernel"]
        assert seen[-1].constants["MERGE"] is True


def test_poison_in_the_prefix_and_in_padding_slots(device: str) -> None:
    """No key of the prefix is read, nor a slot that nobody owns."""
    a = to_device(verify_call(BASE), device)
    out, lse = prefix_state(a, torch.bfloat16)
    want = out.clone(), lse.clone()
    merge(a, *want)
    k, v = copy_of(a, "k_cache"), copy_of(a, "v_cache")
    table, page = a["table"], a["page_size"]
    for position in range(37):
        slot = int(table[int(a["row_ids"][0]), position // page]) * page + position % page
        k[slot], v[slot] = torch.nan, torch.nan
    merge(a, out, lse)
    real = own_rows(a)
    assert torch.equal(out[real], want[0][real]) and torch.equal(lse[real], want[1][real])
