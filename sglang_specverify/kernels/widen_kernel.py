"""Keys and values of a cache in the type of the queries, for the kernels that multiply them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(tile, kind: tl.constexpr, BY_FP16: tl.constexpr):
    """`tile` in the type `kind`, FP8 codes exactly, infinities and NaN included.

    BY_FP16: from E5M2 to BF16 by way of FP16, which has every number of E5M2. On NVIDIA and gfx942 Triton 3.8 shifts the bits and
    multiplies by 2^112, which turns infinity and NaN into finite numbers from 65536 on. gfx950 has an instruction that is right.
    """
    if BY_FP16 and tile.dtype == tl.float8e5 and kind == tl.bfloat16:
        tile = tile.to(tl.float16)
    return tile.to(kind)
