"""Compile what stock arms compile at their first calls, all of it at once, so that a timed run finds it in their caches.

    python -m benchmarks.stock_warm --arm flashinfer --arm fa4
    python -m benchmarks.stock_warm --arm "sglang triton" --processes 10

FlashInfer builds a module for every type and head dim with nvcc (`~/.cache/flashinfer`; ninja, nvcc and a host compiler must be
there), FlashAttention 4 a kernel for every way of calling it (`~/.cache/sglang/cute_aot`). SGLang's sparse decode in Triton tries
3 to 10 launches of a kernel, each compiled for one row, for multiples of 16 and for other counts (Triton's cache). Each family of
points has a process of its own, which says how long its points took and whether the arm is right or why it does not serve. Needs
a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer

from benchmarks import gate, inputs, measure, sparse_mla_arms, sparse_mla_measure, sparse_mla_pool
from benchmarks import sparse_mla_points as sparse
from benchmarks.points import FAMILIES, Point
from benchmarks.stock_triton import STOCK

#: Arms that compile for long: of `benchmarks.verify_attention`, and of `benchmarks.sparse_mla`.
DENSE, SPARSE = ("flashinfer", "fa4"), ("sglang triton",)
ARMS = (*DENSE, *SPARSE)
#: (kind, batch, W, L): FlashAttention 4 divides the keys over many splits, few, or none, and compiles these apart.
CALLS = (
    ("tree", 1, 8, 256),
    ("tree", 4, 16, 256),
    ("tree", 32, 64, 256),
    ("chain", 1, 4, 256),
    ("chain", 4, 4, 256),
    ("chain", 64, 4, 256),
)


def work() -> Iterator[tuple[str, list[Point]]]:
    """The calls of every family that differs in what is compiled: neither pages nor lengths do."""
    families = {"plain": {}} | {name: facts for name, facts in FAMILIES.items() if not {"page_size", "mixed"} & facts.keys()}
    for name, facts in families.items():
        # Chains are measured in the plain family alone.
        calls = CALLS if name == "plain" else CALLS[:3]
        yield name, [Point(kind, *sizes, **facts) for kind, *sizes in calls]  # type: ignore[arg-type]


def sparse_work() -> Iterator[sparse.Point]:
    """One point for each kernel of SGLang's sparse decode and each kind of row count: both lists of rows, the window alone."""
    for batch in (1, 8, 32):
        yield from (sparse.Point(batch, 512), sparse.Point(batch, 0), sparse.Point(batch, 512, 128))
    # Beyond 32 rows of 128 heads the keys are no longer divided.
    yield sparse.Point(64, 512, 128)


def jobs(chosen: Sequence[str]) -> Iterator[tuple[Callable[..., list[str]], tuple[Any, ...]]]:
    """What the processes do: a function and its arguments, the longest first."""
    for name in (name for name in chosen if name in SPARSE):
        yield from ((warm_sparse, (name, point)) for point in sparse_work())
    for name in (name for name in chosen if name in DENSE):
        yield from ((warm, (name, *each)) for each in work())


def warm_sparse(arm_name: str, point: sparse.Point) -> list[str]:
    """As `warm`, of one point of sparse MLA."""
    begin = time.monotonic()
    arm = next(each for each in sparse_mla_arms.ARMS if each.name == arm_name)
    row = sparse_mla_measure.measure(point, [arm], None, sparse_mla_pool.make_pool(torch.device("cuda")))
    found = row["arms"][arm_name]
    return [_line(begin, arm_name, point.name, found)]


def _line(begin: float, arm: str, what: str, found: dict[str, Any]) -> str:
    return f"{time.monotonic() - begin:5.1f} s  {arm}, {what}: " + (found.get("why") or f"error {found['error']:.2g}")


def warm(arm_name: str, family: str, points: list[Point]) -> list[str]:
    """One line for each point: seconds of the first call, and the error or the reason."""
    arm = next(each for each in STOCK if each.name == arm_name)
    said = []
    for point in points:
        begin = time.monotonic()
        made = inputs.make(point, torch.device("cuda"), most_layers=1)
        calls: dict[str, Any] = {}
        found = measure.check(arm, made, gate.samples(made), calls)
        torch.cuda.synchronize()
        said.append(_line(begin, arm_name, f"{family}, {point.name}", found))
    return said


def main(
    arm: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(ARMS)}; several times.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="At once.")] = 6,
) -> None:
    """Compile; the exit code is 0 also where an arm does not serve."""
    chosen = arm or list(ARMS)
    unknown = set(chosen) - set(ARMS)
    if unknown:
        raise typer.BadParameter(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}", param_hint="--arm")
    begin = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(function, *given): given for function, given in jobs(chosen)}
        for future in as_completed(futures):
            try:
                print("\n".join(future.result()), flush=True)
            except Exception as failure:
                print(f"{futures[future][0]}, {futures[future][1]}: {measure.why(failure)}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
