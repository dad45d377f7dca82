"""Every public fault of this kind of code that concerns the kernels, as a kind and not as one example.

| fault, seen in | here | elsewhere |
|---|---|---|
| draft-decode page table scattered out of bounds, SGLang | draft_slots_beyond_the_step | tests/backends: a step's table |
| index buffer without the topk factor, SGLang | draft_rows_of_many_branches | tests/backends: a step's buffers |
| query offsets strided by steps + 1, SGLang | rows_begin_at_multiples_of_w | |
| partial tail page not seen by every branch, SGLang | tail_page | |
| mask of the wrong size, SGLang | mask_bytes | |
| full-pool slots on a window pool, SGLang | translated_slots | tests/backends: window pools |
| window start of the last row for all rows, FlashInfer | window_of_each_row | |
| window with an unmasked loop before it, AITER | window_of_each_row | |
| target's length in draft decode, SGLang | draft_length | tests/backends: lengths of each mode |
| window write slot computed once for all steps, SGLang | ring_of_slots | tests/backends: where a step writes |
| stale rows after a smaller replay, SGLang | test_padding.py, test_graphs.py | |
| prefix shorter than a page, SGLang | short_prefix | |
| idle rank, SGLang | test_padding.py | tests/backends |
| table too narrow near the context limit, SGLang, FlashAttention | narrow_table | |
| NaN in V that nobody sees, FlashAttention | test_padding.py | |
| padded token count that is no multiple of W, SGLang | test_padding.py | |
| last location stored with mixed widths, SGLang | | a function of the engine that this package leaves alone |
| merging two empty states, FlashInfer, vLLM | test_tree_suffix.py, test_merge.py | |
| a finite sentinel for -inf, FlashInfer | test_fault_numbers.py: one_key_at_any_score, blind_rows | |
| soft cap after the mask or fixed to 0, vLLM, FlashInfer | test_fault_numbers.py: cap_then_mask | |
| FP8 scales left at 1, SGLang | test_fault_numbers.py: fp8_scales | |
| 32-bit offsets, SGLang, vLLM | test_fault_numbers.py: offsets_past_2_31 | |
| AMD's launch options on NVIDIA, SGLang | test_fault_numbers.py: launch_options | tests/kernels/test_tables.py |
| Dqk unlike Dv, SGLang | test_against_reference.py, test_fault_numbers.py: wide_heads | |
| head dims and ratios, SGLang, Triton, vLLM | test_against_reference.py, test_fault_numbers.py: next_kv_head | |
| names of quantised draft layers, SGLang, ATOM | | the loader of checkpoints, not attention |
| pages at a larger stride, unused slots, vLLM | test_fault_numbers.py: strided_pages; test_padding.py | |
| empty splits, SGLang | test_splits.py | |
| empty suffix on an empty prefix, LSE +inf, SGLang | test_tree_suffix.py, test_merge.py | |
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import draft_decode_attention, verify_attention
from tests.kernels.cases import GUARD_BYTE, Config, Pool, build_draft, build_pool, build_verify, generator, pack_mask, random_tree

from .bounds import compare
from .calls import call, check, launches, to_device

BF16 = {"q_dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}


def visible(operation: Any, pool: Pool, rows: int, device: str, **arguments: Any) -> list[list[int]]:
    """The cache slots that each row sees, as the kernel's own output tells: Q is 0 and V is one-hot.

    V is cut into pieces of 64 columns, so that pools may be larger than a head. FP16 keeps the weight 1/n of up to a few
    hundred keys apart from 2/n and from 0.
    """
    seen: list[list[int]] = [[] for _ in range(rows)]
    q = torch.zeros(rows, 1, 16, dtype=torch.float16)
    k = torch.nn.functional.pad(pool.k, (0, 16 - pool.k.shape[2]))
    v = torch.nn.functional.pad(pool.v, (0, -pool.v.shape[2] % 64))
    for start in range(0, v.shape[2], 64):
        a = {
            "q": q, "k_cache": k.half(), "v_cache": v[..., start : start + 64].half().contiguous(), "table": pool.table,
            "row_ids": pool.row_ids, "page_size": pool.page_size, "slot_map": pool.slot_map, **arguments,
        }  # fmt: skip
        out, lse = operation(**to_device(a, device), variant="fused", return_lse=True)
        counts = lse[:, 0].exp().round().tolist()
        for row in range(rows):
            weights = out[row, 0].float().cpu()
            slots = weights.nonzero().flatten()
            want = torch.full((len(slots),), 1 / max(counts[row], 1))
            torch.testing.assert_close(weights[slots], want, rtol=2e-3, atol=1e-6)
            seen[row] += [start + slot for slot in slots.tolist()]
    return seen


def slots_of(pool: Pool, r: int, positions: Any) -> list[int]:
    return sorted(pool.cache_slot(r, p) for p in positions)


def verify_pool(seed: int, lens: list[int], w: int, page_size: int = 1, slot_map: bool = False) -> Pool:
    return build_pool(generator(seed), [n + w for n in lens], page_size=page_size, slot_map=slot_map, one_hot=True, head_dim=16)


def draft_pool(
    seed: int, lens: list[int], topk: int, step: int, page_size: int, slot_map: bool = False
) -> tuple[Pool, torch.Tensor, list[list[list[int]]]]:
    """A pool, `draft_slots` whose later steps lie outside of any cache, and the cache slots of each branch's own tokens."""
    bs = len(lens)
    ones = [1] * (bs * topk * (step + 1))
    pool = build_pool(generator(seed), [*lens, *ones], page_size=page_size, one_hot=True, slot_map=slot_map, head_dim=16)
    slots = torch.full((bs, topk, step + 3), 1 << 30)
    slots[:, :, : step + 1] = torch.tensor([row[0] for row in pool.slots[bs:]]).view(bs, topk, -1)
    own = [
        [[pool.cache_slot(bs + (r * topk + b) * (step + 1) + s, 0) for s in range(step + 1)] for b in range(topk)]
        for r in range(bs)
    ]
    pool.row_ids = pool.row_ids[:bs]
    return pool, slots, own


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("topk", [2, 3])
@pytest.mark.parametrize("step", [0, 4])
def test_draft_slots_beyond_the_step(device: str, step: int, topk: int, page_size: int) -> None:
    """Slots of later steps are out of any range and are not followed; those up to the step are seen, each once."""
    lens = [5, 1]
    pool, slots, own = draft_pool(1, lens, topk, step, page_size)
    got = visible(draft_decode_attention, pool, 2 * topk, device, prefix_lens=torch.tensor(lens), draft_slots=slots, topk=topk,
                  step=step)  # fmt: skip
    want = [sorted(slots_of(pool, r, range(n)) + own[r][b]) for r, n in enumerate(lens) for b in range(topk)]
    assert got == want


@pytest.mark.parametrize("topk", [8, 16])
@pytest.mark.parametrize("lens", [(60, 60), (64, 0), (63, 1)])
def test_draft_rows_of_many_branches(device: str, lens: tuple[int, ...], topk: int) -> None:
    """bs * topk rows, each over its whole context: no index or buffer that counts requests only."""
    c = Config(seed=2, prefix_lens=lens, head_dim=16, v_head_dim=16, q_heads=3, **BF16)
    check(to_device(build_draft(c, topk=topk, step=1, steps=2), device))


@pytest.mark.parametrize("w", [2, 5, 6])
@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
def test_rows_begin_at_multiples_of_w(device: str, kind: str, w: int) -> None:
    """bs 3, L [7, 11, 0]: each request's rows have the bits of its run alone."""
    a = to_device(
        build_verify(Config(seed=3, prefix_lens=(7, 11, 0), widths=w, kind=kind, head_dim=16, v_head_dim=16, **BF16)), device
    )
    out, lse = call(a)
    compare(a, out, lse)
    for r in range(3):
        part = {name: a[name][r : r + 1] for name in ("row_ids", "prefix_lens")}
        part["q"] = a["q"][r * w : (r + 1) * w]
        if kind == "qlen_only":
            part["mask"] = a["mask"][r : r + 1]
        if kind == "full_mask":
            part["mask_offsets"] = a["mask_offsets"][r : r + 2]
        alone = call({**a, **part})
        assert torch.equal(alone[0], out[r * w : (r + 1) * w]) and torch.equal(alone[1], lse[r * w : (r + 1) * w])


@pytest.mark.parametrize("slot_map", [False, True])
@pytest.mark.parametrize("lens", [[6], [4, 3, 9]])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_tail_page(device: str, page_size: int, lens: list[int], slot_map: bool) -> None:
    """The prefix's partly filled page is seen once by every branch, with its own tokens: the same sets at every page size."""
    pool, slots, own = draft_pool(4, lens, 2, 1, page_size, slot_map)
    got = visible(draft_decode_attention, pool, 2 * len(lens), device, prefix_lens=torch.tensor(lens), draft_slots=slots, topk=2,
                  step=1)  # fmt: skip
    want = [sorted(slots_of(pool, r, range(n)) + own[r][b]) for r, n in enumerate(lens) for b in range(2)]
    assert got == want and all(len(row) == n + 2 for row, n in zip(got, [n for n in lens for _ in "ab"], strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize(("lens", "w"), [([3, 1, 9, 2, 4], 5), ([0, 0], 1), ([17, 0], 33)])
@pytest.mark.parametrize("kind", ["qlen_only", "full_mask"])
def test_mask_bytes(device: str, kind: str, lens: list[int], w: int, dtype: torch.dtype) -> None:
    """Exactly the entries of the layout are read, 220 of FULL_MASK for the first: guards after them would be visible."""
    gen = generator(5)
    trees = [random_tree(gen, w)[0] for _ in lens]
    packed = pack_mask(Config(prefix_lens=tuple(lens), widths=w, kind=kind, mask_dtype=dtype, flat_mask=True), trees, gen)
    entries = sum(w * (n + w) for n in lens) if kind == "full_mask" else len(lens) * w * w
    assert (packed["mask"][entries:] == (GUARD_BYTE if dtype == torch.uint8 else True)).all() and len(packed["mask"]) > entries
    pool = verify_pool(5, lens, w)
    got = visible(verify_attention, pool, w * len(lens), device, prefix_lens=torch.tensor(lens), num_draft_tokens=w, **packed)
    want = [
        slots_of(pool, r, [*range(n), *(n + j for j in range(w) if trees[r][i, j])]) for r, n in enumerate(lens) for i in range(w)
    ]
    assert got == want


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_translated_slots(device: str, slots: torch.dtype, page_size: int) -> None:
    """Full-pool ids beyond the window pool's size are translated before they are used."""
    pool = verify_pool(6, [9, 2], 3, page_size, slot_map=True)
    assert pool.slot_map is not None and max(map(max, pool.slots)) >= len(pool.k) - 1
    pool.slot_map = pool.slot_map.to(slots)
    got = visible(verify_attention, pool, 6, device, prefix_lens=torch.tensor([9, 2]), num_draft_tokens=3)
    assert got == [slots_of(pool, r, range(n + i + 1)) for r, n in enumerate([9, 2]) for i in range(3)]


@pytest.mark.parametrize("window", [0, 3, 7, 15, 16, 17])
@pytest.mark.parametrize("lens", [[8], [10], [3, 40, 0], [16, 33]])
def test_window_of_each_row(device: str, lens: list[int], window: int) -> None:
    """Row i of a chain sees positions from L + i - window on: a start of its own, also inside a block that others need."""
    pool = verify_pool(7, lens, 4)
    got = visible(
        verify_attention, pool, 4 * len(lens), device, prefix_lens=torch.tensor(lens), num_draft_tokens=4, window=window
    )
    assert got == [slots_of(pool, r, range(max(0, n + i - window), n + i + 1)) for r, n in enumerate(lens) for i in range(4)]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("window", [-1, 0, 1, 4])
def test_draft_length(device: str, window: int, step: int) -> None:
    """`prefix_lens` counts no draft: at step t the t + 1 tokens from position L on carry weight, to the window's start."""
    pool, slots, own = draft_pool(8, [5, 0], 2, step, 1)
    got = visible(draft_decode_attention, pool, 4, device, prefix_lens=torch.tensor([5, 0]), draft_slots=slots, topk=2, step=step,
                  window=window)  # fmt: skip
    want = []
    for r, n in enumerate([5, 0]):
        start = max(0, n + step - window) if window >= 0 else 0
        for b in range(2):
            want.append(sorted(slots_of(pool, r, range(start, n)) + [own[r][b][s] for s in range(step + 1) if n + s >= start]))
    assert got == want


@pytest.mark.parametrize("size", [8, 16])
def test_ring_of_slots(device: str, size: int) -> None:
    """A window pool used as a ring: three steps are three slots, wherever the ring begins."""
    for turn in (0, 3, size - 1):
        ring = (torch.arange(size) + turn) % size
        pool = Pool(
            torch.zeros(size, 1, 16), torch.eye(size)[:, None], ring.int()[None], torch.zeros(1, dtype=torch.int32), None, 1
        )
        got = visible(draft_decode_attention, pool, 1, device, prefix_lens=torch.tensor([size - 3]),
                      draft_slots=ring[-3:].view(1, 1, 3), topk=1, step=2)  # fmt: skip
        assert got == [list(range(size))]


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 15, 16])
def test_short_prefix(device: str, length: int, topk: int) -> None:
    c = Config(seed=9, prefix_lens=(length,), page_size=16, head_dim=16, v_head_dim=16, sinks=True, **BF16)
    check(to_device(build_draft(c, topk=topk, step=1, steps=2), device))
    check(to_device(build_verify(c.but(kind="qlen_only", widths=topk)), device))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("length", "w"), [(63, 4), (60, 5), (0, 65), (64, 1)])
def test_narrow_table(device: str, length: int, w: int, page_size: int) -> None:
    """A context of 64: one token too many is an error before any launch, which names the width; one less is served."""
    c = Config(seed=10, prefix_lens=(length,), widths=w, page_size=page_size, head_dim=16, v_head_dim=16, **BF16)
    a = to_device(build_verify(c), device)
    width = -(-(length + w) // page_size)
    a["table"] = a["table"][:, :width]
    check(a)
    a["table"] = a["table"][:, : width - 1]
    if device == "cpu":  # on a GPU a look at the lengths would wait for it
        with launches() as seen, pytest.raises(ArgumentError, match=rf"table: got {width - 1} columns; allowed: {width} or more"):
            call(a)
        assert not seen
