"""Every tree that was measured, by family of shapes: what a server over FlashAttention runs, beside the best of SGLang's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.aims import Row
from benchmarks.points import Point
from sglang_specverify.backends.plans import SHORT_WINDOW
from sglang_specverify.kernels import specialized
from sglang_specverify.kernels.arguments import Problem
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.plan import MAX_CTAS_PER_SM
from sglang_specverify.kernels.planning import Layers, division
from sglang_specverify.routing.tree import SPECIALIZED_ROWS, TreeFacts, refuse_tile

#: What is enough: `benchmarks.aims` has it of every tree.
LEAST = 0.97
TILE = "fa3+tree_suffix"
#: Of an H200.
_MULTIPROCESSORS = 132
_TYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def served(point: Point) -> str:
    """The arm of a server on an H200 over fa3 whose context just holds the point: one kernel, divided or not, or the prefix
    pass and the tile. As the rules are now, whatever they were when the point was measured."""
    group = point.q_heads // point.kv_heads
    takes = (
        point.cache == "bf16" and point.head_dim in specialized.HEAD_DIMS and point.width * group > SPECIALIZED_ROWS
    ) and point.window < 0
    facts = TreeFacts("sm_90", point.width, group, point.length + point.width, deterministic=False, specialized=takes)
    if point.window < 0 and refuse_tile(facts) is None:
        return TILE
    kernel = "specialized" if takes else "fused"
    return kernel + ("_split" if _is_divided(point, kernel) else "")


def _is_divided(point: Point, kernel: str) -> bool:
    """Whether the plan of a server's step divides prefixes: it knows how many requests there are, and no length."""
    if 0 <= point.window <= SHORT_WINDOW:
        return False
    dtype = torch.bfloat16
    problem = Problem(
        kind="qlen_only", batch=point.batch, rows=point.batch * point.width, queries=point.width, ragged=False,
        q_heads=point.q_heads, kv_heads=point.kv_heads, group=point.q_heads // point.kv_heads, head_dim=point.head_dim,
        v_head_dim=point.head_dim, page_size=point.page_size, window=point.window, softcap=0.0, sm_scale=1.0, out_dtype=dtype,
        device=torch.device("meta"),
    )  # fmt: skip
    layers = Layers(
        num_draft_tokens=point.width, q_heads=point.q_heads, kv_heads=point.kv_heads, head_dim=point.head_dim, v_head_dim=None,
        dtype=dtype, cache_dtype=_TYPES[point.cache], page_size=point.page_size, window=point.window, branches=False,
        q_offsets=None, num_rows=None, mask=None, mask_layout="qlen_only", mask_offsets=None, deterministic=False, divide=None,
        programs=None, config=None, kernel=kernel, out=None, longest=point.length + point.width,
    )  # fmt: skip

    def at_once(config: LaunchConfig) -> int:
        return _MULTIPROCESSORS * min(config.ctas_per_sm, MAX_CTAS_PER_SM)

    return division(problem, layers, _TYPES[point.cache], "sm_90", at_once)[2]


def compared(results: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(family, line, ratio) of each tree that was timed cold beside one of SGLang's kernels; `line` tells of the point."""
    for data in results["points"]:
        point = Point(**data["point"])
        if point.kind != "tree":
            continue
        row, arm = Row(data, "cold", "best"), served(point)
        ours, stock, fastest = row.us(arm), row.stock(), row.ours
        if ours is None or stock is None or fastest is None:
            continue
        times = f"{arm} {ours:.1f} µs, {row.stock_name()} {stock:.1f}; {row.ours_name} {fastest:.1f}"
        yield point.family, f"{data['name']}: {stock / ours:.2f} ({times})", stock / ours


def table(results: Mapping[str, Any]) -> list[str]:
    """Points of a family, how many are not behind, the median and the least ratio; below them those that are behind."""
    families: dict[str, list[float]] = {}
    behind = []
    for family, line, ratio in compared(results):
        families.setdefault(family, []).append(ratio)
        behind += [(ratio, line)] if ratio < LEAST else []
    lines = [
        f"| heads, KV heads, head dim | trees | at {LEAST} of the best or more | median of best / ours | least |",
        "|---|---|---|---|---|",
    ]
    for family, ratios in families.items():
        good = sum(ratio >= LEAST for ratio in ratios)
        lines.append(f"| {family} | {len(ratios)} | {good} | {statistics.median(ratios):.2f} | {min(ratios):.2f} |")
    return [*lines, "", *(f"- {line}" for _, line in sorted(behind))]
