"""What `benchmarks.latency` times of trees beside the fused kernel: the kernel with specialised warps, its parts combined by its
last program or by a second launch, and FlashAttention 3 over the prefix with the drafts as one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.arms import Arm, Call, arguments_of, tree_tile
from benchmarks.inputs import Inputs
from benchmarks.latency_arms import planned
from benchmarks.points import Point
from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.specialized import refusal_of_layers

#: 128 to 512 query rows of a KV head.
POINTS = tuple(
    Point("tree", batch, width, length)
    for batch, width, length in (
        (1, 64, 2048), (1, 64, 8192), (1, 64, 32768), (1, 128, 8192), (4, 64, 2048), (4, 32, 8192), (8, 64, 16384),
    )
)  # fmt: skip

TREE_TILE = Arm("fa3+tree_suffix", "ours", tree_tile, ("tree",), fp8_products=True)

#: Shortest parts that are tried, in keys, where a launch combines them.
_PARTS = (128, 256)


def arms_of(made: Inputs) -> dict[str, Callable[[], Call]]:
    """The divided kernel with specialised warps in each way; none for chains, for drafts, and where it does not serve."""
    if made.point.kind != "tree":
        return {}
    if refusal_of_layers(arguments_of(made)[1], made.q.dtype, made.k.dtype, arch_of(made.q.device)) is not None:
        return {}
    ways: dict[str, dict[str, Any]] = {
        "last": {"combine": "last"},
        "launch": {"combine": "launch"},
        "launch in order": {"combine": "launch", "early": False},
        **{f"launch, parts of {least} keys": {"combine": "launch", "least": least} for least in _PARTS},
    }
    return {
        f"specialized, {way}": lambda how=how: planned(made, variant="specialized_split", **how)  # type: ignore[misc]
        for way, how in ways.items()
    }
