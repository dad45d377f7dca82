"""Which way a main row's values become E4M3 on an architecture; `conversion_kernel.py` has the ways."""

from __future__ import annotations

import re

CONVERSIONS = ("packed", "fp16", "integer")

#: Architectures whose ptxas takes the packed multiply, in their own instruction set (sm_100a, sm_103a), not in the family's.
PACKED_ARCHS = ("sm_100", "sm_103")

#: The first ptxas that does, and the PTX ISA that it is in.
PACKED_PTXAS, PACKED_PTX_ISA = (13, 4), (9, 4)

#: Architectures with the conversion of two FP16 to E4M3, saturating and to the nearest, that Triton uses.
_FP16_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_107")


def conversions(arch: str, ptxas: tuple[int, int]) -> tuple[str, ...]:
    """The ways that `arch` has, best first, where ptxas is of this version; "integer" is everywhere, the interpreter included."""
    ways = ("integer",)
    if arch in _FP16_ARCHS:
        ways = ("fp16", *ways)
    return ("packed", *ways) if arch in PACKED_ARCHS and ptxas >= PACKED_PTXAS else ways


def parse_ptxas_version(text: str) -> tuple[int, int]:
    """Major and minor version from what `ptxas --version` says; (0, 0) where it does not say."""
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
