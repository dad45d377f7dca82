"""The Triton kernels of `quantize.py`, which has the formulas. They see the bits of numbers and compute on integers only.

An FP32 magnitude is m * 2^e with an integer m < 2^24: its fraction and, but for subnormal numbers, the implicit bit. To round it
to multiples of 2^q, m is shifted right by q - e and what is shifted out decides; ties go to the even multiple.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_fp32_bits(x):
    """int32 bits of FP32 numbers at pointers to int32, or to the int16 bits of BF16 numbers."""
    bits = tl.load(x).to(tl.int32)
    if x.dtype.element_ty == tl.int16:
        bits = bits << 16
    return bits


@triton.jit
def _shift_to_nearest(m, shift):
    """m / 2^shift to the nearest integer, ties to even, for 0 <= m < 2^28; shift is 1 or more."""
    # From 29 on the result is 0, at 28 too but for the sum below, which has room up to 2^30.
    shift = tl.minimum(shift, 29)
    odd = (m >> shift) & 1
    return (m + (1 << (shift - 1)) - 1 + odd) >> shift


@triton.jit
def e4m3_code(m, e, leading):
    """The E4M3 code nearest to m * 2^e, at most 0x7E; m < 2^28 and `leading` = floor(log2(m * 2^e)), or less below 2^-6."""
    # Spacing 2^q: three bits of fraction, and nothing finer than 2^-9. A code counts spacings from 0: where the exponent rises by
    # one, the code rises by 8 and the spacing doubles.
    q = tl.maximum(leading - 3, -9)
    return tl.minimum((q + 9) * 8 + _shift_to_nearest(m, tl.maximum(q - e, 1)), 0x7E)


@triton.jit
def _row(slots, slots_stride, capacity, page_rows, cache, page_stride):
    """Where program i's row goes: start of its page, its row in the page, and whether it is in the pool."""
    i = tl.program_id(0).to(tl.int64)
    slot = i
    if slots is not None:
        slot = tl.load(slots + i * slots_stride).to(tl.int64)
    real = (slot >= 0) & (slot < capacity)
    slot = tl.where(real, slot, 0)
    return cache + (slot // page_rows) * page_stride, slot % page_rows, real


@triton.jit
def _e2m1_code(bits, s, f):
    """The E2M1 code, sign included, nearest to a finite FP32 number over s * 2^f, from its bits; s is 1 to 15, f -9 to 5."""
    # The boundaries between codes are 1, 3, 5, 7, 10, 14 and 20 quarters of the scale. The number is counted in eighths of 2^f,
    # rounded down to quarters, with the lowest bit set where something was lost, and compared with 2 * s times these.
    magnitude = bits & 0x7FFFFFFF
    field = magnitude >> 23
    m = (magnitude & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
    # The number is m * 2^(max(field, 1) - 150). A shift below 13 occurs only where the scale is saturated: it is beyond every
    # boundary then, and so is m >> 13, 2^10 or more against 20 * 15. A shift over 31 leaves less than one quarter.
    shift = tl.minimum(tl.maximum(f + 148 - tl.maximum(field, 1), 13), 31)
    quarters = m >> shift
    counted = 2 * quarters + ((quarters << shift) != m).to(tl.int32)
    # A boundary itself belongs to the even code: to the lower one at the first, third, fifth and seventh.
    code = (counted > 2 * s).to(tl.int32) + (counted >= 6 * s).to(tl.int32) + (counted > 10 * s).to(tl.int32)
    code += (counted >= 14 * s).to(tl.int32) + (counted > 20 * s).to(tl.int32) + (counted >= 28 * s).to(tl.int32)
    return code + (counted > 40 * s).to(tl.int32) | ((bits >> 28) & 8)


@triton.jit
def quantize_fp4_kernel(
    x, slots, cache, capacity, page_rows, x_row, slots_stride, page_stride, value_base, value_stride, scale_base, scale_stride,
):  # fmt: skip
    """One program: one row, 512 values at x + i * x_row, to 256 bytes of E2M1 codes and 32 E4M3 scales."""
    page, row, real = _row(slots, slots_stride, capacity, page_rows, cache, page_stride)
    group, pair = tl.arange(0, 32), tl.arange(0, 8)
    byte = group[:, None] * 8 + pair[None, :]
    at = x + tl.program_id(0).to(tl.int64) * x_row + byte * 2
    even, odd = _load_fp32_bits(at), _load_fp32_bits(at + 1)
    # Magnitudes order like their bits; NaN and infinities are the largest.
    amax = tl.max(tl.maximum(even & 0x7FFFFFFF, odd & 0x7FFFFFFF), 1)
    broken = amax >= 0x7F800000

    # Not below 6 * 2^-9, so a normal number, m * 2^e. A sixth of it is m * 16 / 3 * 2^(e - 5). The remainder is dropped: ties
    # are multiples of 2^20 there, and m * 16 is 3 times one or differs from that by 16 or more.
    amax = tl.maximum(tl.where(broken, 0, amax), 0x3C400000)
    m = (amax & 0x7FFFFF) | 0x800000
    exponent = (amax >> 23) - 127
    # m * 2^-23 of [1, 2) over 6 is of [1/6, 1/4) below 1.5 and of [1/4, 1/3) from there.
    leading = exponent - tl.where(m < 0xC00000, 3, 2)
    scale = e4m3_code(m * 16 // 3, exponent - 28, leading)

    s = tl.where(scale < 8, scale, 8 + (scale & 7))[:, None]
    f = tl.where(scale < 8, -9, (scale >> 3) - 10)[:, None]
    codes = _e2m1_code(even, s, f) | (_e2m1_code(odd, s, f) << 4)
    codes = tl.where(broken[:, None], 0, codes)
    tl.store(page + value_base + row * value_stride + byte, codes.to(tl.uint8), mask=real)
    tl.store(page + scale_base + row * scale_stride + group, tl.where(broken, 0x7F, scale).to(tl.uint8), mask=real)


@triton.jit
def quantize_mxfp8_kernel(
    x, slots, cache, capacity, page_rows, x_row, slots_stride, page_stride, value_base, value_stride, scale_base, scale_stride,
    MIN_AMAX_BITS: tl.constexpr,
):  # fmt: skip
    """One program: one row, 512 values at x + i * x_row, to 512 E4M3 codes and 16 E8M0 scales."""
    page, row, real = _row(slots, slots_stride, capacity, page_rows, cache, page_stride)
    group = tl.arange(0, 16)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = _load_fp32_bits(x + tl.program_id(0).to(tl.int64) * x_row + column)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, 1)
    broken = amax >= 0x7F800000
    amax = tl.maximum(tl.where(broken, 0, amax), MIN_AMAX_BITS)
    # 448 = 1.75 * 2^8: the exponent of the next power of two from amax / 448 on is one larger where the significand is over 1.75.
    k = (amax >> 23) - 127 - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)

    code = _e4m3_of_fp32(magnitude, k[:, None])
    code = tl.where(broken[:, None], 0x7F, code | ((bits >> 24) & 0x80))
    tl.store(page + value_base + row * value_stride + column, code.to(tl.uint8), mask=real)
    tl.store(page + scale_base + row * scale_stride + group, tl.where(broken, 0xFF, k + 127).to(tl.uint8), mask=real)


@triton.jit
def quantize_e4m3_kernel(
    x, slots, cache, capacity, page_rows, x_row, slots_stride, page_stride, value_base, value_stride, scale_base, scale_stride,
):  # fmt: skip
    """One program: one row, 512 values at x + i * x_row, to 512 E4M3 codes; the scale's place is not used."""
    page, row, real = _row(slots, slots_stride, capacity, page_rows, cache, page_stride)
    column = tl.arange(0, 512)
    bits = _load_fp32_bits(x + tl.program_id(0).to(tl.int64) * x_row + column)
    magnitude = bits & 0x7FFFFFFF
    code = tl.where(magnitude >= 0x7F800000, 0x7F, _e4m3_of_fp32(magnitude, 0)) | ((bits >> 24) & 0x80)
    tl.store(page + value_base + row * value_stride + column, code.to(tl.uint8), mask=real)


@triton.jit
def _e4m3_of_fp32(magnitude, k):
    """The E4M3 code nearest to a finite FP32 number over 2^k, from its bits without sign; k is -110 or more."""
    field = magnitude >> 23
    m = (magnitude & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
    return e4m3_code(m, tl.maximum(field, 1) - 150 - k, field - 127 - k)
