"""Launch options of the sparse MLA decode, by architecture and by how many programs there are."""

from __future__ import annotations

from dataclasses import replace

from sglang_specverify.kernels.sparse_mla.splits import SparseConfig

#: By architecture: for calls whose rows leave multiprocessors idle, and for those that fill them. Compiled, without spills; which
#: is fastest has not been measured.
CONFIGS: dict[str, tuple[SparseConfig, SparseConfig]] = {
    "sm_90": (SparseConfig(keys=32, value_parts=4, num_warps=4, num_stages=2, pdl=True), SparseConfig(keys=32)),
    "sm_100": (SparseConfig(keys=32, value_parts=4, num_warps=4, num_stages=2, pdl=True), SparseConfig(keys=32)),
    "sm_103": (SparseConfig(keys=32, value_parts=4, num_warps=4, num_stages=2, pdl=True), SparseConfig(keys=32)),
    "sm_107": (SparseConfig(keys=32, value_parts=4, num_warps=4, num_stages=2, pdl=True), SparseConfig(keys=32)),
    "gfx950": (SparseConfig(rows=16, keys=32, value_parts=4, num_warps=4), SparseConfig(rows=16, keys=32)),
    "none": (SparseConfig(rows=16, keys=16, value_parts=2), SparseConfig(rows=16, keys=16)),
}

#: Programs that run at once where no device says so: few enough for Triton's interpreter to be quick.
INTERPRETED_PROGRAMS = 8


def config_of(arch: str, tiles: int, programs: int) -> SparseConfig:
    """Options for `tiles` tiles of rows on a device that runs `programs` programs at once.

    Where 8 programs a tile fit, keys are divided and the columns of the output too: the scores are then computed several
    times, by multiprocessors that had nothing to do, and what each part writes and the reducer reads is a fraction.
    """
    small, large = CONFIGS[arch]
    return small if 8 * tiles <= programs else replace(large, pdl=small.pdl)
