"""Time sparse MLA decode on DeepSeek-V4.1's caches against FlashMLA's SM90 path and what else reads them.

    python -m benchmarks.sparse_mla --only headline --minutes 5 --out sparse.json
    python -m benchmarks.sparse_mla --minutes 9 --resume sparse.json --out sparse.json
    python -m benchmarks.sparse_mla --minutes 9 --resume sparse.json --new-arms --out sparse.json
    TRITON_INTERPRET=1 python -m benchmarks.sparse_mla --device cpu --dry-run --out dry.json

Needs a GPU, some 4 GB of its memory, SGLang and `sgl-flash-mla`; an arm that cannot run says why, and the others go on. A dry run
checks on the CPU that every arm that runs there is right, and times nothing. `benchmarks.sparse_mla_report` prints the results
against what was aimed at and draws them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer

from benchmarks import options, record, report, sparse_mla_report, timing
from benchmarks import sparse_mla_measure as measuring
from benchmarks import sparse_mla_points as points
from benchmarks.sparse_mla_arms import ARMS, SELECTED, Arm
from benchmarks.sparse_mla_points import Point
from benchmarks.sparse_mla_pool import make_pool
from benchmarks.verify_attention import lacks, load, run

#: Rows of a dry run's pools.
TINY_MAIN, TINY_SWA = 128, 128


class Selection(StrEnum):
    HEADLINE = "headline"
    HEADS = "heads"
    VERIFY = "verify"
    REST = "rest"


def main(
    out: options.Out,
    only: Annotated[
        list[Selection] | None, typer.Option(help="What to measure, in this order; repeatable. All if left out.")
    ] = None,
    minutes: options.Minutes = 9.0,
    resume: options.Resume = None,
    new_arms: options.NewArms = False,
    quick: Annotated[bool, typer.Option(help="Every fourth point of each selection.")] = False,
    skip: options.Skip = None,
    device: options.Device = "cuda",
    dry_run: options.DryRun = False,
) -> None:
    """Measure points until the time is used up; a table of all results follows."""
    deadline = time.monotonic() + 60 * minutes
    arms = arms_of(skip or (), device, dry_run=dry_run)
    results: dict[str, Any] = {"earlier": [], "ceilings": None, "points": [], "metadata": []}
    peers = {"sgl-flash-mla": _version("sgl-flash-mla")}
    if resume is not None and resume.exists():
        if (others := json.loads(resume.read_text()).get("peers")) != peers:
            raise typer.BadParameter(f"{resume} was measured beside {others}, and here is {peers}", param_hint="--resume")
        results = load(resume)
    results["peers"] = peers
    where = torch.device(device)
    measuring.repair_interpreter(where)
    chosen = list(points.tiny()) if dry_run else select(only or list(Selection), quick)
    pool = make_pool(where, TINY_MAIN, TINY_SWA) if dry_run else make_pool(where)
    ceilings = None if dry_run else timing.ceilings(where)
    if ceilings is not None:
        results["ceilings"] = ceilings.as_dict()
        typer.echo(f"ceilings: {results['ceilings']}")

    def one(point: Point) -> dict[str, Any]:
        begin = time.monotonic()
        row = measuring.measure(point, arms, ceilings, pool)
        row["seconds"] = round(time.monotonic() - begin, 1)
        typer.echo(f"{row['seconds']:.1f} s, {report.line(row)}")
        return row

    def keep() -> None:
        record.write(out, results)

    old = {row["name"] for row in results["points"] if new_arms and lacks(row, (arm.name for arm in arms))}
    complete = run(chosen, results["points"], one, keep, deadline, renewed=old)
    keep()
    sparse_mla_report.show(results)
    if not complete:
        typer.echo(f"out of time: go on with --resume {out}")
    if dry_run and any("why" in row or "why" in row["arms"].get(SELECTED, {}) for row in results["points"]):
        raise typer.Exit(1)


def arms_of(skip: Iterable[str], device: str, *, dry_run: bool) -> list[Arm]:
    """The arms that are not left out.

    Raises:
        typer.BadParameter: a name that no arm has, or a device that times nothing.
    """
    if device == "cpu" and not dry_run:
        raise typer.BadParameter("the CPU is for --dry-run: there is nothing to time", param_hint="--device")
    if unknown := set(skip) - {arm.name for arm in ARMS}:
        names = ", ".join(arm.name for arm in ARMS)
        raise typer.BadParameter(f"no arm {', '.join(sorted(unknown))}; there are {names}", param_hint="--skip")
    return [arm for arm in ARMS if arm.name not in skip]


def select(wanted: Iterable[Selection], quick: bool) -> list[Point]:
    """The points of some selections, each once, in the order of the selections."""
    found = [point for selection in wanted for point in list(points.SELECTIONS[selection]())[:: 4 if quick else 1]]
    return list(dict.fromkeys(found))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    typer.run(main)
