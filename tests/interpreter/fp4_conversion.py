"""A kernel that is nothing but the conversion of main rows to E4M3, and the launch of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.sparse_mla.conversion_kernel import fp4_to_e4m3


@triton.jit
def convert_kernel(codes, scales, out, BLOCK: tl.constexpr, HOW: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, fp4_to_e4m3(tl.load(codes + i), tl.load(scales + i), HOW))


def converting(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, how: str, **options: int) -> Launch:
    """uint8 [n] each, n a multiple of 512."""
    arguments = {"codes": codes, "scales": scales, "out": out}
    return Launch(convert_kernel, (len(out) // 512, 1, 1), arguments, {"BLOCK": 512, "HOW": how}, {"num_warps": 4, **options})
