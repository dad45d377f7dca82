"""What racecheck reports, by kernel, pair of accesses and what lies at the address, and the one kind that is excused.

Excused is a hazard at a byte by which the compiler's own code tells a further warp what to run (`launched.Compiled`): no source
of this project reads or writes it. The kernel is the one that the report names, compiled as a launch of the same call had it.
Everything else counts (`ordered` has the classes), and so does a report whose address or kernel is not known, or that the tool no
longer printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .launched import Compiled, parse

#: CUDA keeps the first 1 KiB of a block's shared memory, from compute capability 8.0 on; the tool's addresses count it.
RESERVED = 1024
#: What the tool is asked for: every hazard with its address, which its summaries of a pair of accesses do not have.
OPTIONS = ("--racecheck-report", "hazard", "--print-limit", "50000", "--show-backtrace", "device")

_HAZARD = re.compile(r"^=========\s(?:Error|Warning|Info):?.* (RAW|WAR|WAW) hazard detected at __shared__ (0x[0-9a-f]+) in block")
_ACCESS = re.compile(r"^=========\s{2,}(Write|Read) Thread .* at (\w+)\+0x[0-9a-f]+(?: in (\S+))?")
_SUMMARY = re.compile(r"^========= RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_CALL = re.compile(r"^(?:ok   |WRONG) ")

#: Where a hazard is excused.
DISPATCH = "the compiler's dispatch of warps"
#: Where it is not.
OWN = "the kernel's own shared memory"


@dataclass
class _Hazard:
    kind: str
    address: int
    accesses: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def kernel(self) -> str | None:
        """The kernel of both accesses."""
        kernels = {kernel for _, kernel, _ in self.accesses}
        return kernels.pop() if len(kernels) == 1 else None


def is_hazard(line: str) -> bool:
    """Whether a report begins here that `read` reads."""
    return _HAZARD.match(line) is not None


def place_of(hazard: _Hazard, launched: Iterable[Compiled]) -> str:
    """What lies at a hazard's address, in every variant of its kernel that the call launched."""
    offset = hazard.address - RESERVED
    variants = [one for one in launched if one.kernel == hazard.kernel]
    if hazard.kernel is None or not variants:
        return "unknown: no such kernel was launched"
    if all(one.dispatches(offset) for one in variants):
        return DISPATCH
    return OWN if all(0 <= offset < one.shared for one in variants) else "beyond its shared memory"


def read(output: str) -> tuple[list[dict[str, Any]], int]:
    """(hazards of a run, grouped; how many more the tool counted and did not print).

    A group has its kernel, kind, pair of accesses and what lies there, its count, the lowest and the highest offset in the
    program's shared memory, and whether it is excused.
    """
    waiting: list[_Hazard] = []
    launched: list[Compiled] = []
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    unseen = 0

    def settle() -> None:
        # What a call launched is printed when it has ended, behind what was reported of it.
        for hazard in waiting:
            pair = " and ".join(f"{what} at {where}" for what, _, where in hazard.accesses) or "accesses unknown"
            key = (hazard.kernel or "unknown", hazard.kind, pair, place_of(hazard, launched))
            groups.setdefault(key, []).append(hazard.address - RESERVED)
        waiting.clear()
        launched.clear()

    for line in output.splitlines():
        if found := _HAZARD.match(line):
            waiting.append(_Hazard(found[1], int(found[2], 16)))
        elif waiting and (found := _ACCESS.match(line)):
            if len(waiting[-1].accesses) < 2:
                waiting[-1].accesses.append((found[1], found[2], found[3] or "unknown"))
        elif compiled := parse(line):
            launched.append(compiled)
        elif _CALL.match(line):
            settle()
        elif found := _SUMMARY.match(line):
            unseen += max(int(found[2]) + int(found[3]) - int(found[1]), 0)
    settle()
    found_hazards = [
        {
            "kernel": kernel, "kind": kind, "accesses": pair, "at": place, "count": len(offsets),
            "offsets": [min(offsets), max(offsets)], "excused": place == DISPATCH,
        }
        for (kernel, kind, pair, place), offsets in sorted(groups.items())
    ]  # fmt: skip
    return found_hazards, unseen
