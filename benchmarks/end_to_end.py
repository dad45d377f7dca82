"""Tokens per second of whole engines through the plugin and through SGLang's own backends, on one device.

    python -m benchmarks.end_to_end --minutes 9 --out e2e.json
    python -m benchmarks.end_to_end --minutes 9 --resume e2e.json --out e2e.json
    for name in chain off; do python -m benchmarks.end_to_end --scenario $name --turns lock --out $name.json & done; wait
    python -m benchmarks.end_to_end --minutes 0 --resume e2e.json --resume chain.json --resume off.json --out e2e.json
    python -m benchmarks.end_to_end_report e2e.json --plot e2e.png

Engines of real shapes with made-up weights. For each stock arm an engine of it and one of the plugin's are resident at once and
serve the same batches in turn, one at a time. The plugin's engine stays for the next stock arm. Every cell is written at once,
`--resume` goes on where time ran out, and an arm that fails leaves its reason and the others. Several calls with one `--turns`
start their engines side by side and measure one after the other; `--resume` with each of their files puts them together.
`--dry-run` takes the same path on any machine.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from benchmarks import end_to_end_plan as plan
from benchmarks import shapes
from benchmarks.clocks import Clocks
from benchmarks.end_to_end_run import Clock, Run
from benchmarks.engines import OURS, Engine, faults
from benchmarks.turns import NoTurn, Turns
from sglang_specverify.demo import processes
from sglang_specverify.errors import ArgumentError, SpecverifyError, show_without_traceback

#: Seconds that stay for asking engines what ran, stopping them and writing.
_RESERVE = 12.0
#: Seconds past the deadline at which a call that hangs is broken off.
_HARD_MARGIN = 15.0


def serve_scenario(run: Run, chosen: plan.Scenario, wanted: Sequence[plan.Cell]) -> None:
    """All stock arms of a scenario, one after the other, beside one engine of the plugin's."""
    with contextlib.ExitStack() as lasting:
        ours: Engine | None = None
        for stock in run.arms:
            if refused := plan.refusal(run.shape, chosen, stock):
                run.say(f"{chosen.name}, {stock}: {refused}")
                continue
            todo = run.open_cells(chosen, stock, wanted)
            if not todo:
                run.say(f"{chosen.name}, {stock}: measured already")
                continue
            needed = (
                run.settings["start_guess"]
                + plan.cell_seconds(todo[0], run.repetitions, first=True, plain=chosen.topk <= 1)
                + _RESERVE
            )
            if not run.clock.has(needed):
                run.say(f"{chosen.name}, {stock}: not started, {needed:.0f} s are needed; --resume goes on here")
                return
            if ours is not None and not ours.alive:
                ours.stop()
                ours = None
            with contextlib.ExitStack() as passing:
                with run.turns.shared(max(run.clock.left() - needed, 0.0)):
                    theirs = passing.enter_context(stopping(run, run.engine(chosen, stock, wanted))).start()
                    fresh = ours is None
                    if ours is None:
                        ours = lasting.enter_context(stopping(run, run.engine(chosen, OURS, wanted))).start()
                    run.say(f"{chosen.name}: starting {stock}{f' and {OURS}' if fresh else f' beside {OURS}'}")
                    answering = [wait(run, chosen, stock, engine) for engine in ((theirs, ours) if fresh else (theirs,))]
                if all(answering):
                    with run.turns.alone(max(run.clock.left() - _RESERVE, 0.0)):
                        serve_phase(run, chosen, stock, {stock: theirs, OURS: ours}, todo)
            if fresh and not answering[1]:
                ours.stop()
                return


@contextlib.contextmanager
def stopping(run: Run, engine: Engine) -> Iterator[Engine]:
    """Stop the engine at the end, not while another call measures, if that ends in time."""
    with engine:
        yield engine
        with contextlib.suppress(NoTurn), run.turns.shared(max(run.clock.left(), 0.0)):
            engine.stop()


def wait(run: Run, chosen: plan.Scenario, stock: str, engine: Engine) -> bool:
    """Block until an engine answers; a failure is written down."""
    try:
        engine.ready(min(run.start_limit, max(run.clock.left() - _RESERVE, 1.0)))
    except SpecverifyError as error:
        run.note(chosen, stock, engine, {"error": str(error)})
        run.save()
        run.say(f"{engine.server.name} failed: {error}")
        engine.stop()
        return False
    run.say(f"{engine.server.name} answers after {engine.start_seconds:.0f} s")
    return True


def serve_phase(run: Run, chosen: plan.Scenario, stock: str, engines: dict[str, Engine], todo: Sequence[plan.Cell]) -> None:
    """All cells that are left, and after each one what ran in both engines."""
    for number, cell in enumerate(todo):
        seconds = plan.cell_seconds(cell, run.repetitions, first=number == 0, plain=chosen.topk <= 1) + _RESERVE
        if not run.clock.has(seconds):
            run.say(f"{chosen.name}, {stock}, {cell.name}: not started, {seconds:.0f} s are needed; --resume goes on here")
            return
        row = run.row(chosen, stock, cell)
        try:
            row["arms"] = measure(run, engines, cell)
            # Where it could not be, `Engine.ready` raised.
            row["collector"] = dict.fromkeys(engines, plan.FROZEN)
            row["faults"] = check(run, chosen, stock, engines)
            run.say(line(row))
            for text in row["faults"]:
                run.say(f"does not count: {text}")
        except SpecverifyError as error:
            row["error"] = str(error)
            run.say(f"{chosen.name}, {stock}, {cell.name}: {error}")
        run.add(row)
        if "error" in row and not all(engine.alive for engine in engines.values()):
            run.say("an engine is gone; its other cells are left for --resume")
            return


def measure(run: Run, engines: dict[str, Engine], cell: plan.Cell) -> dict[str, Any]:
    """One warm-up round of each arm, then repetitions in turn.

    Raises:
        SpecverifyError: an engine that does not answer, or not as asked.
    """
    batch = plan.prompts(cell, run.shape.prompt_vocabulary)
    rounds: dict[str, list[Any]] = {arm: [] for arm in engines}
    device: dict[str, list[Any]] = {arm: [] for arm in engines}
    with Clocks() as clocks:
        for repetition in range(-1, run.repetitions):
            for arm in plan.order(list(engines), max(repetition, 0)):
                begin = time.monotonic()
                answer = engines[arm].generate(batch, cell.output, seconds=max(run.clock.left() - _RESERVE / 2, 1.0))
                if repetition >= 0:
                    rounds[arm].append(answer)
                    device[arm].append(clocks.between(begin, time.monotonic()))
    return {arm: {**plan.summary(found), "device": device[arm]} for arm, found in rounds.items()}


def check(run: Run, chosen: plan.Scenario, stock: str, engines: dict[str, Engine]) -> list[str]:
    """Ask both engines what ran, write it down, and say why it would not count.

    Raises:
        SpecverifyError: an engine does not say.
    """
    found = []
    for engine in engines.values():
        stats = engine.stats(max(min(run.clock.left(), 30.0), 3.0))
        wrong = faults(engine.setup, stats)
        run.note(chosen, stock, engine, {**stats, "faults": wrong})
        found += [f"{engine.setup.arm}: {text}" for text in wrong]
    return found


def line(row: dict[str, Any]) -> str:
    """A measured cell in one line."""
    parts = [f"{row['scenario']} input {row['input']} concurrency {row['concurrency']}:"]
    for arm, found in row["arms"].items():
        step = "" if found["ms_per_step"] is None else f", {found['ms_per_step']:.1f} ms a step"
        parts.append(f"{arm} {found['tokens_per_s']:.0f} tokens/s (±{found['spread'] / 2:.1%}{step})")
    ratio = row["arms"][OURS]["tokens_per_s"] / row["arms"][row["stock"]]["tokens_per_s"]
    retracted = sum(sum(found["retractions"]) for found in row["arms"].values())
    return " ".join(parts) + f" ratio {ratio:.3f}" + (f", {retracted} retractions" if retracted else "")


@contextlib.contextmanager
def broken_off_after(seconds: float) -> Iterator[None]:
    """Leave the block with `SystemExit`, which stops all engines, if it still runs then."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit("out of time: broken off, everything measured is written")

    previous = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def main(
    out: Annotated[Path, typer.Option(help="Result file to write.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(shapes.SHAPES)}.")] = "qwen3-8b",
    scenario: Annotated[list[str] | None, typer.Option(help="WxTOPK, chain, chain-few, off or pressure; several times.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Stock backend; several times.")] = None,
    length: Annotated[list[int] | None, typer.Option("--input", help="Tokens of a prompt; several times.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests at once; several times.")] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(help="INPUTxCONCURRENCY; several times. These, in place of every input with every concurrency."),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Measured rounds of each arm and cell.")] = 3,
    answer: Annotated[
        list[str] | None,
        typer.Option(help="INPUTxCONCURRENCY=TOKENS: answers of another length in this cell; several times. Measures it anew."),
    ] = None,
    context_length: Annotated[int | None, typer.Option(help="Of every engine; the model's own unless given.")] = None,
    minutes: Annotated[float, typer.Option(help="Start nothing that would not end by then.")] = 60.0,
    resume: Annotated[
        list[Path] | None, typer.Option(help="Result file to go on with; several times, of two rows of a cell the later file's.")
    ] = None,
    turns: Annotated[Path | None, typer.Option(help="Lock file of calls that share the device; each measures alone.")] = None,
    start_limit: Annotated[float, typer.Option(help="Seconds that an engine may take to start.")] = 240.0,
    start_guess: Annotated[float, typer.Option(help="Seconds that must be left to start engines at all.")] = 90.0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' output.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Two tiny cells, one repetition: does everything work?")] = False,
) -> None:
    """Measure whole engines."""
    if dry_run:
        shape, repetitions, start_guess, start_limit = "tiny", 1, 5.0, 600.0
    names = scenario or (["4x2"] if dry_run else list(plan.DEFAULT_SCENARIOS))
    arms = arm or (["triton"] if dry_run else ["fa3", "triton"])
    if cell and (length or concurrency):
        raise ArgumentError("cell", ", ".join(cell), "no --input and no --concurrency beside it")
    places = plan.places(cell or ())
    lengths = length or [n for n, _ in places] or ([8, 40] if dry_run else plan.INPUTS)
    counts = concurrency or [n for _, n in places] or ([2] if dry_run else plan.CONCURRENCIES)
    scenarios = [plan.scenario(name) for name in names]
    settings: dict[str, Any] = {
        "shape": shape,
        "scenarios": names,
        "arms": arms,
        "inputs": list(lengths),
        "concurrencies": list(counts),
        "cells": list(cell or ()),
    }
    settings |= {
        "repetitions": repetitions,
        "answers": list(answer or ()),
        "turns": turns is not None,
        "context_length": context_length,
        "minutes": minutes,
        "start_guess": start_guess,
        "dry_run": dry_run,
    }
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="specverify-") as folder, processes.stopping_on_signals():
        run = Run(shapes.get(shape), arms, repetitions, Clock(minutes * 60), start_limit, out, Path(folder), settings, logs)
        run.context_length = context_length
        run.turns = Turns(turns)
        for file in resume or ():
            if file.exists():
                run.load(file)
        run.save()
        wanted = [
            (chosen, plan.with_answers(plan.at(cells_of(chosen, lengths, counts, dry_run=dry_run), places), answer or ()))
            for chosen in scenarios
        ]
        with broken_off_after(minutes * 60 + _HARD_MARGIN):
            for chosen, cells in wanted:
                try:
                    serve_scenario(run, chosen, cells)
                except NoTurn as late:
                    run.say(f"{chosen.name}: {late}; --resume goes on here")
        pairs = [
            (chosen, stock, cells) for chosen, cells in wanted for stock in arms if not plan.refusal(run.shape, chosen, stock)
        ]
        left = sum(len(run.open_cells(chosen, stock, cells)) for chosen, stock, cells in pairs)
    finish(run, left)


def cells_of(chosen: plan.Scenario, lengths: Sequence[int], counts: Sequence[int], *, dry_run: bool) -> list[plan.Cell]:
    if chosen.under_pressure and not dry_run:
        return [plan.pressure_cell()]
    most = chosen.most_requests or max(counts)
    found = plan.cells(lengths, [count for count in counts if count <= most], plain=chosen.topk <= 1)
    if not found:
        raise ArgumentError("concurrency", ", ".join(map(str, counts)), f"at most {most} requests at once in {chosen.name}")
    # A step takes seconds where kernels run in Triton's interpreter.
    return [plan.Cell(cell.input, cell.concurrency, 4) for cell in found] if dry_run else found


def finish(run: Run, left: int) -> None:
    """Say what came of it. The exit code is 1 where something failed, and 0 where it is only not done yet."""
    failed = sum("error" in row or bool(row.get("faults")) for row in (*run.cells, *run.engines))
    done = sum(map(plan.counts, run.cells))
    print(f"{done} cells measured, {left} left, {failed} engines or cells failed: {run.out}", flush=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    show_without_traceback()
    typer.run(main)
