"""Checks of one argument at a time: type, dtype, device, shape, stride.

They look at metadata only, so none of them waits for the device; those of values are for the CPU. Each raises `ArgumentError`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import cast

import torch

from sglang_specverify.errors import ArgumentError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SINKS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
MASKS = (torch.bool, torch.uint8)


def names(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(
    argument: str,
    value: object,
    shape: tuple[int | str, ...],
    dtypes: Collection[torch.dtype],
    device: torch.device | None = None,
    *,
    unit_last: bool = False,
) -> torch.Tensor:
    """`value` as a tensor of `shape`, in which a string is the name of a free dimension."""
    described = f"a tensor [{', '.join(map(str, shape))}] of {names(dtypes)}"
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(argument, type(value).__name__, described)
    if value.dtype not in dtypes:
        raise ArgumentError(argument, names((value.dtype,)), described)
    fits = value.dim() == len(shape) and all(
        isinstance(want, str) or want == have for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits:
        raise ArgumentError(argument, f"shape {list(value.shape)}", described)
    if device is not None and value.device != device:
        raise ArgumentError(argument, f"a tensor on {value.device}", f"a tensor on q's device, {device}")
    if unit_last and value.dim() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(argument, f"strides {list(value.stride())}", "last stride 1")
    return value


def output(argument: str, value: torch.Tensor) -> None:
    """Two elements of an output must not share memory, as an expanded tensor's do."""
    if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise ArgumentError(argument, f"shape {list(value.shape)} with strides {list(value.stride())}", "no stride 0")


def integer(argument: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, repr(value), f"an int of at least {least}")
    return value


def dtype(argument: str, value: object, allowed: Collection[torch.dtype]) -> torch.dtype:
    if value not in allowed:
        raise ArgumentError(argument, names((value,)) if isinstance(value, torch.dtype) else repr(value), names(allowed))
    return cast(torch.dtype, value)


def flag(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(argument, repr(value), "True or False")
    return value


def number(argument: str, value: object, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise ArgumentError(argument, repr(value), "a finite number" + ("" if least == -math.inf else f" of at least {least}"))
    return float(value)


def scale(argument: str, value: object, kv_heads: int, device: torch.device) -> None:
    """A number, a tensor of one element, or a tensor [Hkv]."""
    if not isinstance(value, torch.Tensor):
        number(argument, value)
        return
    one = value.dim() <= 1 and value.numel() == 1
    tensor(argument, value, tuple(value.shape) if one else (kv_heads,), FLOATS, device, unit_last=True)


def on_cpu(value: torch.Tensor) -> bool:
    """Whether values may be looked at: elsewhere a look would wait for the device."""
    return value.device.type == "cpu"


def first_row(bad: torch.Tensor) -> int | None:
    """The first index at which `bad` (bool [n], on the CPU) is true."""
    return cast(int, bad.nonzero()[0].item()) if bool(bad.any()) else None


def tree_mask(
    mask: torch.Tensor, layout: str, mask_offsets: torch.Tensor | None, batch: int, width: int, device: torch.device
) -> None:
    """The mask of `batch` requests of `width` drafts in one of the two layouts: types, shapes, entries, strides."""
    if layout == "qlen_only":
        if mask_offsets is not None:
            raise ArgumentError("mask_offsets", "a value with a qlen_only mask", "None: only full_mask has offsets")
        entries = batch * width * width
        flat = isinstance(mask, torch.Tensor) and mask.dim() == 1
        shape: tuple[int | str, ...] = (f">= {entries}",) if flat else (batch, width, width)
        tensor("mask", mask, shape, MASKS, device)
        if mask.numel() < entries:
            raise ArgumentError("mask", f"{mask.numel()} entries", f"bs*W*W = {entries} or more")
    else:
        tensor("mask", mask, ("entries",), MASKS, device)
        tensor("mask_offsets", mask_offsets, (batch + 1,), (torch.int64,), device)
    if not mask.is_contiguous():
        raise ArgumentError("mask", f"strides {list(mask.stride())}", "a contiguous mask")


def length_values(prefix_lens: torch.Tensor) -> None:
    """Lengths, on the CPU."""
    if (r := first_row(prefix_lens < 0)) is not None:
        raise ArgumentError("prefix_lens", f"{int(prefix_lens[r])} for request {r}", "0 or more")


def table_values(
    table: torch.Tensor, row_ids: torch.Tensor, prefix_lens: torch.Tensor, ends: torch.Tensor, page_size: int
) -> None:
    """Lengths, row ids and the table's width, all on the CPU; the table is asked for positions below `ends[r]`."""
    length_values(prefix_lens)
    rows, width = table.shape
    if (r := first_row((row_ids < 0) | (row_ids >= rows))) is not None:
        raise ArgumentError("row_ids", f"{int(row_ids[r])} for request {r}", f"a row of table: 0 to {rows - 1}")
    pages = (ends + page_size - 1) // page_size
    if (r := first_row(pages > width)) is not None:
        raise ArgumentError("table", f"{width} columns", f"{int(pages[r])} or more: request {r} ends at position {int(ends[r])}")


def mask_values(mask: torch.Tensor, mask_offsets: torch.Tensor, prefix_lens: torch.Tensor, width: torch.Tensor | int) -> None:
    """Offsets of a full_mask, on the CPU: W rows of L + W entries each, all inside the mask; W is an int or int64 [bs]."""
    starts, stops = mask_offsets[:-1], mask_offsets[1:]
    short = stops - starts < width * (prefix_lens.long() + width)
    if (r := first_row((starts < 0) | short)) is not None:
        raise ArgumentError("mask_offsets", f"{int(starts[r])} to {int(stops[r])} for request {r}", "W rows of L + W entries")
    if len(stops) and int(stops.max()) > len(mask):
        raise ArgumentError("mask", f"{len(mask)} entries", f"{int(stops.max())} or more: mask_offsets reaches so far")
