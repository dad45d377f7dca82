"""The kernels equal the FP64 reference, each element within its derived bound, over the whole range of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.errors import SpecverifyError
from tests.kernels.cases import Config

from .calls import check, launches, names, to_device
from .strategies import FP8, HALF, LSE_LAYOUTS, configs, draft_call, outputs, verify_call

SMALL = Config(
    prefix_lens=(21, 0), widths=4, kind="qlen_only", q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32, page_size=4,
    q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16, pad_rows=1,
)  # fmt: skip

#: Kinds of visible sets, as the changes of a configuration.
KINDS = {
    "chain": {"kind": "chain"},
    "ragged chain": {"kind": "chain", "widths": (3, 0)},
    "qlen_only": {"kind": "qlen_only"},
    "full_mask": {"kind": "full_mask"},
    "ragged full_mask": {"kind": "full_mask", "widths": (2, 6)},
    "branches": {"kind": "branches"},
}


def build(c: Config, device: str) -> dict[str, Any]:
    return to_device(draft_call(c, 3, 2, 4) if c.kind == "branches" else verify_call(c), device)


@given(c=configs(), where=outputs())
def test_verify(device: str, c: Config, where: dict[str, Any]) -> None:
    check(to_device(verify_call(c), device), **where)


@given(c=configs(("branches",)), topk=st.sampled_from([1, 2, 4, 8]), step=st.integers(0, 4), where=outputs())
def test_draft_decode(device: str, c: Config, topk: int, step: int, where: dict[str, Any]) -> None:
    check(to_device(draft_call(c, topk, step, step + 2), device), **where)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 16])
def test_head_dims_and_ratios(device: str, head_dim: int, group: int) -> None:
    """Every head dim of a served model, beside every ratio of heads, odd ones too."""
    c = SMALL.but(seed=group, head_dim=head_dim, v_head_dim=head_dim, q_heads=2 * group, prefix_lens=(18, 0), widths=3)
    check(to_device(verify_call(c), device))


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (128, 80), (96, 16), (16, 256), (24, 8)])
@pytest.mark.parametrize("kind", ["chain", "branches"])
def test_v_head_dim_of_its_own(device: str, dims: tuple[int, int], kind: str) -> None:
    check(build(SMALL.but(kind=kind, head_dim=dims[0], v_head_dim=dims[1], strided=True), device))


@pytest.mark.parametrize("q_dtype", HALF, ids=str)
@pytest.mark.parametrize("cache", ["q", *FP8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_types(device: str, kind: str, cache: Any, q_dtype: torch.dtype) -> None:
    c = SMALL.but(**KINDS[kind], q_dtype=q_dtype, cache_dtype=q_dtype if cache == "q" else cache, k_scale=0.5, v_scale="heads")
    check(build(c, device))


@pytest.mark.parametrize(("page_size", "slot_map"), [(1, False), (1, True), (16, True), (64, False), (128, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_pages(device: str, kind: str, slot_map: bool, page_size: int) -> None:
    c = SMALL.but(**KINDS[kind], page_size=page_size, slot_map=slot_map, prefix_lens=(70, 17), strided=True)
    check(build(c, device))


@pytest.mark.parametrize("window", [0, 1, 16, 17, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_windows(device: str, kind: str, window: int) -> None:
    check(build(SMALL.but(**KINDS[kind], window=window, prefix_lens=(50, 16), sinks=True), device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap_and_sinks(device: str, kind: str, softcap: float, sinks: bool) -> None:
    check(build(SMALL.but(**KINDS[kind], softcap=softcap, sinks=sinks, sm_scale=1.0), device))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kind", ["chain", "branches"])
def test_sinks_of_each_type(device: str, kind: str, dtype: torch.dtype) -> None:
    """As a model holds them: they are read as they are, and computed with in FP32."""
    a = build(SMALL.but(**KINDS[kind], sinks=True), device)
    # About as large as the denominators, and far from what a type of 16 bits holds of them times log2(e).
    a["sinks"] = (a["sinks"] + 2.3).to(dtype)
    check(a)


@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0, 1e-46, -1e-46, "scalar", "heads"])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales(device: str, name: str, scale: Any) -> None:
    """Numbers and device tensors, of one element or one for each KV head; their sign counts too."""
    check(build(SMALL.but(**{name: scale}, q_heads=6, kv_heads=3, sinks=True), device))


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("sm_scale", [1e-46, -1e-46, 1e-40])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_fp32_does_not_hold(device: str, kind: str, sm_scale: float, softcap: float) -> None:
    """Positive as a Python number and 0 as the kernel's: all keys weigh the same, and none is NaN."""
    check(build(SMALL.but(**KINDS[kind], sm_scale=sm_scale, softcap=softcap, sinks=True), device))


@pytest.mark.parametrize("change", [{"k_scale": 1e40}, {"v_scale": -1e39}, {"softcap": 1e-46}, {"softcap": 1e39}], ids=str)
def test_factors_that_are_infinite_in_fp32_are_refused(device: str, change: dict[str, float]) -> None:
    a = build(SMALL.but(**change), device)
    with launches() as seen, pytest.raises(SpecverifyError, match="a factor that is infinite in FP32"):
        check(a, variant="fused")
    assert not seen


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scale_of_one_element(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = build(SMALL, device)
    a["k_scale"], a["v_scale"] = (torch.full(shape, value, dtype=dtype, device=device) for value in (0.5, 1.5))
    check(a)


@pytest.mark.parametrize("layout", LSE_LAYOUTS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kind", ["chain", "branches"])
def test_output_views(device: str, kind: str, strided: bool, layout: str) -> None:
    """Outputs with gaps, and LSEs as FlashAttention lays them out, [Hq, T] and [T, Hq, 1]: written as views, in place."""
    check(build(SMALL.but(kind=kind), device), strided=strided, lse_layout=layout)


@pytest.mark.parametrize("w", [1, 2, 16, 33])
@pytest.mark.parametrize("kind", ["chain", "qlen_only"])
def test_widths(device: str, kind: str, w: int) -> None:
    check(build(SMALL.but(kind=kind, widths=w, prefix_lens=(20,)), device))


@pytest.mark.parametrize("gap", [0, 1, 7])
def test_ragged_rows_that_do_not_begin_at_0(device: str, gap: int) -> None:
    """`q_offsets` may start anywhere: rows before the first and after the last belong to nobody."""
    c = SMALL.but(kind="full_mask", widths=(3, 0, 5), prefix_lens=(9, 4, 33))
    a = verify_call(c)
    a["q"] = torch.cat([torch.full((gap, *a["q"].shape[1:]), torch.nan, dtype=a["q"].dtype), a["q"]])
    a["positions"] = torch.cat([torch.zeros(gap, dtype=torch.int64), a["positions"]])
    a["q_offsets"] = a["q_offsets"] + gap
    check(to_device(a, device))


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("prefix", [15, 126, 127, 128])
@pytest.mark.parametrize("group", [2, 16])
def test_tree_whose_parents_come_after_their_children(device: str, group: int, prefix: int, window: int) -> None:
    """A mask says what it says: nothing promises that a node's ancestors have smaller indices."""
    c = SMALL.but(seed=5, q_heads=group, kv_heads=1, widths=6, prefix_lens=(prefix,), window=window)
    a = verify_call(c.but(seed=4))
    a["mask"], a["positions"] = a["mask"].flip(1, 2).contiguous(), a["positions"].flip(0)
    check(to_device(a, device))


def test_a_call_is_one_launch_of_the_fused_kernel(device: str) -> None:
    for kind in KINDS:
        a = build(SMALL.but(**KINDS[kind]), device)
        with launches() as seen:
            check(a)
        # A tree's mask is packed into bits first, unless a plan of the step holds them.
        masked = KINDS[kind]["kind"] in ("qlen_only", "full_mask")
        assert names(seen) == ["plan_kernel"] * masked + ["verify_attention_kernel"], kind
