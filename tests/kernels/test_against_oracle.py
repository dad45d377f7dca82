"""The FP64 reference equals a key-by-key computation in Python floats, over the whole range of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_specverify.kernels import draft_decode_attention, verify_attention

from . import oracle
from .cases import Config, build_draft, build_verify

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@st.composite
def configs(draw: Any, kinds: tuple[str, ...] = ("chain", "qlen_only", "full_mask")) -> Config:
    kind = draw(st.sampled_from(kinds))
    bs = draw(st.integers(1, 3))
    widths: Any = draw(st.integers(1, 6))
    if kind != "qlen_only" and draw(st.booleans()):
        widths = tuple(draw(st.lists(st.integers(0, 6), min_size=bs, max_size=bs)))
    kv_heads = draw(st.sampled_from([1, 2]))
    scales = st.sampled_from([1.0, 0.5, "scalar", "heads"])
    return Config(
        seed=draw(st.integers(0, 10**6)),
        prefix_lens=tuple(draw(st.lists(st.integers(0, 11), min_size=bs, max_size=bs))),
        widths=widths,
        kind=kind,
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(st.sampled_from([1, 4, 7])),
        v_head_dim=draw(st.sampled_from([1, 3, 8])),
        page_size=draw(st.sampled_from([1, 2, 3, 4, 16])),
        window=draw(st.sampled_from([-1, -1, 0, 1, 3, 7, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sinks=draw(st.booleans()),
        q_dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=draw(st.sampled_from(FLOATS + FP8)),
        k_scale=draw(scales),
        v_scale=draw(scales),
        sm_scale=draw(st.sampled_from([None, 1.0, 5.0])),
        strided=draw(st.booleans()),
        slot_map=draw(st.booleans()),
        mask_dtype=draw(st.sampled_from([torch.bool, torch.uint8])),
        flat_mask=draw(st.booleans()),
        pad_rows=draw(st.integers(0, 3)),
    )


def outputs(a: dict[str, Any], dtype: torch.dtype, strided: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Guard-filled outputs; with `strided` the LSE is a view [T, Hq] of [Hq, T], as FlashAttention has it."""
    rows, heads, dim = len(a["q"]), a["q"].shape[1], a["v_cache"].shape[2]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.full((rows, heads + strided, dim + 2 * strided), 77.0, dtype=dtype)[:, :heads, :dim]
    lse = torch.full((heads, rows), 77.0, dtype=lse_dtype).T if strided else torch.full((rows, heads), 77.0, dtype=lse_dtype)
    return out, lse


def check(operation: Any, a: dict[str, Any], expected: oracle.Expected, dtype: torch.dtype, strided: bool) -> None:
    out, lse = outputs(a, dtype, strided)
    got = operation(**a, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    oracle.assert_matches(out, lse, expected)
    padding = [row for row in range(len(out)) if row not in expected.keys]
    assert (out[padding] == 77.0).all() and (lse[padding] == 77.0).all(), "a padding row was written"


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(config=configs(), dtype=st.sampled_from(FLOATS))
def test_verify(config: Config, dtype: torch.dtype) -> None:
    a = build_verify(config)
    check(verify_attention, a, oracle.verify(a), dtype, config.strided)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(config=configs(("branches",)), topk=st.integers(1, 4), step=st.integers(0, 3), dtype=st.sampled_from(FLOATS))
def test_draft_decode(config: Config, topk: int, step: int, dtype: torch.dtype) -> None:
    a = build_draft(config, topk=topk, step=step, steps=step + 2)
    check(draft_decode_attention, a, oracle.draft_decode(a), dtype, config.strided)


@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
@pytest.mark.parametrize("prefix_lens", [(200, 40), (0, 0), (0, 63), (1, 129)])
def test_uneven_and_empty_prefixes(kind: str, prefix_lens: tuple[int, ...]) -> None:
    a = build_verify(Config(seed=5, prefix_lens=prefix_lens, widths=3, kind=kind, head_dim=4, v_head_dim=2, page_size=16))
    check(verify_attention, a, oracle.verify(a), torch.float64, False)


@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_rows_in_blocks(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A call too large for one block of scores gives the same numbers."""
    from sglang_specverify.kernels import reference

    a = build_verify(Config(seed=6, widths=6, kind="qlen_only", window=4))
    monkeypatch.setattr(reference, "MAX_SCORES", limit)
    check(verify_attention, a, oracle.verify(a), torch.float64, False)


def test_defaults() -> None:
    """New outputs: q's type, FP32 LSE, padding rows that hold 0 and -inf; alone or as a pair."""
    c = Config(seed=7, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16, pad_rows=2)
    a = build_verify(c)
    out, lse = verify_attention(**a, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    oracle.assert_matches(out, lse, oracle.verify(a))
    assert not out[-2:].any() and (lse[-2:] == -torch.inf).all()
    alone = verify_attention(**a)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out)
    given_lse = torch.zeros(len(out), 2)
    verify_attention(**a, lse=given_lse)
    assert torch.equal(given_lse[:-2], lse[:-2]), "an LSE buffer is written whether or not it is returned"


def test_scale_is_inverse_root_of_head_dim() -> None:
    a = build_verify(Config(seed=8, head_dim=16))
    assert torch.equal(verify_attention(**a), verify_attention(**{**a, "sm_scale": 0.25}))
