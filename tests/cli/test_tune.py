"""`specverify tune` where it cannot run; `tests/tuning` covers what it does where it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_specverify.hardware import NO_GPU, Hardware
from tests.cli.conftest import Run


def test_a_machine_without_a_gpu_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_specverify.cli.tune.detect", lambda: NO_GPU)
    outcome = run("tune", "--out", str(tmp_path / "new.json"))
    assert outcome.code == 2
    assert outcome.err.splitlines() == [
        "specverify: error: tuning times kernels on a GPU, and torch sees none here",
        "  remedy: run it on the machine to tune for",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_does_not_exist_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_specverify.cli.tune.detect", lambda: Hardware("nvidia", "sm_90", "H200", 1))
    outcome = run("tune", "--out", str(tmp_path / "new.json"), "--only", "rows 7")
    assert outcome.code == 2
    assert "nothing to tune with --kernel None --only 'rows 7'; there are" in outcome.err
    assert "  fused rows 1-16 dim 1-64 cache 16\n" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_could_not_be_written_is_refused_before_anything_is_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_specverify.cli.tune.detect", lambda: Hardware("nvidia", "sm_90", "H200", 1))
    monkeypatch.setattr("sglang_specverify.tuning.run.Gpu", None)  # nothing of it is made
    outcome = run("tune", "--out", str(tmp_path))
    assert outcome.code == 2
    assert f"specverify: error: --out: got {tmp_path}, and {tmp_path} is a directory; allowed: the path of a file" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_out_is_required(run: Run) -> None:
    assert run("tune").code == 2
