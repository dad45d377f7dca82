"""Compile every shipped launch configuration for its architecture, without a GPU, and say what it takes there.

    scripts/compile_all [--arch sm_90]

A launch that spills registers without saying so, does not fit, has no matrix instruction or does not compile is a problem: it is
printed, stands in the result file, and makes the exit code 1. What was compiled before is taken from a cache, so an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import record
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels import aot, aot_auxiliary, aot_cases, aot_specialized, tables, targets

#: A call of an attention kernel.
Case = aot_cases.Case | aot_specialized.SpecializedCase

#: A case, or the architecture and number of an auxiliary launch.
Job = Case | tuple[str, int]

OUT = Path(__file__).parent / "results" / "compile-all.json"


@dataclass(frozen=True)
class Outcome:
    """What came of a job. `source` is the entry of the table, "rule", or "" for an auxiliary launch."""

    name: str
    arch: str
    source: str
    launch: dict[str, Any]
    compiled: aot.Compiled | None
    problems: list[str]

    @property
    def text(self) -> str:
        if self.compiled is None:
            return "does not compile"
        c = self.compiled
        matrix = ", ".join(f"{number} {name}" for name, number in c.matrix_instructions.items())
        parts = [
            f"{c.registers} registers",
            f"{c.spill_bytes} bytes spilled",
            f"{c.shared_bytes} bytes shared",
            matrix,
            self.source,
        ]
        return "; ".join(part for part in parts if part)


def run(case: Case, cache: aot.Cache) -> Outcome:
    """Compile a case with the launch configuration that serves it."""
    config, spill_bytes, source = case.configured()
    compiled, problems = aot.check(case.launch(config), case.arch, cache, spill_bytes=spill_bytes)
    return Outcome(case.name, case.arch, source, asdict(config), compiled, problems)


def outcome_of(made: aot_auxiliary.Auxiliary, arch: str, cache: aot.Cache) -> Outcome:
    """Compile an auxiliary launch."""
    compiled, problems = aot.check(made.launch, arch, cache, spill_bytes=made.spill_bytes, matrix=made.matrix)
    return Outcome(made.name, arch, "", dict(made.launch.options), compiled, problems)


def jobs(arches: list[str]) -> Iterator[Job]:
    """Every case of every architecture, and the number of every auxiliary launch, which itself goes to no other process."""
    for arch in arches:
        yield from aot_cases.shipped(arch)
        yield from aot_specialized.specialized(arch)
        yield from ((arch, number) for number in range(sum(1 for _ in aot_auxiliary.auxiliary(arch))))


def name_of(job: Job) -> str:
    return job.name if isinstance(job, Case) else _auxiliary(job[0])[job[1]].name


def run_job(job: Job, path: Path) -> Outcome:
    if isinstance(job, Case):
        return run(job, _cache(path))
    arch, number = job
    return outcome_of(_auxiliary(arch)[number], arch, _cache(path))


@cache
def _auxiliary(arch: str) -> list[aot_auxiliary.Auxiliary]:
    return list(aot_auxiliary.auxiliary(arch))


@cache
def _cache(path: Path) -> aot.Cache:
    return aot.Cache(path)


def summary(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Of every table entry, and of the auxiliary launches of an architecture: the most that any of its launches takes."""
    out: dict[str, dict[str, Any]] = {}
    for o in outcomes:
        row = out.setdefault(
            f"{o.arch} {o.source or 'auxiliary'}", {"launches": 0, "problems": 0, "launch": o.launch if o.source else None}
        )
        row["launches"] += 1
        row["problems"] += bool(o.problems)
        if o.compiled is None:
            continue
        for name in ("registers", "spill_bytes", "shared_bytes"):
            row[name] = max(row.get(name, 0), getattr(o.compiled, name))
        row["matrix_instructions"] = sorted({*row.get("matrix_instructions", ()), *o.compiled.matrix_instructions})
    return out


def architectures(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    """Of every architecture: launches, those with a problem, those that spill what was accepted, and the most that they take."""
    out: dict[str, dict[str, int]] = {}
    for o in outcomes:
        row = out.setdefault(o.arch, dict.fromkeys(("launches", "problems", "accepted_spills", "registers", "shared_bytes"), 0))
        row["launches"] += 1
        row["problems"] += bool(o.problems)
        if o.compiled is not None:
            row["accepted_spills"] += not o.problems and o.compiled.spill_bytes > 0
            row["registers"] = max(row["registers"], o.compiled.registers)
            row["shared_bytes"] = max(row["shared_bytes"], o.compiled.shared_bytes)
    return out


def main(
    arch: Annotated[list[str] | None, typer.Option(help="Only this architecture; may be given again.")] = None,
    out: Annotated[Path, typer.Option(help="Result file to write.")] = OUT,
    cache_file: Annotated[
        Path | None, typer.Option("--cache", help="Results of earlier runs.  [default: in the user's cache folder]")
    ] = None,
    only: Annotated[str | None, typer.Option(help='Only launches whose name holds this, as "fused_split chain d128".')] = None,
    processes: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes.  [default: one for each core]")] = None,
) -> None:
    """Compile every shipped launch configuration; exit code 1 if one of them has a problem."""
    arches = arch or list(tables.shipped())
    for name in arches:
        targets.from_arch(name)
    path = cache_file or aot.Cache.default().path
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    todo = [job for job in jobs(arches) if only is None or only in name_of(job)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("compiling", total=len(todo))
        running = [pool.submit(run_job, job, path) for job in todo]
        try:
            for future in as_completed(running):
                outcome = future.result()
                outcomes.append(outcome)
                for problem in outcome.problems:
                    progress.console.print(f"{outcome.name}: {problem}", highlight=False, soft_wrap=True)
                progress.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes.sort(key=lambda o: (arches.index(o.arch), o.name))
    bad = {o.name: o.problems for o in outcomes if o.problems}
    results = {
        "targets": {name: asdict(targets.from_arch(name)) for name in arches},
        "only": only,
        "launches": len(outcomes),
        "problems": bad,
        "architectures": architectures(outcomes),
        "entries": summary(outcomes),
        "resources": {o.name: o.text for o in outcomes},
    }
    record.write(out, results)
    console.print(_table(outcomes), f"{out}: {len(bad)} of {len(outcomes)} launches with a problem")
    raise typer.Exit(1 if bad else 0)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("architecture", "launches", "problems", "most registers", "most shared KB", "seconds", "from cache")
    for arch, launches in Counter(o.arch for o in outcomes).items():
        done = [o.compiled for o in outcomes if o.arch == arch and o.compiled is not None]
        problems = sum(bool(o.problems) for o in outcomes if o.arch == arch)
        most = (max((c.registers for c in done), default=0), max((c.shared_bytes for c in done), default=0) // 1024)
        seconds = sum(c.seconds for c in done if not c.cached)
        table.add_row(arch, *map(str, (launches, problems, *most, round(seconds), sum(c.cached for c in done))))
    return table


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecverifyError as error:
        raise SystemExit(f"compile_all: error: {error}") from None
