"""One launch of a Triton kernel as data: what runs, what is compiled ahead of time and what is tuned are the same thing."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_specverify import hardware
from sglang_specverify.errors import ArgumentError, SpecverifyError

#: Options that only AMD's compiler takes; on NVIDIA some of them are errors and some are ignored.
AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")

#: Who combines the parts of a divided prefix: the program that comes last, or a second launch.
COMBINATIONS = ("last", "launch")


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is launched on one architecture; `configs/kernels/<arch>.json` holds them.

    Attributes:
        block_m: query rows (tokens times grouped heads) of a program.
        block_n: keys that a program reads at once.
        num_warps: warps of a program (of 32 lanes on NVIDIA, 64 on AMD).
        num_stages: depth of the software pipeline over keys.
        ctas_per_sm: programs that a multiprocessor holds at once; a split of the prefix aims at filling them once.
        amd: options for AMD's compiler, by the names of `AMD_OPTIONS`; must be empty on NVIDIA.
        peel: 1 for a loop of its own over the part of the prefix that needs no mask, which pays where that is long.
        max_registers: limit on NVIDIA, so that more programs fit; 0 for none.
        combine: one of `COMBINATIONS`, for kernels that divide prefixes. The last program of a request and KV head reads its
            parts alone; a second launch spreads them over the device.

    Raises:
        ArgumentError: another `combine`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    amd: tuple[tuple[str, int], ...] = ()
    peel: int = 1
    max_registers: int = 0
    combine: str = "last"

    def __post_init__(self) -> None:
        if self.combine not in COMBINATIONS:
            raise ArgumentError("combine", repr(self.combine), ", ".join(COMBINATIONS))

    def options(self, arch: str) -> dict[str, int]:
        """Compiler options for `arch`: those of AMD only where it is one of AMD's."""
        common = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if arch.startswith("gfx"):
            return common | dict(self.amd)
        return common | {"maxnreg": self.max_registers} if self.max_registers else common


@dataclass(frozen=True)
class Launch:
    """A kernel with everything it is called with.

    Attributes:
        kernel: a `triton.jit` function.
        grid: programs in each of three dimensions; none are launched where one of them is 0.
        arguments: run-time arguments by name. A tensor on the "meta" device stands for its type and alignment when the
            launch is only compiled.
        constants: `tl.constexpr` arguments by name.
        options: compiler options.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        if not all(self.grid):
            return
        device = next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))
        # Triton launches on the current device, whatever its arguments' is.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def has_dependent_launch(arch: str) -> bool:
    """Whether a launch on `arch` may start before the one in front of it has ended: NVIDIA's, from SM90 on."""
    number = arch.removeprefix("sm_")
    return number != arch and number.isdecimal() and int(number) >= 90


def interpreting() -> bool:
    """Whether Triton kernels run on CPU tensors here: TRITON_INTERPRET is on, as Triton reads it, and Triton is installed.

    Triton binds its interpreter when it is imported, so the variable must be set before. Imports nothing.
    """
    # Triton's own variable and no flag of this package.
    on = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")
    return on and importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Whether an operation that has one kernel runs it for tensors on `device`, or its plain PyTorch reference.

    Raises:
        SpecverifyError: neither serves such a device.
    """
    if device.type not in ("cpu", "cuda"):
        raise SpecverifyError(f"no kernel for {device.type} tensors is in this version", "pass tensors on a GPU or on the CPU")
    return device.type == "cuda" or interpreting()


def arch_of(device: torch.device) -> str:
    """The architecture that launches on `device` are made for: "sm_90", "gfx950", …; "none" for the interpreter."""
    return hardware.detect().arch if device.type == "cuda" else "none"
