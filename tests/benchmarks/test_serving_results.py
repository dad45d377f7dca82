"""What result files of whole servers hold where something failed, or does not belong there. Stand-ins serve; none is started."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks import serving_farm, serving_memory, serving_models, serving_parity
from benchmarks.serving_rows import Row, Size

SIZE = Size(False, 512, 4096, 4)


def run_of(rows: list[Row], tmp_path: Path, minutes: float) -> serving_parity.Run:
    return serving_parity.Run(rows, serving_models.TINY, SIZE, tmp_path, tmp_path / "out.json", minutes, None)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_row_that_fails_when_the_time_is_over_was_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, in_time: bool
) -> None:
    rows = [Row("early", "plugin"), Row("late", "plugin")]
    run = run_of(rows, tmp_path, 5)

    def probed(row: Row, *_: object) -> None:
        if row.name == "late" and not in_time:
            run.end = time.monotonic()
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(serving_parity, "Probed", probed)
    monkeypatch.setattr(serving_models, "build", lambda *_: None)
    assert not run.go(1), "what was not run has not passed"
    found = json.loads(run.out.read_text())
    failed = {row["row"]["name"]: row["problems"] for row in found["rows"]}
    why = ["ConnectionError: the server is gone"]
    assert failed == ({"early": why, "late": why} if in_time else {"early": why})
    assert found["not run"] == ([] if in_time else ["late"]) and found["judged"] == len(failed)


def test_a_row_without_one_of_its_references_was_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = run_of([Row("plain-bf16", "plain"), Row("row", "plugin")], tmp_path, 5)
    monkeypatch.setattr(run, "_one", lambda row: serving_parity.Outcome(row, error="x" * row.name.startswith("plain")))
    monkeypatch.setattr(serving_models, "build", lambda *_: None)
    assert not run.go(1)
    found = json.loads(run.out.read_text())
    assert found["rows"] == [] and found["not run"] == ["row"] and len(found["references"]) == 1


def test_numbers_of_processes_stay_out_of_result_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probed = MagicMock()
    probed.ask.side_effect = lambda *_: {"pid": 7, "capacity": 4096, "masks": []}
    monkeypatch.setattr(serving_memory, "Probed", lambda *_: probed)
    asked: list[int] = []
    monkeypatch.setattr(serving_farm, "device_memory", asked.append)
    found = serving_memory.measure(Row("row", "plugin"), tmp_path, serving_models.TINY, SIZE, [], None)
    assert "error" not in found and found["probe"] == {"capacity": 4096} and asked == [7]
    monkeypatch.setattr(time, "sleep", lambda _: None)
    outcome = serving_parity.Outcome(Row("row", "plugin"))
    run_of([], tmp_path, 5)._ask(probed, outcome)
    assert outcome.facts["probe"] == {"capacity": 4096, "masks": []}
    results = Path(serving_parity.__file__).parent / "results"
    assert all('"pid"' not in file.read_text() for file in results.glob("serving-*.json"))
