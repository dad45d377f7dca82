"""Print a result file of `benchmarks.long_context`: a row for each point, the checks, and what was aimed at.

python -m benchmarks.long_context_report long.json
python -m benchmarks.long_context_report long.json --markdown
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.aims import Row, State, Verdict, verdicts
from benchmarks.long_context_points import WIDTH, chain
from benchmarks.points import Point
from benchmarks.report import number, verdict_cell

#: SGLang's own kernels for chains; `upstream_splitkv` it calls on gfx95x alone.
STOCK = ("fa3", "triton")
COLUMNS = ("point", "floor", "ours", "variant", "TB/s", "of ceiling", "again", "deterministic",
           "fa3", "/ ours", "triton", "/ ours", "upstream split", "/ ours")  # fmt: skip


def in_plane(point: Point) -> bool:
    """Of the shape whose whole plane is measured."""
    return point == chain(point.batch, point.length)


def tb_per_s(row: Row) -> float | None:
    """Bytes that the call needs over the time of this project's fastest form."""
    return None if row.ours is None else float(row.data["bytes"]) / row.ours / 1e6


def ceiling(results: dict[str, Any]) -> float | None:
    """TB/s: the better of a copy and a sum."""
    found = results["ceilings"]
    return None if found is None else max(found["copy_tb_per_s"], found["read_tb_per_s"])


def of_ceiling(row: Row, most: float | None) -> float | None:
    rate = tb_per_s(row)
    return None if rate is None or most is None else rate / most


def cells(row: dict[str, Any], most: float | None) -> list[str]:
    """One row of the table, with K and V not in the L2 cache."""
    if "why" in row:
        return [row["name"], row["why"], *[""] * (len(COLUMNS) - 2)]
    cold = Row(row, "cold", "best")
    variant = cold.ours_name or ""
    if variant and variant != row["selected"]:
        variant += f" (selected: {row['selected']})"
    found = [
        row["name"],
        number(row.get("floor_us")),
        number(cold.ours),
        variant,
        number(tb_per_s(cold), 2),
        number(of_ceiling(cold, most), 2),
        number(cold.noise(), 2) if cold.ours else "",
        number(cold.us("deterministic")),
    ]
    for name in (*STOCK, "upstream_splitkv"):
        us = cold.us(name)
        found += [number(us) or str(row["arms"].get(name, {}).get("why", ""))[:24], number(cold.ratio(us, cold.ours), 2)]
    return found


def check_line(row: dict[str, Any]) -> str:
    """One check in one line."""
    facts = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("name", "ok", "lengths"))
    return f"{'ok' if row['ok'] else 'FAILED'}: {row['name']}: {facts}"


def judged(results: dict[str, Any], of: Callable[[Point], bool]) -> dict[State, list[Verdict]]:
    """The demands on chains that have values, over some points, in both states."""
    chosen = [row for row in results["points"] if of(Point(**row["point"]))]
    few = {"points": chosen, "ceilings": None, "metadata": []}
    found = {state: verdicts(few, state, "best") for state in get_args(State)}
    kept = [i for i in range(len(found["cold"])) if any(found[state][i].values for state in found)]
    return {state: [found[state][i] for i in kept] for state in found}


def show(results: dict[str, Any], console: Console | None = None, *, markdown: bool = False) -> None:
    """Print points, steps, checks and verdicts."""
    console = console or Console(width=240)
    style = box.MARKDOWN if markdown else box.SIMPLE
    most = ceiling(results)
    table = Table(*COLUMNS, title="microseconds of one layer, K and V not in the cache", box=style)
    for row in results["points"]:
        table.add_row(*cells(row, most))
    console.print(table)
    steps = [row for row in results["points"] if "plan" in row.get("step", {})]
    if steps:
        table = Table("a step", "layers", "its one launch", "layers with it", "layers without", box=style)
        for row in steps:
            step = row["step"]
            times = (number(step[key]["us"]) for key in ("plan", "with_plan", "without_plan"))
            table.add_row(row["name"], str(step["layers"]), *times)
        console.print(table)
    for row in results["checks"]:
        console.print(check_line(row), markup=False)
    far = [row for row in results["points"] if row.get("beyond_32_bits")]
    right = [row for row in far if all("wrong" not in arm.get("why", "") for arm in row["arms"].values())]
    console.print(f"{len(far)} points read beyond 2^31 elements of one cache; every arm that ran was right in {len(right)}")
    if most is None:
        return
    for title, of in ((f"32/8 heads of 128, bf16, W {WIDTH}", in_plane), ("other shapes", lambda p: not in_plane(p))):
        console.print(_verdict_table(title, judged(results, of), style))
        for text in _missed(judged(results, of)):
            console.print(text, markup=False)


def _verdict_table(title: str, found: dict[State, list[Verdict]], style: box.Box) -> Table:
    table = Table("aim", "limit", *found, title=title, box=style)
    for columns in zip(*found.values(), strict=True):
        aim = columns[0].aim
        table.add_row(aim.what, f"{'>=' if aim.at_least else '<='} {aim.limit:g}", *map(verdict_cell, columns))
    return table


def _missed(found: dict[State, list[Verdict]]) -> list[str]:
    texts = []
    for state, columns in found.items():
        for verdict in columns:
            worst = sorted(verdict.missed.items(), key=lambda item: item[1], reverse=not verdict.aim.at_least)
            where = "; ".join(f"{name}: {value:.3g}" for name, value in worst[:6])
            texts += [f"missed ({state}): {verdict.aim.what}: {where}"] if worst else []
    return texts


def main(
    file: Annotated[Path, typer.Argument(help="A result file.")],
    markdown: Annotated[bool, typer.Option(help="Tables that a Markdown page takes.")] = False,
) -> None:
    """Print a result file against what was aimed at."""
    show(json.loads(file.read_text()), markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
