"""Reports of racecheck in three classes: errors, the compiler's dispatch of warps, and hand-overs between groups of warps.

    python -m tests.interpreter.ordered sanitizers.json handovers.json --out sanitizers.json

A hand-over is a write to shared memory, a barrier of the writing group, one thread's arrival at an mbarrier, the other group's
wait there, and its read. PTX's memory model orders these, and the tool reports them nonetheless: `handovers` shows it of the
smallest such kernels. So such a report says nothing, and is counted apart, neither as an error nor as clean: only where
`handovers` had the right ones reported, and the wrong one told from them, on the same hardware by the same versions; and only for
the statements in `HANDOVERS`, whose order a test reads from the source.

By itself this puts the reports of a recorded run into their classes. Its numbers stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sglang_specverify

from . import hazards

KERNELS = Path(sglang_specverify.__file__).parent / "kernels"
#: Kernels with specialised warps, and the files in which they begin.
BEGINS = {"specialized_kernel": "specialized_kernel.py", "hopper_kernel": "sparse_mla/hopper_kernel.py"}

ERROR, DISPATCH, HANDED = "error", "dispatch", "hand-over"
#: The wrong one of `handovers`, which the tool also reports the other way round: the next write before the read is done.
WRONG, TOLD_BY = "nobody waits", "WAR"


@dataclass(frozen=True)
class Statement:
    """A statement that a function of a file has once. `first`: of the part of a kernel that is compiled into its own function."""

    file: str
    function: str
    text: str
    first: bool = False

    @property
    def line(self) -> int:
        return _statements(self.file, self.function)[self.text]

    @property
    def reported(self) -> str:
        """As the tool names it: of the first part with the line in its own file, and the kernel's file."""
        return f"{BEGINS['hopper_kernel'].split('/')[-1] if self.first else self.file + '.py'}:{self.line}"


@dataclass(frozen=True)
class HandOver:
    """One hand-over, by its statements in the order in which they must be: three of the writer, two of the reader.

    Attributes:
        control: the one of `handovers` that is made alike.
    """

    kernel: str
    control: str
    write: Statement
    meets: Statement
    arrive: Statement
    wait: Statement
    read: Statement

    @property
    def accesses(self) -> str:
        return f"Write at {self.write.reported} and Read at {self.read.reported}"

    @property
    def unnamed(self) -> str:
        """As the tool reports it where it names no line of the write."""
        return f"Write at unknown and Read at {self.read.reported}"


def _handover(control: str, writer: tuple[str, str, bool], reader: tuple[str, str, bool], *texts: str) -> HandOver:
    write, arrive, wait, read = texts
    own, other = (lambda text: Statement(*writer[:2], text, writer[2])), (lambda text: Statement(*reader[:2], text, reader[2]))
    return HandOver("hopper_kernel", control, own(write), own("barrier()"), own(arrive), other(wait), other(read))


_LEAD, _SECOND = ("hopper_consume", "lead", True), ("hopper_consume", "second", False)

HANDOVERS = (
    # What earlier sums are multiplied by, and in the end what all are.
    _handover(
        "first group writes", ("hopper_consume", "_hand_over", False), _SECOND,
        "alpha_ring.index(stage).store(alpha)", "mbarrier.arrive(p_full.index(stage), count=1)",
        "mbarrier.wait(p_full.index(stage), (j // STAGES) & 1)", "o = o * alpha_ring.index(stage).load(rows_o)[:, None]",
    ),
    _handover(
        "first group writes", _LEAD, _SECOND,
        "alpha_ring.index(stage).store(factor)", "mbarrier.arrive(p_full.index(stage), count=1)",
        "mbarrier.wait(p_full.index(stage), (number // STAGES) & 1)", "factor = alpha_ring.index(stage).load(rows_o)",
    ),
    # Which rows of a tile count.
    _handover(
        "second group writes", ("hopper_produce", "_publish", False), _LEAD,
        "bias_ring.index(stage).store(bias)", "mbarrier.arrive(full.index(stage), count=1)",
        "mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)", "bias = bias_ring.index(stage).load(gl.SliceLayout(0, mma_s))",
    ),
)  # fmt: skip


@cache
def _statements(file: str, function: str) -> dict[str, int]:
    """The lines of a function's statements that it has once."""
    source = (KERNELS / "sparse_mla" / f"{file}.py").read_text()
    (defined,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    found: dict[str, list[int]] = {}
    for node in ast.walk(defined):
        if isinstance(node, ast.stmt):
            found.setdefault(ast.get_source_segment(source, node) or "", []).append(node.lineno)
    return {text: lines[0] for text, lines in found.items() if len(lines) == 1}


@cache
def begin_of(kernel: str) -> str | None:
    """Both accesses at the line where a kernel is defined, which has no statement: the compiler's own."""
    if kernel not in BEGINS:
        return None
    path = KERNELS / BEGINS[kernel]
    (line,) = (n.lineno for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == kernel)
    return f"Write at {path.name}:{line} and Read at {path.name}:{line}"


def controls(found: dict[str, Any] | None, of: dict[str, Any]) -> frozenset[str]:
    """The hand-overs of a result of `handovers` that are right and were reported, if it may be held against the run `of`.

    None where the hardware, its driver, the tool or Triton are others, or where the wrong one was not told from them.
    """
    if found is None or any(_of(found, *path) is None or _of(found, *path) != _of(of, *path) for path in _SAME):
        return frozenset()
    kinds = {name: {one["kind"] for one in groups if not one["excused"]} for name, groups in found["cases"].items()}
    if TOLD_BY not in kinds.get(WRONG, ()):
        return frozenset()
    return frozenset(name for name in {one.control for one in HANDOVERS} if kinds.get(name) == {"RAW"})


_SAME = (("hardware", "name"), ("hardware", "driver"), ("compute_sanitizer",), ("versions", "triton"))


def _of(results: Any, *path: str) -> Any:
    for name in path:
        results = results.get(name, {})
    return results or None


def class_of(one: dict[str, Any], every: Iterable[dict[str, Any]], known: frozenset[str], *, again: bool = False) -> str:
    """The class of a hazard of a run, of which `every` are all.

    Args:
        known: `controls`.
        again: of a recorded run, whose hazards were grouped and have no addresses of their own: the compiler's dispatch is then
            told by where both accesses are, too.
    """
    if one["excused"] or (again and one["kind"] == "RAW" and one["accesses"] == begin_of(one["kernel"])):
        return DISPATCH
    if one["kind"] != "RAW" or one["at"] != hazards.OWN:
        return ERROR
    there = [other for other in every if other["kernel"] == one["kernel"] and _meets(one, other) and not other["excused"]]
    if any(other["kind"] != "RAW" for other in there):
        return ERROR
    for handover in HANDOVERS:
        if handover.kernel != one["kernel"] or handover.control not in known:
            continue
        # A write without a line counts as this one where it is at bytes that this one was reported at.
        named = any(other["accesses"] == handover.accesses and _meets(one, other, whole=True) for other in there)
        if one["accesses"] == handover.accesses or (one["accesses"] == handover.unnamed and named):
            return HANDED
    return ERROR


def _meets(one: dict[str, Any], other: dict[str, Any], *, whole: bool = False) -> bool:
    """Whether two ranges of bytes have any in common; `whole`: all of the first."""
    (low, high), (first, last) = one["offsets"], other["offsets"]
    return bool(first <= low and high <= last) if whole else bool(low <= last and first <= high)


def sort(runs: list[dict[str, Any]], known: frozenset[str], *, again: bool = False) -> list[dict[str, Any]]:
    """The runs with the class of each hazard, and with how many reports there are of each class."""
    return [_sorted(run, known, again) if "reports" in run else run for run in runs]


def _sorted(run: dict[str, Any], known: frozenset[str], again: bool) -> dict[str, Any]:
    every = run["hazards"]
    found = [{**one, "class": class_of(one, every, known, again=again)} for one in every]
    count = {name: sum(one["count"] for one in found if one["class"] == name) for name in (ERROR, DISPATCH, HANDED)}
    # Reports that are no hazards, and wrong results, are errors.
    others = sum(run["reports"].values()) - sum(one["count"] for one in every if not one["excused"])
    errors = count[ERROR] + others + len(run["wrong"])
    return {**run, "hazards": found, "classes": {"errors": errors, "dispatch": count[DISPATCH], "hand-overs": count[HANDED]}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sanitizers", type=Path, help="a result of tests.interpreter.sanitizers")
    parser.add_argument("handovers", type=Path, help="one of tests.interpreter.handovers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results, found = (json.loads(path.read_text()) for path in (options.sanitizers, options.handovers))
    known = controls(found, results)
    again = {
        "command": f"python -m tests.interpreter.ordered {options.sanitizers.name} {options.handovers.name}",
        "handovers": found["date"], "controls": sorted(known),
        "dispatch": "of groups of hazards also by both accesses being at the line where their kernel is defined",
    }  # fmt: skip
    results = {**results, "read_again": again, "runs": sort(results["runs"], known, again=True)}
    options.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    for run in results["runs"]:
        print(run["checker"], run["sweep"], run.get("classes", run["state"]))
    return 1 if any(run.get("classes", {}).get("errors") for run in results["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
