"""What is tuned: ranges of calls that share a launch configuration, the calls that stand for them, and the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from sglang_specverify.kernels.launch import COMBINATIONS, LaunchConfig

#: Packed query rows of a KV head: least, most, and what stands for them as (W, query heads per KV head).
ROWS: tuple[tuple[int, int | None, tuple[int, int]], ...] = (
    (1, 16, (4, 4)),
    (17, 32, (8, 4)),
    (33, 64, (16, 4)),
    (65, 128, (32, 4)),
    (129, None, (64, 4)),
)
#: Head dims: least, most, which itself stands for them.
DIMS = ((1, 64), (65, 128), (129, 256))
#: Batch and prefix length of the calls that stand for a range: the device is full, or needs the prefix divided.
FULL = ((32, 384), (32, 2048))
DIVIDED = ((1, 8192), (4, 16384))
KV_HEADS = 8


@dataclass(frozen=True)
class Call:
    """A call to time.

    Attributes:
        operation: "fused", "fused_split" or "tree_suffix".
        queries: W.
        group: query heads per KV head.
        cache_bits: 16 for BF16, 8 for E4M3.
        prefix: tokens of every request's prefix.
    """

    operation: Literal["fused", "fused_split", "tree_suffix"]
    kind: Literal["chain", "qlen_only"]
    batch: int
    queries: int
    group: int
    head_dim: int
    cache_bits: int
    prefix: int

    def small(self) -> Call:
        """The same instructions on a prefix short enough for the reference; long enough to be divided, and no whole tiles."""
        return replace(self, batch=min(self.batch, 2), prefix=1337)


@dataclass(frozen=True)
class Bucket:
    """A range of calls: `when` as in a table entry."""

    kernel: Literal["fused", "tree_suffix"]
    when: tuple[tuple[str, tuple[Any, ...]], ...]
    calls: tuple[Call, ...]

    @property
    def name(self) -> str:
        rows, dims = dict(self.when)["rows"], dict(self.when)["head_dim"]
        split = ", divided" if self.calls[0].operation == "fused_split" else ""
        return f"{self.kernel} rows {rows[0]}-{rows[1] or ''} dim {dims[0]}-{dims[1]} cache {self.calls[0].cache_bits}{split}"


def buckets() -> tuple[Bucket, ...]:
    """Every range, those of few rows first."""
    out = []
    for operation, rows, dims, bits in product(("fused", "fused_split", "tree_suffix"), ROWS, DIMS, (16, 8)):
        least, most, (queries, group) = rows
        if operation == "tree_suffix" and least == 1:
            # The first range of the tree tile reaches up to the second.
            continue
        kernel: Any = "tree_suffix" if operation == "tree_suffix" else "fused"
        sizes = {"rows": (1 if operation == "tree_suffix" and least == 17 else least, most), "head_dim": dims, "v_head_dim": dims}
        when = {**sizes, "cache_bits": (bits,), "q_bits": (16,)}
        if kernel == "fused":
            when["split"] = (operation == "fused_split",)
        kind: Any = "chain" if queries <= 8 and kernel == "fused" else "qlen_only"
        calls = [
            Call(operation, kind, batch, queries, group, dims[1], bits, prefix)  # type: ignore[arg-type]
            for batch, prefix in (DIVIDED if operation == "fused_split" else FULL)
        ]
        out.append(Bucket(kernel, tuple(when.items()), tuple(calls)))
    return tuple(out)


def candidates(arch: str, bucket: Bucket, shipped: Sequence[LaunchConfig]) -> tuple[LaunchConfig, ...]:
    """Blocks and warps to try for `bucket`, what serves its calls now first; `refinements` then vary the fastest of them.

    Blocks of rows up to the rows of the range, and for each warp between 256 and 2048 scores at once. Parts are combined as
    what serves the first call now combines them.

    Args:
        shipped: what serves each of its calls now.
    """
    amd = arch.startswith("gfx")
    rows = max(call.queries * call.group for call in bucket.calls)
    wide = bucket.calls[0].head_dim > 128
    blocks = [block for block in (16, 32, 64, 128) if rows // 4 <= block <= max(16, rows)][-2:]
    out = list(shipped)
    for block_m, block_n, warps in product(blocks, (32, 64, 128), (2, 4, 8)):
        scores = block_m * block_n // warps
        if 256 <= scores <= 2048 and not (wide and (block_n > 64 or block_m > 16 * warps)):
            stages = 1 if amd else 2 if wide or bucket.kernel == "tree_suffix" else 3
            options = _amd_options(arch)[0] if amd else ()
            out.append(LaunchConfig(block_m, block_n, warps, stages, 1, options, combine=shipped[0].combine))
    return tuple(dict.fromkeys(out))


def refinements(arch: str, bucket: Bucket, best: LaunchConfig) -> tuple[LaunchConfig, ...]:
    """`best` with another pipeline depth, occupancy or AMD option; of divided prefixes also with parts combined otherwise."""
    amd = arch.startswith("gfx")
    out = [replace(best, num_stages=stages) for stages in ((1, 2) if amd else (1, 2, 3, 4))]
    if bucket.calls[0].operation == "fused_split":
        out += [replace(best, ctas_per_sm=ctas) for ctas in (1, 2)]
        out += [replace(best, combine=combine) for combine in COMBINATIONS]
    if amd:
        out += [replace(best, amd=options) for options in _amd_options(arch)]
    return tuple(config for config in dict.fromkeys(out) if config != best)


def _amd_options(arch: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    # kpack is deprecated on gfx950, where anything but 1 is a warning.
    packs = (1, 2) if arch == "gfx942" else (1,)
    return tuple(
        (("waves_per_eu", waves), ("matrix_instr_nonkdim", 16), ("kpack", pack)) for waves, pack in product((1, 2), packs)
    )
