"""The producers of `hopper_kernel.py`: they decode rows of both pools into a ring in shared memory, as far ahead as it allows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sglang_specverify.kernels.sparse_mla.hopper_parts import HALF, barrier, keys_of
from sglang_specverify.kernels.sparse_mla.hopper_rows import main_bytes, main_words, window_bytes, window_words


@gluon.jit
def _place(ring, stage, own: gl.constexpr, KEYS: gl.constexpr):
    """Where half the rows of a tile go, as int32 [KEYS / 2, 128]."""
    words: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF // 2], gl.int32)
    return ring.index(stage)._reinterpret(gl.int32, [KEYS, HALF // 2], words).slice(own * (KEYS // 2), KEYS // 2)


@gluon.jit
def _publish(bias_ring, full, stage, bias, own: gl.constexpr, KEYS: gl.constexpr):
    """Hand half a tile's decoded rows to the consumers, with which of them count."""
    bias_ring.index(stage).slice(own * (KEYS // 2), KEYS // 2).store(bias)
    # wgmma reads through another path than these writes, which must see them: of all threads, before the arrival of one.
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _listed(
    main_list, main_lens, tile, n, token, queries, list_tiles, main_width, main_index_row, main_len_batch, main_len_row,
    TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_MAIN_LENS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """int32: the slots that entries n of main tile `tile` name, -1 for an entry that no row reads and beyond the last list."""
    batch = gl.program_id(2).to(gl.int64)
    mine = 0
    within = tile
    if TOKENS > 1 and not SHARED_MAIN:
        mine = tile // list_tiles
        within = tile % list_tiles
    limit = main_width
    if HAS_MAIN_LENS:
        if SHARED_MAIN:
            limit = 0
            for t in gl.static_range(TOKENS):
                at = main_lens + batch * main_len_batch + (token + t) * main_len_row
                limit = gl.maximum(limit, gl.load(at, mask=token + t < queries, other=0))
        else:
            there = (token + mine < queries) & (mine < TOKENS)
            limit = gl.load(main_lens + batch * main_len_batch + (token + mine) * main_len_row, mask=there, other=0)
        limit = gl.minimum(limit, main_width)
    if not SHARED_MAIN:
        limit = gl.where((token + mine < queries) & (mine < TOKENS), limit, 0)
    at = within * KEYS + n
    return gl.load(main_list + mine * main_index_row + at, mask=at < limit, other=-1)


@gluon.jit
def produce(
    swa, main, swa_indices, main_indices, swa_starts, swa_lens, main_lens,
    k_left, k_right, bias_ring, k_full, k_empty,
    queries, swa_width, main_width, swa_capacity, main_capacity, swa_page, main_page,
    swa_index_batch, swa_index_row, main_index_batch, main_index_row,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
    OWN: gl.constexpr, TOKENS: gl.constexpr, SHARED_SWA: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_STARTS: gl.constexpr,
    HAS_SWA_LENS: gl.constexpr, HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr,
    SWA_GROUP: gl.constexpr, SWA_PAGE_ROWS: gl.constexpr,
    SWA_ROW: gl.constexpr, SWA_S_BASE: gl.constexpr, SWA_S_ROW: gl.constexpr,
    MAIN_PAGE_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr, MAIN_S_BASE: gl.constexpr, MAIN_S_ROW: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Decode half the rows of every tile, the first or the second by OWN."""
    first, swa_tiles, main_first, main_tiles = keys_of(
        swa_starts, swa_lens, main_lens, queries, swa_width, main_width,
        swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
        TOKENS, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN, KEYS,
    )  # fmt: skip
    batch = gl.program_id(2).to(gl.int64)
    token = gl.program_id(1) // head_blocks * TOKENS
    # 16 bytes a thread, 4 rows of 128 bytes a warp: whole sectors are read, and the writes to shared memory do not collide.
    four: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 8, 1], [4, 1, 1], [2, 1, 0])
    eight: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 4, 2], [4, 1, 1], [2, 1, 0])
    row_4: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, four))
    row_8: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, eight))

    swa_list = swa_indices + batch * swa_index_batch
    if not SHARED_SWA:
        swa_list += token.to(gl.int64) * swa_index_row
    n = OWN * (KEYS // 2) + gl.arange(0, KEYS // 2, row_8)
    filled = 0
    for tile in range(first, first + swa_tiles):
        at = tile * KEYS + n
        listed = at < 0
        for t in gl.static_range(TOKENS):
            if HAS_STARTS:
                start_at = swa_starts + batch * swa_start_batch + (token + t) * swa_start_row
                begin = gl.maximum(gl.load(start_at, mask=token + t < queries, other=0), 0)
            else:
                begin = 0
            end = swa_width
            if HAS_SWA_LENS:
                length = gl.load(swa_lens + batch * swa_len_batch + (token + t) * swa_len_row, mask=token + t < queries, other=0)
                end = begin + gl.minimum(gl.maximum(length, 0), swa_width)
            listed = listed | ((at >= begin) & (at < end) & (token + t < queries))
        slot = gl.load(swa_list + at, mask=at < swa_width, other=-1)
        valid = listed & (slot >= 0) & (slot < swa_capacity)
        bias = gl.where(valid, 0.0, float("-inf"))
        codes, scales = window_bytes(
            swa, slot, valid, swa_page, 0, eight, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW
        )  # fmt: skip
        right, right_scales = window_bytes(
            swa, slot, valid, swa_page, 1, eight, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW
        )  # fmt: skip
        # The first half is decoded before there is room for it, the second after: both at once would need too many registers.
        left = window_words(codes, scales, SWA_GROUP, KEYS // 2)
        stage = filled % STAGES
        mbarrier.wait(k_empty.index(stage), ((filled // STAGES) & 1) ^ 1)
        _place(k_left, stage, OWN, KEYS).store(left)
        _place(k_right, stage, OWN, KEYS).store(window_words(right, right_scales, SWA_GROUP, KEYS // 2))
        _publish(bias_ring, k_full, stage, bias, OWN, KEYS)
        filled += 1

    if HAS_MAIN:
        n_4 = OWN * (KEYS // 2) + gl.arange(0, KEYS // 2, row_4)
        list_tiles = (main_width + KEYS - 1) // KEYS
        main_list = main_indices + batch * main_index_batch
        if not SHARED_MAIN:
            main_list += token.to(gl.int64) * main_index_row
        # Slots come two tiles ahead, bytes one: what a tile waits for was asked for while the one before was decoded.
        slot_4 = _listed(
            main_list, main_lens, main_first, n_4, token, queries, list_tiles, main_width, main_index_row, main_len_batch,
            main_len_row, TOKENS, SHARED_MAIN, HAS_MAIN_LENS, KEYS,
        )  # fmt: skip
        following = _listed(
            main_list, main_lens, main_first + 1, n_4, token, queries, list_tiles, main_width, main_index_row, main_len_batch,
            main_len_row, TOKENS, SHARED_MAIN, HAS_MAIN_LENS, KEYS,
        )  # fmt: skip
        valid_4 = (slot_4 >= 0) & (slot_4 < main_capacity)
        codes_4, scales_4 = main_bytes(
            main, slot_4, valid_4, main_page, 0, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
        )
        right_4, right_scales_4 = main_bytes(
            main, slot_4, valid_4, main_page, 1, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
        )
        for tile in range(main_first, main_first + main_tiles):
            bias_4 = gl.where(valid_4, 0.0, float("-inf"))
            slot_4 = following
            valid_4 = (slot_4 >= 0) & (slot_4 < main_capacity)
            left_4 = main_words(codes_4, scales_4, four, KEYS // 2)
            codes_4, scales_4 = main_bytes(
                main, slot_4, valid_4, main_page, 0, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
            )
            following = _listed(
                main_list, main_lens, tile + 2, n_4, token, queries, list_tiles, main_width, main_index_row, main_len_batch,
                main_len_row, TOKENS, SHARED_MAIN, HAS_MAIN_LENS, KEYS,
            )  # fmt: skip
            stage = filled % STAGES
            mbarrier.wait(k_empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            _place(k_left, stage, OWN, KEYS).store(left_4)
            _place(k_right, stage, OWN, KEYS).store(main_words(right_4, right_scales_4, four, KEYS // 2))
            _publish(bias_ring, k_full, stage, bias_4, OWN, KEYS)
            right_4, right_scales_4 = main_bytes(
                main, slot_4, valid_4, main_page, 1, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
            )
            filled += 1
