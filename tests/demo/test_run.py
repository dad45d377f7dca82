"""The demonstration: its options, its verdict, and that it leaves nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_specverify.cli import app
from sglang_specverify.demo import run
from sglang_specverify.demo.run import Answer, Options
from sglang_specverify.errors import ArgumentError, SpecverifyError
from tests.signals import as_in_a_terminal


@pytest.mark.parametrize(
    "options, draft, tokens",
    [
        (Options(), "mirror", "8"),
        (Options(topk=1), "copy", "4"),
        (Options("EAGLE3", topk=2, steps=1), "eagle3", "3"),
        (Options("EAGLE", topk=2, steps=3, draft_tokens=11), "eagle", "11"),
        (Options("NGRAM"), "", "8"),
    ],
)
def test_options_become_arguments(options: Options, draft: str, tokens: str) -> None:
    arguments = options.server_arguments(Path("at"))
    assert arguments[arguments.index("--speculative-num-draft-tokens") + 1] == tokens
    assert options.draft == draft
    assert (f"at/{draft}" in arguments) == bool(draft)


@pytest.mark.parametrize(
    "options, named, allowed",
    [
        (Options("MEDUSA"), "--algorithm", "STANDALONE, EAGLE, EAGLE3, NGRAM"),
        (Options(topk=1, draft_tokens=8), "--draft-tokens", "4 for a chain of 3 steps"),
        (Options(topk=2, steps=2, draft_tokens=8), "--draft-tokens", "2 to 7 for this tree"),
    ],
)
def test_options_that_do_not_fit(options: Options, named: str, allowed: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        options.server_arguments(Path("at"))
    assert (caught.value.argument, caught.value.allowed) == (named, allowed)


@pytest.mark.parametrize(
    "wanted, got, place",
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([5], [6], 0)],
)
def test_first_difference(wanted: list[int], got: list[int], place: int | None) -> None:
    assert run.first_difference(wanted, got) == place


def test_verdict_names_the_place() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    same, other = Answer("/generate 1", (1, 2, 3), 3, 2.5), Answer("/generate 1", (1, 2, 4), 3, 1.0)
    assert run._show_answers([same], [same], console)
    assert not run._show_answers([same, same], [same, other], console)
    assert "no, from 2" in console.export_text()


class FakeServer:
    """Answers as a server would; `shift` makes the speculating one wrong."""

    shift = 0

    def __init__(self, arguments: list[str], *, stock: bool = False, name: str = "", **_: Any) -> None:
        self.stock, self.name, self.started_at = stock, name, time.monotonic()

    def start(self) -> FakeServer:
        return self

    def stop(self) -> None:
        pass

    def poll(self) -> bool:
        return True

    def last_line(self) -> str:
        return "[a log line]"

    def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        tokens = [len(payload["text"]), 7 + (0 if self.stock else self.shift)]
        return {"output_ids": tokens, "meta_info": {"prompt_tokens": 3, "completion_tokens": 2, "spec_accept_length": 2.0}}

    def chat(self, payload: dict[str, Any]) -> dict[str, Any]:
        message = {"content": payload["messages"][0]["content"]}
        return {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "choices": [{"message": message}]}

    def get(self, path: str) -> dict[str, Any]:
        row = {"mode": "target_verify", "layer": "full attention", "kernel": "reference", "reason": "no GPU", "calls": 5}
        return {"internal_states": [{"specverify": {"hardware": "no GPU", "base": "triton", "routes": [row, row]}}]}


@pytest.mark.parametrize("shift, code", [(0, 0), (1, 1)])
def test_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shift: int, code: int) -> None:
    monkeypatch.setattr(run, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "shift", shift)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "140"})
    assert result.exit_code == code, result.output
    assert ("all tokens equal" in result.output) == (code == 0)
    assert ("no, from 1" in result.output) == (code == 1)
    assert "10" in result.output.split("target_verify")[1].splitlines()[0]  # two rows of 5 calls, as one
    assert list(tmp_path.iterdir()) == []


def test_port_in_use_reaches_the_user_without_a_traceback(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = specverify_demo(tmp_path, "--port", str(taken.getsockname()[1]))
        output = result.communicate(timeout=120)[0]
    assert result.returncode == 2
    assert "cannot be used" in output and "remedy:" in output and "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def specverify_demo(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    code = "from sglang_specverify.cli import main; main()"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code, "demo", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=as_in_a_terminal,
    )


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals, code: int) -> None:
    demo = specverify_demo(tmp_path)
    family: list[psutil.Process] = []
    limit = time.monotonic() + 120
    while len(family) < 2:  # both servers are there, and neither is ready
        assert demo.poll() is None, demo.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.1)
        family = [p for p in psutil.Process(demo.pid).children(recursive=True) if "sglang.launch_server" in " ".join(p.cmdline())]
    demo.send_signal(number)
    output = demo.communicate(timeout=60)[0]
    assert demo.returncode == code, output
    assert "Traceback" not in output
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert list(tmp_path.iterdir()) == []


def test_missing_sglang_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_specverify.demo.run", None)
    monkeypatch.delattr("sglang_specverify.demo.run")
    with pytest.raises(SpecverifyError, match="comes with SGLang") as caught:
        app(["demo"], standalone_mode=False)
    assert "scripts/setup" in caught.value.remedy


@pytest.mark.demo
@pytest.mark.server
def test_whole_demonstration(tmp_path: Path) -> None:
    """The default demonstration, as a user runs it."""
    demo = specverify_demo(tmp_path)
    output = demo.communicate(timeout=900)[0]
    assert demo.returncode == 0, output
    assert "all tokens equal" in output
    accepted = [float(line.split("│")[5]) for line in output.splitlines() if "/generate" in line and "│" in line]
    assert len(accepted) == 4 and min(accepted) > 1.5  # drafts were accepted, so the comparison could have failed
    assert "target_verify" in output and "reference" in output
    assert list(tmp_path.iterdir()) == []
