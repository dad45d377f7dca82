"""What `benchmarks.verify_attention` measures: points, their order, and the least work each of them needs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

BATCHES = (1, 4, 8, 32, 64)
LENGTHS = (128, 384, 2048, 8192, 32768, 131072)
WIDTHS = (4, 8, 16, 32, 64, 128)

#: Bytes of one element in a cache of this type.
CACHE_BYTES = {"bf16": 2, "e4m3": 1}

#: Levels of a tree, the root among them.
TREE_DEPTH = 9

#: A draft decode is measured at this step of the draft, counted from 0: each branch has one token more than that.
DRAFT_STEP = 4


@dataclass(frozen=True)
class Point:
    """One call.

    Attributes:
        kind: "tree" and "chain" are target verify, "draft" is one step of a draft decode.
        width: draft tokens of a request, W; for a draft its branches, topk.
        length: prefix tokens of a request, L; where `mixed`, the most.
        cache: "bf16" or "e4m3".
        window: as in `verify_attention`; -1 for none.
        mixed: lengths log-uniform from 128 to `length`.
    """

    kind: Literal["tree", "chain", "draft"]
    batch: int
    width: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bf16"
    page_size: int = 1
    window: int = -1
    sinks: bool = False
    mixed: bool = False

    @property
    def family(self) -> str:
        """Everything but batch, width and length, for people."""
        marks = [f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"]
        marks += [self.cache] if self.cache != "bf16" else []
        marks += [f"page {self.page_size}"] if self.page_size > 1 else []
        marks += [f"window {self.window}"] if self.window >= 0 else []
        marks += ["sinks"] if self.sinks else []
        marks += ["mixed lengths"] if self.mixed else []
        return ", ".join(marks)

    @property
    def name(self) -> str:
        """Tells this point from every other; results are found by it."""
        return f"{self.kind} bs {self.batch} W {self.width} L {self.length} ({self.family})"

    def lengths(self) -> list[int]:
        """L of each request."""
        if not self.mixed:
            return [self.length] * self.batch
        draw = random.Random(self.name)
        low, high = math.log(min(128, self.length)), math.log(self.length)
        return [round(math.exp(draw.uniform(low, high))) for _ in range(self.batch)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """The least that any implementation moves and computes.

    Attributes:
        bytes: q, output, visible K and V, and a tree's mask, each once.
        flops: two for each multiply-add of both products, over visible pairs of query row and key only.
    """

    bytes: int
    flops: int

    def floor_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The longer of both at the ceilings, in microseconds."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s) * 1e6

    def bound(self, bytes_per_s: float, flops_per_s: float) -> Literal["bytes", "FLOPs"]:
        """Which of both is the longer."""
        return "bytes" if self.bytes / bytes_per_s >= self.flops / flops_per_s else "FLOPs"


def work(point: Point, depths: Sequence[Sequence[int]], visible: Sequence[Sequence[int]]) -> Work:
    """The work of one call.

    Args:
        depths: of each request's rows, their position minus L.
        visible: of each request's rows, how many draft keys they see.
    """
    pairs = keys = 0
    for length, depth, drafts in zip(point.lengths(), depths, visible, strict=True):
        seen = [length if point.window < 0 else max(0, min(length, point.window - d)) for d in depth]
        pairs += sum(seen) + sum(drafts)
        keys += max(seen) + (point.width * (DRAFT_STEP + 1) if point.kind == "draft" else point.width)
    rows = point.batch * point.width
    io = 2 * rows * point.q_heads * point.head_dim * 2
    kv = 2 * keys * point.kv_heads * point.head_dim * CACHE_BYTES[point.cache]
    mask = rows * point.width if point.kind == "tree" else 0
    return Work(io + kv + mask, 4 * point.head_dim * point.q_heads * pairs)


#: The throwaway experiment's table: what the targets for trees are stated on.
TREE_TABLE = (
    (32, 128, 128), (32, 128, 2048), (32, 128, 384), (8, 64, 384), (8, 64, 2048), (8, 128, 128), (8, 64, 128),
    (1, 64, 384), (1, 64, 8192), (8, 64, 16384), (32, 16, 2048), (32, 64, 128), (32, 64, 2048), (8, 128, 2048),
)  # fmt: skip
CHAIN_TABLE = ((1, 8192), (1, 32768), (4, 131072), (1, 131072), (16, 8192), (16, 32768))

FAMILIES: dict[str, dict[str, Any]] = {
    "sinks and window": {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True, "window": 128},
    "sinks": {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True},
    "head dim 256": {"q_heads": 16, "kv_heads": 2, "head_dim": 256},
    "one KV head": {"q_heads": 8, "kv_heads": 1},
    "fp8 cache": {"cache": "e4m3"},
    "page 64": {"page_size": 64},
    "mixed lengths": {"mixed": True},
}

Selection = Literal["headline", "few", "grid", "families", "chain", "draft"]


def headline() -> Iterator[Point]:
    chains = [Point("chain", batch, 4, length) for batch, length in CHAIN_TABLE]
    yield from (Point("tree", batch, width, length) for batch, width, length in TREE_TABLE[:4])
    yield from chains[:1]
    yield from (Point("tree", batch, width, length) for batch, width, length in TREE_TABLE[4:])
    yield from chains[1:]


def grid() -> Iterator[Point]:
    """Every tree, those of the targets first and then by what they cost."""
    points = [Point("tree", batch, width, length) for batch in BATCHES for length in LENGTHS for width in WIDTHS]
    yield from sorted(points, key=lambda p: (not aimed_at(p), _cost(p)))


def few() -> Iterator[Point]:
    """Wide trees of few requests, whose prefixes are divided: those of the targets first and then by what they cost."""
    yield from (point for point in grid() if point.batch in (1, 4) and point.width in (32, 64, 128) and point.length <= 32768)


def families() -> Iterator[Point]:
    """A quarter of the grid for each family, a different quarter each time; one of every family before the next."""
    cells = [(batch, width, length) for length in LENGTHS for batch in BATCHES for width in WIDTHS]
    chosen = []
    for number, (name, facts) in enumerate(FAMILIES.items()):
        # Coprime steps walk all rows and columns of the grid instead of some of them four times.
        points = [Point("tree", *cells[(7 * i + number) % len(cells)], **facts) for i in range(len(cells) // 4)]
        if name == "mixed lengths":
            points = [replace(p, batch=max(p.batch, 4)) for p in points if p.length > 128]
        chosen.append(sorted(dict.fromkeys(points), key=_cost))
    for rank in range(max(map(len, chosen))):
        yield from (points[rank] for points in chosen if rank < len(points))


def chains() -> Iterator[Point]:
    yield from sorted((Point("chain", b, 4, n) for b in (*BATCHES, 16) for n in LENGTHS), key=_cost)


def drafts() -> Iterator[Point]:
    yield from sorted((Point("draft", b, topk, n) for topk in (8, 16) for b in BATCHES for n in LENGTHS), key=_cost)


SELECTIONS: dict[Selection, Callable[[], Iterator[Point]]] = {
    "headline": headline,
    "grid": grid,
    "few": few,
    "families": families,
    "chain": chains,
    "draft": drafts,
}


def tiny() -> Iterator[Point]:
    """One of each kind, small enough for Triton's interpreter."""
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
    yield Point("tree", 2, 6, 40, **shape)
    yield Point("chain", 2, 4, 40, **shape)
    yield Point("draft", 2, 3, 24, **shape)
    yield Point("tree", 2, 6, 40, **shape, page_size=16)
    yield Point("tree", 2, 6, 40, **shape, window=8, sinks=True)
    yield Point("tree", 2, 6, 40, **shape, cache="e4m3")
    yield Point("tree", 3, 5, 140, **shape, mixed=True)


def aimed_at(point: Point) -> bool:
    """Whether the factor of three over stock is demanded here."""
    return point.kind == "tree" and point.width >= 64 and point.batch >= 8 and point.length <= 2048


def _cost(point: Point) -> int:
    return point.batch * point.width * point.length * point.q_heads * point.head_dim
