"""Faults in the kernel with specialised warps that its tests on a CPU must find, and what they find them with.

Each fault is put into what the kernel is given, or into what one of its instructions does; the kernel is as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError

from . import gluon_cpu
from .gluon_cpu import Deadlock, Program
from .gluon_memory import Barrier, Memory, Shared
from .gluon_tensors import Buffer, Fault, Pointer, Tensor, arange, load, maximum, where
from .specialized_calls import BASE, build, check, launch_of

pytestmark = pytest.mark.usefixtures("emulated")

FULL, EMPTY = ["q_full", "k_full", "v_full"], ["q_empty", "k_empty", "v_empty"]

#: What a fault may show as: the emulator's word, or numbers outside their bounds.
FOUND = (Fault, AssertionError)


def several_items(**changes: Any) -> dict[str, Any]:
    """A call of which every program has three items or more, of several tiles each, so that every ring goes round."""
    return build(BASE.but(prefix_lens=(200, 130, 64), kv_heads=2, widths=20, **changes), "cpu")


def short_items() -> dict[str, Any]:
    """A call of one tile an item, so that the rings of keys and values let the producer run items ahead."""
    return build(BASE.but(prefix_lens=(3, 0, 50, 7, 1, 20), q_heads=2), "cpu")


def run(program: type[Program], seed: int = 0, *, short: bool = False) -> None:
    if short:
        check(short_items(), config=(64, 4), seed=seed, program=program)
    else:
        check(several_items(), config=(64, 2), seed=seed, program=program)


@pytest.mark.parametrize("short", [False, True])
def test_the_calls_themselves_pass(short: bool) -> None:
    for seed in range(3):
        run(Program, seed, short=short)


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("name", [*FULL, *EMPTY, "turns"])
def test_a_barrier_that_counts_wrongly(name: str, by: int) -> None:
    class Miscounted(Program):
        def specialize(self, *arguments: Any) -> None:
            for function, values in arguments[0]:
                for known, value in zip(function.__code__.co_varnames, values, strict=False):
                    if known == name:
                        for barrier in value.memory.barriers.values():
                            barrier.count += by
                            barrier.missing += by
                # The first is a consumer, which knows every barrier.
                break
            super().specialize(*arguments)

    with pytest.raises(Deadlock if by > 0 else FOUND, match=name if by > 0 else None):
        run(Miscounted)


# Without q_full: whoever brings the keys brings Q before them, so that the wait for the first keys is one for Q too.
@pytest.mark.parametrize("name", ["k_full", "v_full", *EMPTY])
def test_a_wait_that_is_missing(name: str) -> None:
    class Hasty(Program):
        def wait(self, barrier: Shared, phase: Any) -> None:
            if barrier.memory.name == name:
                self.switch()
            else:
                super().wait(barrier, phase)

    for seed in range(3):
        with pytest.raises(FOUND):
            run(Hasty, seed, short=name == "q_empty")


@pytest.mark.parametrize("name", [*EMPTY, "turns"])
def test_an_arrival_that_is_missing(name: str) -> None:
    class Silent(Program):
        def arrive(self, barrier: Shared, *, count: int = 1) -> None:
            if barrier.memory.name != name:
                super().arrive(barrier, count=count)

    with pytest.raises(Deadlock, match=f"parity . of {name}"):
        run(Silent)


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_place_that_is_released_before_its_product_has_read_it(name: str) -> None:
    class Early(Program):
        def product(self, a: Any, b: Shared, acc: Any, **options: Any) -> Any:
            result = super().product(a, b, acc, **options)
            if options.get("is_async") and b.memory.name == f"{name}_ring":
                super().arrive(self.shared[f"{name}_empty"].index(b.place))
                self.early.add((self.own.name, b.place))
            return result

        def arrive(self, barrier: Shared, *, count: int = 1) -> None:
            key = (self.own.name, barrier.place)
            if barrier.memory.name == f"{name}_empty" and key in self.early:
                self.early.remove(key)
            else:
                super().arrive(barrier, count=count)

        def specialize(self, *arguments: Any) -> None:
            self.early: set[Any] = set()
            super().specialize(*arguments)

    def shown(seed: int) -> bool:
        try:
            run(Early, seed)
        except Fault as fault:
            assert f"{name}_ring" in str(fault) and "changed under a product in flight" in str(fault)
            return True
        return False

    assert any([shown(seed) for seed in range(6)])


def test_a_fence_that_is_missing() -> None:
    class Unfenced(Program):
        def fence(self) -> None:
            pass

    with pytest.raises(Fault, match="no fence between a write and a product"):
        run(Unfenced)


def test_a_product_that_is_not_waited_for() -> None:
    class Impatient(Program):
        def product_wait(self, num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
            return super().product_wait(num_outstanding + 1, deps)

    with pytest.raises(Fault, match="still in flight"):
        run(Impatient)


def test_one_place_in_the_rings_is_too_few() -> None:
    """The wait for a tile's values stands before the release of the tile before: it would last for ever."""
    with pytest.raises(ArgumentError, match=r"config: got .*num_stages=1.*num_stages 2 or more"):
        check(several_items(), config=(64, 1))


ALTERED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "masks shifted by a key": lambda a: {"tree_bits": a["tree_bits"] >> 1},
    "masks shifted by a word": lambda a: {"tree_bits": a["tree_bits"].roll(1)},
    "masks of the next row": lambda a: {"tree_bits": a["tree_bits"].roll(-a["tree_words"])},
    "drafts that count as unseen": lambda a: {"tree_seen": torch.zeros_like(a["tree_seen"])},
    "lengths of other requests": lambda a: {"prefix_lens": a["prefix_lens"].roll(1)},
    "a prefix too short by one": lambda a: {"prefix_lens": a["prefix_lens"] - 1},
    "rows of other requests": lambda a: {"row_ids": a["row_ids"].roll(1)},
    "an item too few": lambda a: {"items": a["items"] - 1},
    "another scale": lambda a: {"scale": a["scale"] * 1.01},
}


@pytest.mark.parametrize("name", ALTERED)
def test_arguments_of_another_call(name: str) -> None:
    with pytest.raises(FOUND):
        check(several_items(), alter=ALTERED[name])


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        ("items", 1, "outside the tensor"),
        ("k_slot", 1, "not of 16 aligned bytes"),
        ("v_head", 64, "outside the tensor"),
        ("out_row", -512, "stored by two partitions"),
        ("out_head", 16, "stored by two partitions"),
        ("lse_row", 1, "outside the tensor"),
    ],
)
def test_addresses_of_another_call(name: str, by: int, message: str) -> None:
    with pytest.raises(Fault, match=message):
        check(several_items(), alter=lambda a: {name: a[name] + by})


def test_what_runs_is_the_kernel_itself() -> None:
    from sglang_specverify.kernels import specialized_kernel as module

    a = several_items()
    names = Program(launch_of(a, torch.zeros_like(a["q"]), None), 0, random.Random(0)).names(vars(module))
    for name in ("_produce", "_consume", "_copy", "_weigh", "specialized_kernel"):
        assert names[name].__code__ is getattr(module, name).fn.__code__ and names[name].__globals__ is names


def test_phases_of_a_barrier() -> None:
    barrier = Barrier(Memory(Program.__new__(Program), [1]), 0, 2)
    assert barrier.passes(1) and not barrier.passes(0), "nothing waits for the phase before the first"
    barrier.arrive(1)
    assert not barrier.passes(0)
    barrier.arrive(1)
    assert barrier.passes(0) and not barrier.passes(1)
    with pytest.raises(Fault, match="3 arrivals"):
        barrier.arrive(3)


def test_addresses() -> None:
    base = torch.arange(24.0).view(4, 6)
    pointer = Pointer(Buffer("x", base[1:3, :4]))
    lane = arange(0, 8)
    assert load(pointer + lane, mask=lane < 4, other=-1.0).data.tolist() == [6, 7, 8, 9, -1, -1, -1, -1]
    assert bool(load(pointer + lane, mask=lane < 4).data[4:].isnan().all()), "lanes that are masked hold nothing to rely on"
    for offset in (lane, lane - 1, lane + 100):
        with pytest.raises(Fault, match="x: an address outside"):
            load(pointer + offset)
    (pointer + lane).write(Tensor(torch.zeros(8)), lane < 4, writer=1)
    with pytest.raises(Fault, match="stored by two"):
        (pointer + 3).write(1.0, None, writer=2)
    assert base[1].tolist() == [0, 0, 0, 0, 10, 11]


def test_numbers() -> None:
    """As the hardware has them, and not PyTorch's."""
    i = Tensor(torch.tensor([-7, 7], dtype=torch.int32))
    assert (i // 2).data.tolist() == [-3, 3] and (i % 4).data.tolist() == [-3, 3]
    assert (1 << Tensor(torch.tensor(31, dtype=torch.int32))).data.item() == -(2**31)
    assert (i + Tensor(torch.tensor(2**40))).data.tolist() == [2**40 - 7, 2**40 + 7], "a scalar's type counts"
    assert (Tensor(torch.tensor(2**31 - 1, dtype=torch.int32)) + 1).data.item() == -(2**31)
    assert Tensor(torch.tensor(2**32 + 5)).to(torch.int32).data.item() == 5
    assert maximum(Tensor(torch.tensor([torch.nan, 1.0])), 0.5).data.tolist() == [0.5, 1.0]
    assert where(i < 0, i, 0).data.dtype == torch.int32
    with pytest.raises(Fault, match="shapes"):
        i + Tensor(torch.zeros(2, 2))
    with pytest.raises(Fault, match="as a tensor"):
        i + gluon_cpu.Product.__new__(gluon_cpu.Product)
