"""Random calls of the Triton kernels against the FP64 reference, each element within its bound.

    python -m tests.interpreter.soak --cases 10000 --processes 8 --minutes 8 --out soak.json

Case n of seed s is the same on every machine of the same kind; `soak_cases.py` makes it, and `soak_workers.py` shares cases out
over processes. Reference and bounds are computed on the device. Exits with 1 if a case was outside its bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.interpreter.environment import prepare
from tests.interpreter.soak_cases import case
from tests.interpreter.soak_outcomes import Outcome, Tally

#: Seconds from one line of progress, and one write of what there is, to the next.
EVERY = 15.0


def sharpened(operation: str, arguments: dict[str, Any], device: str, *, seed: int = 2) -> str:
    """The kernel with specialised warps in place of the fused one, where it takes the call: divided, for every second seed."""
    from sglang_specverify.kernels.launch import arch_of
    from sglang_specverify.kernels.specialized import refusal
    from tests.interpreter.bounds import checked

    instead = {"fused": "specialized"}
    if seed % 4 >= 2:
        instead |= {"fused_split": "specialized_split", "planned": "planned_specialized"}
    if operation not in instead or device != "cuda":
        return operation
    return operation if refusal(*checked(arguments), arch_of(torch.device(device))) else instead[operation]


@contextmanager
def served() -> Iterator[list[str]]:
    """The variants that the calls with a plan within the context were served by, in order: the plan decides, not its name."""
    from sglang_specverify.kernels import run

    seen: list[str] = []
    stock = run.choose

    def choose(a: Any, problem: Any, variant: str, plan: Any = None) -> Any:
        choice = stock(a, problem, variant, plan)
        if plan is not None:
            seen.append(choice.name)
        return choice

    run.choose = choose
    try:
        yield seen
    finally:
        run.choose = stock


def run_case(operation: str, c: Any, arguments: dict[str, Any], device: str) -> float:
    """The largest error of the case over its bound; raises `AssertionError` where it is above 1."""
    from sglang_specverify.kernels import tree_suffix_merge
    from tests.interpreter.bounds import compare, expect_merged
    from tests.interpreter.calls import check, prefix_state, suffix_arguments, to_device
    from tests.interpreter.plans import plan_for

    a = to_device(arguments, device)
    where = {"strided": c.strided, "lse_layout": "heads" if c.seed % 2 else "rows"}
    if operation == "merge":
        before = prefix_state(a, c.q_dtype)
        out, lse = before[0].clone(), before[1].clone()
        first = ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")
        rest = {name: value for name, value in a.items() if name not in first}
        tree_suffix_merge(*(a[name] for name in first), out, lse, **rest)
        return compare(a, out, lse, expected=expect_merged(a, suffix_arguments(a), *before))
    if operation == "deterministic":
        return check({**a, "deterministic": True}, **where, variant="auto", splits=16)
    if operation in ("planned", "planned_specialized"):
        plan = plan_for(a, kernel="fused" if operation == "planned" else "specialized")
        return check(a, **where, variant="auto", plan=plan, splits=300)
    return check(a, **where, variant=operation, splits=300)


def outcome_of(number: int, seed: int, families: int, device: str) -> Outcome:
    """Run one case."""
    began = time.monotonic()
    operation, c, arguments = case(number, seed, families, device)
    operation = sharpened(operation, arguments, device, seed=c.seed)
    ratio, wrong = 0.0, None
    with served() as seen:
        try:
            ratio = run_case(operation, c, arguments, device)
        except Exception as error:  # a refusal is a failure here as well: every case should be served
            wrong = f"{type(error).__name__}: {error}"[:500]
    if operation in ("planned", "planned_specialized"):
        operation = "_".join(["planned", *seen[:1]])
    types = f"q {str(c.q_dtype)[6:]}, cache {str(c.cache_dtype)[6:]}"
    seconds = time.monotonic() - began
    return Outcome(number, operation, c.kind, types, repr(c), sum(c.prefix_lens), ratio, wrong, seconds)


def soak(
    cases: int, minutes: float, seed: int, families: int, device: str, *, first: int = 0, processes: int = 0,
    each: Callable[[Tally], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run cases until they or the minutes are used up, here or in so many processes; `each` is called after every case."""
    tally, numbers = Tally(), range(first, first + cases)
    deadline = tally.began + 60 * minutes
    outcomes = _here(numbers, seed, families, device, deadline)
    if processes:
        from tests.interpreter.soak_workers import shared

        outcomes = shared(numbers, seed, families, processes, deadline)
    for one in outcomes:
        tally.add(one)
        if each is not None:
            each(tally)
    how = {"seed": seed, "families": families, "processes": processes, "asked": cases}
    return {**ended(tally, cases, deadline), **how, **tally.result(seed, families)}


def ended(tally: Tally, asked: int, deadline: float) -> dict[str, Any]:
    """Whether all cases that were asked for ran, and what stopped the soak where not."""
    if tally.count["all"] == asked:
        return {"finished": True}
    return {"finished": False, "stopped": "time" if time.monotonic() >= deadline else "too many processes died"}


def _here(numbers: Sequence[int], seed: int, families: int, device: str, deadline: float) -> Iterator[Outcome]:
    for number in numbers:
        if time.monotonic() > deadline:
            return
        yield outcome_of(number, seed, families, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one")
    parser.add_argument("--processes", type=int, default=0, help="that share the cases out; 0: this one alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = prepare()
    from benchmarks import record

    names = ("cases", "minutes", "seed", "families", "first", "processes")
    command = " ".join(["python -m tests.interpreter.soak", *(f"--{name} {getattr(options, name):g}" for name in names)])
    last, shown = time.monotonic(), 0

    def progress(tally: Tally) -> None:
        nonlocal last, shown
        for one in tally.failures[shown:]:
            print(f"case {one.number}, {one.operation}: {one.error}", file=sys.stderr, flush=True)
        shown = len(tally.failures)
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            print(tally.line(), flush=True)
            if options.out is not None:
                so_far = {"finished": False, "device": device, **tally.result(options.seed, options.families)}
                record.write(options.out, {"command": command, **so_far})

    how = {"first": options.first, "processes": options.processes, "each": progress}
    result = soak(options.cases, options.minutes, options.seed, options.families, device, **how)
    if options.out is not None:
        record.write(options.out, {"command": command, "device": device, **result})
    print(f"{result['cases']} cases in {result['seconds']} s, {result['outside_their_bound']} outside their bound")
    if not result["finished"]:
        print(f"not all of {result['asked']} cases ran: {result['stopped']}")
    print("largest error over its bound:", result["largest_error_over_bound"])
    return 1 if result["outside_their_bound"] or not result["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
