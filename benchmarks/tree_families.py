"""Every tree that was measured, by family of shapes: what a server over FlashAttention runs, beside the best of SGLang's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.aims import Row
from benchmarks.points import Point
from sglang_specverify.kernels import specialized
from sglang_specverify.routing.tree import SPECIALIZED_ROWS, TreeFacts, refuse_tile

#: What is enough: `benchmarks.aims` has it of every tree.
LEAST = 0.97
TILE = "fa3+tree_suffix"


def routed(point: Point, selected: str) -> str:
    """The arm of a server on SM90 over fa3 whose context just holds the point: `selected`, or the prefix pass and the tile."""
    group = point.q_heads // point.kv_heads
    if point.window >= 0:
        return selected
    takes = point.cache == "bf16" and point.head_dim in specialized.HEAD_DIMS and point.width * group > SPECIALIZED_ROWS
    facts = TreeFacts("sm_90", point.width, group, point.length + point.width, deterministic=False, specialized=takes)
    return TILE if refuse_tile(facts) is None else selected


def compared(results: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """(family, line, ratio, noise) of each tree that was timed cold beside one of SGLang's kernels; `line` tells of the point."""
    for data in results["points"]:
        point = Point(**data["point"])
        if point.kind != "tree" or not data.get("selected"):
            continue
        row = Row(data, "cold", "best")
        arm = routed(point, data["selected"])
        ours, stock, fastest = row.us(arm), row.stock(), row.ours
        if ours is None or stock is None or fastest is None:
            continue
        times = f"{arm} {ours:.1f} µs, {row.stock_name()} {stock:.1f}; {row.ours_name} {fastest:.1f}"
        line = f"{data['name']}: {stock / ours:.2f} ({times})"
        yield point.family, line, stock / ours, row.noise() / ours


def table(results: Mapping[str, Any]) -> list[str]:
    """Points of a family, how many are not behind, the median and the least ratio; below them those that are behind."""
    families: dict[str, list[float]] = {}
    behind = []
    for family, line, ratio, noise in compared(results):
        enough = ratio >= LEAST or 1 - ratio <= noise
        families.setdefault(family, []).append(ratio)
        behind += [] if enough else [(ratio, family, line)]
    lines = [
        f"| heads, KV heads, head dim | trees | at {LEAST} of the best or more | median of best / ours | least |",
        "|---|---|---|---|---|",
    ]
    for family, ratios in families.items():
        good = len(ratios) - sum(each == family for _, each, _ in behind)
        lines.append(f"| {family} | {len(ratios)} | {good} | {statistics.median(ratios):.2f} | {min(ratios):.2f} |")
    return [*lines, "", *(f"- {line}" for _, _, line in sorted(behind))]
