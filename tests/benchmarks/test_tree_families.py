"""The table of all measured trees: which arm stands for a server, and which points count as behind."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.points import Point
from benchmarks.tree_families import TILE, routed, table


@pytest.mark.parametrize(
    ("point", "arm"),
    [
        (Point("tree", 32, 128, 2048), "selected"),
        (Point("tree", 32, 128, 40960 - 128), "selected"),  # the last context that leaves one kernel ahead
        (Point("tree", 32, 128, 40960), TILE),
        (Point("tree", 32, 16, 2048), TILE),  # no specialised tile is filled
        (Point("tree", 32, 16, 1024 - 16), "selected"),
        (Point("tree", 32, 8, 131072), "selected"),  # few rows
        (Point("tree", 32, 128, 2048, cache="e4m3"), TILE),
        (Point("tree", 32, 128, 2048, q_heads=16, kv_heads=2, head_dim=256), TILE),
        (Point("tree", 32, 128, 131072, window=128), "selected"),
    ],
)
def test_the_arm_of_a_server(point: Point, arm: str) -> None:
    assert routed(point, "selected") == arm


def row(point: Point, ours: float, stock: float, again: float) -> dict[str, Any]:
    arms = {
        "specialized": ("ours", ours),
        "fused": ("ours", 50.0),
        "fa3": ("stock", stock),
        "specialized (again)": ("again", again),
    }
    timed = {name: {"group": group, "cold": {"us": us, "spread": 0.0}} for name, (group, us) in arms.items()}
    return {"name": point.name, "point": point.as_dict(), "selected": "specialized", "arms": timed}


def test_the_table() -> None:
    rows = [
        row(Point("tree", 1, 64, 128), 10.0, 20.0, 10.0),
        row(Point("tree", 4, 64, 128), 10.0, 9.0, 10.1),  # behind
        row(Point("tree", 8, 64, 128), 10.0, 9.6, 10.5),  # within what the same launch differs by
        row(Point("tree", 8, 64, 128, page_size=64), 10.0, 9.8, 10.0),
        row(Point("chain", 8, 64, 128), 10.0, 1.0, 10.0),
        {"name": "failed", "point": Point("tree", 64, 64, 128).as_dict(), "why": "no memory"},
    ]
    lines = table({"points": rows})
    assert lines[2:4] == ["| 32/8/128 | 3 | 2 | 0.96 | 0.90 |", "| 32/8/128, page 64 | 1 | 1 | 0.98 | 0.98 |"]
    assert lines[4:] == ["", "- tree bs 4 W 64 L 128 (32/8/128): 0.90 (specialized 10.0 µs, fa3 9.0; specialized 10.0)"]
