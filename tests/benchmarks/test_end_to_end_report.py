"""Aims, tables, estimates and the picture of whole engines, from results written by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import end_to_end_plan as plan
from benchmarks import end_to_end_plot, estimates, shapes
from benchmarks.end_to_end_report import Pair, Verdict, against_best, pairs, remarks, show, verdicts
from benchmarks.engines import OURS
from benchmarks.points import Point
from sglang_specverify.routing.tree import SHORT_CONTEXT, SPECIALIZED_CONTEXT

HEADS = (32, 8, 128)


def arm(speed: float, spread: float = 0.002, **changes: Any) -> dict[str, Any]:
    found = {"tokens_per_s": speed, "spread": spread, "latency_p50_s": 1.0, "latency_p95_s": 1.1, "ms_per_step": 3000 / speed}
    return {**found, "accept_length": 3.0, "in_lockstep": True, "retractions": [0, 0, 0], **changes}


def row(
    name: str, length: int, concurrency: int, stock: str, ours: float, theirs: float, *, spread: float = 0.002, **changes: Any
) -> dict[str, Any]:
    """A measured cell; speeds are of both arms, in tokens/s."""
    chosen = plan.scenario(name)
    speculation = None if chosen.speculation is None else vars(chosen.speculation)
    return {
        "shape": "qwen3-8b",
        "scenario": name,
        "stock": stock,
        "input": length,
        "concurrency": concurrency,
        "output": 48,
        "speculation": speculation,
        "page_size": chosen.page_size,
        "under_pressure": chosen.under_pressure,
        "arms": {OURS: arm(ours, spread), stock: arm(theirs, spread)},
        "faults": [],
        **changes,
    }


def results(*rows: dict[str, Any], engines: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    settings = {"shape": "qwen3-8b", "dry_run": False}
    return {"settings": settings, "hardware": {"name": "test"}, "cells": list(rows), "engines": list(engines)}


def verdict(start: str, *rows: dict[str, Any]) -> Verdict:
    (found,) = [found for found in verdicts(results(*rows)) if found.what.startswith(start)]
    return found


@pytest.mark.parametrize(("last", "held"), [(115.5, True), (114.5, False)])
def test_the_median_against_fa3(last: float, held: bool) -> None:
    rows = [row("64x4", length, 1, "fa3", ours, 100.0) for length, ours in ((128, 130.0), (2048, last), (8192, 101.0))]
    assert verdict("against fa3, median", *rows).held is held


@pytest.mark.parametrize(("ours", "held"), [(120.0, True), (119.9, False)])
def test_the_largest_tree_at_the_shortest_input(ours: float, held: bool) -> None:
    # The others would lift a median that took them in.
    others = [row("128x16", length, 32, "fa3", 200.0, 100.0) for length in (2048, 8192)]
    assert verdict("against fa3, W 128", row("128x16", 128, 32, "fa3", ours, 100.0), *others).held is held


def test_the_best_stock_arm_is_chosen_for_each_configuration() -> None:
    rows = [
        row("64x4", 128, 1, "fa3", 110.0, 100.0),
        row("64x4", 128, 1, "triton", 110.0, 108.0),
        row("64x4", 8192, 1, "fa3", 110.0, 100.0),
        row("64x4", 8192, 1, "triton", 110.0, 60.0),
    ]
    found = against_best([Pair(one) for one in rows])
    assert [(pair.place[1], pair.stock) for pair in found] == [(128, "triton"), (8192, "fa3")]
    assert verdict("against the best stock arm of each", *rows).held is True


@pytest.mark.parametrize("start", ["against the best stock arm of each", "against the best stock arm, none"])
def test_one_stock_arm_is_not_the_best_of_any(start: str) -> None:
    both = [row("64x4", 128, 1, stock, 90.0, 100.0) for stock in ("fa3", "triton")]
    found = verdict(start, *both)
    assert found.held is False and found.missed
    found = verdict(start, *both, row("64x4", 8192, 1, "fa3", 110.0, 100.0))
    assert (found.held, found.value, found.missed) == (None, "one stock arm measured in 1 of 2", ())
    assert verdict(start, both[0]).value == "one stock arm measured in 1 of 1"
    assert verdict(start).value == "not measured"


@pytest.mark.parametrize(
    ("ours", "spread", "held"),
    [(99.6, 0.0, True), (99.4, 0.0, False), (99.4, 0.01, True), (98.8, 0.01, False), (120.0, 0.0, True)],
)
def test_none_slower_by_more_than_its_spread(ours: float, spread: float, held: bool) -> None:
    rows = [row("64x4", 128, 1, stock, ours, speed, spread=spread) for stock, speed in (("triton", 100.0), ("fa3", 50.0))]
    found = verdict("against the best stock arm, none", *rows)
    assert found.held is held
    assert len(found.missed) == (not held)
    assert f"slack {max(spread, 0.005):.3f} to {max(spread, 0.005):.3f}" in found.value


@pytest.mark.parametrize(
    ("name", "ours", "held"),
    [
        ("off", 100.4, True),
        ("off", 100.6, False),
        ("chain", 99.4, False),
        ("chain", 100.6, False),
        ("chain-few", 99.4, False),
        ("chain-few", 99.6, True),
        # The plugin's kernel serves it, and may be faster.
        ("chain-few", 120.0, True),
    ],
)
def test_without_trees_nothing_changes_but_for_few_requests(name: str, ours: float, held: bool) -> None:
    plain = row(name, 128, 1, "fa3", ours, 100.0)
    about, other = "topk 1 and no speculation", "topk 1 in servers"
    about, other = (other, about) if name == "chain-few" else (about, other)
    assert verdict(about, plain).held is held
    assert verdict(other, plain).held is None
    assert verdict("against fa3, median", plain).held is None, "what speculates without a tree is no gain or loss of trees"


def test_a_lower_accept_length_is_told() -> None:
    lower = row("64x4", 128, 1, "fa3", 120.0, 100.0)
    assert verdict("accept length", lower).held is True
    lower["arms"][OURS]["accept_length"] = 2.99
    assert verdict("accept length", lower).held is False


def test_a_run_under_pressure_without_retractions_proves_nothing() -> None:
    pressed = row("pressure", 128, 32, "fa3", 120.0, 100.0)
    assert verdict("requests were retracted", pressed).held is False
    for found in pressed["arms"].values():
        found["retractions"] = [3, 0, 2]
    assert verdict("requests were retracted", pressed).held is True
    assert verdict("against fa3, median", pressed).held is None


def test_what_failed_or_does_not_count_is_in_no_aim() -> None:
    broken = row("64x4", 128, 1, "fa3", 1.0, 100.0, error="gone\nits log")
    faulty = row("64x4", 128, 8, "fa3", 1.0, 100.0, faults=["no verify ran on a kernel of the plugin"])
    slow = row("64x4", 128, 32, "fa3", 130.0, 100.0)
    slow["arms"]["fa3"]["in_lockstep"] = False
    found = results(broken, faulty, slow)
    assert [pair.place[2] for pair in pairs(found)] == [32]
    said = remarks(found)
    assert len(said) == 3 and said[0].endswith("gone") and "no verify ran" in said[1] and "not in lockstep" in said[2]


def test_a_dry_run_holds_no_aim(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(row("64x4", 128, 1, "triton", 5000.0, 1.0))
    for dry in (False, True):
        found["settings"]["dry_run"] = dry
        show(found, Console(width=200))
        assert ("pass" in capsys.readouterr().out) is not dry


def grid(**us: float) -> dict[str, Any]:
    """Kernel times that grow by `us` microseconds for each 1000 tokens of prefix, from 10."""
    points = []
    for batch in plan.CONCURRENCIES:
        for length in (128, 2048, 8192):
            for width in plan.WIDTHS:
                point = Point("tree", batch, width, length)
                arms = {name.replace("_", "+", 1): {"cold": {"us": 10 + slope * length / 1000}} for name, slope in us.items()}
                points.append({"point": point.as_dict(), "arms": arms, "selected": "specialized"})
    return {"points": points, "hardware": {}}


def test_lines_between_measured_lengths() -> None:
    points = [(100, 10.0), (200, 20.0), (400, 60.0)]
    assert estimates.at(points, 150) == (15.0, False)
    assert estimates.at(points, 300) == (40.0, False)
    assert estimates.at(points, 400) == (60.0, False)
    assert estimates.at(points, 401) == (60.2, True)
    assert estimates.at(points, 500) == (80.0, True)
    assert estimates.at(points, 1000) == (180.0, True)
    assert estimates.at(points, 50) == (10.0, True)
    assert estimates.at(points[:1], 100) is None


def test_which_kernel_an_engine_runs() -> None:
    assert estimates.kernel("triton", 128, HEADS, 1024) == "triton"
    assert estimates.kernel(OURS, 128, HEADS, 1024) == estimates.SELECTED
    assert estimates.kernel(OURS, 128, HEADS, 1 << 20) == "fa3+tree_suffix"


@pytest.mark.parametrize(
    ("width", "heads", "specialized"),
    [(128, (32, 8, 128), True), (17, (32, 8, 64), True), (16, (32, 8, 128), False), (128, (16, 2, 256), False)],
)
def test_the_kernel_with_specialised_warps_takes_some_shapes(width: int, heads: tuple[int, int, int], specialized: bool) -> None:
    """A context that is short for it alone tells."""
    context = 2 * SHORT_CONTEXT
    assert context <= SPECIALIZED_CONTEXT
    assert estimates.kernel(OURS, width, heads, context) == (estimates.SELECTED if specialized else "fa3+tree_suffix")


def test_the_selected_variant_is_read_at_each_point() -> None:
    times = grid(fused=1.0, specialized=2.0)
    for point in times["points"]:
        point["selected"] = "fused" if point["point"]["length"] < 8192 else "specialized"
    found = estimates.curve(times, estimates.SELECTED, 32, 128, HEADS)
    assert found == [(128, pytest.approx(10.128)), (2048, pytest.approx(12.048)), (8192, pytest.approx(26.384))]
    assert estimates.curve(times, "fused", 32, 128, HEADS)[2] == (8192, pytest.approx(18.192))
    assert estimates.curve(times, "fused", 32, 128, (16, 2, 256)) == []


def test_an_estimate_changes_the_attention_alone() -> None:
    """Steps made of 7 ms and the grid's attention: the estimate must find the 7 ms, and the other lengths' steps."""
    layers = shapes.get("qwen3-8b").layers
    times = grid(specialized=1.0, fa3_tree_suffix=1.0, fa3=9.0)

    def step(slope: float, length: int) -> float:
        return 7.0 + layers * (10 + slope * (length + 24) / 1000) / 1e3

    measured = row("128x16", 2048, 32, "fa3", 1.0, 1.0)
    measured["arms"][OURS]["ms_per_step"] = step(1.0, 2048)
    measured["arms"]["fa3"]["ms_per_step"] = step(9.0, 2048)
    found = estimates.estimate(results(measured), times)
    # The other five pairs of width and topk and the other inputs, where width and concurrency are those of the measured cell.
    assert {(one["scenario"], one["input"]) for one in found} == {
        (f"128x{topk}", length) for topk in plan.TOPKS for length in plan.INPUTS
    } - {("128x16", 2048)}
    for one in found:
        assert one["estimate"] is True and "tokens_per_s" not in one and "ratio" not in one
        # Both kernels of ours have the same times here; lengths are taken half-way through 48 tokens of output.
        want = {OURS: step(1.0, one["input"]), "fa3": step(9.0, one["input"])}
        assert one["estimated_ms_per_step"] == pytest.approx(want, abs=1e-3)
        assert one["estimated_ratio"] == pytest.approx(want["fa3"] / want[OURS], abs=1e-3)
        # Answers that begin at the grid's longest prefix go beyond it.
        source = {128: "kernel times", 2048: "another topk", 8192: "kernel times, beyond their grid"}
        assert one["from"] == source[one["input"]]


def test_the_same_input_with_another_topk_goes_before_kernel_times() -> None:
    measured = row("128x16", 2048, 32, "fa3", 200.0, 100.0)
    # 3000 over the speed is what `arm` makes a step last. No kernel was ever timed.
    found = estimates.estimate(results(measured), {"points": []})
    assert [one["scenario"] for one in found] == ["128x4", "128x8"]
    assert found[0]["estimated_ms_per_step"] == {OURS: 15.0, "fa3": 30.0} and found[0]["from"] == "another topk"


def test_estimates_come_from_valid_measurements_only() -> None:
    faulty = row("128x16", 2048, 32, "fa3", 1.0, 1.0, faults=["the plugin is in a stock engine"])
    assert estimates.estimate(results(faulty), grid(specialized=1.0, fa3=9.0)) == []


def test_estimates_say_that_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimates.estimate(results(row("64x4", 128, 8, "fa3", 300.0, 100.0)), grid(specialized=1.0, fa3=9.0))
    estimates.show(found, Console(width=200))
    said = capsys.readouterr().out
    assert "ESTIMATES, not measured" in said and said.count("~") >= 3 * len(found) > 0


def test_measured_and_estimated_panels() -> None:
    measured = [Pair(row("64x4", 128, 8, "fa3", 120.0, 100.0))]
    guessed = [
        {"scenario": "64x4", "stock": "fa3", "input": length, "concurrency": 8, "estimated_ratio": 1.5} for length in (128, 2048)
    ]
    assert end_to_end_plot.panels(measured, guessed) == (["fa3"], ["64x4"], [128, 2048], [8])
    assert end_to_end_plot.values(measured, guessed, "fa3", "64x4") == ({(128, 8): 1.2}, {(2048, 8): 1.5})


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    end_to_end_plot.draw(results(row("64x4", 128, 8, "fa3", 120.0, 100.0)), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
