"""The 584-byte rows of DeepSeek-V4, which FlashMLA's SM90 path and SGLang's Triton kernel read: written and read here in PyTorch.

A row is 448 E4M3 values in seven groups of 64 columns with a scale that is a power of two, and 64 values in bf16. Within a page
576 bytes of every row come first, behind them 8 of every row: seven scales, E8M0, and one byte of nothing. Pages lie at multiples
of 576 bytes.
"""

from __future__ import annotations

import torch

from benchmarks.sparse_mla_points import V4_BYTES
from sglang_specverify.kernels.sparse_mla.formats import e8m0_table

#: Columns in E4M3, columns of a group, and bytes of a row's values and of its scales.
SCALED, GROUP, VALUE_BYTES, SCALE_BYTES = 448, 64, 576, 8
E4M3_LARGEST, LEAST_AMAX = 448.0, 1e-8


def allocate(pages: int, page_rows: int, device: torch.device) -> torch.Tensor:
    """uint8 [pages, page_rows, 1, 584] of zeros, in the strides that FlashMLA asks for."""
    used = page_rows * V4_BYTES
    padded = -(-used // VALUE_BYTES) * VALUE_BYTES
    return torch.zeros(pages, padded, dtype=torch.uint8, device=device)[:, :used].view(pages, page_rows, 1, V4_BYTES)


def write(cache: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Write bf16 [n, 512] into the pages from `first` on; n is a multiple of a page's rows."""
    pages, page_rows = len(rows) // cache.shape[1], cache.shape[1]
    groups = rows[:, :SCALED].float().view(-1, SCALED // GROUP, GROUP)
    # 2^ceil(log2 y) from the parts of y, which are exact: y = fraction * 2^exponent, 1/2 <= fraction < 1
    fraction, exponent = torch.frexp(groups.abs().amax(dim=2).clamp_min(LEAST_AMAX) / E4M3_LARGEST)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    scaled = torch.ldexp(groups, -exponent[..., None]).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    values = torch.cat([codes, rows[:, SCALED:].contiguous().view(torch.uint8)], dim=1)
    scales = torch.zeros(len(rows), SCALE_BYTES, dtype=torch.uint8, device=rows.device)
    scales[:, : SCALED // GROUP] = (exponent + 127).to(torch.uint8)
    parts = [values.view(pages, page_rows * VALUE_BYTES), scales.view(pages, page_rows * SCALE_BYTES)]
    cache[first : first + pages].view(pages, -1).copy_(torch.cat(parts, dim=1))


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """FP64 [n, 512]: the rows at `slots`, exactly."""
    page_rows = cache.shape[1]
    flat = cache.view(len(cache), -1)
    page, row = slots.long()[:, None] // page_rows, slots.long()[:, None] % page_rows
    values = flat[page, row * VALUE_BYTES + torch.arange(VALUE_BYTES, device=cache.device)]
    at = page_rows * VALUE_BYTES + row * SCALE_BYTES + torch.arange(SCALED // GROUP, device=cache.device)
    scales = e8m0_table().to(cache.device)[flat[page, at].long()].repeat_interleave(GROUP, dim=1)
    codes = values[:, :SCALED].contiguous().view(torch.float8_e4m3fn).double()
    return torch.cat([codes * scales, values[:, SCALED:].contiguous().view(torch.bfloat16).double()], dim=1)
