"""Which compiled kernels a call of the sweep launches, and at which bytes of shared memory the compiler dispatches warps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from sglang_specverify.kernels.launch import Launch

#: How a kernel with specialised warps asks which part is its warp's: a byte at a place and the number of the warp, read into 16
#: bits or, where the compiler makes a table of jumps of it, 32.
_ASKS = re.compile(r"ld\.shared\.b8\s+%rs?\d+, \[%r\d+\+(\d+)\];")
_PRINTED = re.compile(r"^kernel (\w+): shared (\d+), dispatch (\d+) to (\d+)$")


@dataclass(frozen=True, order=True)
class Compiled:
    """A kernel as it was compiled.

    Attributes:
        shared: bytes of shared memory of a program.
        first, behind: offsets there of the bytes that tell further warps what to run; equal where there are none, or where the
            compiled code does not show which they are.
    """

    kernel: str
    shared: int
    first: int = 0
    behind: int = 0

    def __str__(self) -> str:
        return f"kernel {self.kernel}: shared {self.shared}, dispatch {self.first} to {self.behind}"

    def dispatches(self, offset: int) -> bool:
        return self.first <= offset < self.behind


def parse(line: str) -> Compiled | None:
    """What `str` of one printed."""
    match = _PRINTED.match(line)
    return None if match is None else Compiled(match[1], *map(int, match.groups()[1:]))


def compiled_of(binary: Any, warps: int) -> Compiled:
    """From what Triton made of a launch whose first part has `warps` warps."""
    metadata = binary.metadata
    places = _ASKS.findall(binary.asm.get("ptx", ""))
    # The compiler numbers the bytes by warp and keeps none for the warps of the first part.
    if metadata.num_warps <= warps or len(places) != 1 or int(places[0]) + metadata.num_warps > metadata.shared:
        return Compiled(metadata.name, metadata.shared)
    return Compiled(metadata.name, metadata.shared, int(places[0]) + warps, int(places[0]) + metadata.num_warps)


class _Noting:
    """A kernel that notes what each launch of it ran."""

    def __init__(self, launch: Launch, noted: set[Compiled]) -> None:
        self.launch, self.noted = launch, noted

    def __getitem__(self, grid: Any) -> Any:
        start = self.launch.kernel[grid]

        def run(**arguments: Any) -> Any:
            binary = start(**arguments)
            # Nothing where Triton interprets.
            if hasattr(binary, "asm"):
                self.noted.add(compiled_of(binary, int(self.launch.options.get("num_warps", 4))))
            return binary

        return run


@contextmanager
def noting() -> Iterator[set[Compiled]]:
    """The kernels that are launched inside."""
    noted: set[Compiled] = set()
    run = Launch.run
    with mock.patch.object(Launch, "run", lambda launch: run(replace(launch, kernel=_Noting(launch, noted)))):
        yield noted
