"""What `compact_visible_slots` and `gather_suffix_merge` refuse: by name, before any launch, with nothing written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.compact import compact_visible_slots
from sglang_specverify.kernels.gather_suffix import gather_suffix_merge, gather_suffix_merge_reference

from . import compactions, suffixes
from .calls import launches, to_device
from .compactions import GUARD

COMPACT_REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "W 0": ({"num_draft_tokens": 0}, "num_draft_tokens", "at least 1"),
    "W 257": ({"num_draft_tokens": 257}, "num_draft_tokens", "1 to 256"),
    "layout": ({"mask_layout": "guess"}, "mask_layout", "qlen_only or full_mask"),
    "no mask": ({"mask": None}, "mask", "NoneType"),
    "mask type": ({"mask": torch.zeros(75)}, "mask", "float32"),
    "mask short": ({"mask": torch.zeros(74, dtype=torch.bool)}, "mask", "bs*W*W = 75"),
    "mask shape": ({"mask": torch.zeros(3, 5, 6, dtype=torch.bool)}, "mask", "[3, 5, 6]"),
    "mask strided": ({"mask": torch.zeros(150, dtype=torch.bool)[::2]}, "mask", "contiguous"),
    "offsets with qlen_only": ({"mask_offsets": torch.zeros(4, dtype=torch.int64)}, "mask_offsets", "None"),
    "full_mask without offsets": ({"mask_layout": "full_mask"}, "mask_offsets", "NoneType"),
    "offsets type": (
        {"mask_layout": "full_mask", "mask_offsets": torch.zeros(4, dtype=torch.int32)}, "mask_offsets", "int32",
    ),
    "table type": ({"table": torch.zeros(5, 17, dtype=torch.int64)}, "table", "int64"),
    "row_ids length": ({"row_ids": torch.zeros(2, dtype=torch.int32)}, "row_ids", "[2]"),
    "page_size": ({"page_size": 0}, "page_size", "at least 1"),
    "num_rows": ({"num_rows": -1}, "num_rows", "at least 0"),
    "num_rows type": ({"num_rows": torch.tensor([3])}, "num_rows", "int64"),
    "out_slots type": ({"out_slots": torch.zeros(15, 5, dtype=torch.int64)}, "out_slots", "int64"),
    "out_slots rows": ({"out_slots": torch.zeros(14, 5, dtype=torch.int32)}, "out_slots", "bs*W = 15"),
    "out_slots columns": ({"out_slots": torch.zeros(15, 6, dtype=torch.int32)}, "out_slots", "[15, 6]"),
    "out_slots overlaps itself": ({"out_slots": torch.zeros(1, 5, dtype=torch.int32).expand(15, 5)}, "out_slots", "no stride 0"),
    "out_lens rows": ({"out_lens": torch.zeros(14, dtype=torch.int32)}, "out_lens", "bs*W = 15"),
}  # fmt: skip

#: Values are looked at on a CPU only.
COMPACT_VALUES: dict[str, tuple[dict[str, Any], str, str]] = {
    "row_ids": ({"row_ids": torch.tensor([0, 9, 1], dtype=torch.int32)}, "row_ids", "9 for request 1"),
    "prefix_lens": ({"prefix_lens": torch.tensor([3, -1, 9])}, "prefix_lens", "-1 for request 1"),
    "table narrow": ({"prefix_lens": torch.tensor([3, 1, 90])}, "table", "request 2 ends at position 95"),
    "visible draft without a slot": ({"table": torch.full((5, 17), -1, dtype=torch.int32)}, "table", "draft 0 of request 0"),
    "num_rows tensor": ({"num_rows": torch.tensor([-1], dtype=torch.int32)}, "num_rows", "-1"),
}


@pytest.mark.parametrize("name", [*COMPACT_REFUSALS, *COMPACT_VALUES])
def test_compact_refusals(device: str, name: str) -> None:
    if name in COMPACT_VALUES and device != "cpu":
        pytest.skip("on a GPU values are not looked at")
    changes, argument, text = {**COMPACT_REFUSALS, **COMPACT_VALUES}[name]
    outputs = {
        "out_slots": torch.full((15, 5), GUARD, dtype=torch.int32),
        "out_lens": torch.full((15,), GUARD, dtype=torch.int32),
    }
    good = to_device({**compactions.build(compactions.Case()), **outputs}, device)
    compact_visible_slots(**{**good, **{n: v.clone() for n, v in good.items() if n in outputs}})
    with launches() as seen, pytest.raises(ArgumentError) as raised:
        compact_visible_slots(**{**good, **to_device(changes, device)})
    assert raised.value.argument == argument and text in str(raised.value), str(raised.value)
    assert not seen and all(bool((good[n] == GUARD).all()) for n in outputs)


SUFFIX_REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "q type": ({"q": torch.zeros(5, 4, 16, dtype=torch.int32)}, "q", "int32"),
    "q stride": ({"q": torch.zeros(5, 4, 32, dtype=torch.bfloat16)[:, :, ::2]}, "q", "last stride 1"),
    "head ratio": ({"q": torch.zeros(5, 3, 16, dtype=torch.bfloat16)}, "q", "3 query heads for 2 KV heads"),
    "k head dim": ({"k_cache": torch.zeros(17, 2, 17, dtype=torch.bfloat16)}, "k_cache", "[17, 2, 17]"),
    "v slots": ({"v_cache": torch.zeros(18, 2, 16, dtype=torch.bfloat16)}, "v_cache", "[18, 2, 16]"),
    "slots type": ({"suffix_slots": torch.zeros(4, 9, dtype=torch.int64)}, "suffix_slots", "int64"),
    "slots rows": ({"suffix_slots": torch.zeros(5, 9, dtype=torch.int32)}, "suffix_slots", "[5, 9]"),
    "too deep": ({"suffix_slots": torch.zeros(4, 257, dtype=torch.int32)}, "suffix_slots", "256"),
    "lens type": ({"suffix_lens": torch.zeros(4, dtype=torch.int64)}, "suffix_lens", "int64"),
    "more rows than q": (
        {"suffix_lens": torch.zeros(6, dtype=torch.int32), "suffix_slots": torch.zeros(6, 9, dtype=torch.int32)},
        "suffix_lens", "at most the 5 rows of q",
    ),
    "out shape": ({"prefix_out": torch.zeros(5, 4, 17, dtype=torch.bfloat16)}, "prefix_out", "[5, 4, 17]"),
    "out overlaps itself": ({"prefix_out": torch.zeros(1, 4, 16).expand(5, 4, 16)}, "prefix_out", "no stride 0"),
    "lse type": ({"prefix_lse": torch.zeros(5, 4, dtype=torch.bfloat16)}, "prefix_lse", "bfloat16"),
    "lse shape": ({"prefix_lse": torch.zeros(4, 5)}, "prefix_lse", "[4, 5]"),
    "k_scale": ({"k_scale": torch.ones(3)}, "k_scale", "[3]"),
    "v_scale": ({"v_scale": math.nan}, "v_scale", "nan"),
    "sm_scale": ({"sm_scale": math.inf}, "sm_scale", "inf"),
    "softcap": ({"softcap": -1.0}, "softcap", "-1.0"),
    "sinks type": ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks", "float64"),
    "sinks heads": ({"sinks": torch.zeros(2)}, "sinks", "[2]"),
}  # fmt: skip

#: Values are looked at on a CPU only.
SUFFIX_VALUES: dict[str, tuple[dict[str, Any], str, str]] = {
    "longer than deep": ({"suffix_lens": torch.tensor([1, 10, 0, 9], dtype=torch.int32)}, "suffix_lens", "10 for row 1"),
    "slot beyond": ({"suffix_slots": torch.full((4, 9), 17, dtype=torch.int32)}, "suffix_slots", "slot 17"),
}


@pytest.mark.parametrize("name", [*SUFFIX_REFUSALS, *SUFFIX_VALUES])
def test_suffix_refusals(device: str, name: str) -> None:
    if name in SUFFIX_VALUES and device != "cpu":
        pytest.skip("on a GPU values are not looked at")
    changes, argument, text = {**SUFFIX_REFUSALS, **SUFFIX_VALUES}[name]
    good = to_device(suffixes.build(suffixes.Case()), device)
    assert len(good["k_cache"]) == 17 and len(good["q"]) == 5
    before = good["prefix_out"].clone(), good["prefix_lse"].clone()
    with launches() as seen, pytest.raises(ArgumentError) as raised:
        gather_suffix_merge(**{**good, **to_device(changes, device)})
    assert raised.value.argument == argument and text in str(raised.value), str(raised.value)
    assert not seen and torch.equal(good["prefix_out"], before[0]) and torch.equal(good["prefix_lse"], before[1])


def test_fp64_runs_on_a_cpu_only(device: str) -> None:
    """What the kernel does not serve goes to the reference on a CPU, and is refused by name on a GPU."""
    a = to_device(suffixes.build(suffixes.Case(q_type=torch.float64, cache_type=torch.float64, out_type=torch.float64)), device)
    with launches() as seen:
        if device == "cpu":
            want = gather_suffix_merge_reference(
                **{**a, "prefix_out": a["prefix_out"].clone(), "prefix_lse": a["prefix_lse"].clone()}
            )
            assert all(map(torch.equal, gather_suffix_merge(**a), want))
        else:
            with pytest.raises(ArgumentError, match="q: got float64"):
                gather_suffix_merge(**a)
    assert not seen


@pytest.mark.parametrize(("name", "value"), [("sm_scale", 1e39), ("v_scale", 1e39), ("softcap", 1e-46), ("softcap", 1e39)])
def test_factors_that_are_infinite_in_fp32_go_to_the_reference(device: str, name: str, value: float) -> None:
    a = to_device({**suffixes.build(suffixes.Case()), name: value}, device)
    with launches() as seen:
        if device == "cpu":
            gather_suffix_merge(**a)
        else:
            with pytest.raises(ArgumentError, match=f"{name}: got a factor of"):
                gather_suffix_merge(**a)
    assert not seen


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_wide_heads_are_refused_by_the_kernel(device: str, which: str) -> None:
    """576 and 512: the reference computes them; the kernel says what it takes, and on a CPU makes way for the reference."""
    dim, v_dim = (576, 512) if which == "k_cache" else (64, 512)
    a = to_device(suffixes.build(suffixes.Case(lens=(2,), head_dim=dim, v_head_dim=v_dim, extra_rows=0)), device)
    with launches() as seen:
        if device == "cpu":
            suffixes.assert_close(
                *gather_suffix_merge(**a),
                suffixes.exact(suffixes.build(suffixes.Case(lens=(2,), head_dim=dim, v_head_dim=v_dim, extra_rows=0))),
            )
        else:
            with pytest.raises(ArgumentError, match=f"{which}: got head dim"):
                gather_suffix_merge(**a)
    assert not seen
