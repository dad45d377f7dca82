"""A 2-D page table of a fixed width, from either of the forms in which an engine holds slots, in one launch.

Attention that reads pages by `table[r, position // page_size]` takes this; one builder serves all callers: the prefix and the
drafts of a verify come from the engine's rows, those of a draft step as ragged lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton

#: Entries that a program writes at once.
_BLOCK = 1024
#: Programs of a launch, and the fewest that a row has: as in `snapshot.py`.
_PROGRAMS = 4096
_ROW_PROGRAMS = 8


@dataclass(frozen=True)
class PageTableArguments:
    """Checked arguments. `starts` is set for ragged slots, `row_ids` and `lens` for rows."""

    source: torch.Tensor
    page_size: int
    table: torch.Tensor
    window_table: torch.Tensor | None
    slot_map: torch.Tensor | None
    row_lens: torch.Tensor | None
    starts: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    extra: int = 0

    @property
    def rows(self) -> int:
        return len(self.lens) if self.lens is not None else len(self.starts) - 1 if self.starts is not None else 0


@torch.no_grad()
def page_table_of_rows(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    extra: int = 0,
    page_size: int,
    table: torch.Tensor,
    slot_map: torch.Tensor | None = None,
    window_table: torch.Tensor | None = None,
    row_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`table[r, c] = slot(r, c * page_size) // page_size` for each page of positions 0 to `seq_lens[r] + extra - 1`.

    The last page counts where it is partly filled. `window_table` receives the same of the slots that `slot_map` makes of them.
    Behind a row's last page both hold page 0, up to the end of a block of 1024 entries or of the row; what lies further
    behind keeps what it held, so a table that began as zeros holds pages of the pool everywhere. Does not wait for a GPU.

    Args:
        req_to_token: int32 or int64 [rows, context], the slot of each position.
        req_pool_indices: int32 or int64 [bs].
        seq_lens: int32 or int64 [bs].
        extra: positions beyond `seq_lens` that are read too, such as the drafts of a verify.
        page_size: tokens a page.
        table: int32 [bs or more, width], last stride 1.
        slot_map: int [n], full-pool slot to window-pool slot; given with `window_table`, int32 of the table's width.
        row_lens: int64 [bs or more], receives each row's number of positions.

    Returns:
        table.

    Raises:
        ArgumentError: also, on a CPU, a length beyond the context or the table, a row or slot out of range, a page that does
            not start at a multiple of page_size. Nothing was written. On a GPU, where no value is looked at, such a row is
            cut at the context and at the table, and a slot below 0 counts as 0.
    """
    checks.tensor("req_to_token", req_to_token, ("rows", "context"), checks.INTS)
    device = req_to_token.device
    checks.tensor("req_pool_indices", req_pool_indices, ("bs",), checks.INTS, device)
    checks.tensor("seq_lens", seq_lens, (len(req_pool_indices),), checks.INTS, device)
    checks.integer("extra", extra, 0)
    a = PageTableArguments(
        req_to_token, page_size, table, window_table, slot_map, row_lens, row_ids=req_pool_indices, lens=seq_lens, extra=extra
    )
    return _build(a)


@torch.no_grad()
def page_table_of_ragged(
    slots: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int,
    table: torch.Tensor,
    slot_map: torch.Tensor | None = None,
    window_table: torch.Tensor | None = None,
    row_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `page_table_of_rows`, of row r's slots `slots[starts[r] : starts[r + 1]]`, one for each position.

    Args:
        slots: int32 or int64 [n].
        starts: int32 or int64 [bs + 1].
        The others: as there.

    Returns:
        table.

    Raises:
        ArgumentError: as there; on a CPU also starts that fall, or reach beyond `slots`.
    """
    checks.tensor("slots", slots, ("n",), checks.INTS)
    checks.tensor("starts", starts, ("bs + 1",), checks.INTS, slots.device)
    if len(starts) == 0:
        raise ArgumentError("starts", "no entry", "one more than there are rows")
    return _build(PageTableArguments(slots, page_size, table, window_table, slot_map, row_lens, starts=starts))


def _build(a: PageTableArguments) -> torch.Tensor:
    device = a.source.device
    _check_outputs(a, device)
    if a.rows == 0:
        return a.table
    triton = device.type in ("cpu", "cuda") and uses_triton(device)
    if checks.on_cpu(a.source) or not triton:
        plain = _slots_of(a)
        if not triton:
            _write(a, *plain)
            return a.table
    page_table_launch(a, arch_of(device)).run()
    return a.table


def _check_outputs(a: PageTableArguments, device: torch.device) -> None:
    checks.integer("page_size", a.page_size, 1)
    shape: tuple[int | str, ...] = (">= bs", "width")
    checks.output("table", checks.tensor("table", a.table, shape, (torch.int32,), device, unit_last=True))
    if len(a.table) < a.rows:
        raise ArgumentError("table", f"{len(a.table)} rows", f"{a.rows} or more, one for each request")
    if (a.slot_map is None) != (a.window_table is None):
        missing = "slot_map" if a.slot_map is None else "window_table"
        raise ArgumentError(missing, "None", "slot_map and window_table together, or neither")
    if a.slot_map is not None and a.window_table is not None:
        checks.tensor("slot_map", a.slot_map, ("n",), checks.INTS, device)
        if len(a.slot_map) == 0:
            raise ArgumentError("slot_map", "no entry", "one for each slot of the full pool")
        shape = (">= bs", a.table.shape[1])
        checks.output(
            "window_table", checks.tensor("window_table", a.window_table, shape, (torch.int32,), device, unit_last=True)
        )
        if len(a.window_table) < a.rows:
            raise ArgumentError("window_table", f"{len(a.window_table)} rows", f"{a.rows} or more, one for each request")
    if a.row_lens is not None:
        checks.output("row_lens", checks.tensor("row_lens", a.row_lens, (">= bs",), (torch.int64,), device))
        if len(a.row_lens) < a.rows:
            raise ArgumentError("row_lens", f"{len(a.row_lens)} entries", f"{a.rows} or more, one for each request")


def _slots_of(a: PageTableArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In plain PyTorch: each row's length, where a page starts (int64 [rows, columns]) and whether a column is wanted.

    Raises:
        ArgumentError: on a CPU, a value that `page_table_of_rows` refuses.
    """
    look, width = checks.on_cpu(a.source), a.table.shape[1]
    if a.starts is not None:
        begins, name, limit = a.starts[:-1].long(), "starts", len(a.source)
        lengths = a.starts[1:].long() - begins
        if look and (r := checks.first_row((lengths < 0) | (begins < 0) | (begins + lengths > limit))) is not None:
            raise ArgumentError(name, f"{int(begins[r])} to {int(begins[r] + lengths[r])} for row {r}", f"rising, 0 to {limit}")
    else:
        assert a.lens is not None and a.row_ids is not None
        rows, limit = a.source.shape
        begins, name = a.row_ids.long(), "seq_lens"
        lengths = a.lens.long() + a.extra
        if look and (r := checks.first_row((lengths < 0) | (lengths > limit))) is not None:
            raise ArgumentError(name, f"{int(lengths[r])} positions of request {r}", f"0 to {limit}, the columns of req_to_token")
        if look and (r := checks.first_row((begins < 0) | (begins >= rows))) is not None:
            raise ArgumentError("req_pool_indices", f"{int(begins[r])} for request {r}", f"0 to {rows - 1}")
    pages = (lengths + a.page_size - 1) // a.page_size
    if look and (r := checks.first_row(pages > width)) is not None:
        raise ArgumentError("table", f"{width} columns", f"{int(pages[r])} or more: row {r} has {int(lengths[r])} positions")
    column = torch.arange(int(pages.max()) if look else width, device=a.source.device)
    wanted, places = column < pages[:, None], column * a.page_size
    if a.starts is not None:
        # A device that is not looked at may have no slot at all.
        flat = a.source if len(a.source) else a.source.new_zeros(1)
        slots = flat[(begins[:, None] + places).clamp(0, len(flat) - 1)].long()
    else:
        slots = a.source[begins[:, None], places.clamp(max=limit - 1)].long()
    slots = slots.masked_fill(~wanted, 0)
    if look:
        _check_slots("slots" if a.starts is not None else "req_to_token", slots, a.page_size, a.slot_map)
    return lengths, slots.clamp(min=0), wanted


def _check_slots(name: str, slots: torch.Tensor, page_size: int, slot_map: torch.Tensor | None) -> None:
    bad = (slots < 0) | (slots % page_size != 0)
    allowed = "0 or more"
    if slot_map is not None:
        bad, allowed = bad | (slots >= len(slot_map)), f"0 to {len(slot_map) - 1}"
    if bool(bad.any()):
        aligned = f", a multiple of {page_size} where a page starts" if page_size > 1 else ""
        raise ArgumentError(name, f"slot {int(slots[bad][0])}", allowed + aligned)


def _write(a: PageTableArguments, lengths: torch.Tensor, slots: torch.Tensor, wanted: torch.Tensor) -> None:
    """What the kernel does, on a device without Triton."""
    columns = min(-(-max(1, slots.shape[1]) // _BLOCK) * _BLOCK, a.table.shape[1])
    # A block without a page of a row is left as it is, but for the row's first.
    blocks = (wanted.sum(dim=1, keepdim=True).clamp(min=1) + _BLOCK - 1) // _BLOCK
    touched = torch.arange(columns, device=slots.device) // _BLOCK < blocks
    mapped = None if a.slot_map is None else a.slot_map[slots].long().clamp(min=0).masked_fill(~wanted, 0)
    for out, values in ((a.table, slots), (a.window_table, mapped)):
        if out is not None and values is not None:
            padded = torch.zeros(a.rows, columns, dtype=torch.int32, device=slots.device)
            padded[:, : values.shape[1]] = values // a.page_size
            target = out[: a.rows, :columns]
            target.copy_(torch.where(touched, padded, target))
    if a.row_lens is not None:
        a.row_lens[: a.rows] = lengths


def page_table_launch(a: PageTableArguments, arch: str) -> Launch:
    """The one launch that computes a page table of checked arguments."""
    import triton

    from sglang_specverify.kernels.page_table_kernel import page_table_kernel

    width = a.table.shape[1]
    blocks = max(1, triton.cdiv(width, _BLOCK))

    def stride(value: torch.Tensor | None, dim: int = 0) -> int:
        return 0 if value is None else value.stride(dim)

    return Launch(
        kernel=page_table_kernel,
        grid=(a.rows, min(blocks, max(_ROW_PROGRAMS, triton.cdiv(_PROGRAMS, max(a.rows, 1)))), 1),
        arguments={
            "source": a.source,
            "starts": a.starts,
            "row_ids": a.row_ids,
            "lens": a.lens,
            "slot_map": a.slot_map,
            "table": a.table,
            "window_table": a.window_table,
            "row_lens": a.row_lens,
            "width": width,
            "source_end": a.source.shape[-1],
            "slot_count": 0 if a.slot_map is None else len(a.slot_map),
            "extra": a.extra,
            "source_row": 0 if a.starts is not None else a.source.stride(0),
            "source_column": a.source.stride(-1),
            "starts_stride": stride(a.starts),
            "ids_stride": stride(a.row_ids),
            "lens_stride": stride(a.lens),
            "map_stride": stride(a.slot_map),
            "table_row": a.table.stride(0),
            "window_row": stride(a.window_table),
            "row_lens_stride": stride(a.row_lens),
        },
        constants={
            "PAGE_SIZE": a.page_size,
            "RAGGED": a.starts is not None,
            "WINDOW": a.slot_map is not None,
            "LENGTHS": a.row_lens is not None,
            "BLOCK": _BLOCK,
        },
        options={"num_warps": 2 if arch.startswith("gfx") else 4},
    )
