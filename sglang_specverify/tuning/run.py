"""The whole of `specverify tune`: measure every candidate of every range of calls, and write the table."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.hardware import Hardware
from sglang_specverify.kernels import tables
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, render
from sglang_specverify.tuning.buckets import Bucket, buckets, candidates, refinements
from sglang_specverify.tuning.inputs import expect, facts_of, make
from sglang_specverify.tuning.results import Measured, State, entry_of, key_of, ranked, table_of, timings_of

#: How one launch does on the calls of a bucket.
Measure = Callable[[Bucket, LaunchConfig], Measured]
#: Bytes that a launch spills on the calls of a bucket.
Spills = Callable[[Bucket, LaunchConfig], int]


@dataclass(frozen=True)
class Step:
    """One launch of a bucket has been measured, or was found in the file of an earlier run."""

    bucket: Bucket
    config: LaunchConfig
    measured: Measured
    left: int


def chosen(kernel: str | None, only: str | None) -> tuple[Bucket, ...]:
    """The buckets of `kernel` whose name holds `only`.

    Raises:
        SpecverifyError: none.
    """
    found = tuple(b for b in buckets() if kernel in (None, b.kernel) and (only is None or only in b.name))
    if not found:
        names = "\n  ".join(b.name for b in buckets())
        raise SpecverifyError(f"nothing to tune with --kernel {kernel} --only {only!r}; there are\n  {names}", "ask for less")
    return found


def measure_bucket(bucket: Bucket, arch: str, state: State, measure: Measure) -> Iterator[Step]:
    """Measure the candidates, then the refinements of the fastest; what `state` holds already is not measured again."""
    tried: dict[LaunchConfig, Measured] = {}
    todo = list(candidates(arch, bucket, now(bucket, arch)))
    refined = False
    while todo:
        config = todo.pop(0)
        key = key_of(bucket, config)
        if key not in state.measured:
            state.add(key, measure(bucket, config))
        tried[config] = state.measured[key]
        if not todo and not refined and (order := ranked(tried)):
            refined = True
            todo = [c for c in refinements(arch, bucket, order[0][0]) if c not in tried]
        yield Step(bucket, config, tried[config], len(todo))


def measured_before(arch: str, state: State, but: Sequence[Bucket]) -> dict[Bucket, dict[LaunchConfig, Measured]]:
    """The buckets, but these, that earlier runs finished."""

    def measure(bucket: Bucket, config: LaunchConfig) -> Measured:
        raise _Missing

    found = {}
    for bucket in buckets():
        if bucket not in but:
            with contextlib.suppress(_Missing):
                found[bucket] = {step.config: step.measured for step in measure_bucket(bucket, arch, state, measure)}
    return found


class _Missing(Exception):
    """Not measured yet."""


def now(bucket: Bucket, arch: str) -> tuple[LaunchConfig, ...]:
    """What serves each of the bucket's calls without tuning: not one launch for all where a table asks how full the device is."""
    return tuple(tables.lookup(arch, bucket.kernel, facts_of(call, arch))[0] for call in bucket.calls)


def served(bucket: Bucket, arch: str, measured: Mapping[LaunchConfig, Measured]) -> Measured:
    """Each of the bucket's calls with what serves it without tuning; a problem where one of them was not timed."""
    found = [measured.get(config, Measured((), "not measured")) for config in now(bucket, arch)]
    if failed := [m.problem for m in found if m.problem]:
        return Measured((), failed[0])
    return Measured(tuple(m.microseconds[n] for n, m in enumerate(found)))


def text_of_table(
    arch: str,
    triton: str,
    note: str,
    measured: Mapping[Bucket, Mapping[LaunchConfig, Measured]],
    spills: Spills,
) -> str:
    """The result file."""
    tuned: dict[str, list[Entry]] = {"fused": [], "tree_suffix": []}
    timings: list[dict[str, Any]] = []
    for bucket, results in measured.items():
        entry = entry_of(bucket, results, lambda config, bucket=bucket: spills(bucket, config))  # type: ignore[misc]
        if entry is not None:
            tuned[bucket.kernel].append(entry)
        timings += timings_of(bucket, results)
    return render(table_of(arch, triton, note, tuned, tables.read(arch)), timings)


def check_machine(machine: Hardware) -> None:
    """Raises `SpecverifyError` where there is nothing to tune."""
    if not machine.has_gpu:
        raise SpecverifyError("tuning times kernels on a GPU, and torch sees none here", "run it on the machine to tune for")
    if machine.vendor not in ("nvidia", "amd"):
        raise SpecverifyError(f"the kernels do not run on {machine.name}", "tune on an NVIDIA or AMD GPU")


def check_out(out: Path) -> None:
    """Find out before the first measurement whether `write` and `State.add` will be able to write.

    Raises:
        ArgumentError: a directory is where a file is to be, or the files' own directory cannot be made or written.
    """
    out = out.absolute()
    taken = [out] if os.path.isdir(out) else [path for path in (state_path(out), _partial(out)) if os.path.isdir(path)]
    if taken:
        raise ArgumentError("--out", f"{out}, and {taken[0]} is a directory", "the path of a file, as configs/kernels/sm_90.json")
    there = next(folder for folder in out.parents if os.path.exists(folder))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written" if os.path.isdir(there) else "is no directory"
        raise ArgumentError("--out", f"{out}, and {there} {why}", "a file in a directory that can be made and written")
    state = state_path(out)
    if os.path.exists(state) and not os.access(state, os.R_OK | os.W_OK):
        raise ArgumentError("--out", f"{out}, and {state} beside it cannot be read and written", "a file beside which it can")


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _partial(out: Path) -> Path:
    """Where the table is written before it gets its name."""
    return out.with_suffix(".writing")


def state_path(out: Path) -> Path:
    """Where the measurements of a run that writes `out` are kept."""
    return out.with_suffix(".partial.jsonl")


def kernels() -> tuple[Any, ...]:
    """Every `triton.jit` function among the launches of the calls that are tuned: attention, the combining of parts, plans."""
    from sglang_specverify.kernels.combine_parts_kernel import combine_parts_kernel
    from sglang_specverify.kernels.fused_kernel import verify_attention_kernel
    from sglang_specverify.kernels.plan_kernel import plan_kernel

    return verify_attention_kernel, combine_parts_kernel, plan_kernel


class Gpu:
    """Measures on the GPU at hand. Tensors of a bucket are kept until the next one is asked for."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._bucket: Bucket | None = None
        self._timed: list[Any] = []
        self._expected: Sequence[Any] = ()

    def belongs(self, machine: Hardware) -> dict[str, str]:
        """What measurements depend on: hardware, Triton, and the source of the kernels with how a plan divides for them."""
        import triton

        from sglang_specverify.kernels.plan import ALIGN, MIN_CHUNKS, OVERHEAD_KEYS

        division = [*sorted(MIN_CHUNKS.items()), OVERHEAD_KEYS, ALIGN]
        sources = [*(kernel.cache_key for kernel in kernels()), *map(str, division)]
        source = hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]
        return {"hardware": machine.name, "arch": machine.arch, "triton": triton.__version__, "kernel source": source}

    def measure(self, bucket: Bucket, config: LaunchConfig) -> Measured:
        """Time a launch on every call of the bucket, if it computes the small ones right."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        from sglang_specverify.tuning.timing import microseconds

        self._prepare(bucket)
        try:
            for expected in self._expected:
                if problem := expected.problem(config, self.arch):
                    return Measured((), problem)
            return Measured(tuple(round(microseconds(inputs.launches(config, self.arch)), 2) for inputs in self._timed))
        except (CompilationError, OutOfResources, PTXASError) as error:
            return Measured((), f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def spills(self, bucket: Bucket, config: LaunchConfig) -> int:
        from sglang_specverify.kernels.aot import compile_launch

        self._prepare(bucket)
        launches = (launch for inputs in self._timed for launch in inputs.launches(config, self.arch))
        return max(compile_launch(launch, self.arch).spill_bytes for launch in launches)

    def _prepare(self, bucket: Bucket) -> None:
        if bucket == self._bucket:
            return
        self._bucket, self._timed, self._expected = bucket, [], ()
        self._timed = [make(call, "cuda", self.arch) for call in bucket.calls]
        self._expected = [expect(make(call, "cuda", self.arch)) for call in dict.fromkeys(call.small() for call in bucket.calls)]
