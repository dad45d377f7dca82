"""Raw pages as `ncu` prints them, and stand-ins for it and for Python, for tests of `benchmarks.kernel_profile`.

A page has the form, the names and the units that `ncu` has for GH100; its numbers are made up.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernel_profile
from benchmarks.kernel_profile import Children

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: One launch: unit and value of each metric.
LAUNCH: dict[str, tuple[str, str]] = {
    "dram__bytes_read.sum": ("byte", "33,620,480"),
    "dram__bytes_write.sum": ("byte", "20,480"),
    "gpc__cycles_elapsed.max": ("cycle", "31,205"),
    "gpu__time_duration.sum": ("ns", "16,820"),
    "l1tex__throughput.avg.pct_of_peak_sustained_active": ("%", "31.40"),
    "launch__block_size": ("", "128"),
    "launch__grid_size": ("", "136"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "launch__shared_mem_per_block": ("byte/block", "99,328"),
    "launch__waves_per_multiprocessor": ("", "0.52"),
    "lts__t_bytes.sum": ("byte", "50,460,000"),
    "lts__t_sector_hit_rate.pct": ("%", "33.30"),
    "lts__t_sectors.sum": ("sector", "1,600,000"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "38.10"),
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": ("%", "99.00"),
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed": ("%", "9.80"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "12.50"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "7.70"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("%", "6.90"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "6.30"),
    STALLED.format("long_scoreboard"): ("inst", "5.00"),
    STALLED.format("long_scoreboard_not_issued"): ("inst", "900.00"),
    STALLED.format("barrier"): ("inst", "1.50"),
    STALLED.format("selected"): ("inst", "1.00"),
    STALLED.format("wait"): ("inst", "1.25"),
    STALLED.format("short_scoreboard"): ("inst", "0.75"),
    STALLED.format("not_selected"): ("inst", "0.25"),
    STALLED.format("sleeping"): ("inst", "0.25"),
}  # fmt: skip
PARTS = {"gpu__time_duration.sum": ("ns", "2,180"), "dram__bytes_read.sum": ("byte", "4,096")}
CHECKED = {"variant": "fused", "bytes": 34e6, "flops": 1e9, "error": 0.002}
#: What a stand-in for `ncu` says of itself.
VERSION = '[ "$1" = --version ] && echo NVIDIA && echo "Version 2025.3.1.0" && exit'
CEILINGS = {"copy_tb_per_s": 4.0, "matmul_tflops": 800.0, "from": "another.json"}


def raw(*launches: Mapping[str, tuple[str, str]]) -> str:
    """What `ncu --csv --page raw` prints of some launches, with its own lines and a program's around."""
    names = sorted({name for launch in launches for name in launch})
    page = io.StringIO()
    rows = csv.writer(page, quoting=csv.QUOTE_ALL, lineterminator="\n")
    rows.writerow(["ID", "Process ID", "Kernel Name", "Block Size", *names])
    rows.writerow(["", "", "", "", *(next(launch[name][0] for launch in launches if name in launch) for name in names)])
    for number, launch in enumerate(launches):
        values = [launch[name][1] if name in launch else "n/a" for name in names]
        rows.writerow([number, "4711", f"kernel_{number}(T1, T2)", "(128, 1, 1)", *values])
    before = '==PROF== Connected to process 4711 (/usr/bin/python3.12)\nsome "warning"\n'
    return f"{before}==PROF== Profiling: 0%....100% - 38 passes\n==PROF== Disconnected from process 4711\n{page.getvalue()}"


def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Children]:
    """Makes an `ncu` and a Python of a few words each, and children of them; neither runs the other."""

    def script(name: str, text: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def make(ncu: str, checked: Mapping[str, Any] = CHECKED) -> Children:
        (tmp_path / "raw.csv").write_text(raw(LAUNCH))
        (tmp_path / "checked.json").write_text(json.dumps(checked))
        script("ncu", VERSION + "\n" + ncu.format(raw=tmp_path / "raw.csv"))
        python = script("python", f'cp {tmp_path / "checked.json"} "$4"')
        monkeypatch.setattr(kernel_profile.sys, "executable", str(python))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        folder = tmp_path / "children"
        folder.mkdir(exist_ok=True)
        return Children(folder, "cpu")

    return make
