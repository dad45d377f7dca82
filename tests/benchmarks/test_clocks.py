"""Reading a device's clock and power while something runs, from a program in `nvidia-smi`'s place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.clocks import Clocks


def test_samples_of_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    # Half a line and a value that a device does not have, then samples until it is stopped.
    program.write_text(
        '#!/bin/sh\necho "$@" > "$0.arguments"\nprintf "[N/A], 400.0\\n"\n'
        'while :; do echo "1980, 500.26"; echo "1700, 700.04"; echo "1830, 650.0"; sleep 0.01; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with Clocks() as clocks:
        begin = end = time.monotonic()
        while (found := clocks.between(begin, end)) is None or found["samples"] < 3:
            end = time.monotonic()
            time.sleep(0.01)
            assert end - begin < 30
    assert {"clocks.sm,power.draw", "3"} <= set((tmp_path / "nvidia-smi.arguments").read_text().replace("=", " ").split())
    everything = clocks.between(0.0, time.monotonic())
    assert everything is not None and everything["sm_mhz"] in (1830.0, 1905.0, 1980.0)
    assert clocks.between(begin - 20, begin - 10) is None


def test_without_the_program_there_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Clocks() as clocks:
        assert clocks.between(0.0, time.monotonic()) is None
