"""Launch options of the sparse MLA decode, by architecture and by how many programs there are."""

from __future__ import annotations

from dataclasses import replace

from sglang_specverify.kernels.sparse_mla.splits import SparseConfig

_HOPPER = SparseConfig(keys=64, num_warps=4, specialized=True, pdl=True)
#: The columns of the output go to four programs, so that their sums fit the registers of 4 warps beside what decoding takes.
_TRITON = SparseConfig(keys=16, num_warps=4, value_parts=4, pdl=True)
_CDNA = SparseConfig(rows=16, keys=16, num_warps=4, value_parts=4)
_INTERPRETED = SparseConfig(rows=16, keys=16, reduce_rows=16)

#: By architecture: for calls whose rows leave multiprocessors idle, and for those that fill them. Compiled; which is fastest
#: has not been measured.
CONFIGS: dict[str, tuple[SparseConfig, SparseConfig]] = {
    "sm_90": (_HOPPER, _HOPPER),
    "sm_100": (_TRITON, _TRITON),
    "sm_103": (_TRITON, _TRITON),
    "sm_107": (_TRITON, _TRITON),
    "gfx950": (_CDNA, _CDNA),
    "none": (replace(_INTERPRETED, value_parts=2), _INTERPRETED),
}

#: Programs that run at once where no device says so: few enough for Triton's interpreter to be quick.
INTERPRETED_PROGRAMS = 8


def config_of(arch: str, tiles: int, programs: int, bf16: bool = True) -> SparseConfig:
    """Options for `tiles` tiles of rows on a device that runs `programs` programs at once.

    Where 8 programs a tile fit, keys are divided and the columns of the output too: the scores are then computed several
    times, by multiprocessors that had nothing to do, and what each part writes and the reducer reads is a fraction.
    """
    small, large = CONFIGS[arch]
    if not bf16:
        # Hopper's kernel copies q as it is.
        small, large = (_TRITON if one.specialized else one for one in (small, large))
    return small if 8 * tiles <= programs else large
