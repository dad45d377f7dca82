"""Rows that sit on and beside every boundary of the cache formats, for tests of quantisers."""

from __future__ import annotations

import torch

from sglang_specverify.kernels.sparse_mla.formats import DIM, e2m1_table, e4m3_table

from .cases import generator


def beside(points: torch.Tensor) -> torch.Tensor:
    """FP32 [..., 3]: each point, which must be an FP32 number, with its neighbours below and above."""
    exact = points.float()
    assert torch.equal(exact.double(), points.double())
    inf = torch.tensor(torch.inf)
    return torch.stack([exact.nextafter(-inf), exact, exact.nextafter(inf)], dim=-1)


def rows_of(groups: torch.Tensor) -> torch.Tensor:
    """FP32 [n, 512] of groups [m, group], the last row filled up with zeros."""
    flat = groups.flatten().float()
    return torch.cat([flat, flat.new_zeros(-len(flat) % DIM)]).view(-1, DIM)


def signed(values: torch.Tensor) -> torch.Tensor:
    """Every other value with a minus."""
    return values * torch.tensor([1.0, -1.0]).repeat(values.shape[-1] // 2 + 1)[: values.shape[-1]]


def fp4_codes() -> torch.Tensor:
    """FP32 [n, 512]: for every E4M3 scale from 2^-9 to 448, the ties between E2M1 codes times it, and beside them."""
    scales = e4m3_table()[1:127]
    magnitudes = e2m1_table()[:8]
    ties = beside(scales[:, None] * (magnitudes[:-1] + magnitudes[1:]) / 2).flatten(1)
    largest = (6 * scales).float()[:, None]
    # 21 values of a scale in two groups of 16, each with the 6 times the scale that leads to it.
    groups = torch.cat([largest, signed(ties[:, :15]), largest, -largest, signed(ties[:, 15:]), ties[:, 6:14]], dim=1).view(
        -1, 16
    )
    # Once more with the other sign and in the other half of a byte.
    return rows_of(torch.cat([groups, -groups.flip(1)]))


def fp4_scales() -> torch.Tensor:
    """FP32 [n, 512]: the largest value of a group is 6 times each tie between E4M3 scales, beside it, and beyond both ends."""
    scales = e4m3_table()[:127]
    peaks = beside(6 * (scales[:-1] + scales[1:]) / 2).flatten()
    ends = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-30, 6 * 2.0**-9, 2687.0, 2688.0, 2689.0, 2784.0, 4e3, 1e10, 3.4e38])
    peaks = torch.cat([peaks, ends])
    shape = torch.linspace(-1, 1, 15) * peaks[:, None]
    return rows_of(torch.cat([shape[:, :5], peaks[:, None], shape[:, 5:]], dim=1))


def mxfp8_scales() -> torch.Tensor:
    """FP32 [n, 512]: the largest value of a group is 448 * 2^k, or beside it, for every second k that there is."""
    k = torch.cat([torch.arange(-40, 119, 2), torch.tensor([-22, -21, -13, 118, 119])]).double()
    peaks = beside(448 * 2.0**k)
    peaks = torch.cat([peaks.flatten(), torch.tensor([0.0, 1e-45, 1e-38, 1e-4, 9.9e-5, 0.0448, 0.0447, 3.4e38, 3.4028235e38])])
    shape = torch.linspace(-1, 1, 31) * peaks[:, None]
    return rows_of(torch.cat([shape[:, :20], peaks[:, None], shape[:, 20:]], dim=1))


def e4m3_codes(exponent: int = 0) -> torch.Tensor:
    """FP32 [n, 512]: every E4M3 value and every tie between two, times 2^exponent, and beside them.

    One in each group of 32 is 448 * 2^exponent, so that swa_mxfp8 has this scale.
    """
    values = e4m3_table()[:127]
    points = torch.cat([values[1:], (values[:-1] + values[1:]) / 2]) * 2.0**exponent
    near = beside(points).flatten()
    near = torch.cat([near, -near, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38])])
    near = near[near.abs() <= 448 * 2.0**exponent]
    near = torch.cat([near, near.new_zeros(-len(near) % 31)]).view(-1, 31)
    return rows_of(torch.cat([near, near.new_full((len(near), 1), 448 * 2.0**exponent)], dim=1))


def any_bits(seed: int, rows: int, *, finite: bool = False) -> torch.Tensor:
    """FP32 [rows, 512] of random bits, NaN and subnormal numbers among them; or of random exponents without the largest."""
    gen = generator(seed)
    bits = torch.randint(-(2**31), 2**31, (rows, DIM), generator=gen, dtype=torch.int64).int()
    if not finite:
        return bits.view(torch.float32)
    # A common exponent for each row, so that more than one value of a group is not 0.
    exponents = torch.randint(-16, 16, (rows, 1), generator=gen).float()
    return torch.randn(rows, DIM, generator=gen) * 2.0**exponents


def broken(group: int) -> torch.Tensor:
    """FP32 [4, 512]: finite but for one NaN, -NaN, inf or -inf in one group of each row."""
    x = any_bits(3, 4, finite=True)
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    for row, value in enumerate([nan[0], nan[1], torch.tensor(torch.inf), torch.tensor(-torch.inf)]):
        x[row, (2 * row + 1) * group + row] = value
    return x
