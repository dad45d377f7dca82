"""The slots of each draft row's visible drafts, moved to the front: what a gather suffix reads.

For draft row i of request r, with n = prefix_lens[r] and slot(r, p) the slot of position p as in `verify_attention`,

    out_slots[r*W + i] = [slot(r, n + j) for visible j, in order] + [slot(r, n + j) for the other j, in order]
    out_lens[r*W + i]  = how many are visible

a stable partition of the W drafts. The columns from a tree's depth on need not be read afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.arguments import MASK_LAYOUTS
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton

#: Drafts of a request; one program holds a row of them.
MAX_DRAFTS = 256


@dataclass(frozen=True)
class CompactArguments:
    """Checked arguments of `compact_visible_slots`, by the same names.

    Attributes:
        mask: uint8, flat: a full_mask where there are `mask_offsets`. Bytes, because Triton's compiler reads a bool as one bit.
        width: W.
        num_rows: real rows; an int is at most bs*W.
    """

    mask: torch.Tensor
    mask_offsets: torch.Tensor | None
    table: torch.Tensor
    row_ids: torch.Tensor
    prefix_lens: torch.Tensor
    width: int
    num_rows: int | torch.Tensor
    page_size: int
    slot_map: torch.Tensor | None
    out_slots: torch.Tensor
    out_lens: torch.Tensor


@torch.no_grad()
def compact_visible_slots(
    mask: torch.Tensor,
    table: torch.Tensor,
    row_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    num_draft_tokens: int,
    mask_layout: str,
    mask_offsets: torch.Tensor | None = None,
    num_rows: int | torch.Tensor | None = None,
    page_size: int = 1,
    slot_map: torch.Tensor | None = None,
    out_slots: torch.Tensor,
    out_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partition the draft slots of every row: visible first, then invisible, each group in order.

    Args:
        mask: bool or uint8 in `mask_layout`, nonzero is visible; see `verify_attention`. Entries past bs*W*W, or past
            the last of `mask_offsets`, are not read.
        table: int32 [rows, width], slots, or page ids with page_size > 1. An entry of an invisible draft may be -1.
        row_ids: int32 [bs].
        prefix_lens: int32 or int64 [bs]; drafts are not counted.
        num_draft_tokens: W, 1 to 256.
        mask_layout: "qlen_only" or "full_mask"; the latter needs `mask_offsets`.
        mask_offsets: int64 [bs + 1].
        num_rows: how many of the bs*W rows are real, an int or an int32 tensor [1] that is read on the device; None or
            more than bs*W is all. The others are padding: nothing is read or written for them.
        page_size: tokens a table entry stands for.
        slot_map: int [n], applied to the slots.
        out_slots: int32 [bs*W or more, W], last stride 1. A slot that is none (table or `slot_map` holds less than 0)
            becomes -1.
        out_lens: int32 [bs*W or more].

    Returns:
        (out_slots, out_lens).

    Raises:
        ArgumentError: an argument that cannot be served; nothing was written. On a GPU values are not checked.
    """
    w = checks.integer("num_draft_tokens", num_draft_tokens, 1)
    if w > MAX_DRAFTS:
        raise ArgumentError("num_draft_tokens", w, f"1 to {MAX_DRAFTS}")
    if mask_layout not in MASK_LAYOUTS:
        raise ArgumentError("mask_layout", repr(mask_layout), " or ".join(MASK_LAYOUTS))
    checks.integer("page_size", page_size, 1)
    checks.tensor("table", table, ("rows", "width"), (torch.int32,), unit_last=True)
    device = table.device
    batch = len(checks.tensor("prefix_lens", prefix_lens, ("bs",), checks.INTS, device))
    checks.tensor("row_ids", row_ids, (batch,), (torch.int32,), device)
    checks.tree_mask(mask, mask_layout, mask_offsets, batch, w, device)
    if slot_map is not None:
        checks.tensor("slot_map", slot_map, ("n",), checks.INTS, device)
    for name, output, shape in (("out_slots", out_slots, (">= bs*W", w)), ("out_lens", out_lens, (">= bs*W",))):
        checks.output(name, checks.tensor(name, output, shape, (torch.int32,), device, unit_last=len(shape) == 2))
        if len(output) < batch * w:
            raise ArgumentError(name, f"{len(output)} rows", f"bs*W = {batch * w} or more")
    rows = _check_num_rows(num_rows, batch * w, device)
    if batch == 0:
        return out_slots, out_lens
    a = CompactArguments(
        mask=mask.reshape(-1).view(torch.uint8), mask_offsets=mask_offsets, table=table, row_ids=row_ids,
        prefix_lens=prefix_lens, width=w, num_rows=rows, page_size=page_size, slot_map=slot_map, out_slots=out_slots,
        out_lens=out_lens,
    )  # fmt: skip
    if checks.on_cpu(table):
        a = replace(a, num_rows=min(int(rows), batch * w))
        _check_values(a)
    if uses_triton(device):
        compact_visible_slots_launch(a, arch_of(device)).run()
    else:
        _run_reference(a)
    return out_slots, out_lens


def compact_visible_slots_launch(a: CompactArguments, arch: str) -> Launch:
    """The launch that computes `compact_visible_slots`. A tensor `num_rows` launches all rows, of which the padding exits."""
    import triton

    from sglang_specverify.kernels.compact_kernel import compact_visible_slots_kernel

    num_rows = a.num_rows if isinstance(a.num_rows, torch.Tensor) else None
    rows = len(a.prefix_lens) * a.width if isinstance(a.num_rows, torch.Tensor) else a.num_rows
    block = triton.next_power_of_2(a.width)
    arguments = {
        "mask": a.mask, "mask_offsets": a.mask_offsets, "table": a.table, "row_ids": a.row_ids, "prefix_lens": a.prefix_lens,
        "slot_map": a.slot_map, "num_rows": num_rows, "out_slots": a.out_slots, "out_lens": a.out_lens, "queries": a.width,
        "slot_count": 0 if a.slot_map is None else len(a.slot_map),
        "offsets_stride": 0 if a.mask_offsets is None else a.mask_offsets.stride(0), "table_row": a.table.stride(0),
        "ids_stride": a.row_ids.stride(0), "lens_stride": a.prefix_lens.stride(0),
        "map_stride": 0 if a.slot_map is None else a.slot_map.stride(0), "slots_row": a.out_slots.stride(0),
        "out_lens_stride": a.out_lens.stride(0),
    }  # fmt: skip
    constants = {
        "FULL_MASK": a.mask_offsets is not None, "PAGE_SIZE": a.page_size, "HAS_SLOT_MAP": a.slot_map is not None,
        "HAS_NUM_ROWS": num_rows is not None, "BLOCK": block,
    }  # fmt: skip
    lanes = 64 if arch.startswith("gfx") else 32
    return Launch(
        kernel=compact_visible_slots_kernel,
        grid=(rows, 1, 1),
        arguments=arguments,
        constants=constants,
        options={"num_warps": max(1, block // (4 * lanes))},
    )


def _run_reference(a: CompactArguments) -> None:
    """The same in plain PyTorch, one request at a time."""
    rows = int(a.num_rows)
    for r in range(-(-rows // a.width)):
        visible, slots = _request(a, rows, r)
        start, stop = r * a.width, r * a.width + len(visible)
        # False sorts before True.
        order = torch.argsort((~visible).int(), dim=1, stable=True)
        a.out_slots[start:stop] = slots[order].int()
        a.out_lens[start:stop] = visible.sum(dim=1).int()


def _request(a: CompactArguments, num_rows: int, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Request `r`: bool [its real rows, W] visible, and int64 [W] the slots of its drafts, -1 for none."""
    n, w = int(a.prefix_lens[r]), a.width
    start = r * w * w if a.mask_offsets is None else int(a.mask_offsets[r])
    row = w if a.mask_offsets is None else n + w
    visible = a.mask[start : start + w * row].view(w, row)[: num_rows - r * w, row - w :] != 0
    position = torch.arange(n, n + w, device=a.table.device)
    entry = a.table[int(a.row_ids[r])][position // a.page_size].long()
    slots = entry * a.page_size + position % a.page_size
    none = entry < 0
    if a.slot_map is not None:
        none |= slots >= len(a.slot_map)
        slots = a.slot_map[slots.masked_fill(none, 0)].long() if len(a.slot_map) else slots
    return visible, slots.masked_fill(none, -1).clamp(min=-1)


def _check_num_rows(num_rows: int | torch.Tensor | None, all_rows: int, device: torch.device) -> int | torch.Tensor:
    """`num_rows`, but never more than there are; a tensor is looked at on the CPU only."""
    if num_rows is None:
        return all_rows
    if not isinstance(num_rows, torch.Tensor):
        return min(checks.integer("num_rows", num_rows, 0), all_rows)
    checks.tensor("num_rows", num_rows, (1,), (torch.int32,), device)
    if checks.on_cpu(num_rows):
        checks.integer("num_rows", int(num_rows), 0)
    return num_rows


def _check_values(a: CompactArguments) -> None:
    """On the CPU, of the requests that have a real row: padding may hold anything."""
    rows = int(a.num_rows)
    real = -(-rows // a.width)
    lens = a.prefix_lens[:real]
    checks.table_values(a.table, a.row_ids[:real], lens, lens.long() + a.width, a.page_size)
    if a.mask_offsets is not None:
        checks.mask_values(a.mask, a.mask_offsets[: real + 1], lens, a.width)
    for r in range(real):
        visible, slots = _request(a, rows, r)
        if (j := checks.first_row(visible.any(dim=0) & (slots < 0))) is not None:
            raise ArgumentError("table", f"no slot for draft {j} of request {r}", "a slot for every visible draft")
