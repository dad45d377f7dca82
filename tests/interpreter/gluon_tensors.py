"""Tensors, pointers and the functions on them for `gluon_cpu.py`: what a Gluon kernel computes with, on PyTorch's CPU tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Fault(Exception):
    """The kernel did what has no defined result on a GPU."""


def poison(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def raw(x: Any) -> Any:
    """A PyTorch tensor or a number."""
    if isinstance(x, Tensor):
        return x.data
    if not isinstance(x, (bool, int, float)):
        raise Fault(f"a {type(x).__name__} is used as a tensor")
    return x


def same(a: Any, b: Any) -> tuple[Any, Any]:
    """Both in their common type. PyTorch's own rule would let a scalar tensor's type give way."""
    a, b = raw(a), raw(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dim() != b.dim() and a.dim() and b.dim():
            raise Fault(f"shapes {list(a.shape)} and {list(b.shape)} in one operation")
        dtype = torch.promote_types(a.dtype, b.dtype)
        return a.to(dtype), b.to(dtype)
    return a, b


class Tensor:
    """A tensor in registers, or a scalar that is known at run time only."""

    __slots__ = ("data",)

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape(shape))

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.data[at])

    def __neg__(self) -> Tensor:
        return Tensor(-self.data)

    def __bool__(self) -> bool:
        return bool(self.__index__())

    def __index__(self) -> int:
        if self.data.dim() or self.data.is_floating_point():
            raise Fault(f"{self.data.dtype} {list(self.data.shape)} as a number of the host")
        return int(self.data)

    __hash__ = None  # type: ignore[assignment]


def _define(name: str, function: Callable[[Any, Any], Any], *, reflected: bool = True) -> None:
    setattr(Tensor, f"__{name}__", lambda a, b: Tensor(function(*same(a, b))))
    if reflected:
        setattr(Tensor, f"__r{name}__", lambda b, a: Tensor(function(*same(a, b))))


for _name in ("add", "sub", "mul", "truediv", "lshift", "rshift", "and", "or", "xor"):
    _define(_name, getattr(operator, f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, getattr(operator, _name), reflected=False)
# Integers round towards zero.
_define("floordiv", lambda a, b: torch.div(a, b, rounding_mode="trunc"), reflected=False)
_define("mod", torch.fmod, reflected=False)


class Buffer:
    """The memory of a tensor argument, which elements of it are the tensor's, and who stored there."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.name, self.start = name, tensor.storage_offset()
        self.flat = tensor.as_strided((size,), (1,), 0)
        self.own = torch.zeros(size, dtype=torch.bool)
        self.own.as_strided(tensor.shape, tensor.stride(), self.start).fill_(True)
        self.writer = torch.zeros(size, dtype=torch.int32)

    def check(self, at: torch.Tensor) -> torch.Tensor:
        if at.numel() and (int(at.min()) < 0 or int(at.max()) >= len(self.flat) or not bool(self.own[at].all())):
            raise Fault(f"{self.name}: an address outside the tensor, of {int(at.min())} to {int(at.max())}")
        return at


class Pointer:
    """One or more addresses in a buffer, in elements."""

    def __init__(self, buffer: Buffer, at: torch.Tensor | None = None) -> None:
        self.buffer, self.at = buffer, torch.tensor(buffer.start) if at is None else at
        self.dtype = SimpleNamespace(element_ty=buffer.flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        offset = raw(offset)
        return Pointer(self.buffer, self.at + (offset.long() if isinstance(offset, torch.Tensor) else offset))

    def lanes(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses, and which of them are accessed."""
        live = torch.as_tensor(True if mask is None else raw(mask))
        at, live = torch.broadcast_tensors(self.at, live)
        return at, live

    def read(self, mask: Any, other: Any) -> torch.Tensor:
        (at, live), flat = self.lanes(mask), self.buffer.flat
        values = torch.full(at.shape, poison(flat.dtype) if other is None else other, dtype=flat.dtype)
        values[live] = flat[self.buffer.check(at[live])]
        return values

    def write(self, value: Any, mask: Any, writer: int) -> None:
        at, live = self.lanes(mask)
        values = torch.as_tensor(raw(value)).to(self.buffer.flat.dtype).broadcast_to(at.shape)
        at = self.buffer.check(at[live])
        before = self.buffer.writer[at]
        if bool(((before != 0) & (before != writer)).any()):
            raise Fault(f"{self.buffer.name}: stored by two partitions or programs")
        self.buffer.writer[at] = writer
        self.buffer.flat[at] = values[live]


def atomic_add(pointer: Pointer, value: Any) -> Tensor:
    """Add to one element; what it held before."""
    at = pointer.buffer.check(pointer.at)
    before = pointer.buffer.flat[at].clone()
    pointer.buffer.flat[at] += raw(value)
    return Tensor(before)


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    return Tensor(pointer.read(mask, other))


def arange(start: int, stop: int, layout: Any = None) -> Tensor:
    return Tensor(torch.arange(start, stop, dtype=torch.int32))


def full(shape: list[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Tensor:
    return Tensor(torch.full(shape, value, dtype=dtype))


def zeros(shape: list[int], dtype: torch.dtype, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    return Tensor(torch.where(raw(condition), *same(a, b)))


def _extreme(floats: Any, integers: Any) -> Callable[[Any, Any], Tensor]:
    def extreme(a: Any, b: Any) -> Tensor:
        a, b = same(a, b)
        dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.int32)
        a, b = torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype)
        return Tensor((floats if dtype.is_floating_point else integers)(a, b))

    return extreme


#: Of a NaN and a number they give the number, as a GPU does.
maximum, minimum = _extreme(torch.fmax, torch.maximum), _extreme(torch.fmin, torch.minimum)


def largest(x: Tensor, axis: int) -> Tensor:
    data = raw(x)
    return Tensor((data.masked_fill(data.isnan(), -torch.inf) if data.is_floating_point() else data).amax(axis))


def total(x: Tensor, axis: int) -> Tensor:
    return Tensor(raw(x).sum(axis, dtype=x.data.dtype))


class Layout:
    """Who holds which element, which means nothing here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def get_default_for(shape: list[int], dtype: torch.dtype) -> Layout:
        return Layout()


_LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
    "SharedLinearLayout",
)  # fmt: skip

#: `gluon.language` without what belongs to a program.
LANGUAGE: dict[str, Any] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "constexpr": lambda value: value,
    "static_range": range,
    "convert_layout": lambda x, layout: Tensor(raw(x)),
    "arange": arange,
    "full": full,
    "zeros": zeros,
    "where": where,
    "maximum": maximum,
    "minimum": minimum,
    "max": largest,
    "sum": total,
    "exp2": lambda x: Tensor(raw(x).exp2()),
    "log2": lambda x: Tensor(raw(x).log2()),
    "abs": lambda x: Tensor(raw(x).abs()),
    **dict.fromkeys(_LAYOUTS, Layout),
}
