"""Triton functions that read rows of a DeepSeek-V4.1 cache: addresses, bytes, values. `formats.py` says what they mean.

In bf16 every value comes 2^-8 times as large as it is: so it is computed with one multiplication from the bits of its code, all
of them are exact in bf16, and the factor goes into the scale of the scores and of the output (`UNDO`).

    E2M1 code as FP32 bits   magnitude << 22 | sign << 31    = value * 2^-126 (its exponent field is E2M1's: subnormals too)
    E4M3 code as FP32 bits   magnitude << 20 | sign << 31    = value * 2^-120
    E8M0 code as FP32 bits   code << 23                      = value; code 0 is the subnormal 2^-127

A product of an E2M1 value (2 bits) and an E4M3 scale (4 bits) has at most 6 significant bits, bf16 has 8. E4M3 times a power of
two is exact where the result is at least 2^-126; below that it is off by less than 2^-134.

With a CONVERSION, one of `conversions.py`, values come as large as they are, in E4M3: those of the window as they lie there,
those of main rows rounded (`conversion_kernel.py`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from sglang_specverify.kernels.sparse_mla.conversion_kernel import fp4_to_e4m3

#: What the bf16 values of `main_rows` and `window_rows` have to be multiplied by.
UNDO = 256.0


@triton.jit
def page_offsets(slot, page_stride, PAGE_ROWS: tl.constexpr):
    """(int64 byte offset of each slot's page, its row there)."""
    return (slot // PAGE_ROWS).to(tl.int64) * page_stride, slot % PAGE_ROWS


@triton.jit
def e4m3_bits(code):
    """FP32: the values of uint8 E4M3 codes times 2^-120; NaN where the code is."""
    code = code.to(tl.uint32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    bits = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(code):
    """FP32: the values of uint8 E8M0 codes."""
    code = code.to(tl.uint32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    bits = tl.where(code == 0xFF, 0x7FC00000, bits)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_bits(code):
    """FP32: the values of E2M1 codes, the low nibble of a uint32, times 2^-126."""
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def main_rows(
    cache, slot, valid, page_stride, first,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PAGE_ROWS: tl.constexpr,
    V_ROW: tl.constexpr, S_BASE: tl.constexpr, S_ROW: tl.constexpr, CONVERSION: tl.constexpr = "",
):  # fmt: skip
    """bf16, or E4M3 with a CONVERSION, [BLOCK, 16 * GROUPS]: columns of the rows at `slot`, from group `first` on.

    Zeros where not `valid`.
    """
    page, row = page_offsets(slot, page_stride, PAGE_ROWS)
    byte = tl.arange(0, 8 * GROUPS)
    group = tl.arange(0, GROUPS)
    at = page + row * V_ROW + first * 8
    codes = tl.load(cache + at[:, None] + byte[None, :], mask=valid[:, None], other=0)
    at = page + S_BASE + row * S_ROW + first
    scales = tl.load(cache + at[:, None] + group[None, :], mask=valid[:, None], other=0)
    codes = tl.reshape(codes, [BLOCK, GROUPS, 8])
    if CONVERSION != "":
        each = tl.broadcast_to(scales[:, :, None], [BLOCK, GROUPS, 8])
        low_codes = fp4_to_e4m3(codes & 0xF, each, CONVERSION)
        high_codes = fp4_to_e4m3(codes >> 4, each, CONVERSION)
        return tl.reshape(tl.join(low_codes, high_codes), [BLOCK, 16 * GROUPS]).to(tl.float8e4nv, bitcast=True)
    else:
        # value * 2^-8 = (code's bits * 2^-126) * (scale's bits * 2^-120) * 2^238, and 2^238 is no FP32 number
        factor = (e4m3_bits(scales) * 1.329227995784916e36) * 3.323069989462290e35
        codes = codes.to(tl.uint32)
        low = (e2m1_bits(codes) * factor[:, :, None]).to(tl.bfloat16)
        high = (e2m1_bits(codes >> 4) * factor[:, :, None]).to(tl.bfloat16)
        return tl.reshape(tl.join(low, high), [BLOCK, 16 * GROUPS])


@triton.jit
def window_rows(
    cache, slot, valid, page_stride, first,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    V_ROW: tl.constexpr, S_BASE: tl.constexpr, S_ROW: tl.constexpr, CONVERSION: tl.constexpr = "",
):  # fmt: skip
    """bf16, or E4M3 with a CONVERSION, [BLOCK, COLUMNS]: columns of the rows at `slot`, from column `first` on.

    Zeros where not `valid`. GROUP is 32 for E8M0 scales, which E4M3 has no room for, and 0 for none.
    """
    page, row = page_offsets(slot, page_stride, PAGE_ROWS)
    column = tl.arange(0, COLUMNS)
    at = page + row * V_ROW + first
    codes = tl.load(cache + at[:, None] + column[None, :], mask=valid[:, None], other=0)
    if CONVERSION != "":
        tl.static_assert(GROUP == 0)
        return codes.to(tl.float8e4nv, bitcast=True)
    elif GROUP == 0:
        return (e4m3_bits(codes) * 5.192296858534828e33).to(tl.bfloat16)
    else:
        group = tl.arange(0, COLUMNS // GROUP)
        at = page + S_BASE + row * S_ROW + first // GROUP
        # What the scales of an invalid slot hold may be NaN, and NaN * 0 is NaN: 127 is 1.
        scales = tl.load(cache + at[:, None] + group[None, :], mask=valid[:, None], other=127)
        values = tl.reshape(e4m3_bits(codes) * 5.192296858534828e33, [BLOCK, COLUMNS // GROUP, GROUP])
        return tl.reshape((values * e8m0_value(scales)[:, :, None]).to(tl.bfloat16), [BLOCK, COLUMNS])
