"""Starts of engines side by side, measurements alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.turns import Turns
from sglang_specverify.errors import SpecverifyError


def test_starts_go_side_by_side_and_measurements_alone(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "lock")
    with turns.shared(0), turns.shared(0), pytest.raises(SpecverifyError, match="no turn"), turns.alone(0):
        pass
    for other in (turns.shared, turns.alone):
        with turns.alone(0), pytest.raises(SpecverifyError, match="no turn"), other(0):
            pass
    with turns.alone(0):
        pass


def test_a_turn_waits_for_the_one_before_it(tmp_path: Path) -> None:
    turns, order = Turns(tmp_path / "lock"), []
    inside, leave = threading.Event(), threading.Event()

    def start() -> None:
        with turns.shared(60):
            inside.set()
            leave.wait(60)
            order.append("started")

    thread = threading.Thread(target=start)
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.3, leave.set).start()
    with turns.alone(60):
        order.append("measured")
    thread.join()
    assert order == ["started", "measured"]


def test_a_process_that_dies_gives_its_turn_back(tmp_path: Path) -> None:
    """Also while one that it started lives on: a server must not keep the turn of the benchmark that started it."""
    lock = tmp_path / "lock"
    code = f"""
import os, subprocess, sys
from pathlib import Path
from benchmarks.turns import Turns
with Turns(Path({str(lock)!r})).alone(0):
    # As servers are started: nothing but the standard streams is handed on unless asked for.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False, stdin=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.readline()
    os._exit(1)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdin is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(SpecverifyError, match="no turn"), Turns(lock).shared(0):
            pass
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.wait(60) == 1
        with Turns(lock).alone(0):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait()


def test_without_a_lock_file_turns_come_at_once() -> None:
    turns = Turns(None)
    with turns.alone(0), turns.alone(0), turns.shared(0):
        pass
