"""The kernels that quantise DeepSeek-V4.1 rows write, bit for bit, what the plain path writes, and nothing else.

The plain path rounds by comparing FP64 numbers, the kernels by integer arithmetic; `tests/kernels` holds the former against
rational numbers and SGLang's reference.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla import quantize
from sglang_specverify.kernels.sparse_mla.formats import DIM, FORMATS, ROW_LAYOUTS
from tests.kernels import sparse_mla_values as values

from .calls import launches, names, to_device

GUARD = 0xA5
KERNELS = {"main_kv_fp4": "quantize_fp4_kernel", "swa_mxfp8": "quantize_mxfp8_kernel", "swa_fp8": "quantize_e4m3_kernel"}


def plain(x: torch.Tensor, name: str, page_size: int, out: torch.Tensor, **how: Any) -> torch.Tensor:
    """`out` on the CPU as the plain path leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "uses_triton", lambda _: False)
        with launches() as seen:
            quantize.deepseek_v41_quantize_cache(x, name, page_size, out, **how)
    assert not seen
    return out


def assert_same(
    x: torch.Tensor, name: str, device: str, *, pages: int | None = None, page_size: int = 3, padding: int = 5, **how: Any
) -> None:
    """A pool of guard bytes, in which pages lie `padding` bytes apart, after the kernel and after the plain path."""
    kind = FORMATS[name]
    pages = -(-len(x) // page_size) if pages is None else pages
    pools = []
    for place in (device, "cpu"):
        base = torch.full((pages + 2, page_size * kind.row_bytes + padding), GUARD, dtype=torch.uint8, device=place)
        out = base[1:-1, : page_size * kind.row_bytes]
        if place == "cpu" and pools:
            plain(x, name, page_size, out, **how)
        else:
            a = to_device({"x": x, **how}, device)
            with launches() as seen:
                assert quantize.deepseek_v41_quantize_cache(format=name, page_size=page_size, out=out, **a) is out
            assert names(seen) == [KERNELS[name]], "one launch"
        pools.append(base.cpu())
    wrong = (pools[0] != pools[1]).nonzero()
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0].tolist()}"


SETS = {
    "main_kv_fp4": [values.fp4_codes(), values.fp4_scales(), values.broken(16), values.any_bits(0, 4)],
    "swa_mxfp8": [
        values.mxfp8_scales()[::2],
        values.e4m3_codes(-7),
        values.e4m3_codes(100)[:1],
        values.broken(32),
        values.any_bits(1, 4),
    ],
    "swa_fp8": [values.e4m3_codes(), values.any_bits(2, 4), values.broken(1)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_ties_ends_and_what_is_not_finite(device: str, name: str) -> None:
    assert_same(torch.cat(SETS[name]), name, device)


@pytest.mark.parametrize("name", FORMATS)
def test_bf16_rows_of_any_stride(device: str, name: str) -> None:
    wide = torch.cat([values.any_bits(4, 4, finite=True), values.any_bits(5, 2)]).bfloat16().repeat(1, 2)
    assert_same(wide[:, 3 : 3 + DIM], name, device)
    assert_same(wide[:1, :DIM].expand(3, -1), name, device)


@pytest.mark.parametrize("bits", [2.0**-100, 1e-4, quantize.SGLANG_MIN_AMAX, 448.0])
def test_the_least_scale_of_mxfp8(device: str, bits: float) -> None:
    x = torch.cat([values.mxfp8_scales()[:2], values.any_bits(6, 2, finite=True) * 1e-3, torch.full((1, DIM), 1e-40)])
    assert_same(x, "swa_mxfp8", device, min_amax=bits)


#: Every pair of two properties occurs: format, layout, page size, type of the slots, stride of the slots.
PLACES = [
    ("main_kv_fp4", "block_split", 1, torch.int32, 1),
    ("main_kv_fp4", "interleaved", 4, torch.int32, 2),
    ("main_kv_fp4", "interleaved", 61, torch.int64, 2),
    ("swa_mxfp8", "block_split", 1, torch.int32, 1),
    ("swa_mxfp8", "block_split", 4, torch.int64, 2),
    ("swa_mxfp8", "interleaved", 61, torch.int32, 2),
    ("swa_fp8", "interleaved", 1, torch.int64, 2),
    ("swa_fp8", "interleaved", 4, torch.int64, 1),
    ("swa_fp8", "block_split", 61, torch.int32, 1),
]


@pytest.mark.parametrize(("name", "layout", "page_size", "dtype", "stride"), PLACES)
def test_only_the_rows_of_valid_slots_are_written(
    device: str, name: str, layout: str, page_size: int, dtype: torch.dtype, stride: int
) -> None:
    last = 7 * page_size - 1
    slots = torch.tensor([last, -1, 0, last + 1, last // 2, torch.iinfo(dtype).min, torch.iinfo(dtype).max, 1], dtype=dtype)
    slots = slots.repeat_interleave(stride)[::stride]
    x = values.any_bits(7, 8, finite=True)
    assert_same(x, name, device, pages=7, page_size=page_size, layout=layout, slots=slots)


def test_every_pair_of_properties_occurs() -> None:
    properties = [set(column) for column in zip(*PLACES, strict=True)]
    assert properties[0] == set(FORMATS) and properties[1] == set(ROW_LAYOUTS)
    for (i, a), (j, b) in combinations(enumerate(properties), 2):
        assert {(place[i], place[j]) for place in PLACES} == set(product(a, b))


def test_no_rows_and_no_room(device: str) -> None:
    for name in FORMATS:
        assert_same(torch.zeros(0, DIM), name, device, pages=2)
        assert_same(values.any_bits(8, 2), name, device, pages=0, slots=torch.tensor([0, 1]))


def test_offsets_beyond_32_bits(device: str) -> None:
    """Page times stride passes 2**31 in the cache, and row times stride in x. On a CPU untouched pages take no memory."""
    far = torch.empty(4 << 30, dtype=torch.uint8, device=device).as_strided((3, 2 * 288), (3 << 29, 1))
    far.fill_(GUARD)
    x = values.any_bits(9, 3, finite=True).bfloat16()
    source = torch.empty((3 << 30) + DIM, dtype=torch.bfloat16, device=device).as_strided((3, DIM), (3 << 29, 1))
    source.copy_(x)
    slots = torch.tensor([5, 0, 2], device=device)
    quantize.deepseek_v41_quantize_cache(source, "main_kv_fp4", 2, far, slots)
    near = plain(x, "main_kv_fp4", 2, torch.full((3, 2 * 288), GUARD, dtype=torch.uint8), slots=slots.cpu())
    assert torch.equal(far.cpu(), near)


def test_refusals_come_before_the_launch(device: str) -> None:
    x, out = torch.ones(2, DIM, device=device), torch.full((1, 1024), GUARD, dtype=torch.uint8, device=device)
    for change in ({"format": "swa"}, {"page_size": 3}, {"out": out[:, ::2]}, {"slots": torch.zeros(3, device=device)}):
        with launches() as seen, pytest.raises(ArgumentError):
            quantize.deepseek_v41_quantize_cache(**{"x": x, "format": "swa_fp8", "page_size": 2, "out": out, **change})
        assert not seen and bool((out == GUARD).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_bit_is_noticed(device: str, name: str) -> None:
    """Negative control of `assert_same`: the kernel is given a number beside one that is on a tie."""
    x = {"main_kv_fp4": values.fp4_codes, "swa_mxfp8": values.e4m3_codes, "swa_fp8": values.e4m3_codes}[name]()[:2]
    real = quantize.quantize_cache_launch
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="bytes differ"):
        above = torch.tensor(torch.inf, device=device)
        patch.setattr(quantize, "quantize_cache_launch", lambda x, *rest: real(x.nextafter(above), *rest))
        assert_same(x, name, device)
