"""The step's own copy of the slots that its layers read.

The engine may hand a finished request's row to a new request while the layers of the step still run, so they read this
copy and not the engine's table.
"""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton

#: Entries that a program copies at once: 8 a thread.
_BLOCK = 1024

#: Programs of a launch, and the fewest that a row has: a context of a million tokens must not launch a thousand programs
#: for each of a thousand short requests.
_PROGRAMS = 4096
_ROW_PROGRAMS = 8


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
    batch, width = len(seq_lens), out.shape[1]
    if len(out) < batch:
        raise ArgumentError("out", f"{len(out)} rows", f"{batch} or more, one for each request")
    if batch == 0:
        return out

    # Any other device, "meta" among them, takes the plain PyTorch below, which waits for none.
    triton = device.type in ("cpu", "cuda") and uses_triton(device)
    if triton and not checks.on_cpu(out):
        snapshot_table_launch(req_to_token, req_pool_indices, seq_lens, page_size, slot_map, out, arch_of(device)).run()
        return out

    wanted, slots = slots_of(req_to_token, req_pool_indices, seq_lens, page_size, slot_map, width, ("seq_lens", "out"))
    if triton:
        # In the interpreter, after all checks; what they computed is not used.
        snapshot_table_launch(req_to_token, req_pool_indices, seq_lens, page_size, slot_map, out, arch_of(device)).run()
        return out
    target = out[:batch, : wanted.shape[1]]
    target.copy_(torch.where(wanted, slots // page_size, target))
    return out


def slots_of(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    ends: torch.Tensor,
    page_size: int,
    slot_map: torch.Tensor | None,
    width: int,
    names: tuple[str, str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns of a copy are wanted (bool [bs, columns]), and the slots where their pages begin (int64, 0 elsewhere).

    In plain PyTorch. Request r is read below position `ends[r]`; `width` and `names`: columns of the copy, and the arguments
    that errors name for the lengths and for it.

    Raises:
        ArgumentError: on a CPU, a value that `snapshot_table` refuses.
    """
    (rows, context), device = req_to_token.shape, ends.device
    on_cpu = checks.on_cpu(ends)
    pages = (ends.long() + page_size - 1) // page_size
    if on_cpu:
        _check_lengths(ends, pages, context, width, names)
        if (r := checks.first_row((req_pool_indices < 0) | (req_pool_indices >= rows))) is not None:
            raise ArgumentError("req_pool_indices", f"{int(req_pool_indices[r])} for request {r}", f"0 to {rows - 1}")
        width = int(pages.max())
    column = torch.arange(min(width, -(-context // page_size)), device=device)
    wanted = column < pages[:, None]
    slots = req_to_token[req_pool_indices.long()[:, None], column * page_size].long()
    slots = slots.masked_fill(~wanted, 0)
    if slot_map is not None:
        if on_cpu:
            _check_slots("req_to_token", slots, wanted, len(slot_map))
        slots = slot_map[slots.clamp(0, len(slot_map) - 1)].long() if len(slot_map) else slots
    if on_cpu:
        _check_slots("slot_map" if slot_map is not None else "req_to_token", slots, wanted, None, page_size)
    return wanted, slots


def snapshot_table_launch(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    slot_map: torch.Tensor | None,
    out: torch.Tensor,
    arch: str,
) -> Launch:
    """The one launch that computes `snapshot_table` on checked arguments."""
    import triton

    from sglang_specverify.kernels.snapshot_kernel import snapshot_table_kernel

    # An empty map maps nothing, and clamping a slot into it would read beside it.
    slot_map = None if slot_map is None or len(slot_map) == 0 else slot_map
    batch, width = len(seq_lens), min(out.shape[1], -(-req_to_token.shape[1] // page_size))
    blocks = triton.cdiv(width, _BLOCK)
    return Launch(
        kernel=snapshot_table_kernel,
        grid=(batch, min(blocks, max(_ROW_PROGRAMS, triton.cdiv(_PROGRAMS, max(batch, 1)))), 1),
        arguments={
            "req_to_token": req_to_token,
            "req_pool_indices": req_pool_indices,
            "seq_lens": seq_lens,
            "slot_map": slot_map,
            "out": out,
            "width": width,
            "slot_count": 0 if slot_map is None else len(slot_map),
            "source_row": req_to_token.stride(0),
            "source_column": req_to_token.stride(1),
            "indices_stride": req_pool_indices.stride(0),
            "lens_stride": seq_lens.stride(0),
            "map_stride": 0 if slot_map is None else slot_map.stride(0),
            "out_row": out.stride(0),
            "out_column": out.stride(1),
        },
        constants={
            "PAGE_SIZE": page_size,
            "HAS_SLOT_MAP": slot_map is not None,
            "BLOCK": _BLOCK,
            "WIDE": blocks_at_once(req_to_token, page_size, slot_map),
        },
        options={"num_warps": 2 if arch.startswith("gfx") else 4},
    )


def blocks_at_once(req_to_token: torch.Tensor, page_size: int, slot_map: torch.Tensor | None) -> int:
    """Blocks that a program of a long row reads together: as many as registers hold, and what is gathered takes more of them."""
    return 4 if req_to_token.dtype == torch.int32 and page_size == 1 and slot_map is None else 1


def _check_lengths(ends: torch.Tensor, pages: torch.Tensor, context: int, width: int, names: tuple[str, str]) -> None:
    lengths, target = names
    if (r := checks.first_row((ends < 0) | (ends > context))) is not None:
        raise ArgumentError(lengths, f"an end at {int(ends[r])} for request {r}", f"0 to {context}, the columns of req_to_token")
    if (r := checks.first_row(pages > width)) is not None:
        raise ArgumentError(target, f"{width} columns", f"{int(pages[r])} or more: request {r} has {int(ends[r])} tokens")


def _check_slots(argument: str, slots: torch.Tensor, wanted: torch.Tensor, count: int | None, page_size: int = 1) -> None:
    bad = (slots < 0) | (slots % page_size != 0)
    if count is not None:
        bad |= slots >= count
    if bool((bad & wanted).any()):
        allowed = "0 or more" if count is None else f"0 to {count - 1}"
        aligned = f", a multiple of {page_size} where a page starts" if page_size > 1 else ""
        raise ArgumentError(argument, f"slot {int(slots[bad & wanted][0])}", allowed + aligned)
