"""Tables, verdicts and the picture of long chains, from results written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import long_context_plot, long_context_report
from benchmarks.aims import Row
from benchmarks.long_context_points import BATCHES, LENGTHS, chain
from benchmarks.points import Point

GROUPS = {"fa3": "stock", "triton": "stock", "upstream_splitkv": "yardstick", "deterministic": "yardstick"}


def row(point: Point, **us: float) -> dict[str, Any]:
    arms = {}
    for name, time in us.items():
        timed = {"us": time, "spread": 0.5, "rounds": 9, "calls": 10}
        arms[name] = {"group": GROUPS.get(name, "ours"), "error": 0.002, "warm": timed, "cold": timed}
    return {
        "name": point.name, "point": point.as_dict(), "floor_us": 400.0, "bytes": 2 * 10**9, "selected": "fused_split",
        "arms": arms, "beyond_32_bits": point.length >= 1 << 20,
    }  # fmt: skip


def results(*rows: dict[str, Any], checks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    ceilings = {"copy_tb_per_s": 4.0, "matmul_tflops": 700.0, "read_tb_per_s": 5.0}
    return {"ceilings": ceilings, "checks": list(checks), "points": list(rows)}


LONG = chain(4, 1 << 18)


def test_bandwidth_is_bytes_over_the_fastest_form_that_may_serve() -> None:
    cold = Row(row(LONG, fused=1000.0, fused_split=500.0, deterministic=1.0, fa3=400.0), "cold", "best")
    assert long_context_report.tb_per_s(cold) == pytest.approx(4.0)
    assert long_context_report.ceiling(results()) == 5.0
    assert long_context_report.of_ceiling(cold, 5.0) == pytest.approx(0.8)
    assert long_context_report.tb_per_s(Row(row(LONG, fa3=1.0), "cold", "best")) is None


def test_a_row_shows_every_ratio_and_why_an_arm_has_none() -> None:
    data = row(LONG, fused=1000.0, fused_split=500.0, deterministic=600.0, fa3=450.0, triton=9000.0)
    data["arms"]["upstream_splitkv"] = {"group": "yardstick", "why": "of 4 parts one is empty"}
    data["selected"] = "fused"
    cells = long_context_report.cells(data, 5.0)
    assert cells[2:6] == ["500.0", "fused_split (selected: fused)", "4.00", "0.80"]
    assert cells[7:] == ["600.0", "450.0", "0.90", "9000.0", "18.00", "of 4 parts one is empty", ""]
    assert long_context_report.cells({"name": "x", "why": "out of memory"}, None)[:2] == ["x", "out of memory"]


def test_the_plane_and_other_shapes_are_judged_apart() -> None:
    good = row(LONG, fused_split=500.0, fa3=450.0, triton=9000.0, upstream_splitkv=1700.0)
    bad = row(chain(4, 1 << 18, head_dim=256), fused_split=500.0, fa3=250.0, triton=4000.0)
    found = results(good, bad)
    plane = long_context_report.judged(found, long_context_report.in_plane)["cold"]
    assert {verdict.aim.limit: verdict.held for verdict in plane} == {10.0: 1, 1.15: 1}
    others = long_context_report.judged(found, lambda p: not long_context_report.in_plane(p))["warm"]
    assert [list(verdict.missed.values()) for verdict in others] == [[8.0], [2.0]]


def test_the_report_says_what_was_missed_what_failed_and_what_lay_far() -> None:
    console = Console(record=True, width=260, file=open("/dev/null", "w"))  # noqa: SIM115
    slow = row(chain(1, 1 << 20), fused_split=500.0, fa3=100.0)
    wrong = row(chain(2, 1 << 20), fused_split=500.0)
    wrong["arms"]["triton"] = {"group": "stock", "why": "wrong: relative error 1, allowed 0.01"}
    timed = {"us": 12.0, "spread": 0.1, "rounds": 9, "calls": 10}
    slow["step"] = {"error": 0.001, "layers": 36, "plan": timed, "with_plan": timed, "without_plan": timed}
    checks = ({"name": "rows alone", "ok": False, "different": 3}, {"name": "far", "ok": True, "error": 0.001})
    long_context_report.show(results(slow, wrong, checks=checks), console)
    text = console.export_text()
    assert "FAILED: rows alone: different 3" in text and "ok: far: error 0.001" in text
    assert f"missed (cold): chain, own kernel, bs * L > 32 k: over stock fa3: {slow['name']}: 5" in text
    assert "2 points read beyond 2^31 elements of one cache; every arm that ran was right in 1" in text
    assert "its one launch" in text


def test_a_dry_runs_report_judges_nothing() -> None:
    console = Console(record=True, width=260, file=open("/dev/null", "w"))  # noqa: SIM115
    data = row(LONG)
    del data["floor_us"]
    long_context_report.show({"ceilings": None, "checks": [], "points": [data]}, console)
    assert "aim" not in console.export_text()


def test_the_picture_takes_a_value_for_each_measured_cell() -> None:
    data = results(row(LONG, fused_split=500.0, fa3=400.0, triton=9000.0), row(chain(4, 1 << 18, width=8), fused=1.0, fa3=1.0))
    lines = long_context_plot.plane(data, long_context_plot.ratio_to("fa3", "triton"))
    assert lines[BATCHES.index(4)][LENGTHS.index(1 << 18)] == pytest.approx(0.8)
    assert sum(not math.isnan(number) for line in lines for number in line) == 1
    lines = long_context_plot.plane(data, long_context_plot.ratio_to("triton"))
    assert lines[BATCHES.index(4)][LENGTHS.index(1 << 18)] == pytest.approx(18.0)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    long_context_plot.draw(results(row(LONG, fused_split=500.0, fa3=400.0)), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
