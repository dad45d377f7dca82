"""The table of all measured trees: which arm stands for a server, and which points count as behind."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.points import Point
from benchmarks.tree_families import TILE, served, table


@pytest.mark.parametrize(
    ("point", "arm"),
    [
        (Point("tree", 32, 128, 2048), "specialized"),
        (Point("tree", 1, 64, 2048), "specialized_split"),
        (Point("tree", 32, 128, 40960 - 128), "specialized"),  # the last context that leaves one kernel ahead
        (Point("tree", 32, 128, 40960), TILE),
        (Point("tree", 32, 16, 2048), TILE),  # no specialised tile is filled
        (Point("tree", 32, 16, 1024 - 16), "fused"),
        (Point("tree", 64, 8, 131072), "fused"),  # few rows of more requests than run at once
        (Point("tree", 32, 8, 131072), "fused_split"),
        (Point("tree", 32, 128, 2048, cache="e4m3"), TILE),
        (Point("tree", 32, 128, 2048, q_heads=16, kv_heads=2, head_dim=256), TILE),
        (Point("tree", 1, 16, 384, q_heads=16, kv_heads=2, head_dim=256), "fused_split"),  # a plan knows no length
        (Point("tree", 1, 8, 131072, window=128), "fused"),  # too short a window to be divided
        (Point("tree", 1, 8, 131072, window=4096), "fused_split"),
    ],
)
def test_the_arm_of_a_server(point: Point, arm: str) -> None:
    assert served(point) == arm


def row(point: Point, ours: float, stock: float) -> dict[str, Any]:
    arms = {"specialized": ("ours", ours), "specialized_split": ("ours", ours), "fused": ("ours", 50.0), "fa3": ("stock", stock)}
    timed = {name: {"group": group, "cold": {"us": us, "spread": 0.0}} for name, (group, us) in arms.items()}
    return {"name": point.name, "point": point.as_dict(), "selected": "fused", "arms": timed}


def test_the_table() -> None:
    rows = [
        row(Point("tree", 32, 64, 128), 10.0, 20.0),
        row(Point("tree", 8, 64, 128), 10.0, 9.0),  # behind
        row(Point("tree", 4, 64, 128), 10.0, 9.7),
        row(Point("tree", 8, 64, 128, page_size=64), 10.0, 9.8),
        row(Point("chain", 8, 64, 128), 10.0, 1.0),
        {"name": "failed", "point": Point("tree", 64, 64, 128).as_dict(), "why": "no memory"},
    ]
    lines = table({"points": rows})
    assert lines[2:4] == ["| 32/8/128 | 3 | 2 | 0.97 | 0.90 |", "| 32/8/128, page 64 | 1 | 1 | 0.98 | 0.98 |"]
    assert lines[4:] == ["", "- tree bs 8 W 64 L 128 (32/8/128): 0.90 (specialized 10.0 µs, fa3 9.0; specialized 10.0)"]
