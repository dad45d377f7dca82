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
    """Starts servers in the order given, at most `at_once` alive, each when a place is free.

    Starting one takes half a minute, mostly imports on one core: the next one starts while a test asks the last.
    """

    def __init__(self, makers: dict[str, Callable[[], Probed]], at_once: int = 3) -> None:
        self._makers = makers
        self._places = threading.Semaphore(at_once)
        self._ready: dict[str, Probed | BaseException] = {}
        self._changed = threading.Condition()
        self._stopping = False
        threading.Thread(target=self._start_all, daemon=True).start()

    def _start_all(self) -> None:
        for name, make in self._makers.items():
            self._places.acquire()
            if self._stopping:
                return
            outcome: Probed | BaseException
            try:
                outcome = make()
                outcome.server.start().wait()
            except BaseException as error:
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
        self._stopping = True
        for outcome in list(self._ready.values()):
            if isinstance(outcome, Probed):
                outcome.server.stop()
        self._places.release()


def environment(*plugin_folders: str, **more: str) -> dict[str, str]:
    """Environment of a server that loads test-only plugins. One thread: several servers share two cores."""
    path = os.pathsep.join((*plugin_folders, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
