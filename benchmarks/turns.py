"""Whose turn it is on a device that several benchmarks share: any number of them start engines at once, and one measures alone.

A start takes minutes of processors and hardly any of the device, so starts go side by side; a number counts only where nothing
else runs. All hold one lock file, starts and ends of engines shared and measurements alone, so none begins before the other has
ended. The system takes a lock back from a process that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_specverify.errors import SpecverifyError

_POLL_SECONDS = 0.2


class NoTurn(SpecverifyError):
    """A turn did not come in time."""


class Turns:
    """Turns by a lock file; without one every turn comes at once.

    Args:
        lock: made where it is not there. All that share a device name the same.
    """

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock

    @contextlib.contextmanager
    def shared(self, seconds: float) -> Iterator[None]:
        """A turn beside others of this kind, for work that nobody times. Waits at most `seconds` for a measurement to end.

        Raises:
            NoTurn: it did not come in time.
        """
        with self._held(fcntl.LOCK_SH, seconds):
            yield

    @contextlib.contextmanager
    def alone(self, seconds: float) -> Iterator[None]:
        """A turn beside nothing else; as `shared` otherwise."""
        with self._held(fcntl.LOCK_EX, seconds):
            yield

    @contextlib.contextmanager
    def _held(self, kind: int, seconds: float) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        end = time.monotonic() + seconds
        # A file of one's own for each turn: a lock belongs to the opened file, not to the process.
        with self._lock.open("a") as file:
            while True:
                try:
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise NoTurn(
                            f"no turn on {self._lock} in {seconds:.0f} s", "let what holds it end, or give more time"
                        ) from None
                    time.sleep(_POLL_SECONDS)
            yield
