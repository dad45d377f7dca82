"""Runs the kernel of `specialized_kernel.py` on a CPU: as much of Gluon as it uses, which Triton's interpreter does not know.

The kernel's own functions run, as Python, over globals in which Gluon's names stand for what is written here. Layouts mean
nothing, and programs run one after the other, in an order that a seed draws; so do the partitions of a program, by turns. What a
GPU leaves to chance goes wrong here:

- Shared memory starts as NaN. A copy makes its place NaN when it is issued, and fills it some time after the producer's
  arrival was asked for, just before the barrier hears of it.
- A product in flight reads its operands when it is waited for; that they did not change since it was issued is checked, and
  so is that a fence stands between an ordinary write and a product that reads it. Its result is nothing before the wait.
- What a program hands to another through memory lies behind a barrier and a count that releases it, and is read past the
  first cache; anything less is a `Fault`.
- An address outside a tensor, or in a gap of its strides, is a `Fault`; so are a store where another program or partition
  stored, a copy that is not of 16 aligned bytes, and an arrival too many. If everybody waits, that is a `Deadlock`.
"""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from sglang_specverify.kernels.launch import Launch

from .gluon_memory import Barrier, Memory, Partition, Product, Shared
from .gluon_tensors import LANGUAGE, Buffer, Fault, Layout, Pointer, Tensor, atomic_add, load, poison

#: What programs hand to each other, by the names of the arguments.
PARTS = ("partial_out", "partial_lse")


class Deadlock(Fault):
    """Everybody waits."""


class _Stop(BaseException):
    """Ends a partition because another one failed."""


def run(launch: Launch, *, seed: int = 0, program: type[Program] | None = None) -> None:
    """Run a launch of a Gluon kernel on CPU tensors; `seed` draws the order in which partitions run."""
    assert launch.grid[1:] == (1, 1)
    pointers = {name: Pointer(Buffer(name, x)) for name, x in launch.arguments.items() if isinstance(x, torch.Tensor)}
    pids = list(range(launch.grid[0]))
    if seed:
        # Whoever comes last combines the parts of a prefix.
        random.Random(seed).shuffle(pids)
    for pid in pids:
        (program or Program)(launch, pid, random.Random(f"{seed} {pid}")).run(
            {**launch.arguments, **pointers, **launch.constants}
        )


class Program:
    """One program of a launch. Tests override what a faulty kernel would do otherwise."""

    def __init__(self, launch: Launch, pid: int, order: random.Random) -> None:
        self.launch, self.pid, self.order = launch, pid, order
        self.clock = 0
        self.shared: dict[str, Shared] = {}
        self.partitions: list[Partition] = []
        self.weights: list[float] = []
        self.current: Partition | None = None
        self.error: BaseException | None = None

    def run(self, arguments: dict[str, Any]) -> None:
        names = self.names(self.launch.kernel.fn.__globals__)
        names[self.launch.kernel.fn.__name__](**arguments)

    def names(self, module: dict[str, Any]) -> dict[str, Any]:
        """The globals of a kernel's module with Gluon's names and its own functions on what is here."""
        names: dict[str, Any] = {}
        for value in module.values():
            # What a function of another module uses there.
            names |= getattr(getattr(value, "fn", None), "__globals__", {})
        names |= module
        for name, value in list(names.items()):
            function = getattr(value, "fn", None)
            if isinstance(function, FunctionType):
                names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
        gl = SimpleNamespace(**LANGUAGE)
        gl.program_id = lambda axis: Tensor(torch.tensor(self.pid, dtype=torch.int32))
        gl.num_programs = lambda axis: Tensor(torch.tensor(self.launch.grid[0], dtype=torch.int32))
        gl.allocate_shared_memory, gl.store, gl.warp_specialize = self.allocate, self.store, self.specialize
        gl.atomic_add, gl.load, gl.inline_asm_elementwise = self.atomic_add, self.load, self.assembly
        names |= {
            "range": self.range,
            "gl": gl,
            "mbarrier": SimpleNamespace(MBarrierLayout=Layout, init=self.init, wait=self.wait, arrive=self.arrive),
            "async_copy": SimpleNamespace(async_copy_global_to_shared=self.copy, mbarrier_arrive=self.copies_arrive),
            "fence_async_shared": self.fence,
            "barrier": self.barrier,
            "warpgroup_mma": self.product,
            "warpgroup_mma_wait": self.product_wait,
        }
        return names

    @staticmethod
    def range(start: Any, stop: Any, step: Any) -> Iterator[Tensor]:
        """A loop of the device: its variable is a tensor."""
        return (Tensor(torch.tensor(i, dtype=torch.int32)) for i in range(*map(operator.index, (start, stop, step))))

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(Memory(self, shape), torch.full(shape, poison(dtype), dtype=dtype))

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        pointer.write(value, mask, 1 + 64 * self.pid + self.own.number)
        self.own.unordered |= pointer.buffer.name in PARTS

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Tensor:
        if pointer.buffer.name in PARTS and cache_modifier != ".cg":
            raise Fault(f"{pointer.buffer.name}: written by other multiprocessors, and read through the first cache")
        return load(pointer, mask, other)

    def barrier(self) -> None:
        self.own.unordered = False
        self.switch()

    def atomic_add(self, pointer: Pointer, value: Any, sem: str, scope: str) -> Tensor:
        if value > 0 and (self.own.unordered or (sem, scope) != ("acq_rel", "gpu")):
            raise Fault(f"{pointer.buffer.name}: counted before what it counts can be seen by others")
        before = atomic_add(pointer, value)
        self.switch()
        return before

    @staticmethod
    def assembly(text: str, constraints: str, arguments: list[Any], **_: Any) -> Tensor | None:
        """Launches run one after the other here, so whether the next one may start early changes nothing."""
        if not text.startswith("griddepcontrol.launch_dependents;"):
            raise NotImplementedError(text)
        return None

    def init(self, barrier: Shared, count: int) -> None:
        assert barrier.place is not None
        barrier.memory.barriers[barrier.place] = Barrier(barrier.memory, barrier.place, count)

    def wait(self, barrier: Shared, phase: Any) -> None:
        self.own.waits = (barrier.barrier(), operator.index(phase))
        self.switch()
        self.own.waits = None

    def arrive(self, barrier: Shared, *, count: int = 1) -> None:
        barrier.barrier().arrive(count)
        self.switch()

    def copy(self, place: Shared, pointer: Pointer, mask: Any = None) -> None:
        at, live = pointer.lanes(mask)
        chunks = at[live].reshape(-1, 16 // place.dtype.itemsize)
        if chunks.numel() and (bool((chunks.diff() != 1).any()) or bool((chunks[:, 0] % chunks.shape[1] != 0).any())):
            raise Fault(f"{pointer.buffer.name}: a copy that is not of 16 aligned bytes")
        self.own.issued.append((place, pointer.read(mask, 0.0)))
        place.write(poison(place.dtype))
        self.switch()

    def copies_arrive(self, barrier: Shared, increment_count: bool = True) -> None:
        if increment_count:
            raise NotImplementedError("arrivals that count themselves")
        self.own.flights.append((self.own.issued, barrier.barrier()))
        self.own.issued = []
        self.switch()

    def fence(self) -> None:
        self.own.fenced = self.clock

    def product(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Tensor | Product:
        for one in (a, b):
            if isinstance(one, Shared) and one.place is not None and not self.own.fences(one):
                raise Fault(f"{one.memory.name}[{one.place}]: no fence between a write and a product that reads it")
        product = Product(a, b, acc if use_acc else 0.0)
        self.own.products.append(product)
        if is_async:
            self.switch()
            return product
        return self.product_wait(0, (product,))

    def product_wait(self, num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
        self.switch()
        while len(self.own.products) > num_outstanding:
            self.own.products.popleft().finish()
        results = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
        if any(result is None for result in results):
            raise Fault("a result is waited for with its product still in flight")
        return results[0] if len(results) == 1 else results

    @property
    def own(self) -> Partition:
        """The partition that runs."""
        assert self.current is not None, "a kernel does this in a partition"
        return self.current

    def specialize(self, functions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        sizes = [self.launch.options["num_warps"], *warps]
        self.partitions = [Partition(n, f, w) for n, ((f, _), w) in enumerate(zip(functions, sizes, strict=True))]
        for function, arguments in functions:
            for name, value in zip(function.__code__.co_varnames, arguments, strict=False):
                if isinstance(value, Shared) and value not in self.shared.values():
                    self.shared[name], value.memory.name = value, name
        # Partitions, and behind them the copies of each, of very different speeds.
        self.weights = [10 ** self.order.uniform(-1.5, 0.0) for _ in range(2 * len(functions))]
        threads = [
            threading.Thread(target=self.body, args=(partition, *call), daemon=True)
            for partition, call in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.switch()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def body(self, partition: Partition, function: Any, arguments: tuple[Any, ...]) -> None:
        partition.resume.acquire()
        try:
            if self.error is None:
                function(*arguments)
                if partition.products or partition.issued:
                    raise Fault(f"{partition.name} ends with products in flight, or copies of which no barrier hears")
                partition.done = True
                self.switch()
        except _Stop:
            pass
        except BaseException as error:
            self.error = error
            for other in self.partitions:
                other.resume.release()

    def switch(self) -> None:
        """Let others run; called wherever it matters who comes first. A partition that waits comes back when it need not."""
        before = self.current
        number = len(self.partitions)
        while any(not p.done or p.flights for p in self.partitions):
            able = [not p.done and not p.blocked for p in self.partitions] + [bool(p.flights) for p in self.partitions]
            if not any(able):
                waits = [f"{p.name} for parity {p.waits[1]} of {p.waits[0]}" for p in self.partitions if p.waits and not p.done]
                raise Deadlock("; ".join(waits))
            chosen = self.order.choices(range(2 * number), [w * a for w, a in zip(self.weights, able, strict=True)])[0]
            if chosen >= number:
                self.partitions[chosen - number].land()
                continue
            self.current = self.partitions[chosen]
            if self.current is not before:
                self.current.resume.release()
                if before is not None and not before.done:
                    before.resume.acquire()
                    if self.error is not None:
                        raise _Stop
            return
