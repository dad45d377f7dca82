"""`specverify env`, and the page that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_specverify.flags import FLAGS, UPSTREAM_SWITCHES
from tests.cli.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_shows_every_flag(run: Run) -> None:
    outcome = run("env")
    assert outcome.code == 0
    for flag in (*FLAGS, *UPSTREAM_SWITCHES):
        assert flag.name in outcome.out
    assert "auto | fa3 | fa4 | triton | aiter" in outcome.out


def test_shows_current_values(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", "triton")
    line = next(line for line in run("env").out.splitlines() if "SGLANG_SPECVERIFY_BASE" in line)
    assert line.split()[:3] == ["SGLANG_SPECVERIFY_BASE", "triton", "auto"]


def test_a_wrong_value_is_shown_and_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", "fa5")
    outcome = run("env")
    assert outcome.code == 2
    assert "fa5" in outcome.out
    assert "SGLANG_SPECVERIFY_BASE='fa5' is not one of auto, fa3" in outcome.err


def test_an_unknown_flag_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICKT", "1")
    outcome = run("env")
    assert outcome.code == 2
    assert "did you mean SGLANG_SPECVERIFY_STRICT?" in outcome.err


def test_the_page_is_current(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # The page must not depend on who writes it.
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE", "0")
    outcome = run("env", "--markdown")
    assert outcome.code == 0
    assert outcome.out == PAGE.read_text(encoding="utf-8"), "write docs/flags.md with: specverify env --markdown > docs/flags.md"
