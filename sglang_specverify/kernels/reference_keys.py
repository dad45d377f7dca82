"""The keys that the FP64 reference gives each request's rows, and their K and V.

Everything that tells a chain, a tree and draft branches apart is here: a list of keys, and a bool matrix [W, keys].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.arguments import CommonArguments, DraftArguments, Problem, VerifyArguments


@dataclass(frozen=True)
class Keys:
    """The keys that some row of one request may see.

    Attributes:
        slots: int64 [n], before `slot_map`; may hold anything where `visible` has no row.
        visible: bool [rows, n].
        source: the argument that the last entries came from, for error messages.
    """

    slots: torch.Tensor
    visible: torch.Tensor
    source: str


def requests_of(a: VerifyArguments | DraftArguments, problem: Problem) -> Iterator[tuple[int, Keys]]:
    """The first row of each request and the keys of its rows, for arguments that were checked."""
    if problem.batch == 0:
        return
    lens, table_rows = a.prefix_lens.tolist(), a.row_ids.tolist()
    if isinstance(a, DraftArguments):
        for r, prefix in enumerate(lens):
            yield r * a.topk, _branch_keys(a, problem, r, prefix, a.table[table_rows[r]])
        return
    w = problem.queries or 0
    starts = [r * w for r in range(problem.batch + 1)] if a.q_offsets is None else a.q_offsets.tolist()
    mask_starts = None if a.mask_offsets is None else a.mask_offsets.tolist()
    for r, prefix in enumerate(lens):
        start, stop = starts[r], starts[r + 1]
        tree = _tree_mask(a, problem, r, prefix, stop - start, 0 if mask_starts is None else mask_starts[r])
        yield start, _verify_keys(a, problem, a.table[table_rows[r]], prefix, start, stop, tree)


def _branch_keys(a: DraftArguments, problem: Problem, r: int, prefix: int, table_row: torch.Tensor) -> Keys:
    """The prefix, which all branches of a request see, and each branch's own drafts."""
    branch = torch.arange(a.topk, device=problem.device)
    first = 0 if a.window < 0 else max(0, prefix + a.step - a.window)
    shared = torch.arange(min(first, prefix), prefix, device=problem.device)
    own = a.draft_slots[r, :, max(first - prefix, 0) : a.step + 1].long()
    slots = torch.cat([_table_slots(a, table_row, shared), own.flatten()])
    owner = branch.repeat_interleave(own.shape[1])
    everybody = torch.ones(a.topk, len(shared), dtype=torch.bool, device=problem.device)
    visible = torch.cat([everybody, owner == branch[:, None]], dim=1)
    return Keys(slots, visible, "table or draft_slots")


def _tree_mask(a: VerifyArguments, problem: Problem, r: int, prefix: int, w: int, start: int) -> torch.Tensor:
    """bool [W, W]: which drafts of request `r` each of its drafts sees."""
    if a.mask is None:
        return torch.ones(w, w, dtype=torch.bool, device=problem.device).tril()
    if problem.kind == "qlen_only":
        return a.mask.flatten()[r * w * w : (r + 1) * w * w].view(w, w) != 0
    # The columns of the prefix only set the stride: the prefix is visible whatever they hold.
    return a.mask[start : start + w * (prefix + w)].view(w, prefix + w)[:, prefix:] != 0


def _verify_keys(
    a: VerifyArguments, problem: Problem, table_row: torch.Tensor, prefix: int, start: int, stop: int, tree: torch.Tensor
) -> Keys:
    """Prefix and drafts of one request, without the prefix positions that lie before every row's window."""
    w = stop - start
    if problem.kind == "chain" or a.positions is None:
        draft_positions = torch.arange(prefix, prefix + w, device=problem.device)
    else:
        draft_positions = a.positions[start:stop].long()
    first = 0
    if problem.window >= 0 and w > 0:
        least = prefix if problem.kind == "chain" or a.positions is None else int(draft_positions.min())
        first = min(prefix, max(0, least - problem.window))
    index = torch.arange(first, prefix + w, device=problem.device)
    key_positions = torch.cat([index[: prefix - first], draft_positions])
    visible = torch.ones(w, len(index), dtype=torch.bool, device=problem.device)
    visible[:, prefix - first :] = tree
    if problem.window >= 0:
        visible &= key_positions >= draft_positions[:, None] - problem.window
    return Keys(_table_slots(a, table_row, index), visible, "table")


def _table_slots(a: CommonArguments, table_row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """int64: the cache slots of the tokens number `index` of one request, before `slot_map`."""
    if a.page_size == 1:
        return table_row.index_select(0, index).long()
    return table_row.index_select(0, index // a.page_size).long() * a.page_size + index % a.page_size


def keys_and_values(a: CommonArguments, keys: Keys) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP64 K and V of each key, [n, Hkv, D] and [n, Hkv, Dv], and a bool []: whether a visible key has no slot.

    V is 0 for keys that no row sees. Waits for nothing; there must be a slot in the cache, and in `slot_map`.
    """
    unseen = ~keys.visible.any(dim=0)
    slots, nowhere = _inside(keys.slots, unseen, len(a.k_cache) if a.slot_map is None else len(a.slot_map))
    if a.slot_map is not None:
        slots, missing = _inside(a.slot_map[slots].long(), unseen | nowhere, len(a.k_cache))
        nowhere = nowhere | missing
    values = _gather(a.v_cache, slots).masked_fill(unseen[:, None, None], 0.0)
    return _gather(a.k_cache, slots), values, nowhere.any()


def _inside(slots: torch.Tensor, unseen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots with 0 in place of unseen ones and of those outside 0 to count - 1, and which seen ones lie outside."""
    outside = (slots < 0) | (slots >= count)
    return slots.masked_fill(outside | unseen, 0), outside & ~unseen


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """FP64 [n, Hkv, head dim]. FP8 is gathered as bytes: not every device selects rows of an 8-bit float."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8).index_select(0, slots).view(cache.dtype).to(torch.float64)
    return cache.index_select(0, slots).to(torch.float64)


def is_empty(a: CommonArguments) -> bool:
    return len(a.k_cache) == 0 or (a.slot_map is not None and len(a.slot_map) == 0)


def raise_for(a: CommonArguments, keys: Keys) -> None:
    """Raise an error for the first visible key that has no slot, if one has none."""
    slots, source = keys.slots[keys.visible.any(dim=0)], keys.source
    if a.slot_map is not None:
        _check_range(source, slots, len(a.slot_map), "an entry of slot_map")
        slots, source = a.slot_map[slots].long(), "slot_map"
    _check_range(source, slots, len(a.k_cache), "a slot of the cache")


def _check_range(source: str, slots: torch.Tensor, count: int, what: str) -> None:
    bad = (slots < 0) | (slots >= count)
    if bool(bad.any()):
        raise ArgumentError(source, f"slot {int(slots[bad][0])} for a visible key", f"{what}: 0 to {count - 1}")
