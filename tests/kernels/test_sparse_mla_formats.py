"""What the bytes of a DeepSeek-V4.1 cache mean: all codes, both layouts, rounding to codes, refusals."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla.formats import (
    DIM,
    FORMATS,
    ROW_LAYOUTS,
    Format,
    allocate_cache,
    decode_row_bytes,
    decode_rows,
    e2m1_table,
    e4m3_table,
    e8m0_table,
    gather_row_bytes,
)
from sglang_specverify.kernels.sparse_mla.rounding import fp4_as_e4m3, to_e2m1, to_e4m3

from .cases import generator

CODES = torch.arange(256, dtype=torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers and signs of zero, NaN where NaN is."""
    nan = a.isnan()
    bits = [t.double().masked_fill(nan, 0.0).view(torch.int64) for t in (a, b)]
    return torch.equal(nan, b.isnan()) and torch.equal(*bits)


def fp4_value(nibble: int, scale: int) -> float:
    """From the definition of the fields, in rational numbers: 1 sign, 2 exponent and 1 fraction bits; 1, 4 and 3."""
    if scale & 0x7F == 0x7F:
        return math.nan
    exponent, fraction = nibble >> 1 & 3, nibble & 1
    element = Fraction(fraction, 2) if exponent == 0 else Fraction(2 + fraction, 2) * 2 ** (exponent - 1)
    exponent, fraction = scale >> 3 & 15, scale & 7
    factor = Fraction(fraction, 512) if exponent == 0 else Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)
    return math.copysign(float(element * factor), -1 if (nibble >> 3) ^ (scale >> 7) else 1)


def test_the_formats_are_those_of_the_serving_pools() -> None:
    assert {name: f.row_bytes for name, f in FORMATS.items()} == {"main_kv_fp4": 288, "swa_mxfp8": 528, "swa_fp8": 512}
    for kind in FORMATS.values():
        assert kind.scale_bytes * kind.group == (DIM if kind.group else 0)


def test_element_types_are_torchs() -> None:
    assert same(e4m3_table(), CODES.view(torch.float8_e4m3fn).double())
    assert same(e8m0_table(), CODES.view(torch.float8_e8m0fnu).double())
    assert e2m1_table().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert e2m1_table()[8].signbit()


def test_every_fp4_code_with_every_scale() -> None:
    """256 scales, 16 nibbles behind each: 8 rows. The even column is in the low nibble."""
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(8, 32)
    scales = CODES.view(8, 32)
    rows = decode_row_bytes(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scales, "main_kv_fp4")
    want = torch.tensor([[fp4_value(c % 16, 32 * r + c // 16) for c in range(DIM)] for r in range(8)], dtype=torch.float64)
    assert same(rows, want)
    for dtype in (torch.bfloat16, torch.float16):
        assert same(rows.to(dtype).double(), rows), "all values are exact in BF16 and FP16"


def test_every_e4m3_code_with_every_e8m0_scale() -> None:
    codes = CODES.view(1, 8, 32).repeat(256, 1, 1).view(128, DIM)
    scales = CODES.repeat_interleave(8).view(128, 16)
    rows = decode_row_bytes(codes, scales, "swa_mxfp8")
    elements = codes.view(torch.float8_e4m3fn).double().view(128, 16, 32)
    assert same(rows, (elements * scales.view(torch.float8_e8m0fnu).double()[..., None]).flatten(1))
    assert same(decode_row_bytes(codes[:1], scales[:1, :0], "swa_fp8"), codes[:1].view(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize(("page_rows", "padding"), [(1, 0), (61, 7), (64, 64)])
def test_where_a_row_lies(name: str, layout: str, page_rows: int, padding: int) -> None:
    """Every byte of a pool differs in (page, position), told apart by two digits of its address."""
    kind = FORMATS[name]
    size = page_rows * kind.row_bytes
    stride = size + padding
    address = torch.arange(3 * stride).view(3, stride)[:, :size]
    slots = torch.tensor([0, page_rows - 1, page_rows, 3 * page_rows - 1], dtype=torch.int32)
    for shift in (0, 8, 16):
        cache = (address >> shift).to(torch.uint8)
        values, scales = gather_row_bytes(cache, slots, kind, page_rows, layout)
        for n, slot in enumerate(slots.tolist()):
            page, row = divmod(slot, page_rows)
            if layout == "interleaved":
                lies = page * stride + row * kind.row_bytes + torch.arange(kind.row_bytes)
            else:
                first = row * kind.value_bytes + torch.arange(kind.value_bytes)
                second = page_rows * kind.value_bytes + row * kind.scale_bytes + torch.arange(kind.scale_bytes)
                lies = page * stride + torch.cat([first, second])
            assert torch.equal(torch.cat([values[n], scales[n]]), (lies >> shift).to(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_a_page_stride_beyond_the_page_changes_nothing(name: str) -> None:
    kind = FORMATS[name]
    near = allocate_cache(name, 3, 5, "cpu")
    far = allocate_cache(name, 3, 5, "cpu", page_stride=5 * kind.row_bytes + 17)
    assert far.shape == near.shape and far.stride() == (5 * kind.row_bytes + 17, 1)
    slots = torch.tensor([14, 3, 3, 5])
    assert torch.equal(decode_rows(far, slots, name, 5), torch.zeros(4, DIM, dtype=torch.float64)), "allocated as zeros"
    near.copy_(torch.randint(0, 120, near.shape, generator=generator(0)))
    far.copy_(near)
    for layout in ROW_LAYOUTS:
        assert torch.equal(decode_rows(near, slots, name, 5, layout), decode_rows(far, slots, name, 5, layout))
    assert not torch.equal(decode_rows(near, slots, name, 5), decode_rows(near, slots, name, 5, "interleaved")) or kind.group == 0


def around(points: torch.Tensor) -> torch.Tensor:
    """The points, their FP32 neighbours on both sides, and all of these with a minus."""
    points = points.float()
    inf = torch.tensor(torch.inf)
    near = torch.cat([points, points.nextafter(inf), points.nextafter(-inf).abs()])
    return torch.cat([near, -near])


def test_rounding_to_e4m3_is_torchs_and_saturates() -> None:
    values = e4m3_table()[:127]
    x = torch.cat([around(values), around((values[:-1] + values[1:]) / 2), around(torch.tensor([1e-45, 1e-38, 2.0**-11, 447.0]))])
    x = torch.cat([x, torch.randn(4096, generator=generator(1)) * 30, torch.tensor([0.0, -0.0])])
    inside = x[x.abs() <= 448]
    assert torch.equal(to_e4m3(inside.double()), inside.to(torch.float8_e4m3fn).view(torch.uint8))
    large = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, torch.inf, torch.nan], dtype=torch.float64)
    assert to_e4m3(large).tolist() == [0x7E] * 6 + [0x7F]
    assert to_e4m3(-large).tolist() == [0xFE] * 6 + [0xFF]


def test_rounding_to_e2m1_goes_to_the_even_code_at_every_tie() -> None:
    values = e2m1_table()[:8]
    ties = (values[:-1] + values[1:]) / 2
    assert to_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert to_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    inf = torch.tensor(torch.inf, dtype=torch.float64)
    assert to_e2m1(ties.nextafter(inf)).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert to_e2m1(ties.nextafter(-inf)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert torch.equal(to_e2m1(e2m1_table()), torch.arange(16, dtype=torch.uint8)), "-0 is code 8"
    assert to_e2m1(torch.tensor([6.5, 1e30, torch.inf, -1e-300], dtype=torch.float64)).tolist() == [7, 7, 7, 8]


def test_every_fp4_value_in_the_e4m3_contract() -> None:
    exact = torch.tensor([[fp4_value(n, s) for s in range(256)] for n in range(16)], dtype=torch.float64)
    codes = fp4_as_e4m3()
    want = exact.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    finite = ~exact.isnan()
    assert torch.equal(codes[finite], want.view(torch.uint8)[finite])
    assert bool((codes[~finite] & 0x7F == 0x7F).all())
    # Of the products of 7 magnitudes and 126 scales that are not 0: how many E4M3 has, and how many it cuts off at 448.
    positive, rounded = exact[1:8, 1:127], e4m3_table()[codes[1:8, 1:127].long()]
    assert positive.numel() == 882 and int((positive > 448).sum()) == 63
    within = positive <= 448
    assert 0.6 < float((positive == rounded)[within].double().mean()) < 0.8
    normal = within & (positive >= 2.0**-6)
    assert float(((positive - rounded).abs() / positive)[normal].max()) <= 1 / 17, "half a unit of four significant bits"


def refused(**changes: Any) -> ArgumentError:
    good = {"cache": allocate_cache("swa_fp8", 2, 4, "cpu"), "slots": torch.tensor([1]), "format": "swa_fp8", "page_rows": 4}
    with pytest.raises(ArgumentError) as caught:
        decode_rows(**{**good, **changes})
    return caught.value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "fp4"}, "format: got 'fp4'; allowed: main_kv_fp4 or swa_mxfp8 or swa_fp8"),
        ({"format": None}, "format: got None"),
        ({"layout": "planar"}, "layout: got 'planar'; allowed: block_split or interleaved"),
        ({"page_rows": 0}, "page_rows: got 0"),
        ({"page_rows": 5}, "cache: got pages of 2048 bytes; allowed: 2560 bytes or more"),
        ({"cache": torch.zeros(2, 2048)}, "cache: got float32"),
        ({"cache": torch.zeros(2048, dtype=torch.uint8)}, r"cache: got shape \[2048\]"),
        ({"cache": torch.zeros(2048, 2, dtype=torch.uint8).T}, "cache: got strides"),
        ({"cache": torch.zeros(1, 2048, dtype=torch.uint8).expand(2, -1)}, "cache: got a page stride of 0 bytes"),
        ({"slots": torch.tensor([0, 8])}, "slots: got 8 at 1; allowed: a slot of the pool: 0 to 7"),
        ({"slots": torch.tensor([-1])}, "slots: got -1 at 0"),
        ({"slots": torch.tensor([1.0])}, "slots: got float32"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], named: str) -> None:
    import re

    assert re.search(named, str(refused(**changes)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("swa", 1, 1, "cpu"), "format"),
        (("swa_fp8", -1, 1, "cpu"), "pages"),
        (("swa_fp8", 1, 0, "cpu"), "page_rows"),
        (("swa_fp8", 1, 2, "cpu", 1023), "page_stride"),
    ],
)
def test_a_cache_that_cannot_be(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{named}: got"):
        allocate_cache(*arguments)


def test_a_format_of_ones_own_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'mine'"):
        allocate_cache(Format("mine", 256, 0, 0), 1, 1, "cpu")
