"""Servers for the parity suite: started ahead of their test, two at a time, and always stopped."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_specverify.demo.server import Server

PLUGIN_GROUP = "sglang.srt.plugins"


def write_plugin(directory: Path, name: str, module: Path) -> str:
    """Make `module.register` a SGLang plugin for processes that have the returned folder on PYTHONPATH."""
    target = directory / name
    info = target / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(module, target / f"{name}.py")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\n{name} = {name}:register\n")
    return str(target)


class Probed:
    """A server together with the probe's directory."""

    def __init__(self, server: Server, directory: Path | None) -> None:
        self.server, self.directory = server, directory

    def paths(self) -> list[list[int]]:
        """Accepted paths since the last call: the ordinal of each accepted draft token among its siblings."""
        assert self.directory is not None
        file = self.directory / "paths.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [path for line in lines for path in json.loads(line)]

    def inject(self, fault: str) -> None:
        """Break verify from the next step on; "" mends it. The cache holds what was computed before, so it is emptied."""
        assert self.directory is not None
        (self.directory / "fault").write_text(fault)
        self.server.post("/flush_cache")

    def routes(self) -> list[dict[str, Any]]:
        state = self.server.get("/server_info")["internal_states"][0]
        return list(state["specverify"]["routes"])


class Farm:
    """Starts servers in the order given, two at a time, at most `at_once` alive, each when a place is free.

    Starting one takes half a minute, mostly imports: the next ones start while a test asks the last.
    """

    def __init__(self, makers: dict[str, Callable[[], Probed]], at_once: int = 3, starters: int = 2) -> None:
        self._makers = iter(makers.items())
        self._next = threading.Lock()
        self._places = threading.Semaphore(at_once)
        self._ready: dict[str, Probed | BaseException] = {}
        self._changed = threading.Condition()
        self._stopping = False
        for _ in range(starters):
            threading.Thread(target=self._start_in_turn, daemon=True).start()

    def _start_in_turn(self) -> None:
        while True:
            self._places.acquire()
            with self._next:
                name, make = next(self._makers, ("", None))
                if make is None or self._stopping:
                    return
                # Also in turn: it writes models that several servers share.
                outcome: Probed | BaseException
                try:
                    outcome = make()
                    outcome.server.start()
                except BaseException as error:
                    outcome = error
            if isinstance(outcome, Probed):
                try:
                    outcome.server.wait()
                except BaseException as error:
                    outcome.server.stop()
                    outcome = error
            with self._changed:
                self._ready[name] = outcome
                self._changed.notify_all()

    def get(self, name: str) -> Probed:
        """Wait for the server of this name."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._ready, timeout=900)
            outcome = self._ready[name]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def done(self, name: str) -> None:
        """Stop it, and make its place free."""
        outcome = self._ready[name]
        if isinstance(outcome, Probed):
            outcome.server.stop()
        self._places.release()

    def stop(self) -> None:
        """Stop what is ready; what is still starting is stopped with this process."""
        self._stopping = True
        for outcome in list(self._ready.values()):
            if isinstance(outcome, Probed):
                outcome.server.stop()
        self._places.release(2)


def environment(*plugin_folders: str, **more: str) -> dict[str, str]:
    """Environment of a server that loads test-only plugins. One thread: several servers share two cores."""
    path = os.pathsep.join((*plugin_folders, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
