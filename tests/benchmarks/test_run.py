"""Which points a run measures, keeps and takes over from an earlier one."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import measure, points, record, timing, verify_attention
from benchmarks.arms import OURS, Arm, Call, Unavailable
from benchmarks.gate import LIMIT
from benchmarks.inputs import Inputs
from benchmarks.points import Point
from benchmarks.stock_triton import STOCK
from benchmarks.verify_attention import Selection
from sglang_specverify.kernels.variants import SPECIALIZED

ROOT = Path(__file__).parents[2]
CHOSEN = [Point("tree", 1, width, 128) for width in (4, 8, 16, 32)]


def measured(point: Point) -> dict[str, Any]:
    return {"name": point.name, "point": point.as_dict(), "arms": {}, "selected": None}


def test_every_row_is_kept_at_once_until_the_time_is_up() -> None:
    rows: list[dict[str, Any]] = []
    kept: list[int] = []
    clock = iter([0.0, 5.0, 11.0])
    complete = verify_attention.run(CHOSEN, rows, measured, lambda: kept.append(len(rows)), 10.0, lambda: next(clock))
    assert not complete
    assert [row["name"] for row in rows] == [point.name for point in CHOSEN[:2]]
    assert kept == [1, 2]


def test_points_with_a_row_are_not_measured_again() -> None:
    rows = [measured(CHOSEN[1])]
    complete = verify_attention.run(CHOSEN, rows, measured, lambda: None, 10.0, lambda: 0.0)
    assert complete
    assert [row["name"] for row in rows] == [CHOSEN[i].name for i in (1, 0, 2, 3)]


def test_old_rows_stay_until_there_are_new_ones() -> None:
    def one(point: Point) -> dict[str, Any]:
        if point == CHOSEN[1]:
            raise MemoryError("61 GB")
        return {**measured(point), "selected": "fused"}

    rows = [measured(point) for point in CHOSEN[:3]]
    clock = iter([0.0, 5.0, 11.0])
    assert not verify_attention.run(
        CHOSEN, rows, one, lambda: None, 10.0, lambda: next(clock), renewed=[point.name for point in CHOSEN]
    )
    assert {row["name"]: row["selected"] for row in rows} == {
        CHOSEN[0].name: "fused", CHOSEN[1].name: None, CHOSEN[2].name: None,
    }  # fmt: skip


def test_times_of_a_state_that_is_not_measured_again_stay_with_their_date() -> None:
    old = {"date": "then", "arms": {"ours": {"warm": {"us": 9.0}, "cold": {"us": 9.5}}, "gone": {"warm": {"us": 1.0}}}}
    new = {"name": "x", "arms": {"ours": {"cold": {"us": 8.0}}, "wrong": {"why": "wrong"}}}
    assert verify_attention.carried(new, {**old, "arms": {**old["arms"], "wrong": {"warm": {"us": 2.0}}}})["arms"] == {
        "ours": {"cold": {"us": 8.0}, "warm": {"date": "then", "us": 9.0}}, "wrong": {"why": "wrong"},
    }  # fmt: skip


def test_a_row_lacks_arms_that_take_points_of_its_kind() -> None:
    def build(inputs: Inputs) -> Call:
        raise Unavailable("not asked for")

    tree, chain = Arm("ours", OURS, build, ("tree",)), Arm("chains", OURS, build, ("chain",))
    row = {**measured(CHOSEN[0]), "arms": {"ours": {"why": "of no matter"}}}
    for arms, lacking in (([tree, chain], False), ([tree, replace(chain, kinds=("tree", "chain"))], True), ([], False)):
        assert verify_attention.lacks(row, verify_attention.taking(row, arms)) == lacking


def test_a_point_that_fails_says_so_and_the_others_go_on() -> None:
    def one(point: Point) -> dict[str, Any]:
        if point == CHOSEN[0]:
            raise MemoryError("61 GB")
        return measured(point)

    rows: list[dict[str, Any]] = []
    assert verify_attention.run(CHOSEN, rows, one, lambda: None, 10.0, lambda: 0.0)
    assert rows[0]["why"] == "MemoryError: 61 GB"
    assert len(rows) == 4 and all("why" not in row for row in rows[1:])


def write(path: Path, **changes: Any) -> None:
    failed = {"name": "x", "point": CHOSEN[0].as_dict(), "why": "MemoryError"}
    results = {"ceilings": {"copy_tb_per_s": 4.0}, "points": [measured(CHOSEN[1]), failed], "metadata": [{"length": 128}]}
    record.write(path, results | changes)


def test_an_earlier_file_gives_its_rows_without_failures(tmp_path: Path) -> None:
    path = tmp_path / "earlier.json"
    write(path)
    found = verify_attention.load(path)
    assert [row["name"] for row in found["points"]] == [CHOSEN[1].name]
    assert found["metadata"] == [{"length": 128}]
    assert set(found) == {"earlier", "ceilings", "points", "metadata"}


def test_what_made_the_earlier_files_is_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write(first, date="2026-01-02 03:04 UTC", command="first")
    record.write(second, verify_attention.load(first) | {"date": "2026-01-03 04:05 UTC", "command": "second"})
    earlier = verify_attention.load(second)["earlier"]
    assert [(one["date"], one["command"]) for one in earlier] == [
        ("2026-01-02 03:04 UTC", "first"),
        ("2026-01-03 04:05 UTC", "second"),
    ]
    now = record.environment()
    assert all(one["versions"] == now["versions"] and one["hardware"] == now["hardware"] for one in earlier)


def test_a_row_says_when_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {**measured(CHOSEN[0]), "date": "2026-01-02 03:04 UTC"}
    rows = [kept]
    verify_attention.run(CHOSEN[:2], rows, measured, lambda: None, 10.0, lambda: 0.0)
    assert rows[0] is kept and rows[0]["date"] == "2026-01-02 03:04 UTC"
    # In the form of the files' own dates.
    for written in (rows[1]["date"], record.environment()["date"]):
        when = datetime.datetime.strptime(written, "%Y-%m-%d %H:%M UTC").replace(tzinfo=datetime.UTC)
        assert abs(datetime.datetime.now(datetime.UTC) - when) < datetime.timedelta(minutes=10)


def test_every_row_of_the_committed_file_is_of_one_of_its_runs() -> None:
    results = json.loads((ROOT / "benchmarks/results/verify-attention-h200.json").read_text())
    # A file is dated when its last row was; a row is of the first file that could hold it.
    runs = sorted({results["date"], *(one["date"] for one in results["earlier"])})
    dates = {row["date"] for row in results["points"] + results["metadata"]}
    assert max(dates) <= runs[-1]
    assert {next(run for run in runs if date <= run) for date in dates} == set(runs)


@pytest.mark.parametrize("key", ["versions", "hardware"])
def test_a_file_of_other_versions_or_hardware_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "earlier.json"
    write(path, **{key: {"name": "another"}})
    with pytest.raises(typer.BadParameter, match=key):
        verify_attention.load(path)


def test_selections_come_in_the_order_given_and_each_point_once() -> None:
    both = verify_attention.select([Selection.CHAIN, Selection.HEADLINE], quick=False)
    assert both[: len(list(points.chains()))] == list(points.chains())
    assert len(set(both)) == len(both)
    assert Point("tree", 32, 128, 128) in both
    assert len(verify_attention.select([Selection.GRID], quick=True)) == 36
    assert verify_attention.select([Selection.METADATA], quick=False) == []


def test_bad_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(verify_attention.main)
    out = str(tmp_path / "out.json")
    for arguments, complaint in ((["--device", "cpu"], "--dry-run"), (["--skip", "fa5"], "no arm fa5")):
        result = CliRunner().invoke(app, ["--out", out, *arguments])
        assert result.exit_code == 2 and complaint in result.output
    assert not (tmp_path / "out.json").exists()


def test_a_dry_run_holds_this_projects_variants_to_the_gate(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    others = [option for arm in STOCK for option in ("--skip", arm.name)]
    command = [sys.executable, "-m", "benchmarks.verify_attention", "--device", "cpu", "--dry-run", "--quick", *others]
    # In a process of its own: Triton's interpreter is chosen when Triton is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["points"]
    assert len(rows) == 2 and rows[1]["point"]["cache"] == "e4m3"
    for row in rows:
        assert row["selected"] in ("fused", "fused_split"), row["reason"]
        assert set(row["arms"]) == {arm.name for arm in OURS}
        for name in SPECIALIZED:
            why = row["arms"].pop(name)["why"]
            assert "written for sm_90" in why or "it takes q's type" in why
        for name, arm in row["arms"].items():
            assert "why" not in arm and arm["error"] < LIMIT, f"{name}: {arm}"
            assert not {"warm", "cold"} & set(arm)


def test_a_wrong_arm_is_reported_and_not_called_again() -> None:
    calls = []

    def build(made: Inputs) -> Call:
        def call(layer: int) -> torch.Tensor:
            calls.append(layer)
            return torch.zeros_like(made.q)

        return call

    def refuse(made: Inputs) -> Call:
        raise Unavailable("not here")

    arms = [Arm("zeros", "ours", build), Arm("refuses", "stock", refuse), Arm("drafts", "stock", build, ("draft",))]
    row = measure.measure(next(points.tiny()), arms, None, torch.device("cpu"))
    assert row["arms"]["zeros"] == {"group": "ours", "error": 1.0, "why": "wrong: relative error 1, allowed 0.01"}
    assert row["arms"]["refuses"] == {"group": "stock", "why": "not here"}
    assert set(row["arms"]) == {"zeros", "refuses"} and calls == [0]


def timed_row(monkeypatch: pytest.MonkeyPatch, layers: int, states: list[str], times: dict[str, float]) -> dict[str, Any]:
    """A row whose arms take scripted times; the captures of an arm are told apart by what `capture` is given."""
    row: dict[str, Any] = {"selected": "ours", "arms": {name: {"group": "ours"} for name in times}}
    captured = []

    def capture(call: Call, count: int) -> timing.Replay:
        name = call(0)
        captured.append((name, count))
        if times[name] < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return timing.Replay(lambda: times[name], calls=3)

    monkeypatch.setattr(timing, "capture", capture)
    measure.time_arms(row, {name: lambda layer, name=name: name for name in times}, layers, states)
    return row | {"captured": captured}


def test_every_arm_is_timed_in_both_states_and_the_selected_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    row = timed_row(monkeypatch, 7, ["warm", "cold"], {"ours": 10.0, "stock": 30.0, "slow": 90.0, "broken": -1.0})
    assert set(row["arms"]) == {"ours", "stock", "slow", "broken", "ours (again)"}
    for state in ("warm", "cold"):
        assert row["arms"]["ours"][state] == row["arms"]["ours (again)"][state]
        assert row["arms"]["ours"][state] == {"us": 10.0, "spread": 0.0, "rounds": timing.ROUNDS, "calls": 3}
        assert row["arms"]["stock"][state]["rounds"] == timing.ROUNDS
        # Nine times the fastest decides nothing.
        assert row["arms"]["slow"][state]["rounds"] == timing.SLOW_ROUNDS
    assert row["arms"]["broken"]["why"].startswith("not captured: RuntimeError")
    assert {count for _, count in row["captured"][:5]} == {1} and {count for _, count in row["captured"][5:]} == {7}


def test_a_layer_beyond_the_cache_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = timed_row(monkeypatch, 1, ["warm", "cold"], {"ours": 10.0})
    assert len(row["captured"]) == 2 and "note" in row
    assert row["arms"]["ours"]["warm"] == row["arms"]["ours"]["cold"]
    assert "warm" not in timed_row(monkeypatch, 7, ["cold"], {"ours": 10.0})["arms"]["ours"]
