"""How producers of `hopper_kernel.py` read rows of a pool and what their bytes become, two columns in an int32.

Values come times 2^-8 and exact, as in `rows_kernel.py`, two at a time: a bf16 has E2M1's and E4M3's fields in the same order
as FP32, so one 32-bit operation places two codes and one `mul.bf16x2` scales them. Subnormal products and operands are kept.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _scaled(words, factors):
    """Two bf16 products in each int32."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, factors], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _twice(value):
    """int32: the upper half of FP32 bits, a bf16, in both halves."""
    bits = value.to(gl.int32, bitcast=True)
    return (bits & -65536) | ((bits >> 16) & 0xFFFF)


@gluon.jit
def main_bytes(
    cache, slot, valid, page_stride, half, layout: gl.constexpr,
    PAGE_ROWS: gl.constexpr, V_ROW: gl.constexpr, S_BASE: gl.constexpr, S_ROW: gl.constexpr,
):  # fmt: skip
    """(int32 [rows, 8, 4] codes, int32 [rows, 8] pairs of scales) of one half of the rows at `slot`; zeros where not `valid`."""
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    pair = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    page = (slot // PAGE_ROWS).to(gl.int64) * page_stride
    row = slot % PAGE_ROWS
    # Addresses in words, from a pointer to words: of bytes read as words the compiler does not see that they follow each other.
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    at = (page // 4 + row * (V_ROW // 4) + half * 32)[:, None, None] + (group[:, None] * 4 + word[None, :])[None, :, :]
    codes = gl.load(words + at, mask=valid[:, None, None], other=0)
    # Two scales of 16 columns belong to four words of 8.
    at = (page + S_BASE + row * S_ROW + half * 16)[:, None] + pair[None, :] * 2
    scales = gl.load((cache + at).to(gl.pointer_type(gl.int16), bitcast=True), mask=valid[:, None], other=0)
    return codes, scales.to(gl.int32)


@gluon.jit
def main_words(codes, scales, layout: gl.constexpr, ROWS_READ: gl.constexpr):
    """int32 [rows, 128]: what `main_bytes` read as pairs of bf16 columns, times 2^-8."""
    second = (gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout))) >= 2)[None, None, :]
    factors = gl.where(second, _e4m3_factor(scales >> 8)[:, :, None], _e4m3_factor(scales)[:, :, None])
    o0 = _scaled(_pair(codes), factors)
    o1 = _scaled(_pair(codes >> 8), factors)
    o2 = _scaled(_pair(codes >> 16), factors)
    o3 = _scaled(_pair(codes >> 24), factors)
    return gl.join(gl.join(o0, o2), gl.join(o1, o3)).reshape([ROWS_READ, 128])


@gluon.jit
def _pair(code):
    """The two E2M1 codes of the lowest byte as a pair of bf16, times 2^-126."""
    code = code & 0xFF
    # Magnitude bits 0-2 and 4-6 to 6-8 and 22-24, sign bits 3 and 7 to 15 and 31.
    return ((code * 0x40040) & 0x01C001C0) | ((code * 0x1001000) & -2147450880)


@gluon.jit
def _e4m3_factor(code):
    """E4M3 codes, the lowest byte of an int32, times 2^118, as pairs of bf16."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    bits = gl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits)
    # bits are 2^-120 of the value, and 2^238 is no FP32 number
    return _twice(bits.to(gl.float32, bitcast=True) * 1.329227995784916e36 * 3.323069989462290e35)


@gluon.jit
def window_bytes(
    cache, slot, valid, page_stride, half, layout: gl.constexpr, GROUP: gl.constexpr,
    PAGE_ROWS: gl.constexpr, V_ROW: gl.constexpr, S_BASE: gl.constexpr, S_ROW: gl.constexpr,
):  # fmt: skip
    """(int32 [rows, 8, 8] codes, int32 [rows, 8] scales) of one half of the rows at `slot`; zeros and ones where not `valid`."""
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    scale = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    page = (slot // PAGE_ROWS).to(gl.int64) * page_stride
    row = slot % PAGE_ROWS
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    at = (page // 4 + row * (V_ROW // 4) + half * 64)[:, None, None] + (group[:, None] * 8 + word[None, :])[None, :, :]
    codes = gl.load(words + at, mask=valid[:, None, None], other=0)
    at = (page + S_BASE + row * S_ROW + half * 8)[:, None] + scale[None, :]
    # What the scales of an invalid slot hold may be NaN, and NaN * 0 is NaN: 127 is 1.
    scales = gl.load(cache + at, mask=valid[:, None] & (GROUP > 0), other=127)
    return codes, scales.to(gl.int32)


@gluon.jit
def window_words(codes, scales, GROUP: gl.constexpr, ROWS_READ: gl.constexpr):
    """int32 [rows, 128]: what `window_bytes` read as pairs of bf16 columns, times 2^-8."""
    low = _scaled(_e4m3_pair(codes, "prmt.b32 $0, $1, 0, 0x1404;"), gl.full_like(codes, 0x77807780))
    high = _scaled(_e4m3_pair(codes, "prmt.b32 $0, $1, 0, 0x3424;"), gl.full_like(codes, 0x77807780))
    if GROUP > 0:
        bits = gl.where(scales == 0, 0x00400000, scales << 23)
        bits = gl.where(scales == 0xFF, 0x7FC00000, bits)
        factors = _twice(bits.to(gl.float32, bitcast=True))[:, :, None] + gl.zeros_like(codes)
        low = _scaled(low, factors)
        high = _scaled(high, factors)
    # An E4M3 NaN would read as 480. A score with a NaN in it makes its whole row of the output NaN: one column is enough.
    nan = ((codes & 0x7F7F7F7F) + 0x01010101) & -2139062144
    low = gl.where(nan != 0, 0x7FC07FC0, low)
    return gl.join(low, high).reshape([ROWS_READ, 128])


@gluon.jit
def _e4m3_pair(code, SPREAD: gl.constexpr):
    """Two E4M3 codes as a pair of bf16, times 2^-120; SPREAD puts them in the upper bytes of both halves, zeros below."""
    spread = gl.inline_asm_elementwise(SPREAD, "=r,r", [code], dtype=gl.int32, is_pure=True, pack=1)
    return (spread & -2147450880) | ((spread >> 4) & 0x07F007F0)
