"""`specverify tune`: the fastest launch configurations on this machine's GPU, as a table for `configs/kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sglang_specverify import flags
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import detect

if TYPE_CHECKING:
    from sglang_specverify.kernels.launch import LaunchConfig
    from sglang_specverify.tuning.buckets import Bucket
    from sglang_specverify.tuning.results import Measured


def tune(
    out: Annotated[Path, typer.Option(help="Table to write; beside it the measurements, for a run that goes on later.")],
    kernel: Annotated[str | None, typer.Option(help="fused or tree_suffix.  [default: both]")] = None,
    only: Annotated[str | None, typer.Option(help='Ranges whose name holds this, as "rows 1-16 dim 65-128".')] = None,
) -> None:
    """Time launch configurations of the attention kernels on this machine's GPU, and write the fastest as a table.

    Every launch is compared with the reference before it is timed. A run that was interrupted goes on where it stopped. Two
    hours or more for everything; --kernel and --only take parts. The table is what configs/kernels/<arch>.json holds, with all
    timings beside it; what earlier runs with the same --out measured is in it too, and all other ranges keep their entries.
    """
    flags.read()
    machine = detect()
    try:
        from sglang_specverify.tuning import results, run
    except ModuleNotFoundError as error:
        raise SpecverifyError(f"tuning needs {error.name}", "install SGLang or PyTorch beside the plugin") from None
    run.check_machine(machine)
    todo = run.chosen(kernel, only)
    run.check_out(out)
    gpu = run.Gpu(machine.arch)
    belongs = gpu.belongs(machine)
    state = results.State.load(run.state_path(out), belongs)
    before = run.measured_before(machine.arch, state, todo)
    measured: dict[Bucket, dict[LaunchConfig, Measured]] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(todo))
            for bucket in todo:
                tried = measured.setdefault(bucket, {})
                for step in run.measure_bucket(bucket, machine.arch, state, gpu.measure):
                    tried[step.config] = step.measured
                    progress.update(task, description=f"{bucket.name}: {step.left} to go")
                progress.advance(task)
    except KeyboardInterrupt:
        console.print(f"specverify: interrupted; the same command goes on with {run.state_path(out)}")
        raise typer.Exit(130) from None
    note = f"Tuned on {machine.name} with specverify tune."
    run.write(out, run.text_of_table(machine.arch, belongs["triton"], note, before | measured, gpu.spills))
    console.print(_summary(measured, machine.arch), f"written: {out}")


def _summary(measured: dict[Bucket, dict[LaunchConfig, Measured]], arch: str) -> Table:
    """Of each range the fastest launch, its times, and how many times as fast it is as what served before."""
    from sglang_specverify.tuning import results, run

    table = Table("calls", "fastest launch", "microseconds", "before / now", "failed")
    for bucket, tried in measured.items():
        order = results.ranked(tried)
        failed = sum(bool(m.problem) for m in tried.values())
        if not order:
            table.add_row(bucket.name, "none ran", "", "", str(failed))
            continue
        best, _ = order[0]
        served = run.served(bucket, arch, tried)
        ratio = "" if served.problem else f"{results.score(served, tried[best].microseconds):.2f}"
        us = ", ".join(f"{us:.1f}" for us in tried[best].microseconds)
        table.add_row(bucket.name, results.text_of(best), us, ratio, str(failed))
    return table
