"""Calls of the kernels under test: arguments on a device, poisoned and guarded outputs, and what was launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_specverify.kernels import draft_decode_attention, verify_attention
from sglang_specverify.kernels.launch import Launch

from .bounds import Expected, call_reference, compare, expect

#: A NaN that no kernel computes, for each width of an output.
_POISON = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}


def to_device(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """The same call with its tensors on `device`, each with its strides."""
    return {name: _move(value, device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _move(value: torch.Tensor, device: str) -> torch.Tensor:
    if value.device.type == device:
        return value
    bits = value.view(torch.uint8) if value.element_size() == 1 else value
    storage = torch.empty(0, dtype=bits.dtype, device=bits.device).set_(bits.untyped_storage()).to(device)  # type: ignore[call-overload]
    return storage.as_strided(value.shape, value.stride(), value.storage_offset()).view(value.dtype)


@dataclass
class Guarded:
    """A view inside a larger buffer that holds nothing but poison.

    Attributes:
        base: the buffer.
        view: what a kernel is given.
    """

    base: torch.Tensor
    view: torch.Tensor

    def untouched(self, written: torch.Tensor) -> bool:
        """Whether everything is as it was, but for the elements of `view` that `written` (bool [T]) names by their row."""
        kind, poison = _POISON[self.base.element_size()]
        bits = self.base.view(kind)
        same = bits == poison
        inside = same.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset() - self.base.storage_offset())
        inside.logical_or_(written.view(-1, *[1] * (inside.dim() - 1)))
        return bool(same.all())


def guarded(rows: int, heads: int, dim: int, dtype: torch.dtype, device: str, *, strided: bool) -> Guarded:
    """A poisoned output [rows, heads, dim] with guard rows around it; `strided` with gaps after heads and rows too."""
    base = _poisoned((rows + 4, heads + 2 * strided, dim + 8 * strided), dtype, device)
    return Guarded(base, base[2 : 2 + rows, strided : strided + heads, :dim])


def guarded_lse(rows: int, heads: int, device: str, *, layout: str = "rows") -> Guarded:
    """A poisoned LSE, logically [rows, heads]: by "rows", or as a view of "heads" [Hq, T] or of "column" [T, Hq, 1]."""
    if layout == "heads":
        base = _poisoned((heads + 2, rows + 4), torch.float32, device)
        return Guarded(base, base[1 : 1 + heads, 2 : 2 + rows].T)
    base = _poisoned((rows + 4, heads, 1), torch.float32, device)
    return Guarded(base, base[2 : 2 + rows].squeeze(-1) if layout == "column" else base[2 : 2 + rows, :, 0])


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    kind, poison = _POISON[torch.empty(0, dtype=dtype).element_size()]
    return torch.full(shape, poison, dtype=kind, device=device).view(dtype)


def call(arguments: dict[str, Any], **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the operation that `arguments` are for; by the fused kernel unless `extra` names a variant."""
    operation = draft_decode_attention if "draft_slots" in arguments else verify_attention
    return operation(**{"variant": "fused", **arguments, **extra, "return_lse": True})


def own_rows(arguments: dict[str, Any]) -> torch.Tensor:
    """bool [T]: the rows of q that belong to a request."""
    batch = len(arguments["prefix_lens"])
    row = torch.arange(len(arguments["q"]), device=arguments["q"].device)
    if arguments.get("q_offsets") is not None:
        return (row >= arguments["q_offsets"][0]) & (row < arguments["q_offsets"][-1])
    return row < batch * (arguments["topk"] if "draft_slots" in arguments else arguments["num_draft_tokens"])


def check(
    arguments: dict[str, Any], *, out_dtype: torch.dtype | None = None, strided: bool = False, lse_layout: str = "rows",
    splits: int = 1, expected: Expected | None = None, **extra: Any,
) -> float:  # fmt: skip
    """Run a call into poisoned, guarded outputs and compare; returns the largest error over its bound.

    Raises:
        AssertionError: an element outside its bound, or a row or a byte written that belongs to nobody.
    """
    q, device = arguments["q"], arguments["q"].device.type
    rows, heads, _ = q.shape
    out = guarded(rows, heads, arguments["v_cache"].shape[2], out_dtype or q.dtype, device, strided=strided)
    lse = guarded_lse(rows, heads, device, layout=lse_layout)
    got = call(arguments, **extra, out=out.view, lse=lse.view)
    assert got[0] is out.view and got[1] is lse.view
    ratio = compare(arguments, out.view, lse.view, expected=expected, splits=splits)
    real = own_rows(arguments)
    assert out.untouched(real), "out was written where no request has a row"
    assert lse.untouched(real), "lse was written where no request has a row"
    return ratio


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Every launch of the package's Triton kernels within the context, in order."""
    seen: list[Launch] = []
    run = Launch.run

    def record(self: Launch) -> None:
        seen.append(self)
        run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", record)
        yield seen


def names(seen: list[Launch]) -> list[str]:
    """The kernels of launches, by their function's name."""
    return [launch.kernel.fn.__name__ for launch in seen]


def attention(seen: list[Launch]) -> Launch:
    """The one launch of attention among them; a plan's may stand before it, and one that combines parts behind it."""
    (found,) = (launch for launch in seen if launch.kernel.fn.__name__ in ("verify_attention_kernel", "specialized_kernel"))
    return found


def one_table(a: dict[str, Any]) -> dict[str, Any]:
    """The same call with a table of slots in place of pages, one row for each request in order."""
    page, table = a["page_size"], a["table"][a["row_ids"].long()]
    index = torch.arange(table.shape[1] * page, device=table.device)
    pages = table[:, index // page]
    slots = torch.where(pages >= 0, pages * page + index % page, -1).int()
    row_ids = torch.arange(len(table), dtype=torch.int32, device=table.device)
    return {**a, "table": slots, "row_ids": row_ids, "page_size": 1}


def prefix_arguments(a: dict[str, Any]) -> dict[str, Any]:
    """The call that sees the prefix alone, without sinks: what FlashAttention's prefix pass computes."""
    counts, device = _counts(a), a["q"].device
    positions = a.get("positions")
    if positions is None or a.get("mask") is None:
        positions = torch.cat([n + torch.arange(w) for n, w in counts] or [torch.zeros(0)]).long().to(device)
    sizes = torch.tensor([0, *(w * (n + w) for n, w in counts)]).cumsum(0)
    mask = torch.zeros(int(sizes[-1]), dtype=torch.bool, device=device)
    return {
        **a,
        "mask": mask,
        "mask_layout": "full_mask",
        "mask_offsets": sizes.to(device),
        "positions": positions,
        "sinks": None,
    }


def suffix_arguments(a: dict[str, Any]) -> dict[str, Any]:
    """The call that sees the drafts alone, without sinks: prefixes of length 0 and a table of the drafts' slots."""
    a = one_table(a)
    counts, device = _counts(a), a["q"].device
    lens = a["prefix_lens"].long()
    index = torch.arange(max((w for _, w in counts), default=0) + 1, device=device)
    own = a["table"].gather(1, (lens[:, None] + index).clamp(max=a["table"].shape[1] - 1))
    widths = torch.tensor([w for _, w in counts], device=device)
    table = own.masked_fill(index >= widths[:, None], -1)
    changes: dict[str, Any] = {"prefix_lens": torch.zeros_like(a["prefix_lens"]), "table": table, "sinks": None}
    if a.get("positions") is not None:
        shift = torch.cat([torch.full((w,), n) for n, w in counts] or [torch.zeros(0)])
        changes["positions"] = a["positions"][: len(shift)] - shift.to(device, a["positions"].dtype)
    if counts and a.get("mask") is not None and a["mask_layout"] == "full_mask":
        starts = a["mask_offsets"].tolist()
        blocks = [a["mask"][at : at + w * (n + w)].view(w, n + w)[:, n:] for at, (n, w) in zip(starts, counts, strict=False)]
        sizes = torch.tensor([0, *(w * w for _, w in counts)]).cumsum(0)
        changes |= {"mask": torch.cat([block.reshape(-1) for block in blocks]), "mask_offsets": sizes.to(device)}
    return {**a, **changes}


def prefix_state(a: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefix's output in `dtype` and its FP32 LSE, as a prefix pass leaves them; NaN in padding rows."""
    out, lse = call_reference(prefix_arguments(a))
    return out.to(dtype), lse.float()


def _counts(a: dict[str, Any]) -> list[tuple[int, int]]:
    """Prefix length and draft tokens of each request."""
    lens = a["prefix_lens"].tolist()
    widths = [a["num_draft_tokens"]] * len(lens) if a.get("q_offsets") is None else a["q_offsets"].diff().tolist()
    return list(zip(lens, widths, strict=True))


def copy_of(a: dict[str, Any], name: str) -> torch.Tensor:
    """Replace a tensor argument by a copy of its own and give it back, to be written into."""
    a[name] = a[name].clone()
    return a[name]


__all__ = [
    "Expected", "Guarded", "attention", "call", "check", "copy_of", "expect", "guarded", "guarded_lse", "launches", "names",
    "one_table", "own_rows", "prefix_arguments", "prefix_state", "suffix_arguments", "to_device",
]  # fmt: skip
