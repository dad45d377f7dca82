"""Rounding to the nearest code of an 8-bit or 4-bit type, ties to the even code, by comparison with exact midpoints in FP64.

The plain path of the quantiser and the oracle use this; the kernel rounds by integer arithmetic and shares nothing with it.
"""

from __future__ import annotations

import functools

import torch

from sglang_specverify.kernels.sparse_mla.formats import e2m1_table, e4m3_table

#: The largest finite E4M3 code, 448, and NaN.
E4M3_MAX_CODE, E4M3_NAN = 0x7E, 0x7F


@functools.cache
def _midpoints(element: str) -> torch.Tensor:
    """FP64: exact midpoints between neighbouring finite magnitudes; the values have few bits, so none is rounded."""
    magnitudes = {"e2m1": e2m1_table()[:8], "e4m3": e4m3_table()[: E4M3_MAX_CODE + 1]}[element]
    return (magnitudes[:-1] + magnitudes[1:]) / 2


def _nearest(magnitudes: torch.Tensor, element: str) -> torch.Tensor:
    """int64 codes of FP64 `magnitudes` (0 or more); what lies above the largest gets its code."""
    midpoints = _midpoints(element).to(magnitudes.device)
    magnitudes = magnitudes.contiguous()
    below = torch.searchsorted(midpoints, magnitudes)
    # One more than `below` where a midpoint is hit: the even one of the two codes is taken.
    through = torch.searchsorted(midpoints, magnitudes, right=True)
    return torch.where(below % 2 == 0, below, through)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 E2M1 codes of FP64 `x`, saturated to ±6; the sign of what rounds to zero is kept. NaN is not for it."""
    return (_nearest(x.abs(), "e2m1") | (x.signbit().long() << 3)).to(torch.uint8)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """uint8 E4M3 codes of FP64 `x`, saturated to ±448, infinities included; NaN gives 0x7F or 0xFF."""
    codes = _nearest(x.abs(), "e4m3").masked_fill(x.isnan(), E4M3_NAN)
    return (codes | (x.signbit().long() << 7)).to(torch.uint8)


@functools.cache
def fp4_as_e4m3() -> torch.Tensor:
    """uint8 [16, 256]: the E4M3 code nearest to E2M1[i] * E4M3[j], saturated: a main row's value in the e4m3 contract."""
    return to_e4m3(e2m1_table()[:, None] * e4m3_table()[None, :])
