"""Which slots each row sees, printed by the operation itself: uniform scores and one-hot values (`cases.probe`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.kernels import draft_decode_attention, verify_attention

from .cases import GUARD_BYTE, Config, Pool, build_pool, generator, pack_mask, probe, random_tree

SEEDS = [0, 1]


def pool_for(seed: int, lens: list[int], widths: list[int], page_size: int = 1, slot_map: bool = False) -> Pool:
    total = [n + w for n, w in zip(lens, widths, strict=True)]
    return build_pool(generator(seed), total, page_size=page_size, slot_map=slot_map, one_hot=True)


def verify_probe(pool: Pool, lens: list[int], widths: list[int], **arguments: Any) -> list[list[int]]:
    return probe(verify_attention, sum(widths), pool, prefix_lens=torch.tensor(lens), **arguments)


def slots(pool: Pool, r: int, positions: Any) -> list[int]:
    return sorted(pool.cache_slot(r, p) for p in positions)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("lens", [[7, 11], [0, 3], [16, 17, 1], [200, 40]])
@pytest.mark.parametrize("w", [1, 4, 5])
def test_chain(lens: list[int], w: int, page_size: int, seed: int) -> None:
    pool = pool_for(seed, lens, [w] * len(lens), page_size)
    got = verify_probe(pool, lens, [w] * len(lens), num_draft_tokens=w)
    assert got == [slots(pool, r, range(n + i + 1)) for r, n in enumerate(lens) for i in range(w)]


@pytest.mark.parametrize("lens", [[10], [3, 10, 0], [2, 1]])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 50])
@pytest.mark.parametrize("page_size", [1, 4])
def test_chain_window_starts_at_each_row(lens: list[int], window: int, page_size: int) -> None:
    """Row i sees positions from L + i - window on, not from one start for all rows."""
    w = 4
    pool = pool_for(2, lens, [w] * len(lens), page_size)
    got = verify_probe(pool, lens, [w] * len(lens), num_draft_tokens=w, window=window)
    assert got == [slots(pool, r, range(max(0, n + i - window), n + i + 1)) for r, n in enumerate(lens) for i in range(w)]


def test_window_7_over_8_cached_and_4_queries() -> None:
    pool = pool_for(3, [8], [4])
    got = verify_probe(pool, [8], [4], num_draft_tokens=4, window=7)
    assert got == [slots(pool, 0, range(a, b + 1)) for a, b in [(1, 8), (2, 9), (3, 10), (4, 11)]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["qlen_only", "full_mask"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("window", [-1, 0, 2, 5])
def test_tree(kind: str, mask_dtype: torch.dtype, window: int, seed: int) -> None:
    """Prefix, itself and its ancestors, each within the window of its position, L + depth."""
    lens, w = [3, 1, 9, 2, 4], 5
    gen = generator(seed)
    trees = [random_tree(gen, w) for _ in lens]
    config = Config(prefix_lens=tuple(lens), widths=w, kind=kind, mask_dtype=mask_dtype, flat_mask=True)
    positions = torch.tensor([n + d for n, (_, depth) in zip(lens, trees, strict=True) for d in depth])
    pool = pool_for(seed, lens, [w] * 5, 4)
    packed = pack_mask(config, [tree for tree, _ in trees], gen)
    got = verify_probe(pool, lens, [w] * 5, num_draft_tokens=w, window=window, positions=positions, **packed)
    want = []
    for r, (n, (tree, depth)) in enumerate(zip(lens, trees, strict=True)):
        for i in range(w):
            start = n + depth[i] - window if window >= 0 else 0
            drafts = [n + j for j in range(w) if tree[i, j] and n + depth[j] >= start]
            want.append(slots(pool, r, [*range(max(0, start), n), *drafts]))
    assert got == want


def test_full_mask_holds_exactly_220_entries() -> None:
    """bs 5, W 5, L [3,1,9,2,4]; what lies after the 220th entry is a guard that would be visible."""
    lens, w = [3, 1, 9, 2, 4], 5
    config = Config(prefix_lens=tuple(lens), widths=w, kind="full_mask", mask_dtype=torch.uint8)
    packed = pack_mask(config, [torch.eye(w, dtype=torch.bool)] * 5, generator(0))
    assert int(packed["mask_offsets"][-1]) == 220 and bool((packed["mask"][220:] == GUARD_BYTE).all())
    pool = pool_for(1, lens, [w] * 5)
    got = verify_probe(pool, lens, [w] * 5, num_draft_tokens=w, **packed)
    assert got == [slots(pool, r, [*range(n), n + i]) for r, n in enumerate(lens) for i in range(w)]
    exact = {**packed, "mask": packed["mask"][:220]}
    assert verify_probe(pool, lens, [w] * 5, num_draft_tokens=w, **exact) == got


@pytest.mark.parametrize("lens", [[0], [6], [6, 0]])
def test_mask_is_taken_as_it_is(lens: list[int]) -> None:
    """No diagonal is added: an all-false row sees its prefix only, and nothing where there is none."""
    w = 3
    mask = torch.zeros(len(lens), w, w, dtype=torch.bool)
    mask[:, 2, 0] = True
    pool = pool_for(4, lens, [w] * len(lens))
    got = verify_probe(pool, lens, [w] * len(lens), num_draft_tokens=w, mask=mask)
    assert got == [slots(pool, r, [*range(n), *([n] if i == 2 else [])]) for r, n in enumerate(lens) for i in range(w)]


@pytest.mark.parametrize("kind", ["chain", "full_mask"])
@pytest.mark.parametrize("widths", [[2, 5, 1], [0, 3, 4], [6, 0, 0]])
@pytest.mark.parametrize("bound", [None, 6, 9])
def test_ragged(kind: str, widths: list[int], bound: int | None) -> None:
    lens = [4, 0, 7]
    trees = [random_tree(generator(w), w)[0] for w in widths]
    packed = {}
    if kind == "full_mask":
        config = Config(prefix_lens=tuple(lens), widths=tuple(widths), kind=kind)
        packed = pack_mask(config, trees, generator(5))
    else:
        trees = [torch.ones(w, w).tril().bool() for w in widths]
    pool = pool_for(5, lens, widths, 2)
    offsets = torch.tensor([0, *widths]).cumsum(0).int()
    got = verify_probe(pool, lens, widths, q_offsets=offsets, num_draft_tokens=bound, **packed)
    want = []
    for r, (n, tree) in enumerate(zip(lens, trees, strict=True)):
        want += [slots(pool, r, [*range(n), *(n + j for j in row.nonzero().flatten().tolist())]) for row in tree]
    assert got == want


@pytest.mark.parametrize("page_size", [1, 4])
def test_full_pool_slots_are_translated_for_a_window_pool(page_size: int) -> None:
    """Full-pool ids lie beyond the window pool; positions before the window have no slot there any more."""
    lens, w, window = [12, 7], 3, 4
    pool = pool_for(6, lens, [w, w], page_size, slot_map=True)
    assert pool.slot_map is not None
    assert max(max(row) for row in pool.slots) >= len(pool.k), "the case must have ids that the window pool lacks"
    for r, n in enumerate(lens):
        pool.slot_map[pool.slots[r][: n - window]] = -1
    got = verify_probe(pool, lens, [w, w], num_draft_tokens=w, window=window)
    assert got == [slots(pool, r, range(n + i - window, n + i + 1)) for r, n in enumerate(lens) for i in range(w)]


def draft_probe(seed: int, lens: list[int], topk: int, step: int, page_size: int, window: int, slot_map: bool = False) -> tuple:
    """Visible sets of one draft step, and the sets they should be."""
    branches = len(lens) * topk * (step + 1)
    pool = build_pool(generator(seed), [*lens, *[1] * branches], page_size=page_size, one_hot=True, slot_map=slot_map)
    bs = len(lens)
    draft_slots = torch.full((bs, topk, step + 3), -7)  # later steps: no slot at all
    draft_slots[:, :, : step + 1] = torch.tensor([row[0] for row in pool.slots[bs:]]).view(bs, topk, -1)
    pool.row_ids = pool.row_ids[:bs]
    got = probe(draft_decode_attention, bs * topk, pool, prefix_lens=torch.tensor(lens), draft_slots=draft_slots, topk=topk,
                step=step, window=window)  # fmt: skip
    want = []
    for r, n in enumerate(lens):
        start = max(0, n + step - window) if window >= 0 else 0
        for b in range(topk):
            first = bs + (r * topk + b) * (step + 1)
            own = [pool.cache_slot(first + s, 0) for s in range(step + 1) if n + s >= start]
            want.append(sorted([pool.cache_slot(r, p) for p in range(start, n)] + own))
    return got, want


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("lens", [[6], [5, 60, 0], [60, 60]])
def test_draft_branches(lens: list[int], step: int, topk: int, page_size: int) -> None:
    """The prefix once, its partly filled last page too, and the branch's own steps so far: the same at every page size."""
    got, want = draft_probe(7, lens, topk, step, page_size, -1)
    assert got == want
    assert all(len(row) == n + step + 1 for row, n in zip(got, [n for n in lens for _ in range(topk)], strict=True))


@pytest.mark.parametrize("window", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("slot_map", [False, True])
def test_draft_window(window: int, step: int, slot_map: bool) -> None:
    got, want = draft_probe(8, [7, 1, 20], 3, step, 4, window, slot_map)
    assert got == want


def test_draft_length_counts_no_drafts() -> None:
    """L 5 at the second step: the weight lies on the tokens at positions 5 and 6 too."""
    pool = build_pool(generator(9), [7], one_hot=True)
    draft_slots = torch.tensor(pool.slots[0][5:7]).view(1, 1, 2)
    got = probe(draft_decode_attention, 1, pool, prefix_lens=torch.tensor([5]), draft_slots=draft_slots, topk=1, step=1)
    assert got == [slots(pool, 0, range(7))]


def test_ring_pool_keeps_each_step_in_its_own_slot() -> None:
    """A window pool of 8 slots used as a ring: steps at positions 5, 6, 7 are three slots, and a repeated one shows."""
    pool = build_pool(generator(10), [8], one_hot=True)
    ring = torch.arange(40, 48)
    table = torch.full((1, 8), -1, dtype=torch.int32)
    table[0, :5] = ring[:5].int()
    slot_map = torch.full((48,), -1)
    slot_map[ring] = torch.arange(8)
    pool = Pool(
        torch.zeros(8, 1, 8).double(), torch.eye(8).double()[:, None], table, torch.zeros(1, dtype=torch.int32), slot_map, 1
    )
    arguments = {"prefix_lens": torch.tensor([5]), "topk": 1, "step": 2}
    got = probe(draft_decode_attention, 1, pool, draft_slots=ring[5:].view(1, 1, 3), **arguments)
    assert got == [list(range(8))]
    with pytest.raises(AssertionError):
        probe(draft_decode_attention, 1, pool, draft_slots=ring[[5, 5, 5]].view(1, 1, 3), **arguments)


def test_probe_sees_a_wrong_mask() -> None:
    """The probe itself can fail: another mask gives other sets."""
    mask = torch.eye(3, dtype=torch.bool)[None]
    pool = pool_for(11, [2], [3])
    right = verify_probe(pool, [2], [3], num_draft_tokens=3, mask=mask)
    assert right != verify_probe(pool, [2], [3], num_draft_tokens=3, mask=mask.roll(1, 2))
    assert right != verify_probe(pool, [2], [3], num_draft_tokens=3)
