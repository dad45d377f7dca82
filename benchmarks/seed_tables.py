"""Choose launch configurations for an architecture that is not at hand: the largest blocks that compile within its limits.

    python -m benchmarks.seed_tables --arch sm_100 [--cases 16]

An entry of the table that was not measured gets the first candidate, largest blocks first, with which every call that the
entry serves compiles without a problem (see `sglang_specverify/kernels/aot.py`). Measured entries stay. The table is rewritten
in place, entry by entry. Nothing is known of speed; `specverify tune` on the hardware is what measures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels import aot, aot_cases, tables
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, Table, render
from sglang_specverify.kernels.targets import from_arch

FOLDER = Path(__file__).parents[1] / "configs" / "kernels"


def candidates(arch: str, kernel: str, rows: int, wide: bool) -> Iterator[LaunchConfig]:
    """Launches for calls of `rows` rows, largest first: rows, keys, pipeline, then fewer before more warps.

    Args:
        wide: head dims above 128, whose tiles of keys are twice as large.
    """
    amd = arch.startswith("gfx")
    deep = 2 if wide or kernel == "tree_suffix" else 3
    depths = ((2, 1) if from_arch(arch).shared_bytes > 64 * 1024 else (1,)) if amd else tuple(range(deep, 0, -1))
    options = [(("waves_per_eu", waves), ("matrix_instr_nonkdim", 16)) for waves in (2, 1, 0)] if amd else [()]
    blocks = [block for block in (128, 64, 32, 16) if block <= max(16, rows)]
    for block_m, block_n, stages, chosen in product(blocks, (32, 16) if wide else (64, 32, 16), depths, options):
        for warps in (8,) if block_m == 128 else (4, 8):
            yield LaunchConfig(block_m, block_n, warps, stages, 2 if rows <= 32 and kernel == "fused" else 1, chosen)


def spread(cases: Sequence[aot_cases.Case], count: int | None) -> list[aot_cases.Case]:
    """`count` of the cases, evenly taken; all where None."""
    if count is None or count >= len(cases):
        return list(cases)
    return [cases[k * len(cases) // count] for k in range(count)]


def problems(case: aot_cases.Case, config: LaunchConfig, path: Path) -> list[str]:
    _, found = aot.check(case.launch(config), case.arch, aot.Cache(path))
    return found


def seed(
    pool: Executor, table: Table, kernel: str, number: int, cases: list[aot_cases.Case], path: Path, console: Console
) -> Entry:
    """The entry with the first candidate that has no problem.

    Raises:
        SpecverifyError: every candidate has one.
    """
    entry = table.kernels[kernel][number]
    least, most = dict(entry.when).get("rows", (1, None))
    name = f"{table.arch} {kernel} entry {number}"
    last = ""
    for config in candidates(table.arch, kernel, most or 2 * least, max(max(case.dims) for case in cases) > 128):
        running = [pool.submit(problems, case, config, path) for case in cases]
        bad = next(((case, found) for case, future in zip(cases, running, strict=True) if (found := future.result())), None)
        for future in running:
            future.cancel()
        if bad is None:
            console.print(f"{name}: {config} ({len(cases)} calls)", highlight=False, soft_wrap=True)
            return replace(entry, launch=config)
        last = f"{bad[0].name}: {bad[1][0]}"
        console.print(f"  not {config}: {last}", highlight=False, soft_wrap=True)
    raise SpecverifyError(f"no candidate for {name}; the last one: {last}", "add smaller candidates, or refuse these calls")


def main(
    arch: Annotated[str, typer.Option(help="Architecture whose table is rewritten.")],
    cases: Annotated[int | None, typer.Option(min=1, help="Calls to compile for each entry.  [default: all]")] = None,
    processes: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes.  [default: one for each core]")] = None,
) -> None:
    """Rewrite the entries of a table that were not measured."""
    from_arch(arch)
    table = tables.read(arch)
    if table is None:
        raise SpecverifyError(f"there is no table for {arch}", f"write {arch}.json with the ranges of calls first")
    console, path = Console(stderr=True), aot.Cache.default().path
    kernels = {kernel: list(entries) for kernel, entries in table.kernels.items()}
    everything = list(aot_cases.shipped(arch))
    with ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for kernel, entries in kernels.items():
            for number, entry in enumerate(entries):
                served = [case for case in everything if case.configured()[2] == f"{kernel} entry {number}"]
                if not entry.measured and served:
                    entries[number] = seed(pool, table, kernel, number, spread(served, cases), path, console)
                    done = replace(table, kernels={kernel: tuple(entries) for kernel, entries in kernels.items()})
                    (FOLDER / f"{arch}.json").write_text(render(done), encoding="utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecverifyError as error:
        raise SystemExit(f"seed_tables: error: {error}") from None
