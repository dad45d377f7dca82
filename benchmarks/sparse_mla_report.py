"""Print a result file of `benchmarks.sparse_mla`: a row for each point, and what was aimed at; draw it.

python -m benchmarks.sparse_mla_report sparse.json
python -m benchmarks.sparse_mla_report sparse.json --markdown --plot sparse.png
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import AGAIN
from benchmarks.report import number
from benchmarks.sparse_mla_points import Point

State = Literal["warm", "cold"]
OURS = "specverify"
OTHERS = ("rows apart", "flashmla", "sglang triton", "gather + flashmla", "pytorch")
COLUMNS = ("point", "floor", "ours", "again", "of floor", *OTHERS, "flashmla / ours")


#: Results by point.
Rows = dict[Point, dict[str, Any]]


@dataclass(frozen=True)
class Aim:
    """What is demanded of points: `value` of a row, beside all others, at least or at most `limit`."""

    what: str
    of: Callable[[Point], bool]
    value: Callable[[dict[str, Any], State, Rows], float | None]
    limit: float
    at_least: bool

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def us(row: dict[str, Any], arm: str, state: State) -> float | None:
    """Microseconds of an arm, if it was timed."""
    timed = row.get("arms", {}).get(arm, {}).get(state)
    return None if timed is None else float(timed["us"])


def times_faster(row: dict[str, Any], state: State) -> float | None:
    """FlashMLA's time over this project's."""
    ours, theirs = us(row, OURS, state), us(row, "flashmla", state)
    return None if ours is None or theirs is None else theirs / ours


def _gain(row: dict[str, Any], state: State, rows: Rows) -> float | None:
    return times_faster(row, state)


def _own(row: dict[str, Any], state: State, rows: Rows) -> float | None:
    return us(row, OURS, state)


def _over_one_row(row: dict[str, Any], state: State, rows: Rows) -> float | None:
    """What all rows of a request take, over what one takes."""
    ours, one = us(row, OURS, state), rows.get(replace(Point(**row["point"]), queries=1, shared=False))
    single = None if one is None else us(one, OURS, state)
    return None if ours is None or single is None else ours / single


def _over_floor(row: dict[str, Any], state: State, rows: Rows) -> float | None:
    ours, floor = us(row, OURS, state), row.get("floor_us")
    return None if ours is None or floor is None else ours / floor


def _few(point: Point) -> bool:
    return (point.queries, point.heads) == (6, 16) and point.batch <= 8


AIMS = (
    Aim("times as fast as FlashMLA's SM90 path, 64 heads, one row",
        lambda p: (p.heads, p.queries) == (64, 1) and p.topk > 0, _gain, 1.5, at_least=True),
    Aim("us at B 1, K 512", lambda p: p == Point(1, 512), _own, 8.0, at_least=False),
    Aim("us at B 128, K 512", lambda p: p == Point(128, 512), _own, 20.0, at_least=False),
    Aim("times one row: 6 rows, 16 heads, B to 8", lambda p: _few(p), _over_one_row, 2.5, at_least=False),
    Aim("times the floor: 6 rows elsewhere", lambda p: p.queries == 6 and not _few(p), _over_floor, 1.3, at_least=False),
)  # fmt: skip


def cells(row: dict[str, Any], state: State) -> list[str]:
    """One row of the table."""
    if "why" in row:
        return [row["name"], row["why"], *[""] * (len(COLUMNS) - 2)]
    ours, again, floor = us(row, OURS, state), us(row, OURS + AGAIN, state), row.get("floor_us")
    found = [row["name"], number(floor), number(ours) or str(row["arms"].get(OURS, {}).get("why", ""))[:40]]
    found += ["" if ours is None or again is None else number(again / ours, 2)]
    found += ["" if ours is None or floor is None else number(floor / ours, 2)]
    for name in OTHERS:
        time = us(row, name, state)
        found.append(str(row["arms"].get(name, {}).get("why", ""))[:24] if time is None else number(time))
    return [*found, number(times_faster(row, state), 2)]


#: Of rows that are verified: what one call for all of them gains, and what more than one row costs.
CHAIN_COLUMNS = ("point", "ours", "rows apart / ours", "flashmla / ours", "ours / ours of one row")


def chains(results: dict[str, Any], state: State) -> list[list[str]]:
    """A row for each point of several query rows that was timed; a list for each row and one for all are two points."""
    rows = {Point(**row["point"]): row for row in results["points"]}
    lines = []
    for point, row in rows.items():
        ours = us(row, OURS, state)
        if point.queries == 1 or ours is None:
            continue
        apart = us(row, "rows apart", state)
        ratios = [apart and apart / ours, times_faster(row, state), _over_one_row(row, state, rows)]
        lines.append([point.name, number(ours), *(number(ratio, 2) for ratio in ratios)])
    return lines


def judge(results: dict[str, Any]) -> list[list[str]]:
    """Each aim: what, its limit, and for both states how often it was met and where not."""
    lines, every = [], {Point(**row["point"]): row for row in results["points"]}
    for aim in AIMS:
        line = [aim.what, f"{'>=' if aim.at_least else '<='} {aim.limit:g}"]
        for state in get_args(State):
            rows = [row for row in results["points"] if aim.of(Point(**row["point"]))]
            values = {row["name"]: value for row in rows if (value := aim.value(row, state, every)) is not None}
            missed = [f"{name}: {value:.2f}" for name, value in values.items() if not aim.holds(value)]
            if not values:
                line.append("not measured")
                continue
            verdict = f"{'FAIL' if missed else 'pass'} {len(values) - len(missed)}/{len(values)}"
            line.append("; ".join([verdict, *missed]))
        lines.append(line)
    return lines


def show(results: dict[str, Any], console: Console | None = None, *, markdown: bool = False) -> None:
    """Print the points in both states, and the verdicts."""
    console = console or Console(width=220)
    style = box.MARKDOWN if markdown else box.SIMPLE
    for state, title in (("warm", "rows in the L2 cache"), ("cold", "rows not in the L2 cache")):
        table = Table(*COLUMNS, title=f"microseconds of one layer, {title}", box=style)
        for row in results["points"]:
            table.add_row(*cells(row, state))  # type: ignore[arg-type]
        console.print(table)
        if lines := chains(results, state):  # type: ignore[arg-type]
            table = Table(*CHAIN_COLUMNS, title=f"microseconds of several query rows a request, {title}", box=style)
            for line in lines:
                table.add_row(*line)
            console.print(table)
    if results["ceilings"] is not None:
        table = Table("aim", "limit", *get_args(State), box=style)
        for line in judge(results):
            table.add_row(*line)
        console.print(table)


def main(
    file: Annotated[Path, typer.Argument(help="A result file.")],
    markdown: Annotated[bool, typer.Option(help="Tables that a Markdown page takes.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A picture to write, .png; needs matplotlib.")] = None,
) -> None:
    """Print a result file against what was aimed at."""
    results = json.loads(file.read_text())
    show(results, markdown=markdown)
    if plot is not None:
        from benchmarks.sparse_mla_plot import draw

        draw(results, plot)
        typer.echo(f"wrote {plot}")


if __name__ == "__main__":
    typer.run(main)
