"""The Gluon kernel of `decode.py` for Hopper with specialised warps, for tiles of 64 rows. `decode.py` has the formula.

One program: 64 packed rows of a request and one part of its keys, in tiles of KEYS list entries. Eight warps, the producer, read
rows of the pools ahead and write them as bf16 into a ring in shared memory. Four, the lead, compute scores and weights of a tile
and the left half of the output's columns; four more, the second, take the weights through shared memory and compute the right
half. So the tensor cores work while bytes are decoded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sglang_specverify.kernels.sparse_mla.hopper_consume import lead, second
from sglang_specverify.kernels.sparse_mla.hopper_parts import HALF, ROWS
from sglang_specverify.kernels.sparse_mla.hopper_produce import produce


@gluon.jit
def hopper_kernel(
    q, swa, swa_indices, swa_starts, swa_lens, main, main_indices, main_lens, sink, out, lse, partial_out, partial_lse,
    queries, heads, swa_width, main_width, swa_capacity, main_capacity, swa_page, main_page, scale, out_scale,
    q_batch, q_row, q_head, swa_index_batch, swa_index_row, main_index_batch, main_index_row,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row,
    out_batch, out_row, out_head, lse_batch, lse_row, lse_head, head_blocks, splits,
    TOKENS: gl.constexpr, SHARED_SWA: gl.constexpr, HAS_STARTS: gl.constexpr, SHARED_MAIN: gl.constexpr,
    HAS_SWA_LENS: gl.constexpr, HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr,
    SWA_GROUP: gl.constexpr, SWA_PAGE_ROWS: gl.constexpr,
    SWA_ROW: gl.constexpr, SWA_S_BASE: gl.constexpr, SWA_S_ROW: gl.constexpr,
    MAIN_PAGE_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr, MAIN_S_BASE: gl.constexpr, MAIN_S_ROW: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, POSITIVE: gl.constexpr, PDL: gl.constexpr,
    SECOND_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments of `decode_kernel.py`, with caches, lists and lengths as there; BLOCK_M is 64, KEYS stands for BLOCK_N."""
    half_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], gl.bfloat16)
    half_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], gl.bfloat16)
    shared_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], gl.bfloat16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HALF], half_q)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HALF], half_q)
    k_left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HALF], half_k)
    k_right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HALF], half_k)
    p_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, KEYS], shared_p)
    alpha_ring = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    # Pairs of keys side by side, as the lead reads them, and no four: those the compiler would write with `stmatrix`, of which it
    # is not known whether memory checkers see it.
    pairs: gl.constexpr = gl.SharedLinearLayout([[1], [4], [2], [8], [16]] + ([[32]] if KEYS == 64 else []))
    bias_ring = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], pairs)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=128)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=2)
        mbarrier.init(p_full.index(n), count=1)
        mbarrier.init(p_empty.index(n), count=1)
    if PDL:
        # Every input may be the output of the kernel before.
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.warp_specialize(
        [
            (
                lead,
                (
                    swa_starts, swa_lens, main_lens, sink, out, lse, partial_out, partial_lse,
                    q_left, q_right, k_left, k_right, p_ring, alpha_ring, bias_ring, q_full, k_full, k_empty, p_full, p_empty,
                    queries, heads, swa_width, main_width, scale, out_scale,
                    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row,
                    out_batch, out_row, out_head, lse_batch, lse_row, lse_head, head_blocks, splits,
                    TOKENS, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN, HAS_SINK, SPLIT, PDL, KEYS,
                    STAGES, POSITIVE,
                ),
            ),
            (
                second,
                (
                    q, swa_starts, swa_lens, main_lens, out, partial_out,
                    q_left, q_right, k_right, p_ring, alpha_ring, q_full, k_full, k_empty, p_full, p_empty,
                    queries, heads, swa_width, main_width, q_batch, q_row, q_head,
                    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row,
                    out_batch, out_row, out_head, head_blocks, splits,
                    TOKENS, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN, SPLIT, KEYS, STAGES,
                ),
            ),
            (
                produce,
                (
                    swa, main, swa_indices, main_indices, swa_starts, swa_lens, main_lens,
                    k_left, k_right, bias_ring, k_full, k_empty,
                    queries, swa_width, main_width, swa_capacity, main_capacity, swa_page, main_page,
                    swa_index_batch, swa_index_row, main_index_batch, main_index_row,
                    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
                    TOKENS, SHARED_SWA, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN,
                    SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW,
                    MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW, KEYS, STAGES,
                ),
            ),
        ],
        [4, 8],
        [SECOND_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
