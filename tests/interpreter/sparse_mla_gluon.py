"""Runs the Gluon kernel of sparse MLA decode on a CPU: `gluon_cpu.py` with what else that kernel uses.

Grids of three dimensions, pointers to bytes that are read as words, shared memory under another type, `join`, and the
lines of PTX that the kernel holds.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from sglang_specverify.kernels.launch import Launch

from .gluon_cpu import Program
from .gluon_memory import Shared
from .gluon_tensors import Buffer, Fault, Pointer, Tensor, poison, raw


class Bytes(Pointer):
    """Addresses in a tensor of bytes; `size` of them are read as one integer."""

    size = 1

    def __add__(self, offset: Any) -> Bytes:
        return self._at(super().__add__(offset * self.size).at, self.size)

    def to(self, dtype: torch.dtype, bitcast: bool) -> Bytes:
        assert bitcast
        return self._at(self.at, dtype.itemsize)

    def _at(self, at: torch.Tensor, size: int) -> Bytes:
        moved = Bytes(self.buffer, at)
        moved.size = size
        return moved

    def read(self, mask: Any, other: Any) -> torch.Tensor:
        if self.size == 1:
            return super().read(mask, other)
        at, live = self.lanes(mask)
        if bool((at[live] % self.size != 0).any()):
            raise Fault(f"{self.buffer.name}: a word at an address that {self.size} does not divide")
        dtype = {2: torch.int16, 4: torch.int32}[self.size]
        values = torch.full(at.shape, poison(dtype) if other is None else other, dtype=dtype)
        lanes = self.buffer.check(at[live][:, None] + torch.arange(self.size))
        values[live] = self.buffer.flat[lanes].contiguous().view(dtype).flatten()
        return values


class Words(Shared):
    """Shared memory that may be seen under another type."""

    def index(self, at: Any) -> Words:
        return self._of(super().index(at))

    def slice(self, start: int, length: int, dim: int = 0) -> Words:
        return self._of(super().slice(start, length, dim))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Words:
        return Words(self.memory, self.data.view(dtype).view(shape), self.place)

    @staticmethod
    def _of(shared: Shared) -> Words:
        return Words(shared.memory, shared.data, shared.place)


class SparseProgram(Program):
    """One program of a grid of three dimensions."""

    def __init__(self, launch: Launch, place: tuple[int, int, int], order: random.Random) -> None:
        grid = launch.grid
        super().__init__(launch, (place[2] * grid[1] + place[1]) * grid[0] + place[0], order)
        self.place = place

    def names(self, module: dict[str, Any]) -> dict[str, Any]:
        names = super().names(_reachable(module))
        gl = names["gl"]
        gl.program_id = lambda axis: Tensor(torch.tensor(self.place[axis], dtype=torch.int32))
        gl.num_programs = lambda axis: Tensor(torch.tensor(self.launch.grid[axis], dtype=torch.int32))
        gl.int16 = torch.int16
        gl.pointer_type = lambda dtype: dtype
        gl.join = lambda a, b: Tensor(torch.stack([raw(a), raw(b)], dim=-1))
        gl.fma = lambda x, y, z: Tensor((raw(x).double() * raw(y).double() + raw(z).double()).float())
        gl.full_like = lambda x, value: Tensor(torch.full_like(raw(x), value))
        gl.zeros_like = lambda x: Tensor(torch.zeros_like(raw(x)))
        gl.inline_asm_elementwise = self.assembly
        return names

    @staticmethod
    def range(start: Any, stop: Any, step: Any = 1) -> Iterator[Tensor]:
        return (Tensor(torch.tensor(i, dtype=torch.int32)) for i in range(*map(operator.index, (start, stop, step))))

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Words:
        return Words._of(super().allocate(dtype, shape, layout))

    @staticmethod
    def assembly(text: str, constraints: str, arguments: list[Any], **_: Any) -> Tensor | None:
        if text.startswith("griddepcontrol."):
            return None
        if text.startswith("prmt.b32 $0, $1, 0, 0x"):
            code = raw(arguments[0])
            taken = [(code >> (8 * int(digit)) & 0xFF) << (8 * n) if digit < "4" else 0 for n, digit in enumerate(text[-2:-6:-1])]
            return Tensor(sum(taken[1:], code & 0 | taken[0]))
        if text != "mul.rn.bf16x2 $0, $1, $2;":
            raise NotImplementedError(text)
        a, b = torch.broadcast_tensors(*map(raw, arguments))
        # bf16 on a CPU multiplies in FP32 and rounds once.
        pairs = a.contiguous().view(torch.bfloat16) * b.contiguous().view(torch.bfloat16)
        return Tensor(pairs.view(torch.int32))


def _reachable(module: dict[str, Any]) -> dict[str, Any]:
    """The globals of a kernel's module and of those that its functions come from; its own names win."""
    found = dict(module)
    for value in module.values():
        if hasattr(value, "fn") and value.fn.__globals__ is not module:
            found = _reachable(value.fn.__globals__) | found
    return found


def run(launch: Launch, *, seed: int = 0) -> None:
    """Run a launch on CPU tensors; `seed` draws the order in which partitions run."""
    pointers = {
        name: (Bytes if x.dtype == torch.uint8 else Pointer)(Buffer(name, x))
        for name, x in launch.arguments.items()
        if isinstance(x, torch.Tensor)
    }
    for place in product(*map(range, launch.grid)):
        order = random.Random(f"{seed} {place}")
        SparseProgram(launch, place, order).run({**launch.arguments, **pointers, **launch.constants})
