"""A server's life, with small processes in place of SGLang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_specverify.demo import scratch
from sglang_specverify.demo import server as module
from sglang_specverify.demo.server import HOST, Server, check_port, command, free_port
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import NO_GPU, from_name
from tests.signals import as_in_a_terminal

#: Answers /health at once, echoes JSON, and has a child that left the process group and ignores SIGTERM.
ANSWERS = """
import http.server, subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if "missing" in self.path else 200)
        self.end_headers()
        self.wfile.write(b"no such thing" if "missing" in self.path else b'{"method": "GET"}')
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.rfile.read(int(self.headers["Content-Length"])))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
DIES = """
print("loading")
raise RuntimeError("the model is not there")
"""
REFUSES = r"""
print("specverify: error: fa3 does not run here\n  remedy: choose triton", flush=True)
print("later noise")
raise SystemExit(3)
"""


def standing_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(module, "command", lambda *_, **__: ([sys.executable, "-c", code], {"EXTRA": "1"}))


def child_of(server: Server) -> psutil.Process:
    return psutil.Process(int(server.log_text().split()[1]))


def gone(process: psutil.Process) -> bool:
    try:
        process.wait(10)
    except psutil.TimeoutExpired:
        return False
    return True


def test_answers_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standing_in(monkeypatch, ANSWERS)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Server(["x"], hardware=NO_GPU) as server:
        child = child_of(server)
        assert server.get("/server_info") == {"method": "GET"}
        assert server.generate({"text": "a"}) == {"text": "a"}
        assert server.chat({"model": "b"}) == {"model": "b"}
        with pytest.raises(SpecverifyError, match="answered /missing with 404: no such thing"):
            server.get("/missing")
        assert child.is_running()
    assert gone(child)
    assert list(tmp_path.iterdir()) == []
    server.stop()  # idempotent


#: Binds a socket at every path that Python and SGLang make one at, and says where.
BINDS = """
import multiprocessing.util, os, socket, tempfile
from multiprocessing.connection import arbitrary_address
zmq = tempfile.NamedTemporaryFile(delete=False).name
os.unlink(zmq)
memory = os.path.join(tempfile.mkdtemp(prefix="sgl_ar_fd_"), "rank_15.sock")
multiprocessing.util.get_temp_dir()  # made by whoever asks first
for path in (zmq, memory, arbitrary_address("AF_UNIX")):
    assert path.startswith(os.environ["TMPDIR"] + "/")
    socket.socket(socket.AF_UNIX).bind(path)
    print(path, flush=True)
"""


def of_length(length: int, below: str) -> str:
    """A new directory below another, its path filled up to `length`."""
    path = below + "/" + (length - len(below) - 1) * "x"
    os.mkdir(path)
    return path


@pytest.mark.parametrize("length, nested", [(30, True), (63, True), (64, False), (95, False), (200, False)])
def test_sockets_have_valid_paths_whatever_tmpdir(length: int, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang alone starts, with a TMPDIR of up to 95 characters, a server does here; and beyond."""
    standing_in(monkeypatch, BINDS)
    with tempfile.TemporaryDirectory(prefix="sv-", dir="/tmp") as short:
        own = of_length(length, short)
        monkeypatch.setattr(tempfile, "tempdir", own)
        server = Server(["x"], hardware=NO_GPU, log=Path(short) / "log").start()
        used, process = server._scratch, server._process
        try:
            assert os.path.dirname(used) == (own if nested else "/tmp")
            assert process is not None and process.wait(60) == 0, server.log_text()
        finally:
            server.stop()
        assert not os.path.exists(used)
        paths = server.log_text().splitlines()
        assert max(map(len, paths)) == len(used) + scratch.SOCKET_BELOW <= scratch.LONGEST_SOCKET


def test_the_longest_path_of_a_socket_is_the_systems() -> None:
    with tempfile.TemporaryDirectory(prefix="sv-", dir="/tmp") as short, socket.socket(socket.AF_UNIX) as probe:
        path = f"{short}/{'x' * scratch.LONGEST_SOCKET}"
        with pytest.raises(OSError, match="path too long"):
            probe.bind(path[: scratch.LONGEST_SOCKET + 1])
        probe.bind(path[: scratch.LONGEST_SOCKET])


def test_a_temporary_directory_that_is_too_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes, as the system does; and only where the system's own will not do either."""
    own = "/" + 32 * "ä"
    monkeypatch.setattr(tempfile, "tempdir", own)
    monkeypatch.setattr(scratch, "SYSTEMS_TEMPORARY", str(tmp_path / "absent"))
    with pytest.raises(SpecverifyError, match=f"the temporary directory {own} is too long .*absent cannot be used") as caught:
        Server(["x"], hardware=NO_GPU, log=tmp_path / "log").start()
    assert "TMPDIR to a directory whose path has 63 bytes or fewer" in caught.value.remedy


def test_death_at_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standing_in(monkeypatch, DIES)
    log = tmp_path / "log"
    with pytest.raises(SpecverifyError) as caught, Server(["x"], hardware=NO_GPU, log=log, name="test server"):
        pytest.fail("it cannot have started")
    text = str(caught.value)
    assert text.startswith("the test server stopped while starting (exit code 1):")
    assert "RuntimeError: the model is not there" in text
    assert "Traceback" not in text
    assert caught.value.remedy == f"read the whole log: {log}"
    assert "Traceback" in log.read_text()


def test_an_error_of_the_plugin_is_shown_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standing_in(monkeypatch, REFUSES)
    with pytest.raises(SpecverifyError, match=r"fa3 does not run here\n  remedy: choose triton"):
        Server(["x"], hardware=NO_GPU, log=tmp_path / "log").start().wait()


def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standing_in(monkeypatch, "import time; time.sleep(300)")
    monkeypatch.setattr(module, "START_LIMIT", 0.5)
    with pytest.raises(SpecverifyError, match="does not answer after"), Server(["x"], hardware=NO_GPU, log=tmp_path / "log"):
        pytest.fail("it cannot have started")


def test_a_server_that_dies_later_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    standing_in(monkeypatch, ANSWERS)
    with Server(["x"], hardware=NO_GPU, log=tmp_path / "log") as server:
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        with pytest.raises(SpecverifyError, match="did not answer /generate"):
            server.generate({})


def test_an_error_in_the_block_stops_it_and_keeps_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    standing_in(monkeypatch, ANSWERS)
    with pytest.raises(ZeroDivisionError), Server(["x"], hardware=NO_GPU) as server:
        child = child_of(server)
        _ = 1 / 0
    assert gone(child)
    assert server.log.exists()
    server.log.unlink()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_server_along(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import sys, time
from sglang_specverify.demo import server
from sglang_specverify.hardware import NO_GPU
server.command = lambda *_, **__: ([sys.executable, "-c", "import time; time.sleep(300)"], {{}})
made = server.Server(["x"], hardware=NO_GPU, log=__import__("pathlib").Path({str(tmp_path / "log")!r})).start()
print(made._process.pid, flush=True)
time.sleep(300)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=as_in_a_terminal
    )
    assert parent.stdout is not None
    served = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(number)
    parent.wait(10)
    limit = time.monotonic() + 10
    while served.is_running() and served.status() != psutil.STATUS_ZOMBIE:  # nobody may be there to reap it
        assert time.monotonic() < limit, "the server outlived its parent"
        time.sleep(0.05)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpecverifyError, match=rf"port {port} cannot be used: .*in use") as caught:
            Server(["--model-path", "x"], port=port, hardware=NO_GPU)
    assert "--port" in caught.value.remedy


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(SpecverifyError, match="not a port number"):
        check_port(port)


def test_free_ports_differ() -> None:
    assert len({free_port() for _ in range(50)}) == 50


def test_no_other_process_is_given_a_free_port_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server binds its port half a minute after it was chosen, and connections are made meanwhile."""
    own = tmp_path / "range"
    monkeypatch.setattr(module, "_KERNELS_PORTS", own)
    own.write_text("25000\t60999\n")
    assert all(port < 25000 for port in (free_port() for _ in range(50)))
    # A kernel that hands out nearly all leaves no others.
    own.write_text("1024\t65535\n")
    assert check_port(free_port())


def test_a_port_that_is_taken_is_not_called_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "_FIRST_PORT", port)
        monkeypatch.setattr(module, "_first_of_the_kernels_own", lambda: port + 20)
        monkeypatch.setattr(module, "_ports_given", set())
        assert port not in {free_port() for _ in range(10)}


def after(argv: list[str], option: str) -> Any:
    return argv[argv.index(option) + 1] if option in argv else None


@pytest.mark.parametrize(
    "arguments, hardware, stock, backend",
    [
        ([], "none", False, "specverify"),
        ([], "none", True, "torch_native"),
        (["--attention-backend", "triton"], "none", True, "triton"),
        ([], "sm_90", False, "specverify"),
        ([], "sm_90", True, None),
    ],
)
def test_commands(arguments: list[str], hardware: str, stock: bool, backend: str | None) -> None:
    argv, extra = command(["--model-path", "x", *arguments], from_name(hardware), stock=stock)
    assert after(argv, "--attention-backend") == backend
    assert argv.count("--attention-backend") <= 1
    assert after(argv, "--model-path") == "x"
    assert ("SGLANG_USE_CPU_ENGINE" in {**extra, **os.environ}) == (hardware == "none" or "SGLANG_USE_CPU_ENGINE" in os.environ)
    assert (after(argv, "--device") == "cpu") == (hardware == "none")
