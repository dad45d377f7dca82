"""The quantiser of DeepSeek-V4.1 rows as it runs on a CPU: against rational numbers, SGLang's own reference, and its refusals."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla.formats import DIM, FORMATS, ROW_LAYOUTS, allocate_cache, decode_rows, gather_row_bytes
from sglang_specverify.kernels.sparse_mla.quantize import MIN_AMAX, SGLANG_MIN_AMAX, deepseek_v41_quantize_cache

from . import sparse_mla_values as values

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(c, 512) if c < 8 else Fraction(8 + c % 8, 8) * Fraction(2) ** (c // 8 - 7) for c in range(127)]


def nearest(x: Fraction, codes: list[Fraction]) -> int:
    """Index of the nearest, the even one of two; the last one for all that is larger."""
    low, high = 0, len(codes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        tie = (codes[middle - 1] + codes[middle]) / 2
        low, high = (middle, high) if x > tie or (x == tie and middle % 2 == 0) else (low, middle - 1)
    return low


def expected(row: list[float], name: str, min_amax: float = MIN_AMAX) -> tuple[list[int], list[int]]:
    """Codes of the 512 columns and scales of a row, from the formulas in rational numbers."""
    kind, codes, scales = FORMATS[name], [], []
    for start in range(0, DIM, kind.group or 1):
        group = row[start : start + (kind.group or 1)]
        signs = [math.copysign(1, x) < 0 for x in group]
        if not all(map(math.isfinite, group)):
            bad = {"main_kv_fp4": [0] * 16, "swa_mxfp8": [0x7F] * 32, "swa_fp8": [0x7F | 128 * signs[0]]}
            codes += bad[name]
            scales += {"main_kv_fp4": [0x7F], "swa_mxfp8": [0xFF], "swa_fp8": []}[name]
            continue
        exact = [Fraction(abs(x)) for x in group]
        if name == "main_kv_fp4":
            scale = nearest(max(*exact, Fraction(6, 512)) / 6, E4M3)
            scales.append(scale)
            codes += [nearest(x / E4M3[scale], E2M1) | 8 * minus for x, minus in zip(exact, signs, strict=True)]
            continue
        factor = Fraction(1)
        if name == "swa_mxfp8":
            largest, k = max(*exact, Fraction(float(torch.tensor(min_amax, dtype=torch.float32)))), -150
            while 448 * Fraction(2) ** k < largest:
                k += 1
            scales.append(k + 127)
            factor = Fraction(2) ** k
        codes += [nearest(x / factor, E4M3) | 128 * minus for x, minus in zip(exact, signs, strict=True)]
    return codes, scales


def bytes_of(x: torch.Tensor, name: str, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of the rows, one row in each page."""
    cache = deepseek_v41_quantize_cache(x, name, 1, **how)
    return gather_row_bytes(cache, torch.arange(len(x)), name, 1)


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("main_kv_fp4", values.fp4_codes()),
        ("main_kv_fp4", values.fp4_scales()[::3]),
        ("main_kv_fp4", torch.cat([values.any_bits(0, 3), values.broken(16)])),
        ("swa_mxfp8", values.mxfp8_scales()[::4]),
        ("swa_mxfp8", torch.cat([values.e4m3_codes(3)[:2], values.any_bits(1, 2, finite=True), values.broken(32)])),
        ("swa_fp8", torch.cat([values.e4m3_codes()[::2], values.any_bits(2, 2), values.broken(1)])),
    ],
)
def test_against_rational_numbers(name: str, x: torch.Tensor) -> None:
    got, scales = bytes_of(x, name)
    for i, row in enumerate(x.tolist()):
        codes, factors = expected(row, name)
        packed = [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]
        assert got[i].tolist() == (packed if name == "main_kv_fp4" else codes), f"row {i}"
        assert scales[i].tolist() == factors, f"row {i}"


def test_every_code_occurs_in_what_is_tested() -> None:
    """The rows above reach what they are meant to: all finite scales and codes, with both signs of zero."""
    codes, scales = bytes_of(values.fp4_codes(), "main_kv_fp4")
    assert set(scales.flatten().tolist()) == set(range(1, 127))
    assert set(torch.cat([codes & 15, codes >> 4]).flatten().tolist()) == set(range(16))
    assert min(len(half.unique()) for half in (codes & 15, codes >> 4)) >= 12, "either half of a byte"
    assert set(bytes_of(values.fp4_scales(), "main_kv_fp4")[1].flatten().tolist()) == set(range(1, 127))
    codes, _ = bytes_of(values.e4m3_codes(), "swa_fp8")
    assert set(codes.flatten().tolist()) == set(range(256)) - {0x7F, 0xFF}
    _, scales = bytes_of(values.mxfp8_scales(), "swa_mxfp8")
    assert set(range(127 - 22, 127 + 121)) >= set(scales.flatten().tolist()) >= set(range(127 - 21, 127 + 119))


def test_what_is_not_finite_reads_back_as_not_a_number() -> None:
    """All of the group that holds it and nothing else; without groups the element."""
    for name, kind in FORMATS.items():
        x = values.broken(kind.group or 1)
        cache = deepseek_v41_quantize_cache(x, name, 4)
        groups = x.view(4, -1, kind.group or 1)
        bad = (~groups.isfinite()).any(dim=2, keepdim=True).expand_as(groups).reshape(4, DIM)
        assert 4 <= int(bad.sum()) < 4 * DIM
        assert torch.equal(decode_rows(cache, torch.arange(4), name, 4).isnan(), bad)


@pytest.mark.parametrize(
    "x", [values.fp4_codes(), values.fp4_scales(), values.any_bits(4, 32, finite=True)], ids=["codes", "scales", "any"]
)
def test_fp4_is_sglangs(x: torch.Tensor) -> None:
    witness = pytest.importorskip("sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference")
    pages = torch.cat([x, x.new_zeros(-len(x) % 8, DIM)])
    want = witness.quantize_k_cache_v41_fp4(pages.view(-1, 8, DIM), page_bytes=8 * 288)
    got = deepseek_v41_quantize_cache(pages, "main_kv_fp4", 8)
    assert torch.equal(got, want)
    mixed = deepseek_v41_quantize_cache(
        pages, "main_kv_fp4", 8, allocate_cache("main_kv_fp4", len(got), 8, "cpu"), layout="interleaved"
    )
    assert torch.equal(mixed, witness.interleave_pages(want, 8, 256, 32))
    read = decode_rows(got, torch.arange(len(pages)), "main_kv_fp4", 8)
    assert torch.equal(read, witness.dequantize_k_cache_v41_fp4(got, 8).double().view(-1, DIM))


@pytest.mark.parametrize(
    "x", [values.mxfp8_scales(), values.e4m3_codes(5), values.any_bits(5, 32, finite=True)], ids=["scales", "codes", "any"]
)
def test_mxfp8_is_sglangs_with_its_least_scale(x: torch.Tensor) -> None:
    witness = pytest.importorskip("sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference")
    pages = torch.cat([x, x.new_zeros(-len(x) % 8, DIM)])
    want = witness.quantize_k_cache_v41(pages.view(-1, 8, DIM), page_bytes=8 * 528)
    got = deepseek_v41_quantize_cache(pages, "swa_mxfp8", 8, min_amax=SGLANG_MIN_AMAX)
    assert torch.equal(got, want)
    mixed = deepseek_v41_quantize_cache(pages, "swa_mxfp8", 8, layout="interleaved", min_amax=SGLANG_MIN_AMAX)
    assert torch.equal(mixed, witness.interleave_pages(want, 8, 512, 16))
    # FlashInfer's least scale differs, for groups whose values are all below 448 * 2^-14.
    other, scales = bytes_of(pages, "swa_mxfp8")
    small = (pages.view(-1, 16, 32).abs().amax(dim=2) <= 448 * 2.0**-14).flatten()
    differs = (scales != gather_row_bytes(got, torch.arange(len(pages)), "swa_mxfp8", 8)[1]).flatten()
    assert bool((differs == small).all()) and int(other.shape[0]) == len(pages)


GUARD = 0xA5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_only_the_rows_of_valid_slots_are_written(name: str, layout: str) -> None:
    kind = FORMATS[name]
    x = values.any_bits(6, 8, finite=True)
    base = torch.full((6, 3 * kind.row_bytes + 11), GUARD, dtype=torch.uint8)
    out = base[1:-1, : 3 * kind.row_bytes]
    slots = torch.tensor([7, -1, 0, 12, 11, -(2**31), 2**31 - 1, 4], dtype=torch.int32)
    assert deepseek_v41_quantize_cache(x, name, 3, out, slots, layout=layout) is out
    alone = deepseek_v41_quantize_cache(x, name, 1)
    want = torch.full_like(base, GUARD)
    for i, slot in enumerate(slots.tolist()):
        if 0 <= slot < 12:
            lies = torch.arange(3 * kind.row_bytes)
            row = slot % 3
            if layout == "interleaved":
                at = lies[row * kind.row_bytes :][: kind.row_bytes]
            else:
                scale = 3 * kind.value_bytes + row * kind.scale_bytes
                at = torch.cat([lies[row * kind.value_bytes :][: kind.value_bytes], lies[scale:][: kind.scale_bytes]])
            want[1 + slot // 3, at] = alone[i]
    assert torch.equal(base, want)


def test_no_slots_means_the_first_ones_and_no_rows_nothing() -> None:
    x = values.any_bits(7, 5, finite=True)
    new = deepseek_v41_quantize_cache(x, "swa_fp8", 2)
    assert new.shape == (3, 1024) and not new[2, 512:].any()
    given = deepseek_v41_quantize_cache(x, "swa_fp8", 2, allocate_cache("swa_fp8", 3, 2, "cpu"), torch.arange(5))
    assert torch.equal(new, given)
    for name, kind in FORMATS.items():
        assert deepseek_v41_quantize_cache(x[:0], name, 2).shape == (0, 2 * kind.row_bytes)
    assert torch.equal(deepseek_v41_quantize_cache(x[:0], "swa_fp8", 2, given.clone(), torch.arange(0)), given)


def test_bf16_and_strided_rows_are_the_same_numbers() -> None:
    x = values.any_bits(8, 4, finite=True).bfloat16()
    wide = torch.full((4, 600), torch.nan, dtype=torch.bfloat16)
    wide[:, 3 : 3 + DIM] = x
    for name in FORMATS:
        want = deepseek_v41_quantize_cache(x.float(), name, 4)
        assert torch.equal(deepseek_v41_quantize_cache(x, name, 4), want)
        assert torch.equal(deepseek_v41_quantize_cache(wide[:, 3 : 3 + DIM], name, 4), want)


X = torch.zeros(4, DIM)
OUT = torch.zeros(2, 1024, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "fp4"}, "format: got 'fp4'; allowed: main_kv_fp4 or swa_mxfp8 or swa_fp8"),
        ({"x": X.double()}, "x: got float64"),
        ({"x": X[:, :448]}, r"x: got shape \[4, 448\]"),
        ({"x": torch.zeros(DIM, 4).T}, "x: got strides"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"page_size": True}, "page_size: got True"),
        ({"layout": "mixed"}, "layout: got 'mixed'"),
        ({"out": OUT[:, :1023]}, "out: got pages of 1023 bytes"),
        ({"out": OUT[:1].expand(2, -1)}, "out: got a page stride of 0 bytes"),
        ({"out": OUT[:1]}, "out: got 1 pages of 2 rows; allowed: room for the 4 rows of x"),
        ({"out": OUT.float()}, "out: got float32"),
        ({"out": None, "slots": torch.arange(4)}, "out: got None with slots"),
        ({"out": X.view(torch.uint8).view(-1, 1024)}, "out: got memory that x is in"),
        ({"slots": torch.arange(3)}, r"slots: got shape \[3\]"),
        ({"slots": torch.arange(4).float()}, "slots: got float32"),
        ({"slots": torch.tensor([0, 2, 1, 2])}, "slots: got slot 2 2 times; allowed: each slot at most once"),
        ({"min_amax": 1e-3}, "min_amax: got 0.001; allowed: 0.0001 for swa_fp8"),
        ({"format": "swa_mxfp8", "min_amax": 0.0}, "min_amax: got 0.0"),
        ({"format": "swa_mxfp8", "min_amax": 1e3}, "min_amax: got 1000.0"),
        ({"format": "swa_mxfp8", "min_amax": math.nan}, "min_amax: got nan"),
    ],
)
def test_refusals_name_the_argument_and_write_nothing(changes: dict[str, Any], named: str) -> None:
    a = {"x": X + 1, "format": "swa_fp8", "page_size": 2, "out": OUT, **changes}
    if "out" in changes and changes["out"] is not None and changes["out"].numel() == X.numel() * 4:
        a["x"] = X
    with pytest.raises(ArgumentError, match=named):
        deepseek_v41_quantize_cache(**a)
    assert not OUT.any() and not X.any()


def test_skipped_slots_may_occur_often() -> None:
    slots = torch.tensor([-1, -1, 99, 99])
    deepseek_v41_quantize_cache(X + 1, "swa_fp8", 2, OUT, slots)
    assert not OUT.any()
