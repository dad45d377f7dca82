"""Tokens per second of whole engines that verify chains of 4 over long contexts, through the plugin and without it.

    python -m benchmarks.long_context_engines --minutes 7 --out long-engines.json
    python -m benchmarks.long_context_engines --shape llama3-70b-tp8 --minutes 7 --out long-engines-llama3-70b-tp8.json
    python -m benchmarks.long_context_engines --dry-run --minutes 8 --out dry.json

Engines of Qwen3-8B's shape, or of what one of eight devices holds of Llama 3 70B, with made-up weights and a one-layer EAGLE3
draft. Those of a phase are resident at once and serve the same requests in turn. A prefix of 128 k tokens takes long to extend by
and 20 GB to keep, so all requests of an engine share one, from its prefix cache. What is timed is decoding: two answers of
different lengths to the same prompts, and the difference of their latencies.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import record, shapes
from benchmarks.end_to_end import broken_off_after
from benchmarks.end_to_end_plan import CHAIN, order
from benchmarks.engines import Engine, Setup, faults
from benchmarks.long_context_engines_plan import (
    ARMS,
    BATCHES,
    HOW,
    LENGTHS,
    RESIDENT,
    SLACK,
    TINY_ANSWERS,
    Answers,
    Cell,
    Sample,
    between,
    line,
    model_of,
    phases,
    summary,
    unserved,
    verdicts,
)
from benchmarks.turns import NoTurn, Turns
from sglang_specverify.demo import processes
from sglang_specverify.errors import SpecverifyError, show_without_traceback

#: Seconds to ask engines what ran, stop them and write.
RESERVE = 10.0


@dataclass
class Run:
    """One call of this script, and what it has found so far."""

    shape: shapes.Shape
    cells: list[Cell]
    repetitions: int
    end: float
    start_limit: float
    out: Path
    root: Path
    settings: dict[str, Any]
    answers: Answers = field(default_factory=Answers)
    logs: Path | None = None
    turns: Turns = field(default_factory=lambda: Turns(None))
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{max(self.left(), 0):4.0f} s left] {text}", flush=True)

    def save(self) -> None:
        found = {"kind": "long contexts", "how": HOW, "settings": self.settings}
        record.write(self.out, {**found, "engines": self.engines, "cells": list(self.rows.values())})

    def row(self, cell: Cell) -> dict[str, Any]:
        facts = {"name": cell.name, "length": cell.length, "batch": cell.batch, "arms": {}}
        return self.rows.setdefault(cell.name, facts)

    def missing(self, name: str) -> list[Cell]:
        """Cells that an arm has no number for."""
        return [cell for cell in self.cells if "tokens_per_s" not in self.row(cell)["arms"].get(name, {})]

    def engine(self, name: str) -> Engine:
        model, draft = self.shape.write(self.root)
        arm, base = ARMS[name]
        longest, most = max(cell.length for cell in self.cells), max(cell.batch for cell in self.cells)
        setup = Setup(
            arm=arm, model=model, draft=draft, speculation=CHAIN, base=base, pool_tokens=longest + SLACK, max_requests=most,
            graph_sizes=tuple(sorted({cell.batch for cell in self.cells})), context_length=longest + SLACK,
        )  # fmt: skip
        return Engine(setup, None if self.logs is None else self.logs / f"{name}.log")


def serve_phase(run: Run, names: Sequence[str]) -> None:
    """Start the engines of a phase, extend each by the shared prefix, and measure all cells.

    Raises:
        NoTurn: other calls held the device until the time was used up.
    """
    with contextlib.ExitStack() as stack:
        with run.turns.shared(max(run.left() - RESERVE, 0.0)):
            started = {name: stack.enter_context(run.engine(name)).start() for name in names}
            run.say(f"starting {', '.join(started)}")
            ready = {name: engine for name, engine in started.items() if prepare(run, name, engine)}
        with run.turns.alone(max(run.left() - RESERVE, 0.0)):
            # The longest first: its prefix holds those of the others.
            for cell in sorted(run.cells, key=lambda cell: -cell.length):
                if ready and run.left() > RESERVE:
                    measure(run, cell, ready)
            for name, engine in ready.items():
                check(run, name, engine)
            # Not later, when another call may measure.
            stack.close()


def prepare(run: Run, name: str, engine: Engine) -> bool:
    """Wait for an engine and fill its prefix cache. A failure is written down and leaves the others."""
    found: dict[str, Any] = {"setup": engine.setup.as_dict()}
    run.engines[name] = found
    try:
        engine.ready(min(run.start_limit, max(run.left() - RESERVE, 1.0)))
        found["start_s"] = round(engine.start_seconds or 0.0, 1)
        run.say(f"{name} answers after {engine.start_seconds:.0f} s")
        longest = Cell(max(cell.length for cell in run.cells), 1)
        filled = engine.generate(
            longest.prompts(run.shape.prompt_vocabulary), run.answers.short, seconds=max(run.left() - RESERVE, 1.0)
        )
        found["first_answer_s"] = round(filled.seconds, 3)
        run.say(f"{name}: first answer to {longest.length} tokens after {filled.seconds:.1f} s")
    except SpecverifyError as error:
        found["error"] = str(error)
        run.say(f"{name} failed: {error}")
        engine.stop()
    run.save()
    return "error" not in found


def measure(run: Run, cell: Cell, engines: Mapping[str, Engine]) -> None:
    """Repetitions of all arms in turn, after a probe of each that says how long its answers shall be.

    An arm that fails leaves the others.
    """
    batch, arms = cell.prompts(run.shape.prompt_vocabulary), run.row(cell)["arms"]
    open_arms = [name for name in engines if cell in run.missing(name)]
    more = {name: probe(run, engines[name], batch, arms.setdefault(name, {})) for name in open_arms}
    samples: dict[str, list[Sample]] = {name: [] for name in open_arms}
    for repetition in range(run.repetitions):
        for name in order(open_arms, repetition) if open_arms else []:
            if "error" not in arms[name]:
                samples[name] += attempt(run, engines[name], batch, more[name], arms[name])
    for name, found in samples.items():
        if found:
            arms[name] = summary(found, more[name])
        else:
            arms[name].setdefault("error", "no answer took longer than a shorter one")
    run.say(line(run.row(cell)))
    run.save()


def probe(run: Run, engine: Engine, batch: list[list[int]], found: dict[str, Any]) -> int:
    """How many more tokens the longer answers of an arm shall have.

    Its first two, in which kernels may compile, are not looked at.
    """
    found.pop("error", None)
    for _ in range(2):
        samples = [] if "error" in found else attempt(run, engine, batch, run.answers.probe, found)
    return run.answers.more(samples[0]) if samples else run.answers.least


def attempt(run: Run, engine: Engine, batch: list[list[int]], more: int, found: dict[str, Any]) -> list[Sample]:
    """One sample, or none where the longer answer was there sooner; an engine's failure goes into `found`."""
    try:
        short, long = (
            engine.generate(batch, run.answers.short + extra, seconds=max(run.left() - RESERVE / 2, 1.0)) for extra in (0, more)
        )
    except SpecverifyError as error:
        found["error"] = str(error)
        return []
    try:
        return [between(short, long)]
    except SpecverifyError as error:
        run.say(f"{engine.setup.arm}: {error}")
        return []


def check(run: Run, name: str, engine: Engine) -> None:
    """Write down what ran in an engine, and why its numbers would not count."""
    found = run.engines[name]
    try:
        found |= engine.stats(max(min(run.left(), 30.0), 3.0))
        found["faults"] = [*faults(engine.setup, found), *unserved(engine.setup, found)]
    except SpecverifyError as error:
        found["faults"] = [f"it does not say what ran: {error}"]
    for text in found["faults"]:
        run.say(f"{name} does not count: {text}")
    run.save()


def main(
    out: Annotated[Path, typer.Option(help="Result file to write, after every cell.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(shapes.SHAPES)}; each to a file of its own.")] = "qwen3-8b",
    arm: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(ARMS)}; repeatable. All if left out.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at once; repeatable.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Measured rounds of each arm and cell.")] = 3,
    minutes: Annotated[float, typer.Option(help="Be done after this many minutes.")] = 9.0,
    resume: Annotated[Path | None, typer.Option(help="Result file to go on with.")] = None,
    resident: Annotated[int, typer.Option(min=1, help="Engines beside each other.")] = RESIDENT,
    start_limit: Annotated[float, typer.Option(help="Seconds that an engine may take to start.")] = 240.0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' output.")] = None,
    turns: Annotated[Path | None, typer.Option(help="Lock file of calls that share the device; each measures alone.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="A tiny model, two cells: does everything work?")] = False,
) -> None:
    """Measure engines until all is measured or the time is used up."""
    unknown = set(arm or ()) - set(ARMS)
    if unknown:
        raise typer.BadParameter(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}", param_hint="--arm")
    shape = "tiny" if dry_run else shape
    arms = list(arm or (["triton", "specverify-triton"] if dry_run else ARMS))
    lengths, batches = length or ([40] if dry_run else LENGTHS), batch or ([1, 2] if dry_run else BATCHES)
    cells = [Cell(n, b) for n in lengths for b in batches]
    settings: dict[str, Any] = {
        "shape": shape,
        "arms": arms,
        "lengths": list(lengths),
        "batches": list(batches),
        "repetitions": repetitions,
        "dry_run": dry_run,
    }
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="specverify-") as folder, processes.stopping_on_signals():
        end = time.monotonic() + 60 * minutes
        run = Run(
            model_of(shape),
            cells,
            repetitions,
            end,
            start_limit,
            out,
            Path(folder),
            settings,
            TINY_ANSWERS if dry_run else Answers(),
            logs,
            Turns(turns),
        )
        if resume is not None and resume.exists():
            before = json.loads(resume.read_text())
            # Files from before there were several shapes do not name theirs.
            if (other := before["settings"].get("shape", "qwen3-8b")) != shape:
                raise SpecverifyError(f"{resume} is of shape {other}", "write each shape to a file of its own")
            run.engines, run.rows = before["engines"], {row["name"]: row for row in before["cells"]}
        run.save()
        with broken_off_after(60 * minutes + RESERVE):
            for names in phases(arms, resident):
                todo = [name for name in names if run.missing(name)]
                if todo and run.left() > RESERVE:
                    try:
                        serve_phase(run, todo)
                    except NoTurn as late:
                        run.say(f"{', '.join(todo)}: {late}; --resume goes on here")
    for text in verdicts(list(run.rows.values())):
        print(text, flush=True)
    bad = [name for name, found in run.engines.items() if "error" in found or found.get("faults")]
    left = [name for name in arms if run.missing(name)]
    print(f"{len(bad)} engines failed, {len(left)} arms have cells left: {out}", flush=True)
    raise typer.Exit(1 if bad or left else 0)


if __name__ == "__main__":
    show_without_traceback()
    typer.run(main)
