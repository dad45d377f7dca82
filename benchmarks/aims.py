"""What the kernels are to reach on an H200, as checks of a result file; a ratio compares two arms of one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.measure import AGAIN
from benchmarks.points import CACHE_BYTES, Point, aimed_at
from sglang_specverify.kernels.variants import VARIANTS

State = Literal["warm", "cold"]
#: Which of this project's variants a check looks at: the one selected, or the fastest.
Which = Literal["selected", "best"]

#: What a long decode reads at most, measured with FA3 on an H200.
READ_BYTES_PER_US = 4.3e6
STOCK = ("fa3", "fa4", "triton", "flashinfer")


@dataclass(frozen=True)
class Row:
    """One measured point in one state of the cache, seen through one of the project's variants."""

    data: dict[str, Any]
    state: State
    which: Which

    @property
    def point(self) -> Point:
        return Point(**self.data["point"])

    def us(self, arm: str) -> float | None:
        """Microseconds of an arm, if it was timed."""
        timed = self.data.get("arms", {}).get(arm, {}).get(self.state)
        return None if timed is None else float(timed["us"])

    @property
    def ours_name(self) -> str | None:
        """The arm looked at, if it was timed."""
        if self.which == "selected":
            name = self.data.get("selected")
            return name if name is not None and self.us(name) is not None else None
        arms = self.data.get("arms", {})
        return self._fastest(name for name, arm in arms.items() if arm["group"] == "ours")

    @property
    def ours(self) -> float | None:
        return None if self.ours_name is None else self.us(self.ours_name)

    def stock_name(self, *names: str) -> str | None:
        """The fastest of SGLang's arms that were timed."""
        return self._fastest(iter(names or STOCK))

    def stock(self, *names: str) -> float | None:
        name = self.stock_name(*names)
        return None if name is None else self.us(name)

    def own_kernel(self) -> float | None:
        """The fused kernel, whatever would be selected beside FlashAttention."""
        name = self._fastest(iter(VARIANTS))
        return None if name is None else self.us(name)

    def ratio(self, over: float | None, under: float | None) -> float | None:
        return None if over is None or under is None else over / under

    def noise(self) -> float:
        """Microseconds by which two runs of the same arm differ: its two captures, or the spread of one where one is all."""
        name = self.ours_name
        if name is None:
            return 0.0
        us, again = self.us(name), self.us(name + AGAIN)
        if us is not None and again is not None:
            return abs(again - us)
        return float(self.data["arms"][name][self.state]["spread"])

    def _fastest(self, names: Iterator[str]) -> str | None:
        timed = {name: us for name in names if (us := self.us(name)) is not None}
        return min(timed, key=lambda name: timed[name]) if timed else None


@dataclass(frozen=True)
class Aim:
    """One demand.

    Attributes:
        what: for people.
        applies: to which points.
        value: what is compared with `limit`; None where an arm it needs was not timed.
        at_least: the value must reach the limit; else it must stay within it.
    """

    what: str
    applies: Callable[[Point], bool]
    value: Callable[[Row], float | None]
    limit: float
    at_least: bool

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _tokens(point: Point) -> int:
    return point.batch * point.length


def _is(kind: str, batch: int, width: int, length: int) -> Callable[[Point], bool]:
    wanted = Point(kind, batch, width, length)  # type: ignore[arg-type]
    return lambda point: point == wanted


def _gather(row: Row) -> float | None:
    name = row.stock_name("fa3+upstream_gather") or row.stock_name("fa3+gather_suffix")
    return None if name is None else row.ratio(row.us(name), row.ours)


def _never_behind(row: Row) -> float | None:
    ratio = row.ratio(row.stock(), row.ours)
    if ratio is None or ratio >= 0.97:
        return ratio
    inside = (row.ours or math.inf) - (row.stock() or 0.0) <= row.noise()
    return 0.97 if inside else ratio


def _over_prefix_bytes(row: Row) -> float | None:
    point = row.point
    size = sum(point.lengths()) * 2 * point.kv_heads * point.head_dim * CACHE_BYTES[point.cache]
    return row.ratio(row.ours, size / READ_BYTES_PER_US)


AIMS = (
    Aim("trees, W >= 64, bs >= 8, L <= 2048: times the best of stock fa3 and triton",
        aimed_at, lambda row: row.ratio(row.stock("fa3", "triton"), row.ours), 3.0, True),
    Aim("the same, L <= 384: times the gather variant",
        lambda p: aimed_at(p) and p.length <= 384, _gather, 1.8, True),
    Aim("the same, L = 2048: times the gather variant",
        lambda p: aimed_at(p) and p.length == 2048, _gather, 1.5, True),
    Aim("tree bs 32, W 128, L 128: microseconds", _is("tree", 32, 128, 128), lambda row: row.ours, 60.0, False),
    Aim("tree bs 32, W 128, L 2048: over FA3's prefix pass alone",
        _is("tree", 32, 128, 2048), lambda row: row.ratio(row.ours, row.us("fa3_prefix")), 1.15, False),
    Aim("every tree: best of stock fa3, fa4, triton, flashinfer over ours (0.97: or inside two runs' difference)",
        lambda p: p.kind == "tree", _never_behind, 0.97, True),
    Aim("chain, own kernel: times stock triton",
        lambda p: p.kind == "chain", lambda row: row.ratio(row.us("triton"), row.own_kernel()), 10.0, True),
    Aim("chain, own kernel, bs * L <= 32 k: times upstream's split-KV",
        lambda p: p.kind == "chain" and _tokens(p) <= 32768,
        lambda row: row.ratio(row.us("upstream_splitkv"), row.own_kernel()), 3.0, True),
    Aim("chain, own kernel, bs * L > 32 k: over stock fa3",
        lambda p: p.kind == "chain" and _tokens(p) > 32768, lambda row: row.ratio(row.own_kernel(), row.us("fa3")), 1.15, False),
    Aim("chain bs 1, W 4, L 8192, own kernel: microseconds", _is("chain", 1, 4, 8192), Row.own_kernel, 14.0, False),
    Aim("draft decode, bs * L <= 16 k: times stock fa3",
        lambda p: p.kind == "draft" and _tokens(p) <= 16384, lambda row: row.ratio(row.us("fa3"), row.ours), 2.0, True),
    Aim("draft decode, bs * L > 16 k: over its prefix bytes at 4.3 TB/s",
        lambda p: p.kind == "draft" and _tokens(p) > 16384, _over_prefix_bytes, 1.15, False),
    Aim("draft decode: stock triton over ours",
        lambda p: p.kind == "draft", lambda row: row.ratio(row.us("triton"), row.ours), 1.0, True),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """How one demand came out over all points that it applies to and that have its numbers."""

    aim: Aim
    values: dict[str, float]

    @property
    def held(self) -> int:
        return len(self.values) - len(self.missed)

    @property
    def missed(self) -> dict[str, float]:
        """The points where it does not hold."""
        return {name: value for name, value in self.values.items() if not self.aim.holds(value)}

    @property
    def worst(self) -> tuple[str, float] | None:
        """The point furthest on the wrong side."""
        if not self.values:
            return None
        pick = min if self.aim.at_least else max
        return pick(self.values.items(), key=lambda item: item[1])


def verdicts(results: dict[str, Any], state: State, which: Which) -> list[Verdict]:
    """Every demand against a result file; a demand of no measured point has no values."""
    rows = [Row(data, state, which) for data in results["points"]]
    found = []
    for aim in AIMS:
        values = {row.data["name"]: value for row in rows if aim.applies(row.point) and (value := aim.value(row)) is not None}
        found.append(Verdict(aim, values))
    return [*found, *_metadata(results)]


def _metadata(results: dict[str, Any]) -> Iterator[Verdict]:
    ceilings = results["ceilings"] or {}
    short, long = {}, {}
    for row in results["metadata"]:
        us = row["arms"]["ours"].get("warm", {}).get("us")
        if us is None:
            continue
        if row["length"] <= 8192:
            short[f"L {row['length']}"] = us
        elif ceilings:
            long[f"L {row['length']}"] = us / (row["bytes"] / ceilings["copy_tb_per_s"] / 1e6)
    never: Callable[[Any], Any] = lambda _: None  # noqa: E731
    yield Verdict(Aim("a step's metadata at bs 32, W 128, L <= 8192: microseconds", never, never, 5.0, False), short)
    yield Verdict(Aim("a step's metadata beyond that: over its bytes at the copy ceiling", never, never, 1.5, False), long)
