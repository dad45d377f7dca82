"""The step's own copy of the slots that its layers read.

The engine may hand a finished request's row to a new request while the layers of the step still run, so they read this
copy and not the engine's table.
"""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks


@torch.no_grad()
def snapshot_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    slot_map: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Copy the slots of positions below `seq_lens[r]`, or the ids of their pages, into `out[r]`.

    With page_size 1, `out[r, p] = slot(r, p)`; else `out[r, c] = slot(r, c * page_size) // page_size` for each page
    that holds such a position, the last one included where it is partly filled. `slot_map` is applied to the slots
    first. Does not wait for a GPU.

    Args:
        req_to_token: int32 or int64 [rows, context], slot of each position; entries from `seq_lens[r]` on may hold
            anything.
        req_pool_indices: int32 or int64 [bs], row of each request.
        seq_lens: int32 or int64 [bs]: every position that the step reads, so for a verify the prefix plus W.
        page_size: tokens a page.
        slot_map: int [n], full-pool slot to window-pool slot.
        out: int32 [bs or more, width]. Other entries of a row, and rows from bs on, are not written.

    Returns:
        out.

    Raises:
        ArgumentError: also, on a CPU, a width below the pages needed, a length beyond the context, a row or slot out
            of range, and a page that does not start at a multiple of page_size. Nothing was written.
    """
    checks.tensor("req_to_token", req_to_token, ("rows", "context"), checks.INTS)
    device = req_to_token.device
    checks.tensor("req_pool_indices", req_pool_indices, ("bs",), checks.INTS, device)
    checks.tensor("seq_lens", seq_lens, (len(req_pool_indices),), checks.INTS, device)
    checks.integer("page_size", page_size, 1)
    if slot_map is not None:
        checks.tensor("slot_map", slot_map, ("n",), checks.INTS, device)
    checks.output("out", checks.tensor("out", out, (">= bs", "width"), (torch.int32,), device))
    batch, (rows, context), width = len(seq_lens), req_to_token.shape, out.shape[1]
    if len(out) < batch:
        raise ArgumentError("out", f"{len(out)} rows", f"{batch} or more, one for each request")
    if batch == 0:
        return out

    pages = (seq_lens.long() + page_size - 1) // page_size
    if checks.on_cpu(out):
        _check_lengths(seq_lens, pages, context, width)
        if (r := checks.first_row((req_pool_indices < 0) | (req_pool_indices >= rows))) is not None:
            raise ArgumentError("req_pool_indices", f"{int(req_pool_indices[r])} for request {r}", f"0 to {rows - 1}")
        width = int(pages.max())
    column = torch.arange(min(width, -(-context // page_size)), device=device)
    wanted = column < pages[:, None]
    slots = req_to_token[req_pool_indices.long()[:, None], column * page_size].long()
    slots = slots.masked_fill(~wanted, 0)
    if slot_map is not None:
        if checks.on_cpu(out):
            _check_slots("req_to_token", slots, wanted, len(slot_map))
        slots = slot_map[slots.clamp(0, len(slot_map) - 1)].long() if len(slot_map) else slots
    if checks.on_cpu(out):
        _check_slots("slot_map" if slot_map is not None else "req_to_token", slots, wanted, None, page_size)
    target = out[:batch, : len(column)]
    target.copy_(torch.where(wanted, slots // page_size, target))
    return out


def _check_lengths(seq_lens: torch.Tensor, pages: torch.Tensor, context: int, width: int) -> None:
    if (r := checks.first_row((seq_lens < 0) | (seq_lens > context))) is not None:
        raise ArgumentError("seq_lens", f"{int(seq_lens[r])} for request {r}", f"0 to {context}, the columns of req_to_token")
    if (r := checks.first_row(pages > width)) is not None:
        raise ArgumentError("out", f"{width} columns", f"{int(pages[r])} or more: request {r} has {int(seq_lens[r])} tokens")


def _check_slots(argument: str, slots: torch.Tensor, wanted: torch.Tensor, count: int | None, page_size: int = 1) -> None:
    bad = (slots < 0) | (slots % page_size != 0)
    if count is not None:
        bad |= slots >= count
    if bool((bad & wanted).any()):
        allowed = "0 or more" if count is None else f"0 to {count - 1}"
        aligned = f", a multiple of {page_size} where a page starts" if page_size > 1 else ""
        raise ArgumentError(argument, f"slot {int(slots[bad & wanted][0])}", allowed + aligned)
