"""The command as a whole: help, versions, exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from sglang_specverify import __version__
from tests.cli.conftest import Run

COMMANDS = ("doctor", "explain", "checkpoint", "env", "serve", "demo", "tune")


def test_help_names_every_command(run: Run) -> None:
    for arguments in (("--help",), ("-h",)):
        outcome = run(*arguments)
        assert outcome.code == 0
        for command in COMMANDS:
            assert f"\n  {command} " in outcome.out


def test_no_command_shows_the_help(run: Run) -> None:
    outcome = run()
    # Whether that is a mistake differs between releases of the CLI library.
    assert outcome.code in (0, 2)
    assert "explain" in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("doctor", "every trouble comes with its remedy"),
        ("explain", "Needs no GPU, no SGLang and no weights"),
        ("checkpoint", "Needs no GPU and no SGLang; reads no weight"),
        ("env", "current value, default, type and meaning"),
        ("serve", "Every argument goes to SGLang"),
    ],
)
def test_help_of_a_command(run: Run, command: str, says: str) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert f"Usage: specverify {command}" in outcome.out
    assert says in " ".join(outcome.out.split())


def test_version(run: Run) -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out.strip()) == (0, f"sglang-specverify {__version__}")


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("--nonsense",), ("explain", "--mdoel", "x"), ("doctor", "--yaml"), ("env", "extra")],
    ids=str,
)
def test_a_misspelt_line_is_bad_input(run: Run, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.err


def test_an_error_is_two_lines_on_stderr(run: Run, tmp_path: Path) -> None:
    outcome = run("explain", "--model", str(tmp_path), "--hardware", "sm_90")
    assert outcome.code == 2
    assert outcome.out == ""
    first, second = outcome.err.splitlines()
    assert first.startswith("specverify: error: no config.json at ")
    assert second.startswith("  remedy: ")


def test_a_command_is_imported_only_when_it_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang_specverify.cli.demo")

    def demo(times: int = typer.Option(1, "--times")) -> None:
        """A stand-in."""
        typer.echo(f"demo ran {times}")

    module.demo = demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run("demo", "--times", "3").out == "demo ran 3\n"
    monkeypatch.setitem(sys.modules, module.__name__, None)
    # With a demo that cannot be imported at all, the others are as they were.
    assert run("env").code == 0
    assert run("serve", "--help").code == 0


def test_as_a_process(tmp_path: Path) -> None:
    program = "from sglang_specverify.cli import main; main()"
    line = [sys.executable, "-c", program, "explain", "--hardware", "H2000", "--model", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("specverify: error: 'H2000' is no hardware")
    assert len(done.stderr.splitlines()) == 2
