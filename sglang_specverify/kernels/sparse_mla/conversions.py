"""Which way a main row's values become E4M3 on an architecture; `conversion_kernel.py` has the ways."""

from __future__ import annotations

import re

#: All ways, best first.
CONVERSIONS = ("packed", "fp16", "integer")

#: Architectures whose ptxas takes the packed multiply, in their own instruction set (sm_100a, sm_103a), not in the family's.
PACKED_ARCHS = ("sm_100", "sm_103")

#: The first ptxas that does: the instruction is in PTX ISA 9.4.
PACKED_PTXAS = (13, 4)

#: Architectures with the conversion of two FP16 to E4M3, saturating and to the nearest, that Triton uses.
_FP16_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_107")


def conversions(arch: str, ptxas: tuple[int, int]) -> tuple[str, ...]:
    """The ways that `arch` has, best first, where ptxas is of this version; "integer" is everywhere, the interpreter included."""
    if arch not in _FP16_ARCHS:
        return ("integer",)
    if arch not in PACKED_ARCHS or ptxas < PACKED_PTXAS:
        return ("fp16", "integer")
    return CONVERSIONS


def conversion_of(arch: str) -> str:
    """The best way that `arch` has with the ptxas that Triton takes for it here, which is asked where it decides."""
    if arch not in PACKED_ARCHS:
        return conversions(arch, (0, 0))[0]
    from triton.backends.nvidia.compiler import get_ptxas_version

    return conversions(arch, parse_ptxas_version(get_ptxas_version(int(arch[3:]))))[0]


def parse_ptxas_version(text: str) -> tuple[int, int]:
    """Major and minor version from what `ptxas --version` says; (0, 0) where it does not say."""
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
