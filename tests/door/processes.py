"""Real servers that are expected to stop by themselves, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_specverify.demo.server import free_port

SABOTEUR = Path(__file__).with_name("saboteur")
#: Far above what a start takes, for machines that do other things meanwhile.
LIMIT = 600.0
#: SGLang's word that it takes requests.
READY = "The server is fired up and ready to roll!"


def environment(**extra: str) -> dict[str, str]:
    """For a small server on a CPU: one thread and one core for each rank, SGLang's CPU engine."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {
        **inherited,
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Two ranks on one NUMA node start only when each is told its cores.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0" if os.cpu_count() == 1 else "0|1",
        **extra,
    }


def small_server(target: Path, arguments: Sequence[str]) -> list[str]:
    """SGLang's arguments for a server with a tiny cache, which says it is ready without serving a request first."""
    head = ["--model-path", str(target), "--attention-backend", "specverify", "--device", "cpu", "--disable-cuda-graph"]
    small = ["--dtype", "float32", "--max-total-tokens", "256", "--mem-fraction-static", "0.1", "--skip-server-warmup"]
    return [*head, *small, "--sleep-on-idle", *arguments]


#: Set when nobody waits for a server any more, as after Ctrl-C: those that still run are then stopped.
nobody_waits = threading.Event()


@dataclass(frozen=True)
class Ended:
    """How a server ended: its exit code (None where it had to be stopped), its output, and processes that outlived it."""

    code: int | None
    text: str
    left: list[int]


def run_to_its_end(arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> Ended:
    """Start a server in a session of its own, wait until it ends by itself, and look for what is left of the session."""
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--port", str(free_port())]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=variables, stdout=sink, stderr=sink, start_new_session=True)
        code: int | None = None
        try:
            code = _exit_code(process, log)
        finally:
            left = outliving(process.pid, 10.0 if process.poll() is not None else 0.0)
            for outlived in left:
                outlived.kill()
            process.wait()
    return Ended(code, log.read_text(errors="replace"), [outlived.pid for outlived in left])


def _exit_code(process: subprocess.Popen[bytes], log: Path) -> int | None:
    """The exit code; None as soon as the server takes requests, for then it will not end by itself."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and not nobody_waits.is_set():
        if process.poll() is not None:
            return process.returncode
        if READY in log.read_text(errors="replace"):
            return None
        time.sleep(0.5)
    return None


def outliving(session: int, patience: float) -> list[psutil.Process]:
    """Processes of the session that are still there; the kernel may need a moment to end those that were killed.

    By session, because SGLang's processes overwrite their command line and environment with a title.
    """
    deadline = time.monotonic() + patience
    while True:
        alive = [process for process in psutil.process_iter() if _is_alive_in(process, session)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.2)


def _is_alive_in(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False
