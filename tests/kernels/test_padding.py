"""Padding rows, padded requests, idle batches, poison in what nobody sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.kernels import draft_decode_attention, draft_decode_attention_reference, verify_attention
from sglang_specverify.kernels import verify_attention_reference as reference

from . import oracle
from .cases import Config, build_draft, build_verify


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("operation", [verify_attention, reference, draft_decode_attention, draft_decode_attention_reference])
@pytest.mark.parametrize("with_out", [False, True])
def test_idle_batch(operation: Any, rows: int, with_out: bool) -> None:
    """bs 0: the output comes back, and nothing in it was written."""
    empty = torch.zeros(0, dtype=torch.int32)
    a: dict[str, Any] = {
        "q": torch.zeros(rows, 4, 8, dtype=torch.bfloat16),
        "k_cache": torch.zeros(5, 2, 8, dtype=torch.bfloat16),
        "v_cache": torch.zeros(5, 2, 6, dtype=torch.bfloat16),
        "table": torch.zeros(0, 0, dtype=torch.int32),
        "row_ids": empty,
        "prefix_lens": empty,
    }
    if "draft" in operation.__name__:
        a |= {"draft_slots": torch.zeros(0, 2, 3, dtype=torch.int64), "topk": 2, "step": 0}
    else:
        a |= {"num_draft_tokens": 4, "window": 3, "mask": torch.zeros(0, dtype=torch.bool)}
    given = torch.full((rows, 4, 6), 77.0, dtype=torch.bfloat16) if with_out else None
    out, lse = operation(**a, out=given, return_lse=True)
    assert out.shape == (rows, 4, 6) and lse.shape == (rows, 4)
    if given is not None:
        assert out is given and (out == 77.0).all()


@pytest.mark.parametrize(("rows", "requests", "w"), [(232, 38, 6), (7, 2, 3), (5, 1, 4), (6, 2, 3)])
def test_row_count_that_is_no_multiple_of_w(rows: int, requests: int, w: int) -> None:
    c = Config(seed=1, prefix_lens=tuple(i % 4 for i in range(requests)), widths=w, pad_rows=rows - requests * w)
    a = build_verify(c.but(kind="qlen_only", head_dim=2, v_head_dim=2))
    a["q"][requests * w :] = torch.nan
    out, lse = torch.full((rows, 2, 2), 77.0).double(), torch.full((rows, 2), 77.0).double()
    verify_attention(**a, out=out, lse=lse)
    oracle.assert_matches(out, lse, oracle.verify(a))
    assert (out[requests * w :] == 77.0).all() and (lse[requests * w :] == 77.0).all()


@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
def test_smaller_replay_leaves_stale_rows_alone(kind: str) -> None:
    """Fixed buffers for 4 requests, used with 4 and then with 2: rows of the 2 equal a run of their own."""
    a = build_verify(Config(seed=2, prefix_lens=(3, 5, 0, 8), widths=3, kind=kind))
    out = torch.zeros(12, 2, 8, dtype=torch.float64)
    verify_attention(**a, out=out)
    before = out.clone()
    a["q"] = a["q"].flip(0)
    part = {name: a[name][:2] for name in ("row_ids", "prefix_lens")}
    if kind == "qlen_only":
        part["mask"] = a["mask"][:2]
    if kind == "full_mask":
        part["mask_offsets"] = a["mask_offsets"][:3]
    verify_attention(**{**a, **part}, out=out)
    alone = verify_attention(**{**a, **part, "q": a["q"][:6].clone()})
    assert torch.equal(out[:6], alone) and not torch.equal(out[:6], before[:6])
    assert torch.equal(out[6:], before[6:])


@pytest.mark.parametrize("kind", ["chain", "qlen_only"])
@pytest.mark.parametrize("padded_len", [0, 1])
def test_padded_requests_change_nothing(kind: str, padded_len: int) -> None:
    """A graph's spare requests: prefix 0, or 1 with row 0, any slots that exist; the real ones are bit-equal."""
    a = build_verify(Config(seed=3, prefix_lens=(3, 5), widths=3, kind=kind))
    want = verify_attention(**a)
    table = torch.cat([torch.zeros(1, a["table"].shape[1], dtype=torch.int32), a["table"]])
    padded = {
        "q": torch.cat([a["q"], torch.full((6, 2, 8), torch.nan).double()]),
        "table": table,
        "row_ids": torch.cat([a["row_ids"] + 1, torch.zeros(2, dtype=torch.int32)]),
        "prefix_lens": torch.cat([a["prefix_lens"], torch.full((2,), padded_len)]),
    }
    if kind == "qlen_only":
        padded["mask"] = torch.cat([a["mask"], torch.zeros(2, 3, 3, dtype=torch.bool)])
        padded["positions"] = torch.cat([a["positions"], torch.zeros(6, dtype=torch.int64)])
    got = verify_attention(**{**a, **padded})
    assert torch.equal(got[:6], want)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kind", ["chain", "qlen_only"])
def test_poison_in_slots_that_nobody_sees(kind: str, page_size: int, poison: float) -> None:
    """L 33 of a page of 64: the rest of the page and unused pages hold NaN. Finite, and equal to zeros there."""
    a = build_verify(Config(seed=4, prefix_lens=(33, 15), widths=3, kind=kind, page_size=page_size))
    results = []
    for value in (poison, 0.0):
        caches = {name: torch.where(a[name].isnan(), value, a[name]) for name in ("k_cache", "v_cache")}
        results.append(verify_attention(**{**a, **caches}))
    assert a["v_cache"].isnan().any() and results[0].isfinite().all() and torch.equal(*results)


def apart_by_order(values: torch.Tensor, keys: int) -> float:
    """How far outputs of FP64 lie apart that add the same products in another order, as libraries do on other processors.

    Each sum is within n u sum(w |v|) of the exact one (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and
    weights are 1 in all.
    """
    return 2 * keys * 2.0**-53 * values.nan_to_num(0, 0, 0).abs().max().item()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["k_cache", "v_cache"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_poison_in_a_draft_reaches_only_rows_that_see_it(where: str, poison: float, dtype: torch.dtype) -> None:
    """A node's own K or V is NaN: it and its descendants are, its siblings are not."""
    a = build_verify(Config(seed=5, prefix_lens=(6, 4), widths=6, kind="qlen_only", q_dtype=dtype, cache_dtype=dtype))
    want = verify_attention(**a)
    node = 2
    a[where] = a[where].clone()
    a[where][oracle.slot_of(a, 0, 6 + node)] = poison
    got = verify_attention(**a)
    sees = torch.cat([a["mask"][0, :, node], torch.zeros(6, dtype=torch.bool)])
    assert 0 < sees.sum() < 6
    bad = ~got.flatten(1).isfinite().all(1)
    assert torch.equal(bad & ~sees, torch.zeros_like(bad))
    assert bad[sees].any()
    apart = 0.0 if dtype == torch.bfloat16 else apart_by_order(a["v_cache"], keys=6 + 6)
    torch.testing.assert_close(got[~sees], want[~sees], rtol=0, atol=apart)


def test_poison_in_a_sibling_branch_of_draft_decode() -> None:
    a = build_draft(Config(seed=6, prefix_lens=(6, 4), page_size=4), topk=3, step=1, steps=4)
    want = draft_decode_attention(**a)
    a["v_cache"] = a["v_cache"].clone()
    a["v_cache"][int(a["draft_slots"][0, 1, 0])] = torch.nan
    got = draft_decode_attention(**a)
    assert got[1].isnan().all()
    apart = apart_by_order(a["v_cache"], keys=6 + 2)
    torch.testing.assert_close(got[[0, 2, 3, 4, 5]], want[[0, 2, 3, 4, 5]], rtol=0, atol=apart)


@pytest.mark.parametrize("length", [0, 5, 15])
@pytest.mark.parametrize("topk", [2, 4])
def test_prefix_shorter_than_a_page(length: int, topk: int) -> None:
    a = build_draft(Config(seed=7, prefix_lens=(length,), page_size=16), topk=topk, step=1, steps=2)
    out, lse = draft_decode_attention(**a, return_lse=True)
    oracle.assert_matches(out, lse, oracle.draft_decode(a))


def test_plan_and_workspace_change_nothing() -> None:
    a = build_verify(Config(seed=8))
    want = verify_attention(**a)
    for extra in ({"plan": None}, {"workspace": torch.zeros(8, dtype=torch.uint8)}, {"deterministic": True}):
        for operation in (verify_attention, reference):
            assert torch.equal(operation(**a, **extra), want)


def test_inputs_are_not_written() -> None:
    a = build_verify(Config(seed=9, kind="full_mask", window=3, sinks=True, slot_map=True))
    before = {name: value.clone() for name, value in a.items() if isinstance(value, torch.Tensor)}
    verify_attention(**a)
    for name, value in before.items():
        torch.testing.assert_close(a[name], value, rtol=0, atol=0, equal_nan=True)
