"""Compaction, gather suffix and merge together against verify attention as one operation, all in FP64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels import verify_attention_reference
from sglang_specverify.kernels.compact import compact_visible_slots
from sglang_specverify.kernels.gather_suffix import gather_suffix_merge, gather_suffix_merge_reference
from sglang_specverify.kernels.merge import merge_states, merge_states_reference

from .cases import Config, build_verify

CONFIGS = {
    "bool": Config(kind="qlen_only"),
    "deep": Config(kind="qlen_only", widths=12, prefix_lens=(7, 0, 30), seed=1),
    "full_mask": Config(kind="full_mask", widths=7, mask_dtype=torch.uint8, seed=2),
    "pages": Config(kind="qlen_only", page_size=4, slot_map=True, seed=3),
    "cap and sinks": Config(kind="full_mask", softcap=2.0, sinks=True, q_heads=6, kv_heads=2, seed=4),
    "fp8": Config(kind="qlen_only", cache_dtype=torch.float8_e4m3fn, k_scale="heads", v_scale="scalar", kv_heads=2, seed=5),
    "no prefix": Config(kind="qlen_only", prefix_lens=(0, 0), sinks=True, seed=6),
    "padding": Config(kind="qlen_only", pad_rows=3, strided=True, v_head_dim=5, seed=7),
}


def prefix_pass(a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a FlashAttention pass over the prefix leaves: no sinks, no drafts, NaN in rows that see nothing."""
    w, lens = a["num_draft_tokens"], a["prefix_lens"].tolist()
    offsets = torch.tensor([0, *(w * (n + w) for n in lens)]).cumsum(0)
    hidden = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    nothing = {"mask": hidden, "mask_layout": "full_mask", "mask_offsets": offsets, "sinks": None}
    rows, heads, dim = len(a["q"]), a["q"].shape[1], a["v_cache"].shape[2]
    out = torch.full((rows, heads, dim), torch.nan, dtype=torch.float64)
    lse = torch.full((rows, heads), torch.nan, dtype=torch.float64)
    verify_attention_reference(**{**a, **nothing}, out=out, lse=lse)
    out[lse == -torch.inf] = torch.nan
    return out, lse


def suffix_path(a: dict[str, Any], operation: Any = gather_suffix_merge_reference) -> tuple[torch.Tensor, torch.Tensor]:
    bs, w = len(a["prefix_lens"]), a["num_draft_tokens"]
    slots = torch.full((bs * w, w), -7, dtype=torch.int32)
    lens = torch.full((bs * w,), -7, dtype=torch.int32)
    names = ("mask", "table", "row_ids", "prefix_lens", "num_draft_tokens", "mask_layout", "page_size", "slot_map")
    compact_visible_slots(**{n: a[n] for n in names}, mask_offsets=a.get("mask_offsets"), out_slots=slots, out_lens=lens)
    depth = int(lens.max())
    options = {n: a[n] for n in ("k_scale", "v_scale", "sm_scale", "softcap", "sinks")}
    out, lse = prefix_pass(a)
    got = operation(a["q"], a["k_cache"], a["v_cache"], slots[:, :depth], lens, out, lse, **options)
    return got[0][: bs * w], got[1][: bs * w]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("operation", [gather_suffix_merge, gather_suffix_merge_reference])
def test_equals_verify_attention(name: str, operation: Any) -> None:
    """The same scores, weights and sums in another order: equal but for FP64 rounding."""
    a = build_verify(CONFIGS[name])
    out, lse = suffix_path(a, operation)
    rows, heads, dim = len(a["q"]), a["q"].shape[1], a["v_cache"].shape[2]
    want, want_lse = torch.empty(rows, heads, dim, dtype=torch.float64), torch.empty(rows, heads, dtype=torch.float64)
    verify_attention_reference(**a, out=want, lse=want_lse)
    torch.testing.assert_close(out, want[: len(out)], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse[: len(lse)], rtol=1e-12, atol=1e-12)


def test_a_wrong_ancestor_is_noticed() -> None:
    """Negative control: without one bit of the mask the two differ."""
    a = build_verify(CONFIGS["deep"])
    want, _ = suffix_path(a)
    mask = a["mask"].clone()
    mask[2, 5, 5] = False
    got, _ = suffix_path({**a, "mask": mask})
    assert torch.equal(got[:29], want[:29]) and torch.equal(got[30:], want[30:])
    assert bool(((got - want).abs() > 1e-6)[29].any())


def test_merging_halves_of_the_keys() -> None:
    """The reference of `merge_states` on two halves of a batch's prefixes against the whole."""
    gen = torch.Generator().manual_seed(8)
    scores, values = torch.randn(5, 3, 40, generator=gen).double() * 5, torch.randn(40, 8, generator=gen).double()
    halves = [(part.softmax(-1) @ v, part.logsumexp(-1)) for part, v in zip(scores.split(17, -1), values.split(17), strict=True)]
    state = merge_states_reference(*halves[0], *halves[1])
    out, lse = merge_states_reference(*state, *halves[2])
    torch.testing.assert_close(out, scores.softmax(-1) @ values, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)


def test_a_device_that_nothing_serves() -> None:
    """Meta tensors are checked and then refused by name: nothing falls into a PyTorch error."""
    out, lse = torch.empty(2, 2, 8, device="meta"), torch.empty(2, 2, device="meta")
    with pytest.raises(SpecverifyError, match="no kernel for meta tensors"):
        merge_states(out, lse, out, lse)
