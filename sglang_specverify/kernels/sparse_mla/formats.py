"""The bytes of a DeepSeek-V4.1 latent cache: which there are, where a row's lie, what they mean.

A row holds 512 values, which are K and V at once. Three formats:

    main_kv_fp4  288 B: 256 B of E2M1 codes, the even column in the low nibble; then 32 E4M3 scales, one for 16 columns.
    swa_mxfp8    528 B: 512 B of E4M3 values; then 16 E8M0 scales, one for 32 columns.
    swa_fp8      512 B: 512 B of E4M3 values, scale 1.

    value = E2M1[code] * E4M3[scale],   E4M3[code] * 2^(scale - 127),   E4M3[code]

Element types: OCP 8-bit floating point (E4M3, finite with NaN at 0x7F and 0xFF) and OCP Microscaling formats v1.0 (E2M1, E8M0
with NaN at 0xFF).

A cache is a uint8 tensor [pages, page_bytes] or a strided view of one with last stride 1: `cache.stride(0)` is the page stride in
bytes and may exceed the page. Slot s lies in page s // page_rows at row s % page_rows. Two layouts of a page's rows:

    block_split  the values of all rows, then the scales of all rows:
                 values at row * value_bytes, scales at page_rows * value_bytes + row * scale_bytes
    interleaved  each row's scales right behind its values:
                 values at row * row_bytes, scales at row * row_bytes + value_bytes
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks

#: Values of a row: 448 without position and 64 rotated ones, all in one format.
DIM = 512


@dataclass(frozen=True)
class Format:
    """One way to store a row.

    Attributes:
        name: how callers name it.
        value_bytes: bytes of a row's values.
        scale_bytes: bytes of a row's scales, one each.
        group: columns that share a scale; 0 where there are none.
    """

    name: str
    value_bytes: int
    scale_bytes: int
    group: int

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes


FORMATS: dict[str, Format] = {
    "main_kv_fp4": Format("main_kv_fp4", 256, 32, 16),
    "swa_mxfp8": Format("swa_mxfp8", 512, 16, 32),
    "swa_fp8": Format("swa_fp8", 512, 0, 0),
}

ROW_LAYOUTS = ("block_split", "interleaved")

#: Magnitudes of the E2M1 codes 0 to 7; bit 3 of a code is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def format_of(argument: str, value: object) -> Format:
    """The format that `value` names or is.

    Raises:
        ArgumentError: neither.
    """
    if isinstance(value, Format):
        value = value.name
    if not isinstance(value, str) or value not in FORMATS:
        raise ArgumentError(argument, repr(value), " or ".join(FORMATS))
    return FORMATS[value]


def check_layout(argument: str, value: object) -> str:
    if not isinstance(value, str) or value not in ROW_LAYOUTS:
        raise ArgumentError(argument, repr(value), " or ".join(ROW_LAYOUTS))
    return value


def row_addressing(format: Format, page_rows: int, layout: str) -> tuple[int, int, int, int]:
    """Where a page's row r lies, in bytes: (value base, value stride, scale base, scale stride); base + r * stride each."""
    if layout == "interleaved":
        return 0, format.row_bytes, format.value_bytes, format.row_bytes
    return 0, format.value_bytes, page_rows * format.value_bytes, format.scale_bytes


def check_cache(argument: str, cache: object, format: Format, page_rows: int, device: torch.device | None = None) -> torch.Tensor:
    """`cache` as uint8 [pages, page_bytes] whose pages hold `page_rows` rows of `format` and do not overlap.

    Raises:
        ArgumentError: it is something else.
    """
    tensor = checks.tensor(argument, cache, ("pages", "page_bytes"), (torch.uint8,), device, unit_last=True)
    least = page_rows * format.row_bytes
    if tensor.shape[1] < least:
        came = f"pages of {tensor.shape[1]} bytes"
        raise ArgumentError(argument, came, f"{least} bytes or more: {page_rows} rows of {format.name}")
    if tensor.shape[0] > 1 and tensor.stride(0) < least:
        raise ArgumentError(argument, f"a page stride of {tensor.stride(0)} bytes", f"{least} or more: pages must not overlap")
    return tensor


def allocate_cache(
    format: Format | str, pages: int, page_rows: int, device: torch.device | str, page_stride: int | None = None
) -> torch.Tensor:
    """A cache of zero bytes: uint8 [pages, page_rows * row_bytes], its pages `page_stride` bytes apart.

    A row of zero bytes reads as 512 zeros in the FP4 and E4M3 formats with scales of any finite value.

    Args:
        page_stride: bytes from page to page, `page_rows * row_bytes` or more; None for exactly that.

    Raises:
        ArgumentError: an argument outside what it may be.
    """
    kind = format_of("format", format)
    checks.integer("pages", pages, 0)
    page_bytes = checks.integer("page_rows", page_rows, 1) * kind.row_bytes
    stride = page_bytes if page_stride is None else checks.integer("page_stride", page_stride, page_bytes)
    return torch.zeros((pages, stride), dtype=torch.uint8, device=device)[:, :page_bytes]


@functools.cache
def e2m1_table() -> torch.Tensor:
    """FP64 [16]: the value of each E2M1 code; code 8 is -0."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    return torch.cat([magnitudes, -magnitudes])


@functools.cache
def e4m3_table() -> torch.Tensor:
    """FP64 [256]: the value of each E4M3 code: 4 bits of exponent with bias 7, 3 of fraction, NaN at 0x7F and 0xFF."""

    def magnitude(code: int) -> float:
        exponent, fraction = code >> 3, code & 7
        if code == 0x7F:
            return float("nan")
        return fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)

    magnitudes = torch.tensor([magnitude(code) for code in range(128)], dtype=torch.float64)
    return torch.cat([magnitudes, -magnitudes])


@functools.cache
def e8m0_table() -> torch.Tensor:
    """FP64 [256]: the value of each E8M0 code, 2^(code - 127); NaN at 0xFF."""
    return torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64)


def gather_row_bytes(
    cache: torch.Tensor, slots: torch.Tensor, format: Format | str, page_rows: int, layout: str = "block_split"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the rows at `slots`: values uint8 [n, value_bytes] and scales uint8 [n, scale_bytes].

    Args:
        cache: see the head of this file.
        slots: int32 or int64 [n], each in the pool; the values are looked at, so on a GPU this waits for it.

    Raises:
        ArgumentError: an argument outside what it may be, a slot outside the pool included.
    """
    kind, layout = format_of("format", format), check_layout("layout", layout)
    checks.integer("page_rows", page_rows, 1)
    check_cache("cache", cache, kind, page_rows)
    checks.tensor("slots", slots, ("n",), checks.INTS, cache.device)
    capacity = cache.shape[0] * page_rows
    at = slots.long()
    if (bad := checks.first_row(((at < 0) | (at >= capacity)).cpu())) is not None:
        raise ArgumentError("slots", f"{int(at[bad])} at {bad}", f"a slot of the pool: 0 to {capacity - 1}")
    page, row = at // page_rows, (at % page_rows)[:, None]
    value_base, value_stride, scale_base, scale_stride = row_addressing(kind, page_rows, layout)
    values = value_base + row * value_stride + torch.arange(kind.value_bytes, device=cache.device)
    scales = scale_base + row * scale_stride + torch.arange(kind.scale_bytes, device=cache.device)
    return cache[page[:, None], values], cache[page[:, None], scales]


def decode_row_bytes(values: torch.Tensor, scales: torch.Tensor, format: Format | str) -> torch.Tensor:
    """FP64 [n, 512] that the bytes of n rows mean, exactly: uint8 [n, value_bytes] and [n, scale_bytes]."""
    kind = format_of("format", format)
    if kind.name == "main_kv_fp4":
        codes = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(1)
        elements, factors = e2m1_table(), e4m3_table()
    else:
        codes, elements, factors = values, e4m3_table(), e8m0_table()
    rows = elements.to(values.device)[codes.long()]
    if kind.group == 0:
        return rows
    return rows * factors.to(values.device)[scales.long()].repeat_interleave(kind.group, dim=1)


def decode_rows(
    cache: torch.Tensor, slots: torch.Tensor, format: Format | str, page_rows: int, layout: str = "block_split"
) -> torch.Tensor:
    """FP64 [n, 512]: the rows at `slots`, exactly, by table lookup. Arguments and errors of `gather_row_bytes`."""
    return decode_row_bytes(*gather_row_bytes(cache, slots, format, page_rows, layout), format)
