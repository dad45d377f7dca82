"""The consumers of `hopper_kernel.py`: scores, weights, and one half of the output's columns each."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_specverify.kernels.sparse_mla.hopper_parts import HALF, ROWS, barrier, finish, keys_of, row_factor


@gluon.jit
def _scores(q_left, q_right, k_left, k_right, stage, nothing):
    """Scores of a tile, in flight."""
    s = warpgroup_mma(q_left.index(0), k_left.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q_right.index(0), k_right.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _weigh(s, sees, m, total, scale, POSITIVE: gl.constexpr):
    """One step of online softmax, in base 2: (weights, what earlier sums are multiplied by, m, total)."""
    factor = scale
    if not POSITIVE:
        s = s * scale
        factor = 1.0
    s = gl.where(sees, s, float("-inf"))
    # A positive factor leaves the largest the largest: one multiplication a row, and one operation for each exponent.
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(gl.fma(s, gl.zeros_like(s) + factor, gl.zeros_like(s) - shift[:, None]))
    alpha = gl.exp2(m - shift)
    return p, alpha, m_new, total * alpha + gl.sum(p, 1)


@gluon.jit
def _sees(
    bias, number, first, swa_tiles, main_first, list_tiles, column, own_token, swa_begin, swa_end, main_end,
    TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """bool [ROWS, KEYS]: which rows see which keys of the tile `number` of this program."""
    valid = (bias == 0.0)[None, :]
    if TOKENS == 1:
        sees = valid & (own_token >= 0)[:, None]
    else:
        window = number < swa_tiles
        tile = gl.where(window, first + number, main_first + number - swa_tiles)
        mine = own_token
        if not SHARED_MAIN:
            mine = gl.where(window, own_token, own_token * 0 + tile // list_tiles)
            tile = gl.where(window, tile, tile % list_tiles)
        at = (tile * KEYS + column)[None, :]
        begin = gl.where(window, swa_begin, 0)
        end = gl.where(window, swa_end, main_end)
        sees = valid & (at >= begin[:, None]) & (at < end[:, None]) & (mine == own_token)[:, None]
    return sees


@gluon.jit
def _hand_over(p_ring, alpha_ring, p_full, p_empty, j, p, alpha, STAGES: gl.constexpr):
    """Hand the weights of this program's tile `j` to the second, and what they multiply its sums by."""
    stage = j % STAGES
    mbarrier.wait(p_empty.index(stage), ((j // STAGES) & 1) ^ 1)
    p_ring.index(stage).store(p.to(gl.bfloat16))
    alpha_ring.index(stage).store(alpha)
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full.index(stage), count=1)


@gluon.jit
def lead(
    swa_starts, swa_lens, main_lens, sink, out, lse, partial_out, partial_lse,
    q_left, q_right, k_left, k_right, p_ring, alpha_ring, bias_ring, q_full, k_full, k_empty, p_full, p_empty,
    queries, heads, swa_width, main_width, scale, out_scale,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row,
    out_batch, out_row, out_head, lse_batch, lse_row, lse_head, head_blocks, splits,
    TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SWA_LENS: gl.constexpr,
    HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, POSITIVE: gl.constexpr,
):  # fmt: skip
    """Scores, weights, and the left half of the output."""
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    rows_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    HEADS_M: gl.constexpr = ROWS // TOKENS
    first, swa_tiles, main_first, main_tiles = keys_of(
        swa_starts, swa_lens, main_lens, queries, swa_width, main_width,
        swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
        TOKENS, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN, KEYS,
    )  # fmt: skip
    batch = gl.program_id(2).to(gl.int64)
    r = gl.arange(0, ROWS, rows_s)
    own_token = r // HEADS_M
    token = gl.program_id(1) // head_blocks * TOKENS + own_token
    real = token < queries
    column = gl.arange(0, KEYS, gl.SliceLayout(0, mma_s))
    list_tiles = (main_width + KEYS - 1) // KEYS
    swa_begin = own_token * 0
    swa_end = gl.where(real, swa_width, 0)
    main_end = gl.where(real, main_width, 0)
    if TOKENS > 1:
        if HAS_STARTS:
            swa_begin = gl.load(swa_starts + batch * swa_start_batch + token * swa_start_row, mask=real, other=0)
            swa_begin = gl.maximum(swa_begin, 0)
        if HAS_SWA_LENS:
            length = gl.load(swa_lens + batch * swa_len_batch + token * swa_len_row, mask=real, other=0)
            swa_end = gl.minimum(swa_begin + gl.minimum(gl.maximum(length, 0), swa_width), swa_end)
        if HAS_MAIN_LENS:
            limit = gl.load(main_lens + batch * main_len_batch + token * main_len_row, mask=real, other=0)
            main_end = gl.minimum(main_end, limit)

    nothing = gl.zeros([ROWS, KEYS], gl.float32, mma_s)
    m = gl.full([ROWS], float("-inf"), gl.float32, rows_s)
    total = gl.zeros([ROWS], gl.float32, rows_s)
    o = gl.zeros([ROWS, HALF], gl.float32, mma_o)
    number = swa_tiles + main_tiles
    mbarrier.wait(q_full.index(0), 0)
    # Of the copies of q; what producers write they fence themselves.
    fence_async_shared()
    for j in range(0, number):
        stage = j % STAGES
        mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
        s_now = _scores(q_left, q_right, k_left, k_right, stage, nothing)
        s = warpgroup_mma_wait(0, deps=(s_now,))
        # Not before: among the products it would make each wait for a read of shared memory, which they keep busy.
        bias = bias_ring.index(stage).load(gl.SliceLayout(0, mma_s))
        sees = _sees(
            bias, j, first, swa_tiles, main_first, list_tiles, column, own_token, swa_begin, swa_end, main_end,
            TOKENS, SHARED_MAIN, KEYS,
        )  # fmt: skip
        p, alpha, m, total = _weigh(s, sees, m, total, scale, POSITIVE)
        o = o * gl.convert_layout(alpha, rows_o)[:, None]
        o_now = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), operand), k_left.index(stage), o, is_async=True)
        # Under the products: the second has time.
        _hand_over(p_ring, alpha_ring, p_full, p_empty, j, p, alpha, STAGES)
        o = warpgroup_mma_wait(0, deps=(o_now,))
        mbarrier.arrive(k_empty.index(stage), count=1)

    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    factor = row_factor(
        m, total, sink, lse, partial_lse, token, queries, heads, out_scale, lse_batch, lse_row, lse_head, head_blocks, splits,
        rows_s, TOKENS, HAS_SINK, SPLIT,
    )  # fmt: skip
    stage = number % STAGES
    mbarrier.wait(p_empty.index(stage), ((number // STAGES) & 1) ^ 1)
    alpha_ring.index(stage).store(factor)
    barrier()
    mbarrier.arrive(p_full.index(stage), count=1)
    finish(
        o, gl.convert_layout(factor, rows_o), q_left.index(0), out, partial_out, queries, heads,
        out_batch, out_row, out_head, head_blocks, splits, 0, mma_o, TOKENS, SPLIT,
    )  # fmt: skip


@gluon.jit
def second(
    q, swa_starts, swa_lens, main_lens, out, partial_out,
    q_left, q_right, k_right, p_ring, alpha_ring, q_full, k_full, k_empty, p_full, p_empty,
    queries, heads, swa_width, main_width, q_batch, q_row, q_head,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row,
    out_batch, out_row, out_head, head_blocks, splits,
    TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SWA_LENS: gl.constexpr,
    HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr, SPLIT: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the query rows; then the right half of the output."""
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rows_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    HEADS_M: gl.constexpr = ROWS // TOKENS
    batch = gl.program_id(2).to(gl.int64)
    d = gl.arange(0, HALF, gl.SliceLayout(0, copies))
    for chunk in gl.static_range(4):
        r = chunk * 16 + gl.arange(0, 16, gl.SliceLayout(1, copies))
        token = gl.program_id(1) // head_blocks * TOKENS + r // HEADS_M
        head = gl.program_id(1) % head_blocks * HEADS_M + r % HEADS_M
        real = ((token < queries) & (head < heads))[:, None]
        at = q + (batch * q_batch + token.to(gl.int64) * q_row + head.to(gl.int64) * q_head)[:, None] + d[None, :]
        async_copy.async_copy_global_to_shared(q_left.index(0).slice(chunk * 16, 16), at, mask=real)
        async_copy.async_copy_global_to_shared(q_right.index(0).slice(chunk * 16, 16), at + HALF, mask=real)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)

    _, swa_tiles, _, main_tiles = keys_of(
        swa_starts, swa_lens, main_lens, queries, swa_width, main_width,
        swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
        TOKENS, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN, KEYS,
    )  # fmt: skip
    number = swa_tiles + main_tiles
    o = gl.zeros([ROWS, HALF], gl.float32, mma_o)
    for j in range(0, number):
        stage = j % STAGES
        mbarrier.wait(p_full.index(stage), (j // STAGES) & 1)
        mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
        o = o * alpha_ring.index(stage).load(rows_o)[:, None]
        o = warpgroup_mma(p_ring.index(stage), k_right.index(stage), o)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(p_empty.index(stage), count=1)
    stage = number % STAGES
    mbarrier.wait(p_full.index(stage), (number // STAGES) & 1)
    factor = alpha_ring.index(stage).load(rows_o)
    finish(
        o, factor, q_right.index(0), out, partial_out, queries, heads,
        out_batch, out_row, out_head, head_blocks, splits, HALF, mma_o, TOKENS, SPLIT,
    )  # fmt: skip
