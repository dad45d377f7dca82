"""Parts of `hopper_kernel.py`: which keys a program has, how their bytes become bf16, and how a tile of rows ends."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Triton 3.6 has it under its first name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Query rows and keys of a tile, half the columns of a row, tiles in the ring.
ROWS, KEYS, HALF, STAGES = gl.constexpr(64), gl.constexpr(64), gl.constexpr(256), gl.constexpr(2)


@gluon.jit
def keys_of(
    swa_starts, swa_lens, main_lens, queries, swa_width, main_width,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
    TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SWA_LENS: gl.constexpr,
    HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr,
):  # fmt: skip
    """(first window tile, how many, first main tile, how many) of this program, lengths heeded; at least one tile."""
    batch = gl.program_id(2).to(gl.int64)
    token = gl.program_id(1) // head_blocks * TOKENS
    part = gl.program_id(0)
    swa_tiles = (swa_width + KEYS - 1) // KEYS
    list_tiles = (main_width + KEYS - 1) // KEYS
    all_main = 0
    if HAS_MAIN:
        all_main = list_tiles
        if not SHARED_MAIN:
            all_main = list_tiles * TOKENS
    begin = part * (swa_tiles + all_main) // splits
    end = (part + 1) * (swa_tiles + all_main) // splits

    longest = swa_width
    if HAS_SWA_LENS:
        longest = 0
        for t in gl.static_range(TOKENS):
            here = token + t < queries
            start = 0
            if HAS_STARTS:
                start = gl.maximum(gl.load(swa_starts + batch * swa_start_batch + (token + t) * swa_start_row, mask=here, other=0), 0)
            length = gl.load(swa_lens + batch * swa_len_batch + (token + t) * swa_len_row, mask=here, other=0)
            length = gl.minimum(gl.maximum(length, 0), swa_width)
            longest = gl.maximum(longest, gl.minimum(start + length, swa_width))
    swa_count = gl.maximum(gl.minimum(gl.minimum(end, swa_tiles), (longest + KEYS - 1) // KEYS) - begin, 0)

    main_begin = gl.maximum(begin - swa_tiles, 0)
    main_end = gl.maximum(end - swa_tiles, 0)
    if HAS_MAIN and HAS_MAIN_LENS and (TOKENS == 1 or SHARED_MAIN):
        listed = 0
        for t in gl.static_range(TOKENS):
            one = gl.load(main_lens + batch * main_len_batch + (token + t) * main_len_row, mask=token + t < queries, other=0)
            listed = gl.maximum(listed, one)
        main_end = gl.minimum(main_end, (gl.minimum(listed, main_width) + KEYS - 1) // KEYS)
    main_count = gl.maximum(main_end - main_begin, 0)
    # A program without keys attends one tile of the window's, whose entries count only where they do: then none of them.
    idle = swa_count + main_count == 0
    swa_count = gl.where(idle, 1, swa_count)
    begin = gl.where(idle, swa_tiles, begin)
    return begin, swa_count, main_begin, main_count


@gluon.jit
def _scaled(words, factors):
    """Two bf16 products in each int32."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, factors], dtype=gl.int32, is_pure=True, pack=1)


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
    """(int32 [32, 8, 4] codes, int32 [32, 8] pairs of scales) of one half of the rows at `slot`; zeros where not `valid`."""
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    pair = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    page = (slot // PAGE_ROWS).to(gl.int64) * page_stride
    row = slot % PAGE_ROWS
    at = (page + row * V_ROW + half * 128)[:, None, None] + (group[:, None] * 16 + word[None, :] * 4)[None, :, :]
    codes = gl.load((cache + at).to(gl.pointer_type(gl.int32), bitcast=True), mask=valid[:, None, None], other=0)
    # Two scales of 16 columns belong to four words of 8.
    at = (page + S_BASE + row * S_ROW + half * 16)[:, None] + pair[None, :] * 2
    scales = gl.load((cache + at).to(gl.pointer_type(gl.int16), bitcast=True), mask=valid[:, None], other=0)
    return codes, scales.to(gl.int32)


@gluon.jit
def main_words(codes, scales, layout: gl.constexpr):
    """int32 [32, 128]: what `main_bytes` read as pairs of bf16 columns, times 2^-8."""
    second = (gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout))) >= 2)[None, None, :]
    factors = gl.where(second, _e4m3_factor(scales >> 8)[:, :, None], _e4m3_factor(scales)[:, :, None])
    o0 = _scaled(_pair(codes), factors)
    o1 = _scaled(_pair(codes >> 8), factors)
    o2 = _scaled(_pair(codes >> 16), factors)
    o3 = _scaled(_pair(codes >> 24), factors)
    return gl.join(gl.join(o0, o2), gl.join(o1, o3)).reshape([32, 128])


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
    """(int32 [32, 8, 8] codes, int32 [32, 8] scales) of one half of the rows at `slot`; zeros and ones where not `valid`."""
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    scale = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    page = (slot // PAGE_ROWS).to(gl.int64) * page_stride
    row = slot % PAGE_ROWS
    at = (page + row * V_ROW + half * 256)[:, None, None] + (group[:, None] * 32 + word[None, :] * 4)[None, :, :]
    codes = gl.load((cache + at).to(gl.pointer_type(gl.int32), bitcast=True), mask=valid[:, None, None], other=0)
    at = (page + S_BASE + row * S_ROW + half * 8)[:, None] + scale[None, :]
    # What the scales of an invalid slot hold may be NaN, and NaN * 0 is NaN: 127 is 1.
    scales = gl.load(cache + at, mask=valid[:, None] & (GROUP > 0), other=127)
    return codes, scales.to(gl.int32)


@gluon.jit
def window_words(codes, scales, GROUP: gl.constexpr):
    """int32 [32, 128]: what `window_bytes` read as pairs of bf16 columns, times 2^-8."""
    low = _scaled(_e4m3_pair(codes), gl.full_like(codes, 0x77807780))
    high = _scaled(_e4m3_pair(codes >> 16), gl.full_like(codes, 0x77807780))
    if GROUP > 0:
        bits = gl.where(scales == 0, 0x00400000, scales << 23)
        bits = gl.where(scales == 0xFF, 0x7FC00000, bits)
        factors = _twice(bits.to(gl.float32, bitcast=True))[:, :, None] + gl.zeros_like(codes)
        low = _scaled(low, factors)
        high = _scaled(high, factors)
    # An E4M3 NaN would read as 480. A score with a NaN in it makes its whole row of the output NaN: one column is enough.
    nan = ((codes & 0x7F7F7F7F) + 0x01010101) & -2139062144
    low = gl.where(nan != 0, 0x7FC07FC0, low)
    return gl.join(low, high).reshape([32, 128])


@gluon.jit
def _e4m3_pair(code):
    """The two E4M3 codes of the lower half as a pair of bf16, times 2^-120."""
    # byte 0 to bits 8-15, byte 1 to bits 24-31
    spread = ((code & 0xFF) << 8) | ((code & 0xFF00) << 16)
    return (spread & -2147450880) | ((spread >> 4) & 0x07F007F0)


@gluon.jit
def row_factor(
    m, total, sink, lse, partial_lse, token, queries, heads, out_scale, lse_batch, lse_row, lse_head, head_blocks, splits,
    rows: gl.constexpr, TOKENS: gl.constexpr, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """What the rows' sums are multiplied by in the end, [ROWS]; their LSE is written."""
    HEADS_M: gl.constexpr = ROWS // TOKENS
    LOG2_E: gl.constexpr = 1.4426950408889634
    LN_2: gl.constexpr = 0.6931471805599453
    batch = gl.program_id(2).to(gl.int64)
    r = gl.arange(0, ROWS, rows)
    empty = total == 0.0
    norm = gl.where(empty, 1.0, total)
    value = m + gl.log2(norm)
    if SPLIT:
        at = ((batch * gl.num_programs(1) + gl.program_id(1)) * splits + gl.program_id(0)) * ROWS + r
        gl.store(partial_lse + at, gl.where(empty, float("-inf"), value))
        factor = gl.where(empty, 0.0, 1.0 / norm)
    else:
        head = gl.program_id(1) % head_blocks * HEADS_M + r % HEADS_M
        real = (token < queries) & (head < heads)
        at = lse + batch * lse_batch + token.to(gl.int64) * lse_row + head.to(gl.int64) * lse_head
        gl.store(at, gl.where(empty, float("-inf"), value * LN_2), mask=real)
        factor = out_scale / norm
        if HAS_SINK:
            # The larger of both exponents is taken out first; +inf leaves nothing, -inf changes nothing.
            one = gl.load(sink + head, mask=real, other=float("-inf")).to(gl.float32) * LOG2_E
            peak = gl.maximum(m, one)
            shift = gl.where(gl.abs(peak) == float("inf"), 0.0, peak)
            alpha = gl.exp2(m - shift)
            with_sink = out_scale * alpha / (total * alpha + gl.exp2(one - shift))
            with_sink = gl.where(one == float("inf"), 0.0, with_sink)
            factor = gl.where(one == float("-inf"), factor, with_sink)
        factor = gl.where(empty, 0.0, factor)
    return factor


@gluon.jit
def finish(
    o, factor, place, out, partial_out, queries, heads, out_batch, out_row, out_head, head_blocks, splits,
    first: gl.constexpr, mma_o: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Write one half of the columns of a tile of rows; `place` is shared memory of that half's size that nobody reads."""
    HEADS_M: gl.constexpr = ROWS // TOKENS
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    batch = gl.program_id(2).to(gl.int64)
    result = o * factor[:, None]
    if SPLIT:
        at = ((batch * gl.num_programs(1) + gl.program_id(1)) * splits + gl.program_id(0)) * ROWS
        rows_o: gl.constexpr = gl.SliceLayout(1, mma_o)
        at = (at + gl.arange(0, ROWS, rows_o))[:, None] * (2 * HALF) + first + gl.arange(0, HALF, gl.SliceLayout(0, mma_o))[None, :]
        gl.store(partial_out + at, result)
    else:
        result = gl.where(factor[:, None] == 0.0, 0.0, result)
        # Through shared memory, for whole lines to be written.
        place.store(result.to(gl.bfloat16))
        r = gl.arange(0, ROWS, gl.SliceLayout(1, copies))
        d = gl.arange(0, HALF, gl.SliceLayout(0, copies))
        token = gl.program_id(1) // head_blocks * TOKENS + r // HEADS_M
        head = gl.program_id(1) % head_blocks * HEADS_M + r % HEADS_M
        at = (batch * out_batch + token.to(gl.int64) * out_row + head.to(gl.int64) * out_head)[:, None] + first + d[None, :]
        gl.store(out + at, place.load(copies), mask=((token < queries) & (head < heads))[:, None])
