"""Print a result file of `benchmarks.verify_attention`: a row for each point, and what was aimed at.

python -m benchmarks.report verify.json
python -m benchmarks.report verify.json --markdown
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.aims import Row, State, Verdict, Which, verdicts

COLUMNS = ("point", "floor", "ours", "variant", "best stock", "ratio", "of floor", "again", "warm")


def line(row: dict[str, Any]) -> str:
    """One measured point in one line: all arms' microseconds, or why there are none."""
    if "why" in row:
        return f"{row['name']}: {row['why']}"
    parts = []
    for name, arm in row["arms"].items():
        timed = [f"{arm[state]['us']:.1f}" for state in get_args(State) if state in arm]
        if timed:
            parts.append(f"{name} {'/'.join(timed)}")
        else:
            parts.append(f"{name} " + (f"[{arm['why']}]" if "why" in arm else f"right ({arm['error']:.1g})"))
    floor = f"floor {row['floor_us']:.1f}" if "floor_us" in row else "not timed"
    return f"{row['name']}: {floor} | {' | '.join(parts)} | selected {row['selected']}"


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; all but the last column with K and V not in the cache."""
    if "why" in row:
        return [row["name"], row["why"], *[""] * (len(COLUMNS) - 2)]
    cold, warm = Row(row, "cold", "best"), Row(row, "warm", "best")
    ours, stock = cold.ours, cold.stock()
    variant = cold.ours_name or ""
    if variant and variant != row["selected"]:
        variant += f" (selected: {row['selected']})"
    return [
        row["name"],
        number(row.get("floor_us")),
        number(ours),
        variant,
        f"{cold.stock_name()} {number(stock)}" if stock else "none",
        number(cold.ratio(stock, ours), 2),
        number(cold.ratio(row.get("floor_us"), ours), 2),
        number(cold.noise(), 2) if ours else "",
        number(warm.ratio(warm.stock(), warm.ours), 2),
    ]


def verdict_cell(verdict: Verdict) -> str:
    """How often a demand was met, and the worst value."""
    if verdict.worst is None:
        return ""
    met, count = verdict.held, len(verdict.values)
    return f"{'pass' if met == count else 'FAIL'} {met}/{count}, worst {verdict.worst[1]:.3g}"


def verdict_table(results: dict[str, Any], style: box.Box) -> tuple[Table, list[str]]:
    """Every demand with measured points, in both states and by both readings of "ours"; and where it was missed."""
    views = [(state, which) for which in get_args(Which) for state in get_args(State)]
    found = {view: verdicts(results, *view) for view in views}
    table = Table("aim", "limit", *(f"{state}, {which}" for state, which in views), box=style)
    missed, silent = [], 0
    for number, first in enumerate(found[views[0]]):
        columns = [found[view][number] for view in views]
        if not any(verdict.values for verdict in columns):
            silent += 1
            continue
        limit = f"{'>=' if first.aim.at_least else '<='} {first.aim.limit:g}"
        table.add_row(first.aim.what, limit, *map(verdict_cell, columns))
        for view, verdict in zip(views, columns, strict=True):
            if verdict.held < len(verdict.values) and view[1] == "best":
                worst = sorted(verdict.missed.items(), key=lambda item: item[1], reverse=not first.aim.at_least)
                where = "; ".join(f"{name}: {value:.3g}" for name, value in worst[:6])
                missed.append(f"missed ({view[0]}): {first.aim.what}: {where}")
    if silent:
        missed.append(f"{silent} more aims have no measured point")
    return table, missed


def show(results: dict[str, Any], console: Console | None = None, *, markdown: bool = False) -> None:
    """Print the points, the metadata and the verdicts."""
    console = console or Console(width=220)
    style = box.MARKDOWN if markdown else box.SIMPLE
    table = Table(*COLUMNS, title="microseconds, K and V not in the cache; last column: ratio where they are", box=style)
    for row in results["points"]:
        table.add_row(*cells(row))
    console.print(table)
    if results["metadata"]:
        table = Table("a step's metadata", "ours", "fa3", box=style)
        for row in results["metadata"]:
            times = (row["arms"][name] for name in ("ours", "fa3"))
            what = f"bs {row['batch']} W {row['width']} L {row['length']}"
            table.add_row(what, *(number(arm["warm"]["us"]) if "warm" in arm else arm.get("why", "") for arm in times))
        console.print(table)
    if results["ceilings"] is None:
        return
    table, missed = verdict_table(results, style)
    console.print(table)
    for text in missed:
        console.print(text, markup=False)


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main(
    file: Annotated[Path, typer.Argument(help="A result file.")],
    markdown: Annotated[bool, typer.Option(help="Tables that a Markdown page takes.")] = False,
) -> None:
    """Print a result file against what was aimed at."""
    show(json.loads(file.read_text()), markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
