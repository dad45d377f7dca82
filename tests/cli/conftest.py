"""The command line run in this process, with its exit code, and a process environment without the plugin's variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sglang_specverify.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SGLANG_") or name in ("TRITON_INTERPRET", "TORCH_COMPILE_DISABLE", "COLUMNS"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        captured = capsys.readouterr()
        code = left.value.code
        outcome = Outcome(code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err)
        assert "Traceback" not in outcome.out + outcome.err
        return outcome

    return call
