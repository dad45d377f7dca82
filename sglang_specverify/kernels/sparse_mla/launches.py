"""Launch options of the sparse MLA decode, by architecture, by how many programs there are, and by how many keys a row reads."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from sglang_specverify.kernels.sparse_mla.splits import Costs, SparseConfig, divide, microseconds, parts_of

#: Tiles of 64 keys: shared memory serves the products of 64 columns best, and two such tiles fit it. The costs describe what was
#: measured of both tiles in `benchmarks/results/sparse-mla-h200.json` (64 heads, one query row) to 15 %, and pick the tile and
#: the number of parts of each point. What packed rows take besides is from `sparse-mla-peers-h200.json`, 16 heads, 4 and 6 rows.
_COSTS = Costs(start=5.5, tile=2.6, combine=0.55, part=0.0425, rows=0.026, packed_start=1.3, packed_tile=1.2)
_HOPPER = SparseConfig(keys=64, num_warps=4, num_stages=2, specialized=True, pdl=True, costs=_COSTS)
#: Tiles of 32: the first products start after half as many rows, and keys can be divided into twice as many parts.
_HOPPER_NARROW = replace(_HOPPER, keys=32, num_stages=4, costs=replace(_COSTS, start=4.4, tile=1.84))
#: The columns of the output go to four programs, so that their sums fit the registers of 4 warps beside what decoding takes.
_TRITON = SparseConfig(keys=16, num_warps=4, value_parts=4, pdl=True)
#: The e4m3 contract: sums lie in tensor memory, and eight warps can hold all columns while they rescale them, so that a row is
#: decoded once; of packed rows some registers spill.
_E4M3 = SparseConfig(keys=32, num_warps=8, pdl=True)
_E4M3_NARROW = replace(_E4M3, value_parts=2)
_CDNA = SparseConfig(rows=16, keys=16, num_warps=4, value_parts=4)
_INTERPRETED = SparseConfig(rows=16, keys=16, reduce_rows=16)

#: By architecture: for calls whose rows leave multiprocessors idle, and for those that fill them. Measured on sm_90 alone;
#: elsewhere compiled, and which is fastest is not known.
CONFIGS: dict[str, tuple[SparseConfig, SparseConfig]] = {
    "sm_90": (_HOPPER_NARROW, _HOPPER),
    "sm_100": (_TRITON, _TRITON),
    "sm_103": (_TRITON, _TRITON),
    "sm_107": (_TRITON, _TRITON),
    "gfx950": (_CDNA, _CDNA),
    "none": (replace(_INTERPRETED, value_parts=2), _INTERPRETED),
}

#: The same for the e4m3 contract: compiled, not run.
E4M3_CONFIGS: dict[str, tuple[SparseConfig, SparseConfig]] = {
    "sm_100": (_E4M3_NARROW, _E4M3),
    "sm_103": (_E4M3_NARROW, _E4M3),
    "sm_107": (_E4M3_NARROW, _E4M3),
    "none": (replace(_INTERPRETED, keys=32, value_parts=2), replace(_INTERPRETED, keys=32)),
}

#: Programs that run at once where no device says so: few enough for Triton's interpreter to be quick.
INTERPRETED_PROGRAMS = 8


# Asked by every call that no graph holds; pure, and few sizes come again and again.
@lru_cache(maxsize=1024)
def config_of(arch: str, tiles: int, programs: int, entries: int, bf16: bool = True, contract: str = "exact") -> SparseConfig:
    """Options for `tiles` tiles of rows, each over `entries` keys, on a device that runs `programs` programs at once.

    Where 8 programs a tile fit, keys are divided and the columns of the output too: the scores are then computed several
    times, by multiprocessors that had nothing to do, and what each part writes and the reducer reads is a fraction. Hopper's
    kernel never divides columns; of its two tiles it takes the one that is expected to be faster, whatever fits.
    """
    small, large = (E4M3_CONFIGS if contract == "e4m3" else CONFIGS)[arch]
    if not bf16:
        # Hopper's kernel copies q as it is.
        small, large = (_TRITON if one.specialized else one for one in (small, large))
    if small.costs is not None:
        return min((large, small), key=lambda one: _expected(one, tiles, programs, entries))
    return small if 8 * tiles <= programs else large


@lru_cache(maxsize=1024)
def packs(
    arch: str, batch: int, queries: int, heads: int, windows: tuple[int, int], topk: int, programs: int,
    *, shared_main: bool, bf16: bool = True, contract: str = "exact",
) -> bool:  # fmt: skip
    """Whether rows of one request that read one window list share tiles, or have tiles of their own.

    A tile of several tokens reads their window, and a main list that they share, once. Main lists of their own it reads one
    after the other, each for a part of its rows, and fewer programs are there to do it. On Hopper the expected times of both
    decide; elsewhere rows are packed wherever they can be, as neither was measured.

    Args:
        windows: entries of the window's list that a tile of several rows reads, and one of a single row.
        topk: width of the main lists.
        shared_main: whether they share the main list too.
        programs: that run at once.
    """
    configs = [one for one in (E4M3_CONFIGS if contract == "e4m3" else CONFIGS)[arch] if one.costs is not None]
    if not configs or not bf16:
        return True

    def expected(config: SparseConfig, packed: bool) -> float:
        assert config.costs is not None
        window = windows[0] if packed else windows[1]
        found = divide(batch, queries, heads, window, topk, config, programs, packed=packed, shared_main=shared_main)
        several = found.tokens > 1
        return microseconds(batch * found.blocks, found.tiles, found.splits, programs, config.costs, packed=several)

    together, apart = (min(expected(config, packed) for config in configs) for packed in (True, False))
    return together < apart


def _expected(config: SparseConfig, tiles: int, programs: int, entries: int) -> float:
    """Microseconds of a call with the parts that `config` would divide it into."""
    assert config.costs is not None
    keys = -(-entries // config.keys)
    return microseconds(tiles, keys, parts_of(tiles, keys, programs, config), programs, config.costs)
