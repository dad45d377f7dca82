"""The producer of `hopper_kernel.py`: it decodes rows of both pools into a ring in shared memory, as far ahead as it allows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sglang_specverify.kernels.sparse_mla.hopper_parts import HALF, barrier, keys_of, main_limit, part_of, tiled, window_range
from sglang_specverify.kernels.sparse_mla.hopper_rows import main_bytes, main_words, window_bytes, window_words


@gluon.jit
def _place(ring, stage, KEYS: gl.constexpr):
    """Where half the columns of a tile's rows go, as int32 [KEYS, 128]."""
    words: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF // 2], gl.int32)
    return ring.index(stage)._reinterpret(gl.int32, [KEYS, HALF // 2], words)


@gluon.jit
def _publish(bias_ring, full, stage, bias):
    """Hand a tile's decoded rows to the consumers, with which of them count."""
    bias_ring.index(stage).store(bias)
    # wgmma reads through another path than these writes, which must see them: of all threads, before the arrival of one.
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _window_slots(
    slot, swa_starts, swa_lens, tile, begin, end, n, token, queries, swa_width, swa_len_batch, swa_len_row,
    swa_start_batch, swa_start_row, TOKENS: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SWA_LENS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """int32: `slot`, which the entries of window tile `tile` name, but -1 for an entry that no row reads.

    Tile 0 has the entries n. A single row reads the entries from `begin` to `end`.
    """
    at = tile * KEYS + n
    if TOKENS == 1:
        listed = (at >= begin) & (at < end)
    else:
        listed = at < 0
        for t in gl.static_range(TOKENS):
            first, behind = window_range(
                swa_starts, swa_lens, token + t, queries, swa_width,
                swa_len_batch, swa_len_row, swa_start_batch, swa_start_row, HAS_STARTS, HAS_SWA_LENS,
            )  # fmt: skip
            listed = listed | ((at >= first) & (at < behind) & (token + t < queries))
    return gl.where(listed, slot, -1)


@gluon.jit
def _main_slots(
    main_list, main_lens, tile, last, limit, n, token, queries, list_tiles, main_width, main_index_row, main_len_batch,
    main_len_row, TOKENS: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_MAIN_LENS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """int32: the slots that entries n of main tile `tile` name, -1 for an entry that no row reads and from tile `last` on.

    Of a list that all rows of the tile read, the entries before `limit`.
    """
    batch = gl.program_id(2).to(gl.int64)
    mine = 0
    within = tile
    if TOKENS > 1 and not SHARED_MAIN:
        mine = tile // list_tiles
        within = tile % list_tiles
        there = (token + mine < queries) & (mine < TOKENS)
        limit = main_width
        if HAS_MAIN_LENS:
            limit = gl.load(main_lens + batch * main_len_batch + (token + mine) * main_len_row, mask=there, other=0)
            limit = gl.minimum(limit, main_width)
        limit = gl.where(there, limit, 0)
    at = within * KEYS + n
    return gl.load(main_list + mine * main_index_row + at, mask=(at < limit) & (tile < last), other=-1)


@gluon.jit
def produce(
    swa, main, swa_indices, main_indices, swa_starts, swa_lens, main_lens,
    k_left, k_right, bias_ring, k_full, k_empty,
    queries, swa_width, main_width, swa_capacity, main_capacity, swa_page, main_page,
    swa_index_batch, swa_index_row, main_index_batch, main_index_row,
    swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
    TOKENS: gl.constexpr, SHARED_SWA: gl.constexpr, SHARED_MAIN: gl.constexpr, HAS_STARTS: gl.constexpr,
    HAS_SWA_LENS: gl.constexpr, HAS_MAIN_LENS: gl.constexpr, HAS_MAIN: gl.constexpr,
    SWA_GROUP: gl.constexpr, SWA_PAGE_ROWS: gl.constexpr,
    SWA_ROW: gl.constexpr, SWA_S_BASE: gl.constexpr, SWA_S_ROW: gl.constexpr,
    MAIN_PAGE_ROWS: gl.constexpr, MAIN_ROW: gl.constexpr, MAIN_S_BASE: gl.constexpr, MAIN_S_ROW: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Decode the rows of every tile."""
    batch = gl.program_id(2).to(gl.int64)
    token = gl.program_id(1) // head_blocks * TOKENS
    # 16 bytes a thread, of eight neighbouring threads in eight rows: what they write to shared memory lies in different banks.
    four: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [KEYS // 8, 64 // KEYS, 1], [2, 0, 1])
    eight: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 4, 1], [KEYS // 8, 64 // KEYS, 1], [2, 0, 1])
    row_4: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, four))
    row_8: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, eight))
    swa_list = swa_indices + batch * swa_index_batch
    if not SHARED_SWA:
        swa_list += token.to(gl.int64) * swa_index_row
    # The part's first entries are asked for before lengths are known that may cut it short; a part without keys attends a tile
    # behind what is read, where no entry counts. Only where a row's tiles begin with what it reads, its start and length are
    # waited for; neither load waits for the other.
    begin, end = window_range(
        swa_starts, swa_lens, token, queries, swa_width,
        swa_len_batch, swa_len_row, swa_start_batch, swa_start_row, HAS_STARTS, HAS_SWA_LENS,
    )  # fmt: skip
    origin, window = tiled(begin, end, swa_width, TOKENS, HAS_STARTS)
    n = origin + gl.arange(0, KEYS, row_8)
    part_first, _, _ = part_of(window, main_width, splits, TOKENS, SHARED_MAIN, HAS_MAIN, KEYS)
    at = part_first * KEYS + n
    slot = gl.load(swa_list + at, mask=at < swa_width, other=-1)
    following = gl.load(swa_list + KEYS + at, mask=at + KEYS < swa_width, other=-1)
    first, swa_tiles, main_first, main_tiles = keys_of(
        swa_starts, swa_lens, main_lens, queries, swa_width, main_width,
        swa_len_batch, swa_len_row, main_len_batch, main_len_row, swa_start_batch, swa_start_row, head_blocks, splits,
        TOKENS, SHARED_MAIN, HAS_STARTS, HAS_SWA_LENS, HAS_MAIN_LENS, HAS_MAIN, KEYS,
    )  # fmt: skip
    # Slots come two tiles ahead; bytes of the left half one tile ahead, when the registers of the one before are free, those of
    # the right half at the start of their tile.
    slot = _window_slots(
        slot, swa_starts, swa_lens, first, begin, end, n, token, queries, swa_width, swa_len_batch, swa_len_row,
        swa_start_batch, swa_start_row, TOKENS, HAS_STARTS, HAS_SWA_LENS, KEYS,
    )  # fmt: skip
    valid = (slot >= 0) & (slot < swa_capacity)
    codes, scales = window_bytes(swa, slot, valid, swa_page, 0, eight, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW)
    for j in range(0, swa_tiles):
        right, right_scales = window_bytes(
            swa, slot, valid, swa_page, 1, eight, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW
        )  # fmt: skip
        bias = gl.where(valid, 0.0, float("-inf"))
        slot = _window_slots(
            following, swa_starts, swa_lens, first + j + 1, begin, end, n, token, queries, swa_width, swa_len_batch, swa_len_row,
            swa_start_batch, swa_start_row, TOKENS, HAS_STARTS, HAS_SWA_LENS, KEYS,
        )  # fmt: skip
        valid = (slot >= 0) & (slot < swa_capacity) & (j + 1 < swa_tiles)
        at = (first + j + 2) * KEYS + n
        following = gl.load(swa_list + at, mask=(at < swa_width) & (j + 2 < swa_tiles), other=-1)
        stage = j % STAGES
        mbarrier.wait(k_empty.index(stage), ((j // STAGES) & 1) ^ 1)
        _place(k_left, stage, KEYS).store(window_words(codes, scales, SWA_GROUP, KEYS))
        codes, scales = window_bytes(
            swa, slot, valid, swa_page, 0, eight, SWA_GROUP, SWA_PAGE_ROWS, SWA_ROW, SWA_S_BASE, SWA_S_ROW
        )  # fmt: skip
        _place(k_right, stage, KEYS).store(window_words(right, right_scales, SWA_GROUP, KEYS))
        _publish(bias_ring, k_full, stage, bias)

    if HAS_MAIN:
        n_4 = gl.arange(0, KEYS, row_4)
        list_tiles = (main_width + KEYS - 1) // KEYS
        main_list = main_indices + batch * main_index_batch
        if not SHARED_MAIN:
            main_list += token.to(gl.int64) * main_index_row
        limit = main_width
        if HAS_MAIN_LENS and (TOKENS == 1 or SHARED_MAIN):
            limit = main_limit(main_lens, token, queries, main_width, main_len_batch, main_len_row, TOKENS)
        last = main_first + main_tiles
        slot_4 = _main_slots(
            main_list, main_lens, main_first, last, limit, n_4, token, queries, list_tiles, main_width, main_index_row,
            main_len_batch, main_len_row, TOKENS, SHARED_MAIN, HAS_MAIN_LENS, KEYS,
        )  # fmt: skip
        following_4 = _main_slots(
            main_list, main_lens, main_first + 1, last, limit, n_4, token, queries, list_tiles, main_width, main_index_row,
            main_len_batch, main_len_row, TOKENS, SHARED_MAIN, HAS_MAIN_LENS, KEYS,
        )  # fmt: skip
        valid_4 = (slot_4 >= 0) & (slot_4 < main_capacity)
        left_4, left_scales_4 = main_bytes(
            main, slot_4, valid_4, main_page, 0, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
        )
        right_4, right_scales_4 = main_bytes(
            main, slot_4, valid_4, main_page, 1, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
        )
        for j in range(swa_tiles, swa_tiles + main_tiles):
            bias_4 = gl.where(valid_4, 0.0, float("-inf"))
            slot_4 = following_4
            valid_4 = (slot_4 >= 0) & (slot_4 < main_capacity)
            next_4, next_scales_4 = main_bytes(
                main, slot_4, valid_4, main_page, 0, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
            )
            following_4 = _main_slots(
                main_list, main_lens, main_first + j - swa_tiles + 2, last, limit, n_4, token, queries, list_tiles, main_width,
                main_index_row, main_len_batch, main_len_row, TOKENS, SHARED_MAIN, HAS_MAIN_LENS, KEYS,
            )  # fmt: skip
            stage = j % STAGES
            mbarrier.wait(k_empty.index(stage), ((j // STAGES) & 1) ^ 1)
            _place(k_left, stage, KEYS).store(main_words(left_4, left_scales_4, four, KEYS))
            left_4 = next_4
            left_scales_4 = next_scales_4
            next_4, next_scales_4 = main_bytes(
                main, slot_4, valid_4, main_page, 1, four, MAIN_PAGE_ROWS, MAIN_ROW, MAIN_S_BASE, MAIN_S_ROW
            )
            _place(k_right, stage, KEYS).store(main_words(right_4, right_scales_4, four, KEYS))
            right_4 = next_4
            right_scales_4 = next_scales_4
            _publish(bias_ring, k_full, stage, bias_4)
