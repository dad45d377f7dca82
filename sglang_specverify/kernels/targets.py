"""What the kernels are compiled for, and the limits of one program there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_specverify.errors import ArgumentError


@dataclass(frozen=True)
class Target:
    """One architecture as Triton's compiler knows it.

    Attributes:
        arch: as `hardware.Hardware.arch` spells it.
        backend: Triton's name of the vendor: "cuda" or "hip".
        warp_size: threads of a warp, or of a wavefront.
        registers: 32-bit registers that a thread can have; on AMD vector and accumulation registers together.
        shared_bytes: shared memory or LDS that one program can have.
    """

    arch: str
    backend: str
    warp_size: int
    registers: int
    shared_bytes: int

    @property
    def triton(self) -> Any:
        """The `GPUTarget`."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, int(self.arch[3:]) if self.backend == "cuda" else self.arch, self.warp_size)


#: CUDA C++ programming guide, compute capabilities: 227 KB for one block from 9.0 to 10.x. CDNA3 and CDNA4 ISA guides: LDS.
TARGETS = {
    target.arch: target
    for target in (
        Target("sm_90", "cuda", 32, 255, 227 * 1024),
        Target("sm_100", "cuda", 32, 255, 227 * 1024),
        Target("sm_103", "cuda", 32, 255, 227 * 1024),
        Target("sm_107", "cuda", 32, 255, 227 * 1024),
        Target("gfx942", "hip", 64, 512, 64 * 1024),
        Target("gfx950", "hip", 64, 512, 160 * 1024),
    )
}


def from_arch(arch: str) -> Target:
    """The target of that name.

    Raises:
        ArgumentError: none of them.
    """
    if arch not in TARGETS:
        raise ArgumentError("arch", repr(arch), ", ".join(TARGETS))
    return TARGETS[arch]
