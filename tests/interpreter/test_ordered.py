"""The classes of racecheck's reports: what counts as a hand-over, against the source and a recorded run, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.docs import RESULTS
from benchmarks.docs import sanitizers as table

from . import hazards, ordered, sanitizers
from .handovers import CASES
from .ordered import DISPATCH, ERROR, HANDED, HANDOVERS, KERNELS

ALPHA, FACTOR, BIAS = HANDOVERS
KNOWN = frozenset({"first group writes", "second group writes"})


def group(accesses: str, low: int = 214016, high: int = 214143, **how: Any) -> dict[str, Any]:
    usual = {"kernel": "hopper_kernel", "kind": "RAW", "at": hazards.OWN, "count": 3, "excused": False}
    return {**usual, "accesses": accesses, "offsets": [low, high], **how}


def begin(kernel: str) -> str:
    return str(ordered.begin_of(kernel))


def run(*found: dict[str, Any], **reports: int) -> dict[str, Any]:
    named = {one["accesses"]: one["count"] for one in found if not one["excused"]}
    return {
        "checker": "racecheck",
        "sweep": "",
        "state": "finished",
        "hazards": list(found),
        "wrong": [],
        "reports": named | reports,
    }


#: What an H200 reported (driver 580.159.04, compute-sanitizer 2025.3.1, Triton 3.8.0), at the lines that statements have now.
SPARSE = run(
    group(ALPHA.accesses, 212992, 214015, count=13760),
    group(begin("hopper_kernel"), 214960, 215035, count=87, at=hazards.DISPATCH, excused=True),
    group(BIAS.accesses, count=1792),
    group(BIAS.unnamed, count=1024),
)
VERIFY = run(group(begin("specialized_kernel"), 99844, 99883, kernel="specialized_kernel", count=72))
MACHINE = {
    "hardware": {"name": "NVIDIA H200", "driver": "580.159.04"}, "compute_sanitizer": "2025.3.1", "versions": {"triton": "3.8.0"},
    "date": "2026-11-30 15:07 UTC",
}  # fmt: skip
_OWN = group("Write at handovers.py:44 and Read at handovers.py:57", 0, 255, kernel="handover_kernel")
_DISPATCH = group("Write at handovers.py:61 and Read at handovers.py:61", 312, 319, at=hazards.DISPATCH, excused=True)
HELD = {
    **MACHINE,
    "cases": {
        "first group writes": [_OWN, _DISPATCH], "second group writes": [_OWN], "second group writes, stmatrix": [],
        "nobody waits": [_OWN, _DISPATCH, _OWN | {"kind": "WAR"}],
    },
}  # fmt: skip


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


def test_what_an_h200_reported() -> None:
    known = ordered.controls(HELD, MACHINE)
    assert known == KNOWN
    assert [one["classes"] for one in ordered.sort([SPARSE, VERIFY], known, again=True)] == [
        {"errors": 0, "dispatch": 87, "hand-overs": 16576}, {"errors": 0, "dispatch": 72, "hand-overs": 0},
    ]  # fmt: skip
    # Without the controls, or of a run itself, which has each address, they are errors.
    assert [one["classes"] for one in ordered.sort([SPARSE, VERIFY], frozenset())] == [
        {"errors": 16576, "dispatch": 87, "hand-overs": 0}, {"errors": 72, "dispatch": 0, "hand-overs": 0},
    ]  # fmt: skip


def test_no_report_of_a_result_file_is_lost_between_the_classes() -> None:
    kept, found = (json.loads((RESULTS / f"{name}-h200.json").read_text()) for name in ("sanitizers", "handovers"))
    known, seen = ordered.controls(found, kept), 0
    for one in kept["runs"]:
        if "reports" not in one:
            continue
        excused = sum(hazard["count"] for hazard in one["hazards"] if hazard["excused"])
        assert sum(one["classes"].values()) == sum(one["reports"].values()) + excused + len(one["wrong"])
        seen += one["checker"] == "racecheck"
        for hazard in one["hazards"]:
            assert hazard["class"] != HANDED or (hazard["kind"] == "RAW" and known)
    assert seen


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": {"name": "NVIDIA H200", "driver": "1"}},
        {"hardware": {"name": "NVIDIA H100", "driver": "580.159.04"}},
        {"compute_sanitizer": "2026"},
        {"versions": {"triton": "3.9.0"}},
        # The wrong one is not told, the right ones look like it, or are not reported.
        {"cases": HELD["cases"] | {"nobody waits": [_OWN]}},
        {"cases": HELD["cases"] | dict.fromkeys(KNOWN, HELD["cases"]["nobody waits"])},
        {"cases": HELD["cases"] | dict.fromkeys(KNOWN, HELD["cases"]["second group writes, stmatrix"])},
        {"cases": {}},
    ],
)
def test_controls_hold_for_their_own_machine_and_say_which_is_wrong(change: dict[str, Any]) -> None:
    assert ordered.controls(HELD | change, MACHINE) == frozenset()
    assert ordered.controls(None, MACHINE) == frozenset()


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
        (group(begin("hopper_kernel")), [], KNOWN),
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
    one = run(*found, invalid=11) | {"wrong": ["WRONG fused"]}
    (got, missing) = ordered.sort([one, {"state": "not run"}], KNOWN)
    assert got["classes"] == {"errors": 17, "dispatch": 7, "hand-overs": 3} and missing == {"state": "not run"}
    assert [one["class"] for one in got["hazards"]] == [HANDED, ERROR, DISPATCH]
    about = {"checker": "racecheck", "sweep": "all", "calls": 4, "state": "finished"}
    rows = table({"runs": [got | about, {"checker": "none"}, missing | {"checker": "memcheck", "sweep": "all"}]})
    assert rows[2:] == ["| racecheck | all | 4 | 17 | 7 | 3 | finished |", "| memcheck | all | 0 | - | - | - | not run |"]


def test_a_file_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("sanitizers.json", "handovers.json", "again.json")]
    paths[0].write_text(
        json.dumps({**MACHINE, "runs": [SPARSE, VERIFY, {"checker": "memcheck", "sweep": "", "state": "not run"}]})
    )
    monkeypatch.setattr("sys.argv", ["ordered", *map(str, paths[:2]), "--out", str(paths[2])])
    # Controls of another machine are held to nothing: the reports are errors.
    for cases, code in ((HELD, 0), (HELD | {"compute_sanitizer": "another"}, 1)):
        paths[1].write_text(json.dumps(cases))
        assert ordered.main() == code
        got = json.loads(paths[2].read_text())
        assert got["read_again"]["controls"] == ([] if code else sorted(KNOWN)) and got["hardware"] == MACHINE["hardware"]
        # What the run said stands as it stood.
        for kept, now in zip((SPARSE, VERIFY), got["runs"], strict=False):
            assert now == kept | {"hazards": now["hazards"], "classes": now["classes"]}
            assert [{k: v for k, v in one.items() if k != "class"} for one in now["hazards"]] == kept["hazards"]


def test_a_run_is_held_to_its_controls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, held = tmp_path / "sanitizers.json", tmp_path / "handovers.json"
    held.write_text(json.dumps(HELD))
    monkeypatch.setattr(sanitizers, "find", lambda: "tool")
    monkeypatch.setattr(sanitizers, "version_of", lambda _: MACHINE["compute_sanitizer"])
    monkeypatch.setattr(record, "environment", lambda: MACHINE)

    def check(minutes: float, tool: str | None, save: Any) -> list[dict[str, Any]]:
        save([SPARSE])
        return [SPARSE]

    monkeypatch.setattr(sanitizers, "check", check)
    controls: tuple[tuple[list[str], int, int], ...] = (([], 1, 16576), (["--handovers", str(held)], 0, 0))
    for extra, code, errors in controls:
        monkeypatch.setattr("sys.argv", ["sanitizers", "--out", str(out), *extra])
        assert sanitizers.main() == code
        got = json.loads(out.read_text())
        assert got["runs"][0]["classes"] == {"errors": errors, "dispatch": 87, "hand-overs": 16576 - errors}
        assert got["command"].endswith("--minutes 8" + " --handovers handovers.json" * bool(extra))
