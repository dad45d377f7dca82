"""At which clock and power a GPU ran while something was measured, as `nvidia-smi` reads them a few times a second."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from types import TracebackType
from typing import Any

_PERIOD_MS = 100
_QUERY = ("clocks.sm", "power.draw")


class Clocks:
    """Samples of one device while the block runs; none where there is no `nvidia-smi`."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._child: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Clocks:
        if (program := shutil.which("nvidia-smi")) is not None:
            # The first of the visible devices, by the number or UUID that nvidia-smi takes too.
            device = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
            command = [program, "-i", device, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
            self._child = subprocess.Popen([*command, f"--loop-ms={_PERIOD_MS}"], stdout=subprocess.PIPE, text=True)
            self._reader = threading.Thread(target=self._read, args=(self._child,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._child is not None and self._reader is not None:
            self._child.kill()
            self._child.wait()
            self._reader.join()

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # a value that this device does not have, or half a line of a program that was stopped
                continue
            self._samples.append((time.monotonic(), clock, power))

    def between(self, begin: float, end: float) -> dict[str, Any] | None:
        """Medians over an interval of `time.monotonic`, MHz and W; None without a sample in it."""
        found = [(clock, power) for at, clock, power in self._samples if begin <= at <= end]
        if not found:
            return None
        clocks, powers = zip(*found, strict=True)
        return {"sm_mhz": statistics.median(clocks), "watts": round(statistics.median(powers), 1), "samples": len(found)}
