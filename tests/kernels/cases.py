"""Inputs for the kernel tests: trees, cache pools with shuffled slots and poison, whole calls, and the visible-set probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

#: What an 8-bit mask buffer holds past the entries that count: visible, if anybody read it.
GUARD_BYTE = 0xAA


@dataclass(frozen=True)
class Config:
    """One call of verify attention, described; `build_verify` makes its arguments."""

    seed: int = 0
    prefix_lens: tuple[int, ...] = (5, 9)
    widths: tuple[int, ...] | int = 4
    kind: str = "chain"
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    v_head_dim: int = 8
    page_size: int = 1
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    q_dtype: torch.dtype = torch.float64
    cache_dtype: torch.dtype = torch.float64
    k_scale: float | str = 1.0
    v_scale: float | str = 1.0
    sm_scale: float | None = None
    strided: bool = False
    slot_map: bool = False
    mask_dtype: torch.dtype = torch.bool
    flat_mask: bool = False
    pad_rows: int = 0

    @property
    def row_counts(self) -> tuple[int, ...]:
        return (self.widths,) * len(self.prefix_lens) if isinstance(self.widths, int) else self.widths

    @property
    def ragged(self) -> bool:
        return not isinstance(self.widths, int)

    def but(self, **changes: Any) -> Config:
        return replace(self, **changes)


@dataclass
class Pool:
    """A cache in which everything that no request owns is NaN, and the table that leads to the rest."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    row_ids: torch.Tensor
    slot_map: torch.Tensor | None
    page_size: int
    slots: list[list[int]] = field(default_factory=list)

    def cache_slot(self, r: int, position: int) -> int:
        """Row of the cache that holds `position` of request `r`, after `slot_map`."""
        slot = self.slots[r][position]
        return slot if self.slot_map is None else int(self.slot_map[slot])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tree(gen: torch.Generator, width: int) -> tuple[torch.Tensor, list[int]]:
    """bool [W, W], itself and its ancestors, and the depth of each node. Parents come before their children."""
    mask = torch.eye(width, dtype=torch.bool)
    depth = [0] * width
    for i in range(1, width):
        parent = int(torch.randint(-1, i, (), generator=gen))
        if parent >= 0:
            mask[i] |= mask[parent]
            depth[i] = depth[parent] + 1
    return mask, depth


def build_pool(
    gen: torch.Generator,
    lengths: Sequence[int],
    *,
    page_size: int = 1,
    kv_heads: int = 1,
    head_dim: int = 8,
    v_head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    strided: bool = False,
    slot_map: bool = False,
    one_hot: bool = False,
) -> Pool:
    """`lengths[r]` tokens a request, on shuffled pages and table rows. Unused slots hold NaN, unused entries -1.

    With `one_hot`, K is 0 and V of a cache slot is that slot's unit vector, so that v_head_dim is the number of slots.
    """
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=gen)
    table = torch.full((len(lengths) + 2, max([*counts, 0]) + 2), -1, dtype=torch.int32)
    row_ids = torch.randperm(len(lengths) + 2, generator=gen)[: len(lengths)].int()
    slots: list[list[int]] = []
    used = 0
    for r, n in enumerate(lengths):
        own = pages[used : used + counts[r]]
        used += counts[r]
        table[row_ids[r], : counts[r]] = own.int()
        slots.append([int(own[p // page_size]) * page_size + p % page_size for p in range(n)])
    full = len(pages) * page_size
    flat = [slot for row in slots for slot in row]
    mapping, size, stored = None, full, flat
    if slot_map:
        size = len(flat) + 2
        mapping = torch.full((full,), -1, dtype=torch.int64)
        mapping[flat] = torch.randperm(size, generator=gen)[: len(flat)]
        stored = mapping[flat].tolist()
    v_head_dim = size if one_hot else v_head_dim
    gap = 3 if strided else 0
    both = torch.full((size, kv_heads, head_dim + v_head_dim + gap), torch.nan)
    if one_hot:
        both[stored] = 0.0
        both[stored, :, head_dim + torch.tensor(stored, dtype=torch.int64)] = 1.0
    else:
        both[stored, :, : head_dim + v_head_dim] = torch.randn(len(stored), kv_heads, head_dim + v_head_dim, generator=gen)
    both = both.to(dtype)
    k, v = both[..., :head_dim], both[..., head_dim : head_dim + v_head_dim]
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    return Pool(k, v, table, row_ids, mapping, page_size, slots)


def _rows(gen: torch.Generator, rows: int, heads: int, dim: int, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    q = torch.randn(rows, heads + strided, dim + 5 * strided, generator=gen).to(dtype)
    return q[:, :heads, :dim]


def _scale(kind: float | str, heads: int, gen: torch.Generator) -> float | torch.Tensor:
    if kind == "scalar":
        return torch.tensor(0.75)
    if kind == "heads":
        return torch.rand(heads, generator=gen) + 0.5
    return float(kind)


def pack_mask(c: Config, trees: list[torch.Tensor], gen: torch.Generator) -> dict[str, Any]:
    """The mask arguments of `verify_attention` for one bool [W, W] a request; random bits in the columns of the prefix."""
    if c.kind == "qlen_only":
        mask = torch.stack(trees) if trees else torch.zeros(0, 1, 1, dtype=torch.bool)
    else:
        blocks = [
            torch.cat([torch.randint(0, 2, (len(tree), n), generator=gen).bool(), tree], 1).flatten()
            for tree, n in zip(trees, c.prefix_lens, strict=True)
        ]
        offsets = torch.tensor([0, *(len(block) for block in blocks)]).cumsum(0)
        mask = torch.cat(blocks)
    if c.mask_dtype == torch.uint8:
        mask = mask.to(torch.uint8) * 0x80
    if c.flat_mask or c.kind == "full_mask":
        mask = torch.cat([mask.flatten(), torch.full((37,), GUARD_BYTE, dtype=torch.uint8).to(c.mask_dtype)])
    arguments = {"mask": mask, "mask_layout": c.kind}
    return arguments if c.kind == "qlen_only" else {**arguments, "mask_offsets": offsets}


def build_verify(c: Config) -> dict[str, Any]:
    """Arguments of `verify_attention` for `c`. Whatever no row may see is NaN, -1 or a guard."""
    gen = generator(c.seed)
    counts = c.row_counts
    lengths = [n + w for n, w in zip(c.prefix_lens, counts, strict=True)]
    pool = build_pool(
        gen, lengths, page_size=c.page_size, kv_heads=c.kv_heads, head_dim=c.head_dim, v_head_dim=c.v_head_dim,
        dtype=c.cache_dtype, strided=c.strided, slot_map=c.slot_map,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "q": _rows(gen, sum(counts) + c.pad_rows, c.q_heads, c.head_dim, c.q_dtype, c.strided),
        "k_cache": pool.k,
        "v_cache": pool.v,
        "table": pool.table,
        "row_ids": pool.row_ids,
        "prefix_lens": torch.tensor(c.prefix_lens, dtype=torch.int32 if c.seed % 2 else torch.int64),
        "page_size": c.page_size,
        "slot_map": pool.slot_map,
        "window": c.window,
        "softcap": c.softcap,
        "sinks": torch.randn(c.q_heads, generator=gen) if c.sinks else None,
        "k_scale": _scale(c.k_scale, c.kv_heads, gen),
        "v_scale": _scale(c.v_scale, c.kv_heads, gen),
        "sm_scale": c.sm_scale,
    }
    if c.ragged:
        arguments["q_offsets"] = torch.tensor([0, *counts]).cumsum(0).int()
    else:
        arguments["num_draft_tokens"] = c.widths
    if c.kind != "chain":
        trees = [random_tree(gen, w) for w in counts]
        positions = [n + d for n, (_, depth) in zip(c.prefix_lens, trees, strict=True) for d in depth]
        arguments["positions"] = torch.tensor(positions, dtype=torch.int64)
        arguments |= pack_mask(c, [tree for tree, _ in trees], gen)
    return arguments


def build_draft(c: Config, *, topk: int, step: int, steps: int) -> dict[str, Any]:
    """Arguments of `draft_decode_attention`; slots of steps after `step` lie outside the cache."""
    gen = generator(c.seed)
    lengths = [*c.prefix_lens, *[1] * (len(c.prefix_lens) * topk * (step + 1))]
    pool = build_pool(
        gen, lengths, page_size=c.page_size, kv_heads=c.kv_heads, head_dim=c.head_dim, v_head_dim=c.v_head_dim,
        dtype=c.cache_dtype, strided=c.strided, slot_map=c.slot_map,
    )  # fmt: skip
    bs = len(c.prefix_lens)
    draft_slots = torch.full((bs, topk, steps), 1 << 30, dtype=torch.int64)
    draft_slots[:, :, : step + 1] = torch.tensor([row[0] for row in pool.slots[bs:]]).view(bs, topk, step + 1)
    return {
        "q": _rows(gen, bs * topk + c.pad_rows, c.q_heads, c.head_dim, c.q_dtype, c.strided),
        "k_cache": pool.k,
        "v_cache": pool.v,
        "table": pool.table,
        "row_ids": pool.row_ids[:bs],
        "prefix_lens": torch.tensor(c.prefix_lens),
        "draft_slots": draft_slots,
        "topk": topk,
        "step": step,
        "page_size": c.page_size,
        "slot_map": pool.slot_map,
        "window": c.window,
        "softcap": c.softcap,
        "sinks": torch.randn(c.q_heads, generator=gen) if c.sinks else None,
        "k_scale": _scale(c.k_scale, c.kv_heads, gen),
        "v_scale": _scale(c.v_scale, c.kv_heads, gen),
        "sm_scale": c.sm_scale,
    }


def probe(operation: Callable[..., Any], rows: int, pool: Pool, **arguments: Any) -> list[list[int]]:
    """The cache slots that each row sees, told by the operation itself.

    Q is 0, so that all visible keys weigh 1/n, and V is one-hot, so that the output is the distribution. A slot that is
    counted twice weighs 2/n and fails here.
    """
    q = torch.zeros(rows, 1, pool.k.shape[2], dtype=torch.float64)
    out, lse = operation(q, pool.k, pool.v, pool.table, pool.row_ids, page_size=pool.page_size, slot_map=pool.slot_map,
                         return_lse=True, **arguments)  # fmt: skip
    seen = []
    for row in range(rows):
        slots = out[row, 0].nonzero().flatten()
        torch.testing.assert_close(out[row, 0, slots], torch.full((len(slots),), 1 / max(len(slots), 1)).double())
        torch.testing.assert_close(lse[row, 0].exp(), torch.tensor(float(len(slots))))
        seen.append(sorted(slots.tolist()))
    return seen
