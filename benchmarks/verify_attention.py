"""Time verify and draft-decode attention against SGLang's own kernels and against what the hardware can do.

    python -m benchmarks.verify_attention --only headline --minutes 9 --out verify.json
    python -m benchmarks.verify_attention --only grid --minutes 9 --out verify.json --resume verify.json
    TRITON_INTERPRET=1 python -m benchmarks.verify_attention --device cpu --dry-run --out dry.json

Needs a GPU and SGLang with its own packages, except for a dry run, which checks on the CPU that every arm that runs there
is right, and times nothing. `benchmarks.report` prints what came against what was aimed at.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import torch
import typer

from benchmarks import measure, metadata, options, points, record, report, timing
from benchmarks.arms import OURS, Arm
from benchmarks.points import Point
from benchmarks.stock_triton import STOCK

ARMS: tuple[Arm, ...] = (*OURS, *STOCK)


class Named(Protocol):
    """What `run` asks of a point."""

    @property
    def name(self) -> str: ...

    def as_dict(self) -> dict[str, Any]: ...


Some = TypeVar("Some", bound=Named)


class State(StrEnum):
    WARM = "warm"
    COLD = "cold"


class Selection(StrEnum):
    HEADLINE = "headline"
    FEW = "few"
    GRID = "grid"
    FAMILIES = "families"
    CHAIN = "chain"
    DRAFT = "draft"
    METADATA = "metadata"


def main(
    out: options.Out,
    only: Annotated[
        list[Selection] | None, typer.Option(help="What to measure, in this order; repeatable. All if left out.")
    ] = None,
    minutes: options.Minutes = 9.0,
    resume: Annotated[Path | None, typer.Option(help="Keep the points of this result file and measure the others.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure the selected points of the resumed file anew.")] = False,
    new_arms: options.NewArms = False,
    quick: Annotated[bool, typer.Option(help="Every fifth point of each selection.")] = False,
    skip: options.Skip = None,
    state: Annotated[list[State] | None, typer.Option(help="Whether K and V are in the L2 cache; both if left out.")] = None,
    device: options.Device = "cuda",
    dry_run: options.DryRun = False,
) -> None:
    """Measure points until the time is used up; a table of all results follows."""
    deadline = time.monotonic() + 60 * minutes
    arms = arms_of(ARMS, skip or (), device, dry_run=dry_run)
    where = torch.device(device)
    results = load(resume) if resume else {"earlier": [], "ceilings": None, "points": [], "metadata": []}
    ceilings = None if dry_run else timing.ceilings(where)
    if ceilings is not None:
        results["ceilings"] = ceilings.as_dict()
        typer.echo(f"ceilings: {results['ceilings']}")
    chosen = list(points.tiny())[:: 5 if quick else 1] if dry_run else select(only or list(Selection), quick)

    def one(point: Point) -> dict[str, Any]:
        begin = time.monotonic()
        row = measure.measure(point, arms, ceilings, where, [each.value for each in state or State])
        row["seconds"] = round(time.monotonic() - begin, 1)
        typer.echo(f"{row['seconds']:.0f} s, {report.line(row)}")
        return row

    def keep() -> None:
        record.write(out, results)

    old = [row for row in results["points"] if again or (new_arms and lacks(row, taking(row, arms)))]
    complete = run(chosen, results["points"], one, keep, deadline, renewed={row["name"] for row in old})
    if not dry_run and (only is None or Selection.METADATA in only):
        done = {row["length"] for row in results["metadata"]}
        for length in metadata.LENGTHS:
            if length not in done and time.monotonic() < deadline:
                point = Point("tree", metadata.BATCH, metadata.WIDTH, length)
                results["metadata"].append({**metadata.measure(point, where), "date": record.date()})
                keep()
    keep()
    report.show(results)
    if not complete:
        typer.echo(f"out of time: go on with --resume {out}")


def arms_of(known: Sequence[Arm], skip: Sequence[str], device: str, *, dry_run: bool) -> list[Arm]:
    """The arms that are not left out.

    Raises:
        typer.BadParameter: a name that no arm has, or a device that times nothing.
    """
    if device == "cpu" and not dry_run:
        raise typer.BadParameter("the CPU is for --dry-run: there is nothing to time", param_hint="--device")
    unknown = set(skip) - {arm.name for arm in known}
    if unknown:
        names = ", ".join(arm.name for arm in known)
        raise typer.BadParameter(f"no arm {', '.join(sorted(unknown))}; there are {names}", param_hint="--skip")
    return [arm for arm in known if arm.name not in skip]


def select(only: Iterable[Selection], quick: bool) -> list[Point]:
    """The points of some selections, each once, in the order of the selections."""
    found: list[Point] = []
    for selection in only:
        if selection is not Selection.METADATA:
            found += list(points.SELECTIONS[selection.value]())[:: 5 if quick else 1]
    return list(dict.fromkeys(found))


def run(
    chosen: Iterable[Some],
    rows: list[dict[str, Any]],
    one: Callable[[Some], dict[str, Any]],
    keep: Callable[[], None],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    *,
    renewed: Collection[str] = (),
) -> bool:
    """Measure the points that have no row yet, and keep each row with its date at once. False when the time ran out.

    Points named in `renewed` are measured too; until its new row is there, and where that says only why there is none, the
    old one stays.

    A point that fails as a whole, for want of memory say, becomes a row that says so, and is tried again by a run that
    resumes. A device that no longer answers ends the run.
    """
    done = {row["name"] for row in rows} - set(renewed)
    for point in chosen:
        if point.name in done:
            continue
        if clock() >= deadline:
            return False
        try:
            row = one(point)
        except Exception as failure:
            row = {"name": point.name, "point": point.as_dict(), "why": f"{type(failure).__name__}: {failure}"[:300]}
            typer.echo(report.line(row))
        old = next((old for old in rows if old["name"] == point.name), None)
        if old is None:
            rows.append({**row, "date": record.date()})
        elif "why" not in row:
            rows.remove(old)
            rows.append({**carried(row, old), "date": record.date()})
        keep()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
    return True


def carried(row: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """A new row with times of the states of the cache that it does not have, from the row it replaces, with that one's date."""
    arms = dict(row.get("arms", {}))
    for name, found in old.get("arms", {}).items():
        for state in State:
            if name in arms and state not in arms[name] and state in found and "why" not in arms[name]:
                arms[name] = {**arms[name], state.value: {"date": old["date"], **found[state]}}
    return {**row, "arms": arms}


def taking(row: Mapping[str, Any], arms: Iterable[Arm]) -> list[str]:
    """The arms that take points of a row's kind."""
    return [arm.name for arm in arms if row["point"]["kind"] in arm.kinds]


def lacks(row: Mapping[str, Any], arms: Iterable[str]) -> bool:
    """Whether a row was measured without some of these arms; one that says why it has no times is none of them."""
    return not row["arms"].keys() >= set(arms)


def load(path: Path) -> dict[str, Any]:
    """An earlier result file's rows without those of points that failed, if the same versions and hardware made it.

    `earlier` says how that file, and those that it took rows from, were made; a row's date tells which of them it is from.
    """
    found: dict[str, Any] = json.loads(path.read_text())
    now = record.environment()
    for key in ("versions", "hardware"):
        if found.get(key) != now[key]:
            raise typer.BadParameter(f"{path} was measured with other {key}: {found.get(key)}", param_hint="--resume")
    kept = [row for row in found["points"] if "why" not in row]
    before = {name: found[name] for name in ("date", "command", "versions", "hardware")}
    earlier = [*found.get("earlier", []), before]
    return {"earlier": earlier, "ceilings": found["ceilings"], "points": kept, "metadata": found["metadata"]}


if __name__ == "__main__":
    typer.run(main)
