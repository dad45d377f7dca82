"""The kernel with specialised warps equals the FP64 reference, within the bounds of all kernels.

Its own source runs: compiled on an sm_90, elsewhere in the emulator of `gluon_cpu.py`, whose schedules and whose strictness
also show what a lucky GPU would hide: a wait or a fence that is missing, a barrier that counts wrongly, an address outside.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import Config

from .specialized_calls import BASE, CONFIGS, KINDS, build, check
from .strategies import HALF, LSE_LAYOUTS

pytestmark = pytest.mark.usefixtures("specialized")


@st.composite
def configs(draw: Any) -> tuple[Config, tuple[int, int]]:
    bs, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    dim, dtype = draw(st.sampled_from([64, 128])), draw(st.sampled_from(HALF))
    lengths = st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 260])
    c = Config(
        seed=draw(st.integers(0, 10**6)), prefix_lens=tuple(draw(st.lists(lengths, min_size=bs, max_size=bs))),
        widths=draw(st.sampled_from([1, 2, 5, 16, 17, 33, 64, 65])), kind=draw(st.sampled_from(KINDS)), kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 4, 5, 8])), head_dim=dim, v_head_dim=dim, q_dtype=dtype, cache_dtype=dtype,
        page_size=draw(st.sampled_from([1, 16, 64])), sinks=draw(st.booleans()), k_scale=draw(st.sampled_from([1.0, 0.5])),
        v_scale=draw(st.sampled_from([1.0, -0.5])), sm_scale=draw(st.sampled_from([None, 0.05, 1.0])),
        flat_mask=draw(st.booleans()), mask_dtype=draw(st.sampled_from([torch.bool, torch.uint8])),
        pad_rows=draw(st.integers(0, 3)),
    )  # fmt: skip
    return c, draw(st.sampled_from(CONFIGS[dim]))


@given(drawn=configs(), programs=st.integers(1, 4), seed=st.integers(0, 9), strided=st.booleans(),
       lse=st.sampled_from([None, *LSE_LAYOUTS]))  # fmt: skip
@settings(max_examples=20)
def test_verify(device: str, drawn: Any, programs: int, seed: int, strided: bool, lse: str | None) -> None:
    c, config = drawn
    a = build(c, device, strided=strided)
    check(a, config=config, programs=programs, strided=strided, lse_layout=lse, seed=seed)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
def test_heads_and_types(device: str, group: int, head_dim: int, dtype: torch.dtype) -> None:
    kind = KINDS[group % 3]
    c = BASE.but(
        seed=group, kind=kind, head_dim=head_dim, v_head_dim=head_dim, q_heads=2 * group, q_dtype=dtype, cache_dtype=dtype
    )
    check(build(c, device))


@pytest.mark.parametrize("config", CONFIGS[64], ids=str)
@pytest.mark.parametrize("lens", [(0, 1, 62), (63, 64, 65), (127, 128, 129), (300, 191, 193, 256)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_around_tiles(device: str, kind: str, lens: tuple[int, ...], config: tuple[int, int]) -> None:
    c = BASE.but(seed=lens[0], kind=kind, prefix_lens=lens, widths=6, kv_heads=1, q_heads=4)
    check(build(c, device), config=config, seed=lens[1])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_and_views(device: str, kind: str, page_size: int) -> None:
    c = BASE.but(kind=kind, page_size=page_size, prefix_lens=(65, 130))
    check(build(c, device, strided=True), strided=True)


@pytest.mark.parametrize("layout", [None, *LSE_LAYOUTS])
@pytest.mark.parametrize("strided", [False, True])
def test_output_views(device: str, strided: bool, layout: str | None) -> None:
    check(build(BASE, device), strided=strided, lse_layout=layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lse", [None, "rows"])
def test_sinks_and_scales(device: str, lse: str | None, kind: str) -> None:
    a = build(BASE.but(kind=kind, sinks=True, sm_scale=1.0, k_scale=0.5, v_scale=-1.5), device)
    # Some far above every score and some far below.
    a["sinks"] = a["sinks"] + torch.tensor([20.0, -20.0, 0.0, 5.0] * 2, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        check(a | {"sinks": a["sinks"].to(dtype)}, lse_layout=lse)


@pytest.mark.parametrize("w", [1, 2, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("kind", KINDS)
def test_widths(device: str, kind: str, w: int) -> None:
    check(build(BASE.but(kind=kind, widths=w, q_heads=5, kv_heads=1, prefix_lens=(66,), seed=w), device))


@pytest.mark.parametrize(("kind", "group"), [("chain", 8), ("qlen_only", 4), ("full_mask", 1)])
def test_trees_of_256(device: str, kind: str, group: int) -> None:
    check(
        build(BASE.but(kind=kind, widths=256, q_heads=group, kv_heads=1, prefix_lens=(70,), head_dim=128, v_head_dim=128), device)
    )


@pytest.mark.parametrize("programs", [1, 3, 7, 64])
def test_more_items_than_programs_and_fewer(device: str, programs: int) -> None:
    """Twelve items of different lengths: rings and phases go on from one item to the next."""
    c = BASE.but(widths=33, prefix_lens=(3, 200, 64), q_heads=10, kv_heads=2)
    check(build(c, device), programs=programs)


def test_rows_that_see_nothing_and_drafts_that_nobody_sees(device: str) -> None:
    """Such a row is 0 with an LSE of -inf, and such a draft's K and V may hold NaN."""
    a = build(BASE.but(page_size=1, seed=1, prefix_lens=(0, 64, 40)), device)
    a["mask"] = a["mask"].clone()
    a["mask"][:, 4] = False
    for draft in (0, 5):
        a["mask"][:, :, draft] = False
        for r, n in enumerate((0, 64, 40)):
            slot = a["table"][a["row_ids"][r], n + draft]
            a["k_cache"][slot] = a["v_cache"][slot] = torch.nan
    out, lse = check(a)
    assert lse is not None and bool((lse[4] == -torch.inf).all()) and bool((out[4] == 0).all())


@pytest.mark.parametrize("kind", ["chain", "qlen_only"])
def test_the_order_of_partitions_changes_no_bit(device: str, emulated: None, kind: str) -> None:
    a = build(BASE.but(kind=kind, prefix_lens=(200, 65), widths=40, kv_heads=1), device)
    results = [check(a, config=(64, 3), seed=seed) for seed in range(5)]
    for out, lse in results[1:]:
        assert lse is not None and results[0][1] is not None
        assert torch.equal(out[:-2], results[0][0][:-2]) and torch.equal(lse[:-2], results[0][1][:-2])
