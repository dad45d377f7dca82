"""Choose launch configurations for an architecture that is not at hand: the largest blocks that compile within its limits.

    python -m benchmarks.seed_tables --arch sm_100 [--cases 16] [--largest]

An entry of the table that was not measured keeps its launch where every call that it serves compiles with it without a problem
(see `sglang_specverify/kernels/aot.py`). Where some do not, the next candidates are tried, largest blocks first, and only for the
calls that need one: the entry is divided by `AXES`. Measured entries stay. The table is rewritten in place, entry by
entry. Nothing is known of speed; `specverify tune` on the hardware is what measures.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels import aot, aot_cases, tables
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, render
from sglang_specverify.kernels.targets import from_arch

FOLDER = Path(__file__).parents[1] / "configs" / "kernels"


#: What takes registers beside the blocks: a divided prefix is combined in the end, and an FP8 cache is converted.
AXES = ("split", "cache_bits")
#: Values of `AXES`.
Key = tuple[Any, ...]


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
            # Eight wavefronts on four SIMDs are two on each: fewer cannot be asked for.
            if amd and warps == 8 and dict(chosen)["waves_per_eu"] < 2:
                continue
            yield LaunchConfig(block_m, block_n, warps, stages, 2 if rows <= 32 and kernel == "fused" else 1, chosen)


def smaller(config: LaunchConfig, among: Sequence[LaunchConfig]) -> list[LaunchConfig]:
    """`config` itself and the candidates behind it, all of them where it is none; each combines parts as it does."""
    among = [replace(each, combine=config.combine) for each in among]
    return [config, *among[among.index(config) + 1 if config in among else 0 :]]


def spread(cases: Sequence[aot_cases.Case], count: int | None) -> list[aot_cases.Case]:
    """`count` of the cases, evenly taken; all where None."""
    if count is None or count >= len(cases):
        return list(cases)
    return [cases[k * len(cases) // count] for k in range(count)]


def problems(case: aot_cases.Case, config: LaunchConfig, path: Path) -> list[str]:
    _, found = aot.check(case.launch(config), case.arch, aot.Cache(path))
    return found


def parts(cases: Sequence[aot_cases.Case]) -> dict[Key, list[aot_cases.Case]]:
    """The calls of an entry by their values of `AXES`.

    Features are no axis: a table does not know them, and each part has the calls of several.
    """
    out: dict[Key, list[aot_cases.Case]] = {}
    for case in cases:
        facts = case.facts()
        out.setdefault(tuple(getattr(facts, axis) for axis in AXES), []).append(case)
    return out


def seed(
    pool: Executor, name: str, among: Sequence[LaunchConfig], cases: Sequence[aot_cases.Case], path: Path, console: Console
) -> LaunchConfig:
    """The first launch with which no call has a problem.

    Raises:
        SpecverifyError: every one has one.
    """
    last, order = "", list(cases)
    for config in among:
        running = [pool.submit(problems, case, config, path) for case in order]
        bad = next(((case, found) for case, future in zip(order, running, strict=True) if (found := future.result())), None)
        for future in running:
            future.cancel()
        if bad is None:
            console.print(f"{name}: {config} ({len(cases)} calls)", highlight=False, soft_wrap=True)
            return config
        # What was too much for one candidate is asked first of the next.
        order.sort(key=lambda case: case is not bad[0])
        last = f"{bad[0].name}: {bad[1][0]}"
        console.print(f"  not {config}: {last}", highlight=False, soft_wrap=True)
    raise SpecverifyError(f"no candidate for {name}; the last one: {last}", "add smaller candidates, or refuse these calls")


def joined(entry: Entry, launches: Mapping[Key, LaunchConfig]) -> list[Entry]:
    """As few entries as give each part of `entry` its launch; the last has the conditions of `entry` and the commonest launch.

    Of launches that are equally common, the one of the first part.
    """
    counts = Counter(launches.values())
    common = max(counts, key=lambda config: counts[config])
    for axes in (axes for size in range(len(AXES) + 1) for axes in combinations(range(len(AXES)), size)):
        of: dict[Key, set[LaunchConfig]] = {}
        for key, config in launches.items():
            of.setdefault(tuple(key[axis] for axis in axes), set()).add(config)
        if all(len(configs) == 1 for configs in of.values()):
            break
    own = [
        replace(entry, when=_narrowed(entry, {AXES[axis]: value for axis, value in zip(axes, key, strict=True)}), launch=config)
        for key, (config,) in of.items()
        if config != common
    ]
    return [*own, replace(entry, launch=common)]


def _narrowed(entry: Entry, values: dict[str, object]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    return tuple((dict(entry.when) | {name: (value,) for name, value in values.items()}).items())


def main(
    arch: Annotated[str, typer.Option(help="Architecture whose table is rewritten.")],
    cases: Annotated[int | None, typer.Option(min=1, help="Calls to compile for each part of an entry.  [default: all]")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="Begin with the largest candidates, not with the table's.")] = False,
    processes: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes.  [default: one for each core]")] = None,
) -> None:
    """Rewrite the entries of a table that were not measured."""
    from_arch(arch)
    table = tables.read(arch)
    if table is None:
        raise SpecverifyError(f"there is no table for {arch}", f"write {arch}.json with the ranges of calls first")
    console, path = Console(stderr=True), aot.Cache.default().path
    everything = list(aot_cases.shipped(arch))
    done: dict[str, tuple[Entry, ...]] = dict(table.kernels)
    with ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        for kernel, entries in table.kernels.items():
            made: list[Entry] = []
            for number, entry in enumerate(entries):
                name = f"{kernel} entry {number}"
                served = [case for case in everything if case.configured()[2] == name]
                if entry.measured or not served:
                    made.append(entry)
                    continue
                launches = {}
                for key, calls in parts(served).items():
                    among = _among(table.arch, kernel, entry, calls, largest=largest)
                    named = f"{arch} {name}, {', '.join(f'{axis} {value}' for axis, value in zip(AXES, key, strict=True))}"
                    launches[key] = seed(pool, named, among, spread(calls, cases), path, console)
                made += joined(entry, launches)
                done[kernel] = (*made, *entries[number + 1 :])
                (FOLDER / f"{arch}.json").write_text(render(replace(table, kernels=done)), encoding="utf-8")


def _among(arch: str, kernel: str, entry: Entry, cases: Sequence[aot_cases.Case], *, largest: bool) -> list[LaunchConfig]:
    least, most = dict(entry.when).get("rows", (1, None))
    every = list(candidates(arch, kernel, most or 2 * least, max(max(case.dims) for case in cases) > 128))
    return every if largest else smaller(entry.launch, every)


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecverifyError as error:
        raise SystemExit(f"seed_tables: error: {error}") from None
