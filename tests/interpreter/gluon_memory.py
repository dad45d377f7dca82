"""Shared memory, barriers, matrix products and partitions for `gluon_cpu.py`."""

from __future__ import annotations

import operator
import threading
from collections import deque
from typing import Any, Protocol

import torch

from .gluon_tensors import Fault, Tensor, raw


class Clock(Protocol):
    """A program, as its memory knows it."""

    clock: int
    current: Partition | None

    def switch(self) -> None: ...


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived. A wait for a parity ends when the phase of that parity has."""

    def __init__(self, memory: Memory, place: int, count: int) -> None:
        self.memory, self.place, self.count, self.missing, self.phase = memory, place, count, count, 0

    def passes(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def arrive(self, count: int) -> None:
        if count > self.missing:
            raise Fault(f"{count} arrivals at {self}")
        self.missing -= count
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase + 1

    def __str__(self) -> str:
        return f"{self.memory.name}[{self.place}] (phase {self.phase}, {self.missing} of {self.count} missing)"


class Memory:
    """One allocation of shared memory: its barriers, and when each place was last written, by which partition or a copy (None).

    Its name is that of the first parameter of a partition that it is passed as.
    """

    def __init__(self, program: Clock, shape: list[int]) -> None:
        self.program, self.name = program, "shared memory"
        self.written: list[dict[Partition | None, int]] = [{} for _ in range(shape[0])]
        self.barriers: dict[int, Barrier] = {}


class Shared:
    """A descriptor of shared memory; `place` is its index in the allocation."""

    def __init__(self, memory: Memory, data: torch.Tensor, place: int | None = None) -> None:
        self.memory, self.data, self.place, self.dtype = memory, data, place, data.dtype

    def index(self, at: Any) -> Shared:
        at = operator.index(at)
        if self.place is not None or not 0 <= at < len(self.data):
            raise Fault(f"index {at} of {self.memory.name}, {list(self.data.shape)}")
        return Shared(self.memory, self.data[at], at)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory, self.data.narrow(dim, start, length), self.place)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory, self.data.permute(order), self.place)

    def load(self, layout: Any) -> Tensor:
        self.memory.program.switch()
        return Tensor(self.data.clone())

    def store(self, value: Tensor) -> None:
        self.memory.program.switch()
        self.write(raw(value), self.memory.program.current)

    def write(self, value: torch.Tensor | float, partition: Partition | None = None) -> None:
        if isinstance(value, torch.Tensor) and (value.shape != self.data.shape or value.dtype != self.dtype):
            raise Fault(f"{value.dtype} {list(value.shape)} into {self.memory.name}, {self.dtype} {list(self.data.shape)}")
        assert self.place is not None
        self.data[...] = value
        self.memory.program.clock += 1
        self.memory.written[self.place][partition] = self.memory.program.clock

    def barrier(self) -> Barrier:
        assert self.place is not None
        return self.memory.barriers[self.place]


class Product:
    """A matrix product in flight."""

    def __init__(self, a: Tensor | Shared, b: Shared, acc: Any) -> None:
        self.a, self.b, self.acc, self.value = a, b, acc, None
        if a.data.dtype != b.dtype or b.dtype.itemsize != 2 or a.data.shape[1] != b.data.shape[0]:
            raise Fault(f"product of {a.data.dtype} {list(a.data.shape)} and {b.dtype} {list(b.data.shape)}")
        self.before = (a.data.clone(), b.data.clone())

    def finish(self) -> None:
        for one, before in zip((self.a, self.b), self.before, strict=True):
            if isinstance(one, Shared) and not torch.equal(one.data.view(torch.int16), before.view(torch.int16)):
                raise Fault(f"{one.memory.name}[{one.place}] changed under a product in flight")
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = Tensor(raw(acc) + self.a.data.float() @ self.b.data.float())


class Partition:
    """One of the functions that `warp_specialize` runs at the same time."""

    def __init__(self, number: int, function: Any, warps: int) -> None:
        self.name, self.number, self.threads = f"{function.__name__} {number}", number, 32 * warps
        self.resume, self.done, self.fenced = threading.Semaphore(0), False, 0
        self.waits: tuple[Barrier, int] | None = None
        #: Whether it stored a part of a prefix since its threads last met at a barrier.
        self.unordered = False
        self.products: deque[Product] = deque()
        self.issued: list[tuple[Shared, torch.Tensor]] = []
        self.flights: deque[tuple[list[tuple[Shared, torch.Tensor]], Barrier]] = deque()

    def fences(self, shared: Shared) -> bool:
        """Whether a product of this partition sees what was written there: behind a fence of its own, or of the writer."""
        assert shared.place is not None
        return all(
            at <= max(self.fenced, writer.fenced if writer else 0) for writer, at in shared.memory.written[shared.place].items()
        )

    @property
    def blocked(self) -> bool:
        return self.waits is not None and not self.waits[0].passes(self.waits[1])

    def land(self) -> None:
        """The oldest copies that an arrival was asked for arrive."""
        copies, barrier = self.flights.popleft()
        for place, values in copies:
            place.write(values)
        barrier.arrive(self.threads)
