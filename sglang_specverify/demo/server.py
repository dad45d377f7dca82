"""A SGLang server as a child process: started, waited for, asked over HTTP, and always stopped."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_specverify import hardware as machine
from sglang_specverify.cli import serve
from sglang_specverify.demo import processes, scratch
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import Hardware

HOST = "127.0.0.1"
#: Seconds until a server must answer: slow disks and kernels compiled at first use included.
START_LIMIT = 900.0
_PLUGIN_CHOICE = ["--attention-backend", "specverify"]

#: The range of ports that the kernel hands out by itself, and the first one that is given to a server.
_KERNELS_PORTS, _FIRST_PORT = Path("/proc/sys/net/ipv4/ip_local_port_range"), 11000

_running: set[Server] = set()
_ports_given: set[int] = set()


def command(arguments: Sequence[str], hardware: Hardware, *, stock: bool = False) -> tuple[list[str], dict[str, str]]:
    """Argument vector and extra environment of a server through the plugin or, with `stock`, of SGLang's own.

    A stock server without a GPU gets SGLang's `torch_native` backend, as its CPU default needs AMX; on a GPU SGLang chooses.
    """
    if not stock:
        return serve.command(arguments, hardware)
    own = list(arguments)
    named = "--attention-backend" in own
    if named:  # `serve.command` refuses what conflicts with the plugin, so it is put back afterwards
        at = own.index("--attention-backend")
        choice, own = own[at : at + 2], own[:at] + own[at + 2 :]
    else:
        choice = [] if hardware.has_gpu else ["--attention-backend", "torch_native"]
    argv, extra = serve.command(own, hardware)
    at = next(i for i in range(len(argv)) if argv[i : i + 2] == _PLUGIN_CHOICE)
    return argv[:at] + choice + argv[at + 2 :], extra


def free_port() -> int:
    """A port of this machine that nobody listens on, and that this process was not given before.

    A server binds it half a minute later. So it is none of those that the kernel hands to whoever asks for any port, which on
    a busy machine another process soon holds.
    """
    choice = random.SystemRandom()
    while True:
        port = choice.randrange(_FIRST_PORT, _first_of_the_kernels_own())
        if port in _ports_given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _ports_given.add(port)
        return port


def _first_of_the_kernels_own() -> int:
    """The first port that the kernel hands out by itself; ports below it are taken by their number only."""
    try:
        first = int(_KERNELS_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first if first > 2 * _FIRST_PORT else 65536


def check_port(port: int) -> int:
    """`port`, if a server can listen on it.

    Raises:
        SpecverifyError: it is taken, reserved or no port.
    """
    remedy = "choose another one with --port, or leave --port out to get a free one"
    if not 0 < port < 65536:
        raise SpecverifyError(f"{port} is not a port number (1 to 65535)", remedy)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SpecverifyError(f"port {port} cannot be used: {error.strerror}", remedy) from None
    return port


class Server:
    """One server. `with Server([...]) as server:` starts it, waits until it answers, and stops it in every case.

    Args:
        arguments: of `sglang.launch_server`, without host and port.
        environment: added to this process's own.
        log: file for both output streams; a temporary one, removed by `stop` after a good start, when None.
        port: a free one when None.
        stock: SGLang's own server, without the plugin's choices.
        hardware: what it runs on; detected when None.
        name: for messages.
        log_hint: how a user gets to see the log, where its path does not last.

    Raises (the constructor):
        SpecverifyError: a port in use, or arguments that `specverify serve` refuses.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        port: int | None = None,
        stock: bool = False,
        hardware: Hardware | None = None,
        name: str = "server",
        log_hint: str | None = None,
    ) -> None:
        self.port = free_port() if port is None else check_port(port)
        self.url = f"http://{HOST}:{self.port}"
        self.name = name
        hardware = hardware or machine.detect()
        argv, extra = command(arguments, hardware, stock=stock)
        if not hardware.has_gpu and "OMP_NUM_THREADS" not in os.environ:
            # Tiny operations gain nothing from threads, and where cores are few or busy, waiting for each other costs tenfold.
            extra["OMP_NUM_THREADS"] = "1"
        self.argv = [*argv, "--host", HOST, "--port", str(self.port)]
        # Models are local directories; without this a hub is asked for their names when a network is there.
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **extra, **(environment or {})}
        self._remove_log = log is None
        self.log = log or _temporary_log()
        self._log_hint = log_hint or f"read the whole log: {self.log}"
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""
        self.started_at = 0.0

    def start(self) -> Server:
        """Start the process, in a process group of its own, and return at once."""
        _running.add(self)
        self._scratch = scratch.new()
        self.started_at = time.monotonic()
        with self.log.open("wb") as sink:
            self._process = processes.start(self.argv, {**self._environment, "TMPDIR": self._scratch}, sink)
        return self

    def poll(self) -> bool:
        """Whether the server answers by now.

        Raises:
            SpecverifyError: the process has ended, or was given `START_LIMIT` seconds and does not answer.
        """
        import requests

        if self._process is None or self._process.poll() is not None:
            self._remove_log = False
            code = None if self._process is None else self._process.returncode
            raise SpecverifyError(
                f"the {self.name} stopped while starting (exit code {code}):\n{self.last_words()}", self._log_hint
            )
        if time.monotonic() - self.started_at > START_LIMIT:
            self._remove_log = False
            raise SpecverifyError(f"the {self.name} does not answer after {START_LIMIT:.0f} s", self._log_hint)
        try:
            return bool(_session().get(f"{self.url}/health", timeout=5).status_code == 200)
        except requests.RequestException:
            return False

    def wait(self) -> Server:
        """Block until the server answers; raises as `poll` does."""
        while not self.poll():
            time.sleep(0.3)
        return self

    def stop(self) -> None:
        """End the process and everything it started; idempotent, and deaf to signals that ask to stop meanwhile."""
        with processes.deaf():
            process, self._process = self._process, None
            _running.discard(self)
            if process is not None:
                processes.end(process)
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)
            if self._remove_log:
                self.log.unlink(missing_ok=True)

    def __enter__(self) -> Server:
        try:
            return self.start().wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._remove_log = False
        self.stop()

    def generate(self, payload: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """POST /generate; the decoded answer."""
        return self.post("/generate", payload, timeout)

    def chat(self, payload: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """POST /v1/chat/completions; the decoded answer."""
        return self.post("/v1/chat/completions", payload, timeout)

    def get(self, path: str, timeout: float = 600.0) -> Any:
        return self._ask("GET", path, None, timeout)

    def post(self, path: str, payload: Mapping[str, Any] | None = None, timeout: float = 600.0) -> Any:
        return self._ask("POST", path, payload, timeout)

    def _ask(self, method: str, path: str, payload: Mapping[str, Any] | None, timeout: float) -> Any:
        """The decoded answer, or the text where it is no JSON.

        Raises:
            SpecverifyError: no answer, or one that is an error.
        """
        import requests

        try:
            answer = _session().request(method, self.url + path, json=payload, timeout=timeout)
        except requests.RequestException as error:
            raise SpecverifyError(
                f"the {self.name} did not answer {path}: {error}\n{self.last_words()}", self._log_hint
            ) from None
        if not answer.ok:
            raise SpecverifyError(
                f"the {self.name} answered {path} with {answer.status_code}: {answer.text[:500]}", self._log_hint
            )
        try:
            return answer.json()
        except ValueError:
            return answer.text

    def log_text(self) -> str:
        """What the server has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_line(self) -> str:
        """The last line of the log, for a progress display."""
        lines = _tail(self.log).rstrip().splitlines()
        return lines[-1].strip() if lines else ""

    def last_words(self, count: int = 6) -> str:
        """The last lines of the log that say something: no frames of tracebacks, an error of ours with its remedy."""
        lines = [line.rstrip() for line in _tail(self.log).splitlines() if line.strip()]
        ours = [i for i, line in enumerate(lines) if line.startswith("specverify: error:")]
        if ours:
            return "\n".join(lines[ours[-1] : ours[-1] + 3])
        said = [line for line in lines if not line.startswith((" ", "Traceback", "\t")) and not set(line) <= set("^~ ")]
        return "\n".join(f"  | {line[:240]}" for line in said[-count:])


def _session() -> Any:
    import requests

    session = requests.Session()
    session.trust_env = False  # a proxy in the environment must not see requests to this machine
    return session


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="specverify-server-", suffix=".log")
    os.close(handle)
    return Path(name)


def _tail(path: Path, size: int = 20000) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - size))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


@atexit.register
def _stop_all() -> None:
    for server in list(_running):
        server.stop()
