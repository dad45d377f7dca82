"""Compile what the points need in several processes at once, before anything is timed.

A kernel is compiled where it first runs, in the one process that measures, and a dozen of them for each shape take longer than
the measurement. Triton keeps what it compiled on disk, so each process runs small points of some shapes, once through every arm.

    python -m benchmarks.long_context_compile --shape 3 --skip fa3
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import torch
import typer

from benchmarks import long_context_measure as measuring
from benchmarks import long_context_points as points
from benchmarks.long_context_arms import ARMS
from benchmarks.long_context_pool import make_pool
from benchmarks.points import Point

#: Upstream's kernel is compiled for each of its numbers of parts, which follow the length.
LENGTHS = (1 << 10, 1 << 12, 1 << 14)
#: Launch configurations follow the batch, and the size of what plans a step too.
BATCHES = (1, 8, 16, 32, 64)
#: Arms of one process: this project's, and SGLang's.
GROUPS = (("fused", "fused_split", "deterministic"), ("triton", "upstream_splitkv"))
#: Compiling goes on no longer than this, in seconds; what is missing then compiles where it runs.
LONGEST = 120.0


def shapes() -> list[Point]:
    """One point of every shape: the plane's and all variations."""
    return [points.chain(1, LENGTHS[0]), *(points.chain(1, LENGTHS[0], **facts) for facts in points.VARIATIONS.values())]


def small(shape: Point) -> list[Point]:
    """The points that make every kernel of a shape compile."""
    batches = BATCHES if shape == shapes()[0] else (BATCHES[0], BATCHES[-1])
    by_length = [replace(shape, length=length) for length in LENGTHS]
    return by_length + [replace(shape, batch=batch) for batch in batches[1:]]


def jobs(chosen: Iterable[Point], skip: Sequence[str] = ()) -> list[list[str]]:
    """Options of each process, for the shapes that the points have."""
    alike = {replace(point, batch=1, length=LENGTHS[0]) for point in chosen}
    found = []
    for number, shape in enumerate(shapes()):
        for group in GROUPS:
            arms = [option for name in group if name not in skip for option in ("--arm", name)]
            if shape in alike and arms:
                found.append(["--shape", str(number), *arms])
    return found


@contextmanager
def ahead(chosen: Iterable[Point], processes: int, deadline: float, skip: Sequence[str] = ()) -> Iterator[None]:
    """Compile while the block runs, and on until all is compiled; no process outlives this."""
    waiting = jobs(chosen, skip) if processes > 0 else []
    running: list[subprocess.Popen[bytes]] = []
    begin = time.monotonic()

    def fill() -> None:
        while waiting and len(running) < processes:
            command = [sys.executable, "-m", "benchmarks.long_context_compile", *waiting.pop(0)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    try:
        fill()
        yield
        while running and time.monotonic() < min(deadline, begin + LONGEST):
            for process in running:
                if process.poll():
                    typer.echo(f"compiling failed: {process.args!r}")
            running[:] = [process for process in running if process.poll() is None]
            fill()
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if processes > 0:
        typer.echo(f"compiled ahead: {time.monotonic() - begin:.0f} s")


def main(
    shape: Annotated[int, typer.Option(help="Number of the shape.")],
    arm: Annotated[list[str], typer.Option(help="An arm to run; repeatable.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it.")] = "cuda",
) -> None:
    """Run small points of one shape through some arms, for what that leaves in Triton's cache."""
    pool = make_pool(points.SMALL_POOL, torch.device(device))
    for point in small(shapes()[shape]):
        measuring.measure(point, [each for each in ARMS if each.name in arm], None, pool, with_step="fused" in arm)


if __name__ == "__main__":
    typer.run(main)
