"""Calls of `compact_visible_slots` for its tests: arguments, guarded outputs, and a partition list by list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_specverify.kernels.compact import compact_visible_slots
from tests.kernels.cases import GUARD_BYTE, generator, random_tree

from .calls import launches, names, to_device

GUARD = 0x5A5A5A5A


@dataclass(frozen=True)
class Case:
    """A call, described. `tree`: masks as trees make them; else random bits, rows that see nothing among them."""

    seed: int = 0
    prefix_lens: tuple[int, ...] = (3, 1, 9)
    width: int = 5
    layout: str = "qlen_only"
    page_size: int = 1
    slot_map: bool = False
    tree: bool = True
    mask_type: torch.dtype = torch.bool
    lens_type: torch.dtype = torch.int64
    guard: int = 37


def build(c: Case) -> dict[str, Any]:
    """Arguments without outputs. Entries that no visible draft needs are -1, bits that do not count are guards."""
    gen = generator(c.seed)
    bs, w, page = len(c.prefix_lens), c.width, c.page_size
    bits = [random_tree(gen, w)[0] if c.tree else torch.rand(w, w, generator=gen) < 0.4 for _ in range(bs)]
    pages = [-(-(n + w) // page) for n in c.prefix_lens]
    ids = torch.randperm(sum(pages) + 5, generator=gen).int()
    row_ids = torch.randperm(bs + 2, generator=gen)[:bs].int()
    table = torch.full((bs + 2, max([0, *pages]) + 3), -1, dtype=torch.int32)
    for r, n in enumerate(c.prefix_lens):
        own = ids[sum(pages[:r]) : sum(pages[: r + 1])].clone()
        needed = {(n + j) // page for j in range(w) if bits[r][:, j].any()}
        own[[p for p in range(pages[r]) if p not in needed]] = -1
        table[row_ids[r], : pages[r]] = own
    slot_map = torch.randperm(len(ids) * page, generator=gen) + 1000 if c.slot_map else None
    if c.layout == "qlen_only":
        blocks = [b.flatten() for b in bits]
    else:
        blocks = [
            torch.cat([torch.rand(w, n, generator=gen) < 0.5, b], 1).flatten() for b, n in zip(bits, c.prefix_lens, strict=True)
        ]
    mask = torch.cat([torch.zeros(0, dtype=torch.bool), *blocks])
    if c.mask_type == torch.uint8:
        mask = mask.to(torch.uint8) * 0x80
    mask = torch.cat([mask.view(torch.uint8), torch.full((c.guard,), GUARD_BYTE, dtype=torch.uint8)]).view(c.mask_type)
    offsets = torch.tensor([0, *map(len, blocks)]).cumsum(0)
    return {
        "mask": mask, "table": table, "row_ids": row_ids, "prefix_lens": torch.tensor(c.prefix_lens, dtype=c.lens_type),
        "num_draft_tokens": w, "mask_layout": c.layout, "mask_offsets": offsets if c.layout == "full_mask" else None,
        "page_size": page, "slot_map": slot_map,
    }  # fmt: skip


def partition(a: dict[str, Any], row: int) -> tuple[list[int], int]:
    """Slots of one row, visible first, and how many are visible: element by element, on Python numbers."""
    w, page = a["num_draft_tokens"], a["page_size"]
    r, i = divmod(row, w)
    n = int(a["prefix_lens"][r])
    at = row * w if a["mask_offsets"] is None else int(a["mask_offsets"][r]) + i * (n + w) + n
    seen, unseen = [], []
    for j in range(w):
        entry = int(a["table"][int(a["row_ids"][r]), (n + j) // page])
        slot = entry * page + (n + j) % page if entry >= 0 else -1
        if slot >= 0 and a["slot_map"] is not None:
            slot = int(a["slot_map"][slot])
        visible = a["mask"].view(torch.uint8)[at + j] != 0
        (seen if visible else unseen).append(slot)
    return seen + unseen, len(seen)


def run(a: dict[str, Any], device: str, rows: int, num_rows: Any = None, spare: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel into guarded outputs of `rows` rows; the buffers whole, for comparison with `want`."""
    w = a["num_draft_tokens"]
    slots = torch.full((rows + 2 * spare, w + 6), GUARD, dtype=torch.int32, device=device)
    lens = torch.full((rows + 2 * spare,), GUARD, dtype=torch.int32, device=device)
    out_slots, out_lens = slots[spare : rows + spare, 3 : 3 + w], lens[spare : rows + spare]
    with launches() as seen:
        got = compact_visible_slots(**to_device(a, device), num_rows=num_rows, out_slots=out_slots, out_lens=out_lens)
    assert names(seen) == ["compact_visible_slots_kernel"]
    assert got[0] is out_slots and got[1] is out_lens
    return slots.cpu(), lens.cpu()


def want(a: dict[str, Any], rows: int, real: int, spare: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    w = a["num_draft_tokens"]
    slots = torch.full((rows + 2 * spare, w + 6), GUARD, dtype=torch.int32)
    lens = torch.full((rows + 2 * spare,), GUARD, dtype=torch.int32)
    for row in range(real):
        line, count = partition(a, row)
        slots[spare + row, 3 : 3 + w], lens[spare + row] = torch.tensor(line), count
    return slots, lens


def assert_partition(a: dict[str, Any], device: str, *, rows: int, real: int, num_rows: Any = None) -> None:
    got, expected = run(a, device, rows, num_rows), want(a, rows, real)
    assert torch.equal(got[1], expected[1]), "counts"
    assert torch.equal(got[0], expected[0]), "slots"
