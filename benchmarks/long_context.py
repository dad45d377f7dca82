"""Time chains over long prefixes against SGLang's own kernels and against what the hardware can do.

    python -m benchmarks.long_context --minutes 1.7 --out long.json
    python -m benchmarks.long_context --minutes 1.7 --resume long.json --out long.json
    TRITON_INTERPRET=1 python -m benchmarks.long_context --device cpu --dry-run --out dry.json

Needs a GPU of the architecture whose table it measures, a pool's worth of its memory, and SGLang with its own packages, except
for a dry run, which checks on the CPU that every arm that runs there is right, and times nothing.
`benchmarks.long_context_report` prints the results, `benchmarks.long_context_plot` draws them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import long_context_checks as checks
from benchmarks import long_context_compile as compiling
from benchmarks import long_context_measure as measuring
from benchmarks import long_context_points as points
from benchmarks import long_context_report, options, record, report, timing
from benchmarks.long_context_arms import ARMS
from benchmarks.long_context_pool import make_pool
from benchmarks.points import Point
from benchmarks.verify_attention import arms_of, run
from sglang_specverify.hardware import Hardware, detect
from sglang_specverify.kernels import tables

#: The architecture whose table this measures, and whose numbers are aimed at.
ARCH = "sm_90"
#: Seconds of results that may be lost.
KEEP_SECONDS = 3.0
#: A dry run's pool.
TINY_POOL = 64 << 20


class Selection(StrEnum):
    CHECKS = "checks"
    TABLE = "table"
    PLANE = "plane"
    VARIATIONS = "variations"


def main(
    out: options.Out,
    only: Annotated[
        list[Selection] | None, typer.Option(help="What to measure, in this order; repeatable. All if left out.")
    ] = None,
    minutes: options.Minutes = 9.0,
    resume: options.Resume = None,
    quick: Annotated[bool, typer.Option(help="Every fifth point of each selection.")] = False,
    skip: options.Skip = None,
    pool_gb: Annotated[float, typer.Option(help="Memory for K and V; points that need more are left out.")] = 90.0,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile the kernels of the points and stop.")] = False,
    compilers: Annotated[int, typer.Option(help="Processes that compile kernels before anything is timed; 0 for none.")] = 0,
    device: options.Device = "cuda",
    dry_run: options.DryRun = False,
    allow_untuned: Annotated[bool, typer.Option("--allow-untuned", help="Measure other hardware than the table's.")] = False,
) -> None:
    """Measure points until the time is used up; a table of all results follows."""
    deadline = time.monotonic() + 60 * minutes
    arms = arms_of(ARMS, skip or (), device, dry_run=dry_run)
    if not dry_run and not allow_untuned and (reason := untuned(detect(), _triton())) is not None:
        raise typer.BadParameter(f"{reason}: pass --allow-untuned to measure all the same", param_hint="--device")
    wanted = only or list(Selection)
    results = load(resume) if resume is not None and resume.exists() else {"ceilings": None, "checks": [], "points": []}
    where, size = torch.device(device), TINY_POOL if dry_run else round(pool_gb * 1e9)
    chosen = list(points.tiny())[:: 5 if quick else 1] if dry_run else select(wanted, quick, size)
    results["pool"] = {"bytes": size, "left_out": left_out(wanted, size), "arch": ARCH, "arms": [arm.name for arm in arms]}

    written = 0.0

    def keep() -> None:
        # The environment of a file asks the driver, which takes as long as a point.
        nonlocal written
        if time.monotonic() - written >= KEEP_SECONDS:
            record.write(out, results)
            written = time.monotonic()

    with compiling.ahead(chosen, compilers, deadline, skip or ()):
        pool = make_pool(points.SMALL_POOL if compile_only else size, where)
        if not dry_run:
            # What arms import takes long too, and shows in no time here.
            measuring.measure(points.chain(1, min(points.LENGTHS)), arms, None, pool, with_step=True)
    if compile_only:
        return
    ceilings = None if dry_run else timing.ceilings(where)
    if ceilings is not None:
        read = measuring.read_ceiling(where)
        results["ceilings"] = ceilings.as_dict() | {"read_tb_per_s": round(read / 1e12, 3)}
        ceilings = timing.Ceilings(max(read, ceilings.bytes_per_s), ceilings.flops_per_s)
        typer.echo(f"ceilings: {results['ceilings']}")
    keep()
    if Selection.CHECKS in wanted and not results["checks"]:
        for row in checks.run(pool, tiny=dry_run, deadline=deadline):
            results["checks"].append(row)
            typer.echo(long_context_report.check_line(row))
            keep()

    def one(point: Point) -> dict[str, Any]:
        begin = time.monotonic()
        row = measuring.measure(point, arms, ceilings, pool, with_step=dry_run or points.has_step(point))
        row["seconds"] = round(time.monotonic() - begin, 1)
        typer.echo(f"{row['seconds']:.1f} s, {report.line(row)}")
        return row

    complete = run(chosen, results["points"], one, keep, deadline)
    record.write(out, results)
    long_context_report.show(results)
    if not complete:
        typer.echo(f"out of time: go on with --resume {out}")


def untuned(machine: Hardware, triton: str) -> str | None:
    """Why the times of this machine would say nothing about the table, or None."""
    table = tables.read(ARCH)
    if machine.arch != ARCH:
        return f"this measures the table of {ARCH}, and here is {machine.name}, {machine.arch}"
    if table is None:
        return f"there is no table of {ARCH}"
    if table.triton != triton:
        return f"the table of {ARCH} was made with Triton {table.triton}, and here is {triton}"
    return None


def _triton() -> str:
    return str(record.environment()["versions"]["triton"])


def select(wanted: Iterable[Selection], quick: bool, pool_bytes: int) -> list[Point]:
    """The points of some selections that the pool holds, each once, in the order of the selections."""
    found: list[Point] = []
    for selection in wanted:
        if selection is not Selection.CHECKS:
            found += list(points.SELECTIONS[selection]())[:: 5 if quick else 1]
    return [point for point in dict.fromkeys(found) if points.fits(point, pool_bytes)]


def left_out(wanted: Iterable[Selection], pool_bytes: int) -> list[str]:
    """Names of the points that the pool does not hold."""
    every = [point for selection in wanted if selection is not Selection.CHECKS for point in points.SELECTIONS[selection]()]
    return [point.name for point in dict.fromkeys(every) if not points.fits(point, pool_bytes)]


def load(path: Path) -> dict[str, Any]:
    """An earlier result file's rows without those of points that failed, if the same versions and hardware made it."""
    found: dict[str, Any] = json.loads(path.read_text())
    now = record.environment()
    for key in ("versions", "hardware"):
        if found.get(key) != now[key]:
            raise typer.BadParameter(f"{path} was measured with other {key}: {found.get(key)}", param_hint="--resume")
    kept = [row for row in found["points"] if "why" not in row]
    return {"ceilings": found["ceilings"], "checks": found["checks"], "points": kept}


if __name__ == "__main__":
    typer.run(main)
