"""Random calls of sparse MLA decode until the time is up: families of one kernel each, with sizes and bytes that are drawn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.gpu.sparse_mla_calls import Bound, Checker, load
from tests.gpu.sparse_mla_problems import Problem

#: Calls of one family in a row, whose kernels are then loaded.
CHUNK = 8

#: What a kernel is compiled for; sizes are drawn for each call.
FAMILIES = (
    Problem(queries=1, heads=64),
    Problem(queries=1, heads=128, lens=False, sink=False),
    Problem(queries=1, heads=16, swa_format="swa_fp8", swa_page_rows=256, main_page_rows=128),
    Problem(queries=6, heads=16, shared=True, starts=True),
    Problem(queries=4, heads=32, shared=True, starts=True, shared_main=True, swa_layout="interleaved", main_layout="interleaved"),
    Problem(queries=8, heads=8, shared=True, lens=False, swa_page_rows=61, main_page_rows=61, pad=48),
    Problem(queries=2, heads=64, shared=True, starts=True, swa_page_rows=128, pad=1024),
    Problem(queries=5, heads=16, swa_layout="interleaved", main_page_rows=256, sink=False),
    Problem(queries=1, heads=64, topk=0),
    Problem(queries=3, heads=16, topk=0, shared=True, starts=True, swa_format="swa_fp8"),
)  # fmt: skip


def problem(number: int, seed: int) -> Problem:
    """Case `number`, the same everywhere. Mostly widths that 16 divides, of which kernels are compiled anew."""
    family = FAMILIES[number // CHUNK % len(FAMILIES)]
    source = random.Random(f"{seed}: {number}")
    step = source.choice((16, 16, 16, 1))
    window = max(source.randint(1, 272 // step) * step, family.queries)
    topk = source.randint(1, 1024 // step) * step if family.topk else 0
    # As many rows as keys allow: the oracle takes them one by one.
    batch = min(1 + int(160 ** source.random()), 1 + 60_000 // (family.queries * (window + topk)))
    missing = source.choice((0.0, 0.1, 0.1, 0.5, 1.0))
    return replace(family, batch=batch, window=window, topk=topk, missing=missing, seed=number)


def soak(
    device: str, query: str, seed: int, first: int, step: int, deadline: float, each: Callable[[dict[str, Any]], None],
    *, most: int | None = None, clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Run cases first, first + step, ... until the deadline; `each` gets the counts so far, after every case."""
    c, cases, failed = Checker(device, query), 0, list[str]()
    with c.watching():
        for number in _numbers(first, step, most):
            if clock() > deadline:
                return
            p = c.size(problem(number, seed))
            before = len(c.problems)
            try:
                _case(c, p, number)
            except Exception as error:  # a refusal is a failure too: every case should be served
                c.problems.append(f"{type(error).__name__}: {error}"[:400])
            cases += 1
            failed += [f"case {number}: {text}" for text in c.problems[before:]]
            counts = {"cases": cases, "checks": c.checks, "failures": len(failed), "kernels": dict(c.kernels)}
            each({**counts, "problems": failed[:20]})
            if len(failed) >= 20:
                return


def _numbers(first: int, step: int, most: int | None) -> Iterator[int]:
    """Chunks of numbers, every `step`-th chunk from the first on."""
    number = 0
    while most is None or number < most:
        chunk, place = divmod(number, CHUNK)
        yield (first + chunk * step) * CHUNK + place
        number += 1


def _case(c: Checker, p: Problem, number: int) -> None:
    bound = Bound(c.make(p), strided=number % 5 == 0)
    c.check(f"{p}", bound)
    if number % 3 == 0:
        graph = c.graph(bound.run)
        load(bound.call, c.make(replace(p, seed=p.seed + 1_000_003)))
        c.check(f"replayed, {p}", bound, graph)
