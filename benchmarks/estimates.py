"""Estimate configurations that no engine measured, from those that one did and a grid of attention kernels.

Where the same input was measured with the same width, concurrency and another topk, the step is that one's: what drafting with
another topk costs is not known. Else a step is attention in every layer of the target, which is the grid's, and the rest: matrix
products, drafting, launches. The rest comes from measured steps of the same arm, width and concurrency, the median over inputs of
the step less the grid's attention there. Every row says `"estimate": True` and from which of both it comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import end_to_end_plan as plan
from benchmarks import shapes
from benchmarks.engines import OURS
from sglang_specverify.routing.tree import SPECIALIZED_HEAD_DIMS, SPECIALIZED_ROWS, TreeFacts, refuse_tile

#: The variant that the one kernel takes of itself, another one at each point of a grid.
SELECTED = "(selected)"

Curve = list[tuple[int, float]]


def curve(grid: Mapping[str, Any], arm: str, batch: int, width: int, heads: tuple[int, int, int]) -> Curve:
    """(prefix tokens, microseconds of a layer) of one kernel, in ascending order."""
    found = []
    for row in grid["points"]:
        point = row["point"]
        plain = point["cache"] == "bf16" and point["page_size"] == 1 and point["window"] < 0 and not point["sinks"]
        if point["kind"] != "tree" or point["mixed"] or not plain:
            continue
        if (point["batch"], point["width"]) != (batch, width):
            continue
        if (point["q_heads"], point["kv_heads"], point["head_dim"]) != heads:
            continue
        name = row.get("selected") if arm == SELECTED else arm
        timed = row.get("arms", {}).get(name, {}).get("cold")
        if timed is not None:
            found.append((int(point["length"]), float(timed["us"])))
    return sorted(found)


def at(points: Curve, length: float) -> tuple[float, bool] | None:
    """Microseconds at a length, linear between the two nearest, and whether that lies outside of what was measured."""
    if len(points) < 2:
        return None
    after = next((i for i, (known, _) in enumerate(points) if known >= length), len(points) - 1)
    low, high = points[max(after - 1, 0)], points[max(after, 1)]
    slope = (high[1] - low[1]) / (high[0] - low[0])
    # Below the shortest one the fixed part rules; past the longest one the last two go on.
    value = points[0][1] if length < points[0][0] else low[1] + slope * (length - low[0])
    return value, not points[0][0] <= length <= points[-1][0]


def kernel(arm: str, width: int, heads: tuple[int, int, int], context: int) -> str:
    """What an engine of this arm runs: a grid's arm, or `SELECTED`."""
    if arm != OURS:
        return arm
    group = heads[0] // heads[1]
    specialized = heads[2] in SPECIALIZED_HEAD_DIMS and width * group > SPECIALIZED_ROWS
    facts = TreeFacts("sm_90", width, group, context, deterministic=False, specialized=specialized)
    return SELECTED if refuse_tile(facts) else "fa3+tree_suffix"


def estimate(results: Mapping[str, Any], grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each configuration of the goals and stock arm that was not measured and can be estimated."""
    shape = shapes.get(results["settings"]["shape"])
    heads = tuple(int(shape.target[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    assert len(heads) == 3
    context = results["settings"].get("context_length") or int(shape.target["max_position_embeddings"])
    valid = [row for row in results["cells"] if plan.counts(row) and not row["under_pressure"] and row["page_size"] == 1]
    measured = {(row["scenario"], row["stock"], row["input"], row["concurrency"]) for row in valid}

    def attention(arm: str, width: int, cell: tuple[int, int, int]) -> tuple[float, bool] | None:
        length, concurrency, output = cell
        name = kernel(arm, width, heads, context)
        found = at(curve(grid, name, concurrency, width, heads), length + output / 2)
        return None if found is None else (shape.layers * found[0] / 1e3, found[1])

    def alike(stock: str, width: int, concurrency: int) -> list[dict[str, Any]]:
        found = [row for row in valid if row["stock"] == stock and row["concurrency"] == concurrency and row["speculation"]]
        return [row for row in found if row["speculation"]["width"] == width and row["speculation"]["topk"] > 1]

    def step(stock: str, arm: str, width: int, cell: plan.Cell) -> tuple[float, str] | None:
        near = alike(stock, width, cell.concurrency)
        same = [row["arms"][arm]["ms_per_step"] for row in near if row["input"] == cell.input]
        if same:
            return statistics.median(same), "another topk"
        here = attention(arm, width, (cell.input, cell.concurrency, cell.output))
        there = [(row, attention(arm, width, (row["input"], row["concurrency"], row["output"]))) for row in near]
        rest = [row["arms"][arm]["ms_per_step"] - part[0] for row, part in there if part is not None]
        if here is None or not rest:
            return None
        return statistics.median(rest) + here[0], "kernel times, beyond their grid" if here[1] else "kernel times"

    rows = []
    for chosen, cell in plan.grid():
        for stock in dict.fromkeys(row["stock"] for row in valid):
            if (chosen.name, stock, cell.input, cell.concurrency) not in measured:
                ours, theirs = (step(stock, arm, chosen.width, cell) for arm in (OURS, stock))
                if ours is not None and theirs is not None:
                    source = max(ours[1], theirs[1], key=len)
                    rows.append(_row(chosen.name, stock, cell, {OURS: ours[0], stock: theirs[0]}, source))
    return rows


def _row(name: str, stock: str, cell: plan.Cell, steps: Mapping[str, float], source: str) -> dict[str, Any]:
    return {
        "estimate": True,
        "scenario": name,
        "stock": stock,
        "input": cell.input,
        "concurrency": cell.concurrency,
        "estimated_ms_per_step": {arm: round(ms, 3) for arm, ms in steps.items()},
        "estimated_ratio": round(steps[stock] / steps[OURS], 4),
        "from": source,
    }


def show(rows: Sequence[Mapping[str, Any]], console: Console, *, markdown: bool = False) -> None:
    """Print estimates, in a table of their own."""
    title = "ESTIMATES, not measured"
    columns = ("scenario", "input", "concurrency", "against", "est. ratio", "est. ms a step", "est. stock ms", "from")
    table = Table(*columns, title=title, box=box.MARKDOWN if markdown else box.SIMPLE)
    for row in rows:
        steps = row["estimated_ms_per_step"]
        table.add_row(
            row["scenario"], str(row["input"]), str(row["concurrency"]), row["stock"], f"~{row['estimated_ratio']:.2f}",
            f"~{steps[OURS]:.1f}", f"~{steps[row['stock']]:.1f}", row["from"],
        )  # fmt: skip
    console.print(table)
    for stock in dict.fromkeys(row["stock"] for row in rows):
        ratios = [row["estimated_ratio"] for row in rows if row["stock"] == stock]
        text = (
            f"estimates against {stock}: median ~{statistics.median(ratios):.2f}, from ~{min(ratios):.2f} to ~{max(ratios):.2f}"
        )
        console.print(f"{text}, over {len(ratios)} configurations that were not measured", markup=False)
