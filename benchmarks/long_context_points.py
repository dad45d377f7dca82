"""What `benchmarks.long_context` measures: chains, within what a pool of K and V holds.

The whole plane of batch and length for one shape, and one factor at a time around it: the full product of all factors would
be 5000 points, most of which say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from benchmarks.inputs import MOST_LAYERS, POOL_SLOTS, ROTATED_BYTES
from benchmarks.points import CACHE_BYTES, CHAIN_TABLE, Point

#: K and V together, as of one layer.
POOL_BYTES = 90 * 10**9

#: What is enough to run the kernels of every shape once.
SMALL_POOL = 1 << 30

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
WIDTH = 4

#: Where the other shapes are measured: the ends of both axes, as far as the largest of these shapes fits.
CORNERS = ((1, 1 << 12), (64, 1 << 12), (1, 1 << 20), (64, 1 << 16))

#: One factor changed. KV heads stay, but for the last: what one of eight devices holds of 64 heads over 8.
VARIATIONS: dict[str, dict[str, Any]] = {
    "W 2": {"width": 2},
    "W 8": {"width": 8},
    "GQA 8": {"q_heads": 64},
    "GQA 16": {"q_heads": 128},
    "D 64": {"head_dim": 64},
    "D 256": {"head_dim": 256},
    "FP8": {"cache": "e4m3"},
    "one KV head": {"q_heads": 8, "kv_heads": 1},
}

State = Literal["warm", "cold"]


def chain(batch: int, length: int, **facts: Any) -> Point:
    return replace(Point("chain", batch, WIDTH, length), **facts)


def slot_bytes(point: Point) -> int:
    """K and V of a token in one layer."""
    return 2 * point.kv_heads * point.head_dim * CACHE_BYTES[point.cache]


def tokens(point: Point) -> int:
    """Tokens that a call reads."""
    return sum(point.lengths()) + point.batch * point.width


def slots_used(point: Point) -> int:
    """Slots of a layer that random ones are drawn from: a quarter more than are read."""
    return tokens(point) * 5 // 4


def fits(point: Point, pool_bytes: int = POOL_BYTES) -> bool:
    return slots_used(point) * slot_bytes(point) <= pool_bytes


def layout(point: Point, pool_bytes: int) -> tuple[int, int]:
    """Layers and slots of each: layers that exceed the L2 cache twice, slots that calls of few tokens scatter over."""
    wanted = min(-(-ROTATED_BYTES // (tokens(point) * slot_bytes(point))), MOST_LAYERS)
    layers = max(1, min(wanted, pool_bytes // (slots_used(point) * slot_bytes(point))))
    return layers, max(slots_used(point), min(POOL_SLOTS, pool_bytes // (layers * slot_bytes(point))))


def table() -> Iterator[Point]:
    """The chains that the targets are stated on."""
    yield from (chain(batch, length) for batch, length in CHAIN_TABLE)


def corners() -> Iterator[Point]:
    yield from (chain(batch, length) for batch, length in CORNERS)


def plane() -> Iterator[Point]:
    """Every batch and length of the pool, in the order of what they read."""
    yield from sorted((chain(batch, length) for batch in BATCHES for length in LENGTHS), key=tokens)


def variations() -> Iterator[Point]:
    """All shapes at one corner before the next, so that time running out takes corners and not shapes."""
    yield from (chain(batch, length, **facts) for batch, length in CORNERS for facts in VARIATIONS.values())


SELECTIONS: dict[str, Callable[[], Iterator[Point]]] = {"table": table, "plane": plane, "variations": variations}


def states(point: Point) -> tuple[State, ...]:
    """Warm caches matter to a person who reads the table or a corner; a model finds them cold."""
    both = (point.batch, point.length) in (*CHAIN_TABLE, *CORNERS)
    return ("warm", "cold") if both else ("cold",)


def has_step(point: Point) -> bool:
    """Whether a step's metadata is timed beside its layers: it depends on lengths, and hardly on anything else."""
    return point == chain(point.batch, point.length) and len(states(point)) > 1


def tiny() -> Iterator[Point]:
    """Each kind of chain, for the CPU. The last is too short for upstream's kernel, whose arm has to say so."""
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": 1, "head_dim": 64}
    yield chain(1, 520, **shape)
    yield chain(1, 200, **shape, cache="e4m3")
    yield chain(1, 200, **shape | {"q_heads": 16, "width": 8})
    yield chain(1, 130, **shape | {"head_dim": 256, "width": 2})
    yield chain(2, 40, **shape)
