"""Child processes that never outlive this one, and clean-up that survives impatience."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import IO

_TERM_GRACE = 5.0
#: Loaded here, as little as possible may happen between fork and exec.
_libc = ctypes.CDLL(None)
#: The kernel's notice of a parent's death goes by thread, so one that lasts starts all children.
_starter = ThreadPoolExecutor(1, "specverify-starter")


def start(argv: Sequence[str], environment: Mapping[str, str], sink: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, both output streams into `sink`; it gets SIGTERM when this process dies."""
    return _starter.submit(
        subprocess.Popen,
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    ).result()


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, as Ctrl-C is `KeyboardInterrupt`, so that `with` blocks clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP: a second Ctrl-C must not leave half of the children behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    """In the child: ask the kernel for SIGTERM when the parent is gone, in case it was killed and could not clean up."""
    pr_set_pdeathsig = 1
    _libc.prctl(pr_set_pdeathsig, signal.SIGTERM)


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate, then kill, the process, its group and all its descendants; returns when none is left."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_GRACE)
    _signal_group(process.pid, signal.SIGKILL)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(family, timeout=_TERM_GRACE)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
