"""A main row's values in the e4m3 contract, E4M3_RN(E2M1[code] * E4M3[scale]) saturated at 448, in three ways with one result.

    packed   one instruction for four values, `mul.e4m3x4.e2m1p4x4.e4m3x4.satfinite`
    fp16     the product in FP16, where it is exact (6 bits of 2^-10 to 2688), and the conversion of two FP16 to E4M3
    integer  the product of two integers and a shift

`conversions.py` says which of them an architecture has. They agree bit for bit in all but the sign of NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from sglang_specverify.kernels.sparse_mla.quantize_kernel import e4m3_code


@triton.jit
def fp4_to_e4m3(codes, scales, HOW: tl.constexpr):
    """E4M3 codes, uint8, of E2M1 codes in the low half of uint8 (0 in the high one) and uint8 E4M3 scales of the same shape.

    With "packed" each thread must hold a multiple of four neighbours.
    """
    if HOW == "packed":
        return tl.inline_asm_elementwise(
            "mul.e4m3x4.e2m1p4x4.e4m3x4.satfinite $0, $1, $2;", "=r,r,r", [codes, scales], dtype=tl.uint8, is_pure=True, pack=4
        )
    elif HOW == "fp16":
        return _through_fp16(codes, scales)
    else:
        tl.static_assert(HOW == "integer")
        return _through_integers(codes, scales)


@triton.jit
def _through_fp16(codes, scales):
    # E2M1's exponent and fraction in FP16's fields read as its value * 2^-14, subnormal or not: the biases are 1 and 15.
    code = codes.to(tl.int16)
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    value = bits.to(tl.float16, bitcast=True) * 16384.0
    return (value * scales.to(tl.float8e4nv, bitcast=True).to(tl.float16)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _through_integers(codes, scales):
    code, scale = codes.to(tl.int32), scales.to(tl.int32)
    # The element in halves, 0 1 2 3 4 6 8 12; the scale as s * 2^f.
    exponent = (code >> 1) & 3
    halves = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
    magnitude = scale & 0x7F
    s = tl.where(magnitude < 8, magnitude, 8 + (magnitude & 7))
    f = tl.where(magnitude < 8, -9, (magnitude >> 3) - 10)
    product = halves * s
    # Its highest bit, of 8.
    top = (product > 1).to(tl.int32) + (product > 3).to(tl.int32) + (product > 7).to(tl.int32) + (product > 15).to(tl.int32)
    top += (product > 31).to(tl.int32) + (product > 63).to(tl.int32) + (product > 127).to(tl.int32)
    # Four more bits, so that there is something to shift out.
    rounded = e4m3_code(product << 4, f - 5, top + f - 1)
    rounded = tl.where(product == 0, 0, rounded)
    return (tl.where(magnitude == 0x7F, 0x7F, rounded) | (((code << 4) ^ scale) & 0x80)).to(tl.uint8)
