"""Small kernels that are right or wrong on purpose, and the launches of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_specverify.kernels.aot_cases import meta
from sglang_specverify.kernels.launch import Launch


@triton.jit
def product(x, y):
    return tl.dot(x, y)


@triton.jit
def multiply(a, b, out, stride, unused, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * stride + i[None, :]
    x = tl.load(a + at)
    tl.store(out + at, product(x, tl.load(b + at).to(x.dtype)) * SCALE)


@triton.jit
def add(a, b, out, stride, unused, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * stride + i[None, :]
    tl.store(out + at, (tl.load(a + at).to(tl.float32) + tl.load(b + at).to(tl.float32)) * SCALE)


def multiplying(block: int = 64, cache: torch.dtype = torch.bfloat16, **options: int) -> Launch:
    return _launch(multiply, block, cache, options)


def adding() -> Launch:
    return _launch(add, 64, torch.bfloat16, {})


def misspelt() -> Launch:
    """An option that no compiler has."""
    return _launch(multiply, 64, torch.bfloat16, {"num_wraps": 4})


def _launch(kernel: object, block: int, cache: torch.dtype, options: dict[str, int]) -> Launch:
    arguments = {
        "a": meta(block, block, dtype=torch.bfloat16),
        "b": meta(block, block, dtype=cache),
        "out": meta(block, block, dtype=torch.float32),
        "stride": block,
        "unused": 1,
    }
    return Launch(kernel, (1, 1, 1), arguments, {"BLOCK": block, "SCALE": 2.0}, {"num_warps": 4, **options})
