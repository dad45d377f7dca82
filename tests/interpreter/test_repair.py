"""The interpreter computes what a GPU does, with `repair.py`, and still does not without.

Each case runs the same kernel twice. With the repairs it must give PyTorch's bits; a failure there is a fault of the
repair. As Triton ships it, it must not: a failure there means that the installed Triton needs this repair no more (seen
needed: 3.7.1, 3.8.0, 3.9.0), and that it should be deleted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def interpreter_only(device: str) -> None:
    if device != "cpu":
        pytest.skip("the compiler runs here, not the interpreter")


@triton.jit
def _cast_kernel(source, target, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def _dot_kernel(a, b, c, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=dtype)
    _cast_kernel[(1,)](source, target, len(source))
    return target


def both(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run` gives with the repairs and without; a crash without them counts as NaN."""
    from tests.interpreter import repair

    repaired = run()
    with repair.suspended():
        try:
            shipped = run()
        except Exception:
            shipped = torch.full(repaired.shape, torch.nan)
    return repaired, shipped


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def assert_repaired(repaired: torch.Tensor, shipped: torch.Tensor, want: torch.Tensor) -> None:
    number = ~want.isnan()
    assert torch.equal(repaired.isnan(), ~number)
    assert torch.equal(bits(repaired[number]), bits(want[number]))
    same = shipped.shape == want.shape and torch.equal(shipped.double().nan_to_num(7e77), want.double().nan_to_num(7e77))
    assert not same, f"Triton {triton.__version__} does not need this repair any more"


def samples(n: int = 4096) -> torch.Tensor:
    """FP32 values of all signs and sizes that 8 bits and more can hold, ties among them."""
    gen = torch.Generator().manual_seed(0)
    value = torch.randn(n, generator=gen) * torch.exp2(torch.randint(-8, 9, (n,), generator=gen))
    ties = (torch.arange(256) * 2 + 1) / 256 + 1  # half-way between two bf16 numbers, and an FP8 carry at its end
    return torch.cat([value[: n - 256], ties])


def test_fp32_to_bf16_rounds_to_nearest_even() -> None:
    x = samples()
    repaired, shipped = both(lambda: cast(x, torch.bfloat16))
    assert_repaired(repaired, shipped, x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
def test_downcast_to_fp8_carries_and_saturates(source: torch.dtype, dtype: torch.dtype) -> None:
    x = samples().to(source)
    limit = torch.finfo(dtype).max
    repaired, shipped = both(lambda: cast(x, dtype))
    assert_repaired(repaired.float(), shipped.float(), x.float().clamp(-limit, limit).to(dtype).float())


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_upcast_of_every_fp8_code(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    repaired, shipped = both(lambda: cast(x, torch.float32))
    assert_repaired(repaired, shipped, x.float())


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=str)
def test_upcast_of_every_fp8_code_to_16_bits_is_exact(target: torch.dtype) -> None:
    for dtype in FP8:
        x = torch.arange(256, dtype=torch.uint8).view(dtype)
        torch.testing.assert_close(cast(x, target).double(), x.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    """Products of 8- and 16-bit numbers are exact in FP32; with integers of few bits their sums are too."""
    gen = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, (16, 16), generator=gen).to(dtype) for _ in range(2))

    def run() -> torch.Tensor:
        c = torch.zeros(16, 16)
        _dot_kernel[(1,)](a, b, c, 16)
        return c

    repaired, shipped = both(run)
    want = a.float() @ b.float()
    if dtype == torch.bfloat16:
        assert_repaired(repaired, shipped, want)
    else:
        assert torch.equal(repaired, want)


def test_what_is_right_stays_right() -> None:
    """FP32 to FP16, and FP16 products, which Triton gets right by itself."""
    x = samples()
    repaired, shipped = both(lambda: cast(x, torch.float16))
    assert torch.equal(repaired, x.half()) and torch.equal(shipped, x.half())
