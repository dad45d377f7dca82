"""What `benchmarks.sparse_mla` measures: one layer of DeepSeek-V4.1's sparse attention, and what that needs at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.points import Work

DIM = 512
#: Bytes of a row of the window, and of a selected one, as this project reads them; of either as FlashMLA's SM90 path does.
SWA_BYTES, MAIN_BYTES, V4_BYTES = 528, 288, 584
BATCHES, TOPKS = (1, 8, 32, 64, 128), (512, 128, 0)
HEADS, QUERIES = (64, 16, 128), (1, 4, 6)
WINDOW = 128


@dataclass(frozen=True)
class Point:
    """One call.

    Attributes:
        batch: requests.
        topk: selected rows of each query row, K.
        heads: query heads, H.
        queries: query rows of a request, Sq: 1 for decode; more are the rows of a chain that is verified, each with a window that
            ends one position later.
        window: rows of each query row's window.
        shared: all rows of a request select the same rows; otherwise each has rows of its own.
    """

    batch: int
    topk: int
    heads: int = 64
    queries: int = 1
    window: int = WINDOW
    shared: bool = False

    @property
    def name(self) -> str:
        """Tells this point from every other; results are found by it."""
        return f"B {self.batch} K {self.topk} H {self.heads} Sq {self.queries}" + " one list" * self.shared

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.batch * self.queries

    @property
    def lists(self) -> int:
        """Lists of selected rows of all requests."""
        return self.batch if self.shared else self.rows

    @property
    def keys(self) -> int:
        """Keys of each query row."""
        return self.window + self.topk

    @property
    def window_rows(self) -> int:
        """Rows of the windows of all requests, each once."""
        return self.batch * (self.window + self.queries - 1)

    @property
    def bytes(self) -> int:
        """Of every row of a cache once, in the bytes that this project reads, of q, output and LSE."""
        return self.cache_bytes + self.rows * self.heads * (2 * 2 * DIM + 4)

    @property
    def cache_bytes(self) -> int:
        return self.window_rows * SWA_BYTES + self.lists * self.topk * MAIN_BYTES

    @property
    def flops(self) -> int:
        """Of both products, no row of heads padded."""
        return 4 * DIM * self.heads * self.rows * self.keys

    @property
    def work(self) -> Work:
        return Work(self.bytes, self.flops)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def headline() -> Iterator[Point]:
    """What is aimed at: 64 heads, one query row."""
    for topk in TOPKS:
        for batch in BATCHES:
            yield Point(batch, topk)


def heads() -> Iterator[Point]:
    for count in HEADS[1:]:
        for point in headline():
            yield Point(point.batch, point.topk, count)


def verify() -> Iterator[Point]:
    """Rows of draft tokens: of one device of several, whose 16 heads leave room in a tile, and of one that has all 64.

    First few requests, with one row beside six, which is what sharing a tile is for; then 64 heads; then what is between.
    """
    few = [point for point in headline() if point.batch <= 8]
    every = list(headline())
    for points, queries, count in ((few, (1, 6), 16), (every, (6,), 64), (every, (6, 4), 16), (every, (4,), 64)):
        for rows in queries:
            for point in points:
                yield Point(point.batch, point.topk, count, rows)
                if rows > 1 and point.topk:
                    yield Point(point.batch, point.topk, count, rows, shared=True)


def rest() -> Iterator[Point]:
    yield from _of(QUERIES[1:], (128,))


def _of(queries: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Point]:
    for count in counts:
        for rows in queries:
            for point in headline():
                yield Point(point.batch, point.topk, count, rows)


SELECTIONS: dict[str, Callable[[], Iterator[Point]]] = {"headline": headline, "heads": heads, "verify": verify, "rest": rest}


def tiny() -> Iterator[Point]:
    """Every kind of call, small enough for Triton's interpreter."""
    yield Point(2, 32, 16, 1, 16)
    yield Point(1, 0, 64, 1, 32)
    yield Point(1, 16, 8, 3, 16, shared=True)
    yield Point(1, 16, 8, 3, 16)


#: Rows of the pools: those of the largest call twice over and more.
MAIN_ROWS, SWA_ROWS = 1 << 20, 1 << 18
#: Lists of different rows that a graph goes through at most.
MOST_LAYERS = 256


def layers(point: Point, main_rows: int = MAIN_ROWS, swa_rows: int = SWA_ROWS) -> int:
    """How many calls with rows of their own the pools have; 2 at least.

    Raises:
        ValueError: the pools do not have that many.
    """
    found = min(MOST_LAYERS, swa_rows // point.window_rows)
    if point.topk:
        found = min(found, main_rows // (point.lists * point.topk))
    if found < 2:
        raise ValueError(f"pools of {main_rows} and {swa_rows} rows are too small for {point.name}")
    return found
