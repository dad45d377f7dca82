"""The classes of racecheck's reports: what counts as a hand-over, against the source and a recorded run, and what does not."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import RESULTS
from benchmarks.docs import sanitizers as table

from . import hazards, ordered
from .handovers import CASES
from .ordered import DISPATCH, ERROR, HANDED, HANDOVERS, KERNELS

ALPHA, FACTOR, BIAS = HANDOVERS
KNOWN = frozenset({"first group writes", "second group writes"})


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}-h200.json").read_text())
    return loaded


def group(accesses: str, low: int = 214016, high: int = 214143, **how: Any) -> dict[str, Any]:
    usual = {"kernel": "hopper_kernel", "kind": "RAW", "at": hazards.OWN, "count": 3, "excused": False}
    return {**usual, "accesses": accesses, "offsets": [low, high], **how}


def test_the_source_has_each_hand_over_in_its_order() -> None:
    for one in HANDOVERS:
        assert one.write.function == one.meets.function == one.arrive.function and one.wait.function == one.read.function
        assert one.write.line < one.meets.line < one.arrive.line and one.wait.line < one.read.line
        # The control is made alike: the first group writes, or another.
        first, matrix, _, waits = CASES[one.control]
        assert waits == "one arrival" and not matrix and first == (one.write.file == "hopper_consume")
    # What one arrives at, the other waits for: the producer's is named by its caller.
    assert all("p_full.index(stage)" in one.arrive.text and "p_full.index(stage)" in one.wait.text for one in (ALPHA, FACTOR))
    sources = {path.name: path.read_text() for path in (KERNELS / "sparse_mla").glob("hopper_*.py")}
    produce = sources["hopper_produce.py"]
    assert produce.count("_publish(") == 1 + produce.count("_publish(bias_ring, k_full, ") and "k_full" in BIAS.wait.text
    # Nothing else writes these rings, so that a write there without a line is one of these.
    for ring in ("alpha_ring", "bias_ring"):
        written = sum(text.count(f"{ring}.index(stage).store(") for text in sources.values())
        every = sum(text.count(f"{ring}.index(stage)") for text in sources.values())
        assert written == sum(one.write.text.startswith(ring) for one in HANDOVERS)
        assert every == written + sum(f"{ring}." in one.read.text for one in HANDOVERS)


def test_a_recorded_run_is_read_the_same_again() -> None:
    kept, found = result("sanitizers"), result("handovers")
    known = ordered.controls(found, kept)
    assert known == KNOWN
    raw = deepcopy(kept["runs"])
    for run in raw:
        run.pop("classes", None)
        for one in run.get("hazards", []):
            del one["class"]
    assert ordered.sort(raw, known, again=True) == kept["runs"]
    for run in kept["runs"]:
        if run["checker"] == "racecheck":
            # No report is lost between the classes.
            assert sum(run["classes"].values()) == run["summary_errors"] == sum(one["count"] for one in run["hazards"])
    # By the addresses alone, which a group has no longer, or without the controls, they are errors.
    classes = [run.get("classes", {}) for run in ordered.sort(raw, frozenset())]
    assert sum(one.get("errors", 0) for one in classes) == sum(run["summary_errors"] for run in raw if run["hazards"]) - 87
    assert not any(one.get("hand-overs") for one in classes)


@pytest.mark.parametrize("other", ["hardware", "compute_sanitizer", "versions", "told", "right", "not reported", "nothing"])
def test_controls_hold_for_their_own_machine_and_say_which_is_wrong(other: str) -> None:
    kept, found = result("sanitizers"), result("handovers")
    changes: dict[str, dict[str, Any]] = {
        "hardware": {"hardware": found["hardware"] | {"driver": "1"}},
        "compute_sanitizer": {"compute_sanitizer": "Version 2026"},
        "versions": {"versions": found["versions"] | {"triton": "3.9.0"}},
        "told": {"cases": found["cases"] | {"nobody waits": found["cases"]["first group writes"]}},
        "right": {"cases": found["cases"] | {name: found["cases"]["nobody waits"] for name in KNOWN}},
        "not reported": {"cases": found["cases"] | {name: [] for name in KNOWN}},
    }
    assert ordered.controls(None if other == "nothing" else found | changes[other], kept) == frozenset()


def test_what_is_a_hand_over() -> None:
    bias = group(BIAS.accesses)
    for one in HANDOVERS:
        assert ordered.class_of(group(one.accesses), [group(one.accesses)], KNOWN) == HANDED
    unnamed = group(BIAS.unnamed)
    assert ordered.class_of(unnamed, [unnamed, bias], KNOWN) == HANDED


@pytest.mark.parametrize(
    ("one", "others", "known"),
    [
        # Another kind, place or kernel; accesses the other way round, or of two hand-overs; of a control that was not reported.
        (group(BIAS.accesses, kind="WAR"), [], KNOWN),
        (group(BIAS.accesses, at="beyond its shared memory"), [], KNOWN),
        (group(BIAS.accesses, kernel="specialized_kernel"), [], KNOWN),
        (group(f"Write at {BIAS.read.reported} and Read at {BIAS.write.reported}"), [], KNOWN),
        (group(f"Write at {BIAS.write.reported} and Read at {ALPHA.read.reported}"), [], KNOWN),
        (group(BIAS.accesses), [], frozenset({"first group writes"})),
        (group(ALPHA.accesses), [], frozenset({"second group writes"})),
        # The next write is reported too, of any of these bytes: as of the wrong control.
        (group(BIAS.accesses), [group("Read at a.py:1 and Write at a.py:2", 214143, 214300, kind="WAR")], KNOWN),
        # Without a line where the named one was not reported, or partly elsewhere.
        (group(BIAS.unnamed), [], KNOWN),
        (group(BIAS.unnamed, 214000), [group(BIAS.accesses)], KNOWN),
        (group(BIAS.unnamed), [group(ALPHA.accesses)], KNOWN),
        # Where a kernel is defined: of a run, whose addresses are there, no class of its own.
        (group(str(ordered.begin_of("hopper_kernel"))), [], KNOWN),
    ],
)  # fmt: skip
def test_what_is_none(one: dict[str, Any], others: list[dict[str, Any]], known: frozenset[str]) -> None:
    assert ordered.class_of(one, [one, *others], known) == ERROR


def test_dispatch_of_a_recorded_run() -> None:
    at = ordered.begin_of("specialized_kernel")
    one = group(str(at), kernel="specialized_kernel")
    assert at is not None and ordered.class_of(one, [one], KNOWN, again=True) == DISPATCH
    for other in (
        one | {"kind": "WAR"},
        one | {"kernel": "hopper_kernel"},
        one | {"accesses": "Write at a.py:1 and Read at a.py:1"},
    ):
        assert ordered.class_of(other, [other], KNOWN, again=True) == ERROR
    assert ordered.begin_of("another") is None


def test_reports_that_are_no_hazards_and_wrong_results_are_errors() -> None:
    found = [group(BIAS.accesses), group("Write at a.py:1 and Read at a.py:2", 0, 3, count=5), group("x", excused=True, count=7)]
    run = {"hazards": found, "wrong": ["WRONG fused"], "reports": {"a": 3, "b": 5, "Invalid __global__ read": 11}}
    (got, missing) = ordered.sort([run, {"state": "not run"}], KNOWN)
    assert got["classes"] == {"errors": 17, "dispatch": 7, "hand-overs": 3} and missing == {"state": "not run"}
    assert [one["class"] for one in got["hazards"]] == [HANDED, ERROR, DISPATCH]
    about = {"checker": "racecheck", "sweep": "all", "calls": 4, "state": "finished"}
    rows = table({"runs": [got | about, {"checker": "none"}, missing | {"checker": "memcheck", "sweep": "all"}]})
    assert rows[2:] == ["| racecheck | all | 4 | 17 | 7 | 3 | finished |", "| memcheck | all | 0 | - | - | - | not run |"]


def test_a_file_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "again.json"
    paths = [str(RESULTS / f"{name}-h200.json") for name in ("sanitizers", "handovers")]
    monkeypatch.setattr("sys.argv", ["ordered", *paths, "--out", str(out)])
    assert ordered.main() == 0 and json.loads(out.read_text()) == result("sanitizers")
    # A run on another machine is held to nothing: its reports are errors.
    other = tmp_path / "other.json"
    other.write_text(json.dumps(result("handovers") | {"compute_sanitizer": "another"}))
    monkeypatch.setattr("sys.argv", ["ordered", paths[0], str(other), "--out", str(out)])
    assert ordered.main() == 1
