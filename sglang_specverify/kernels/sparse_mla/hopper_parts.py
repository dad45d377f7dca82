"""Parts of `hopper_kernel.py`: which keys a program has, and how a tile of rows ends."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Triton 3.6 has it under its first name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Query rows of a tile, and half the columns of a row.
ROWS, HALF = gl.constexpr(64), gl.constexpr(256)


@gluon.jit
def part_of(
    window, main_width, splits, TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_MAIN: gl.constexpr, KEYS: gl.constexpr
):
    """(first tile of this program's part, behind its last, tiles of the `window` entries), lengths of main lists not heeded."""
    part = gl.program_id(0)
    swa_tiles = (window + KEYS - 1) // KEYS
    tiles = swa_tiles
    if HAS_MAIN:
        list_tiles = (main_width + KEYS - 1) // KEYS
        tiles = swa_tiles + (list_tiles if SHARED_MAIN else list_tiles * TOKENS)
    return part * tiles // splits, (part + 1) * tiles // splits, swa_tiles


@gluon.jit
def window_range(
    swa_starts, swa_lens, token, queries, swa_width, swa_len_batch, swa_len_row, swa_start_batch, swa_start_row,
    HAS_STARTS: gl.constexpr, HAS_SWA_LENS: gl.constexpr,
):  # fmt: skip
    """(first, behind the last) entry of its window list that query row `token` reads, both within it."""
    batch = gl.program_id(2).to(gl.int64)
    here = token < queries
    first = 0
    if HAS_STARTS:
        first = gl.load(swa_starts + batch * swa_start_batch + token * swa_start_row, mask=here, other=0)
        first = gl.minimum(gl.maximum(first, 0), swa_width)
    behind = swa_width
    if HAS_SWA_LENS:
        length = gl.load(swa_lens + batch * swa_len_batch + token * swa_len_row, mask=here, other=0)
        behind = first + gl.minimum(gl.maximum(length, 0), swa_width - first)
    return first, behind


@gluon.jit
def tiled(begin, end, swa_width, TOKENS: gl.constexpr, HAS_STARTS: gl.constexpr):
    """(entry of the window's list with which its first tile begins, how many entries from there on parts are divided over).

    Those of the whole list, whatever lengths say; but of a row with tiles and a start of its own those that it reads, from
    `begin` to `end`: it takes as few tiles wherever it begins, and no part is given window tiles that it does not read.
    """
    origin = 0
    window = swa_width
    if TOKENS == 1 and HAS_STARTS:
        origin = begin
        window = end - begin
    return origin, window


@gluon.jit
def main_limit(main_lens, token, queries, main_width, main_len_batch, main_len_row, TOKENS: gl.constexpr):
    """Entries of a main list that any of the query rows from `token` on reads; all of them read the same list."""
    batch = gl.program_id(2).to(gl.int64)
    limit = 0
    for t in gl.static_range(TOKENS):
        one = gl.load(main_lens + batch * main_len_batch + (token + t) * main_len_row, mask=token + t < queries, other=0)
        limit = gl.maximum(limit, one)
    return gl.minimum(limit, main_width)


@gluon.jit
def keys_of(
    swa_starts, swa_lens, main_lens, queries, swa_width, main_width,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
    TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SWA_LENS: gl.constexpr,
    HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """(first window tile, how many, first main tile, how many) of this program, lengths heeded; at least one tile.

    Window tiles are counted from the entry that `tiled` names.
    """
    token = gl.program_id(1) // head_blocks * TOKENS
    first, longest = window_range(
        swa_starts, swa_lens, token, queries, swa_width,
        swa_len_batch, swa_len_row, swa_start_batch, swa_start_row, HAS_STARTS, HAS_SWA_LENS,
    )  # fmt: skip
    origin, window = tiled(first, longest, swa_width, TOKENS, HAS_STARTS)
    begin, end, swa_tiles = part_of(window, main_width, splits, TOKENS, SHARED_MAIN, HAS_MAIN, KEYS)

    for t in gl.static_range(1, TOKENS):
        _, behind = window_range(
            swa_starts, swa_lens, token + t, queries, swa_width,
            swa_len_batch, swa_len_row, swa_start_batch, swa_start_row, HAS_STARTS, HAS_SWA_LENS,
        )  # fmt: skip
        longest = gl.maximum(longest, behind)
    swa_count = gl.maximum(gl.minimum(gl.minimum(end, swa_tiles), (longest - origin + KEYS - 1) // KEYS) - begin, 0)

    main_begin = gl.maximum(begin - swa_tiles, 0)
    main_end = gl.maximum(end - swa_tiles, 0)
    if HAS_MAIN and HAS_MAIN_LENS and (TOKENS == 1 or SHARED_MAIN):
        listed = main_limit(main_lens, token, queries, main_width, main_len_batch, main_len_row, TOKENS)
        main_end = gl.minimum(main_end, (listed + KEYS - 1) // KEYS)
    main_count = gl.maximum(main_end - main_begin, 0)
    # A program without keys attends one tile of the window's, whose entries count only where they do: then none of them.
    idle = swa_count + main_count == 0
    swa_count = gl.where(idle, 1, swa_count)
    begin = gl.where(idle, swa_tiles, begin)
    return begin, swa_count, main_begin, main_count


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
        column = first + gl.arange(0, HALF, gl.SliceLayout(0, mma_o))
        at = (at + gl.arange(0, ROWS, rows_o))[:, None] * (2 * HALF) + column[None, :]
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
