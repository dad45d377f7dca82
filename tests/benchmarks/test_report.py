"""Aims, tables and the picture, from results written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import plot_verify_attention, report
from benchmarks.aims import AIMS, Row, State, Verdict, verdicts
from benchmarks.points import Point

GROUPS = {"fused": "ours", "fused_split": "ours", "fa3+tree_suffix": "ours", "fused (again)": "again"}


def row(point: Point, selected: str = "fused", spread: float = 0.5, **us: float) -> dict[str, Any]:
    """A measured point; keywords are arms' times, in both states."""
    arms = {}
    for key, time in us.items():
        name = {"again": "fused (again)", "tree": "fa3+tree_suffix", "gather": "fa3+upstream_gather"}.get(key, key)
        timed = {"us": time, "spread": spread, "rounds": 9, "calls": 10}
        arms[name] = {"group": GROUPS.get(name, "stock"), "warm": timed, "cold": timed}
    return {"name": point.name, "point": point.as_dict(), "floor_us": 20.0, "selected": selected, "arms": arms}


def results(*rows: dict[str, Any], metadata: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"ceilings": {"copy_tb_per_s": 4.0, "matmul_tflops": 700.0}, "points": list(rows), "metadata": list(metadata)}


def verdict(start: str, *rows: dict[str, Any], which: str = "selected") -> Verdict:
    (found,) = [v for v in verdicts(results(*rows), "cold", which) if v.aim.what.startswith(start)]  # type: ignore[arg-type]
    return found


BIG = Point("tree", 32, 128, 128)


@pytest.mark.parametrize(("ours", "held"), [(50.0, True), (60.0, True), (60.1, False)])
def test_microseconds_at_most(ours: float, held: bool) -> None:
    found = verdict("tree bs 32, W 128, L 128", row(BIG, fused=ours, fa3=753.0))
    assert found.values == {BIG.name: ours}
    assert (found.held == 1) == held


@pytest.mark.parametrize(("ours", "held"), [(73.0, True), (74.0, False)])
def test_three_times_the_better_of_two_stock_kernels(ours: float, held: bool) -> None:
    found = verdict("trees, W >= 64", row(BIG, fused=ours, fa3=753.0, triton=220.0))
    assert found.values[BIG.name] == pytest.approx(220.0 / ours)
    assert (found.held == 1) == held


def test_the_selected_variant_and_the_best_are_told_apart() -> None:
    slow = row(BIG, selected="fused", fused=100.0, tree=50.0, fa3=753.0, triton=220.0)
    assert verdict("trees, W >= 64", slow).values[BIG.name] == pytest.approx(2.2)
    assert verdict("trees, W >= 64", slow, which="best").values[BIG.name] == pytest.approx(4.4)


@pytest.mark.parametrize(
    ("again", "spread", "value"),
    [({}, 0.5, 0.9), ({}, 12.0, 0.97), ({"again": 111.0}, 0.5, 0.97), ({"again": 100.5}, 12.0, 0.9)],
    ids=["behind", "rounds differ by more", "two captures differ by more", "two captures differ by less"],
)
def test_behind_stock_counts_only_beyond_the_noise(again: dict[str, float], spread: float, value: float) -> None:
    found = verdict("every tree", row(BIG, fused=100.0, spread=spread, triton=90.0, **again))
    assert found.values[BIG.name] == pytest.approx(value)


def test_an_aim_without_its_arms_has_no_value() -> None:
    assert verdict("trees, W >= 64", row(BIG, fused=50.0)).values == {}
    assert verdict("trees, W >= 64", {"name": BIG.name, "point": BIG.as_dict(), "why": "no memory"}).worst is None


def test_families_are_held_to_the_ratios_but_not_to_the_microseconds() -> None:
    other = Point("tree", 32, 128, 128, cache="e4m3")
    assert verdict("trees, W >= 64", row(other, fused=50.0, fa3=753.0)).held == 1
    assert verdict("tree bs 32, W 128, L 128", row(other, fused=50.0)).values == {}


def test_chains_are_about_the_own_kernel_whatever_is_selected() -> None:
    point = Point("chain", 1, 4, 8192)
    data = row(point, selected="fa3", fused=40.0, fused_split=13.0, fa3=18.0, triton=418.0, upstream_splitkv=37.0)
    assert verdict("chain, own kernel: times stock triton", data).values[point.name] == pytest.approx(418 / 13)
    assert verdict("chain, own kernel, bs * L <= 32 k", data).held == 0
    assert verdict("chain bs 1, W 4, L 8192", data).held == 1


def test_a_draft_step_is_measured_by_its_prefix_bytes() -> None:
    point = Point("draft", 8, 8, 8192)
    floor = 8 * 8192 * 2 * 8 * 128 * 2 / 4.3e6
    assert verdict("draft decode, bs * L > 16 k", row(point, fused=floor * 1.1)).held == 1
    assert verdict("draft decode, bs * L > 16 k", row(point, fused=floor * 1.2)).held == 0
    assert verdict("draft decode, bs * L <= 16 k", row(point, fused=floor, fa3=floor)).values == {}


def test_a_steps_metadata_has_a_limit_in_microseconds_and_one_in_bytes() -> None:
    def step(length: int, us: float) -> dict[str, Any]:
        return {
            "batch": 32,
            "width": 128,
            "length": length,
            "bytes": 40_000_000,
            "arms": {"ours": {"warm": {"us": us}}, "fa3": {}},
        }

    found = verdicts(results(metadata=(step(8192, 6.0), step(131072, 14.0))), "warm", "best")[-2:]
    assert [list(v.values.values()) for v in found] == [[6.0], [pytest.approx(1.4)]]
    assert [v.held for v in found] == [0, 1]


def test_every_aim_applies_to_some_point_of_the_selections() -> None:
    from benchmarks.points import SELECTIONS

    every = [point for selection in SELECTIONS.values() for point in selection()]
    for aim in AIMS:
        assert any(map(aim.applies, every)), aim.what


def test_a_line_tells_times_reasons_and_the_choice() -> None:
    data = row(BIG, fused=50.0, fa3=753.0)
    data["arms"]["fa4"] = {"group": "stock", "why": "ImportError: no cute"}
    assert report.line(data) == (
        f"{BIG.name}: floor 20.0 | fused 50.0/50.0 | fa3 753.0/753.0 | fa4 [ImportError: no cute] | selected fused"
    )


@pytest.mark.parametrize("markdown", [False, True])
def test_the_report_says_what_was_missed_and_where(markdown: bool) -> None:
    console = Console(record=True, width=250, file=open("/dev/null", "w"))  # noqa: SIM115
    good = row(Point("tree", 8, 64, 384), fused=20.0, fa3=112.0, triton=70.0)
    report.show(results(row(BIG, fused=100.0, fa3=753.0, triton=220.0), good), console, markdown=markdown)
    text = console.export_text()
    assert "FAIL 1/2, worst 2.2" in text
    assert f"missed (cold): {AIMS[0].what}: {BIG.name}: 2.2" in text
    assert "triton 220.0" in text and "more aims have no measured point" in text


def test_the_table_marks_a_choice_that_is_not_the_fastest() -> None:
    cells = report.cells(row(BIG, selected="fused", fused=100.0, tree=50.0, fa3=200.0))
    assert cells[2:6] == ["50.0", "fa3+tree_suffix (selected: fused)", "fa3 200.0", "4.00"]
    assert cells[6] == "0.40"


def test_the_picture_takes_a_value_for_each_measured_cell() -> None:
    data = results(row(BIG, fused=50.0, fa3=200.0), row(Point("tree", 32, 128, 128, kv_heads=1), fused=1.0, fa3=1.0))
    (_, ratio), (_, of_floor) = plot_verify_attention.PANELS
    state: State = "cold"
    cells = plot_verify_attention.grid(data, 128, ratio, state, "best")
    assert cells[3][0] == 4.0
    assert sum(not math.isnan(cell) for line in cells for cell in line) == 1
    assert plot_verify_attention.grid(data, 128, of_floor, state, "best")[3][0] == pytest.approx(0.4)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_verify_attention.draw(results(row(BIG, fused=50.0, fa3=200.0)), tmp_path / "out.png", "cold", "best")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_noise_without_a_second_capture_is_the_spread() -> None:
    assert Row(row(BIG, fused=50.0, spread=0.7), "cold", "selected").noise() == 0.7
