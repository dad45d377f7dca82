"""The run of the memory checkers, with a script in place of compute-sanitizer: what it reads, and what it records of failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import sanitizers

RUN = ("memcheck", (), ("--cases", "1"), 0.9)

CLEAN = """========= COMPUTE-SANITIZER
ok    fused, chain, bfloat16, plain (0.1 s)
ok    fused, qlen_only, bfloat16, plain (0.1 s)
========= ERROR SUMMARY: 0 errors
"""

FOUND = """========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuFuncSetAttribute.
=========     Saved host backtrace up to driver entry point at error
ok    fused, chain, bfloat16, plain (0.1 s)
========= Invalid __global__ read of size 4 bytes
=========     at verify_attention_kernel+0x1230 in fused_kernel.py:310
=========     by thread (3,0,0) in block (1,0,0)
========= Invalid __global__ read of size 2 bytes
WRONG fused, qlen_only, bfloat16, plain: 3 times its bound
========= ERROR SUMMARY: 3 errors
"""

RACES = """ok    fused, chain, bfloat16, plain (0.1 s)
========= Error: Race reported between Write access at a+0x340 and Read access at a+0x480 [16 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def tool(folder: Path, output: str, then: str = "exit 0") -> str:
    """A script that takes any arguments and prints `output`."""
    path = folder / "compute-sanitizer"
    # With nothing but the shell's own, which needs no PATH.
    says = "while IFS= read -r line; do printf '%s\\n' \"$line\"; done"
    path.write_text(f"#!/bin/sh\n{says} <<'END'\n{output}END\n{then}\n")
    path.chmod(0o755)
    return str(path)


def checked(monkeypatch: pytest.MonkeyPatch, name: str | None, *, minutes: float = 1.0) -> dict[str, Any]:
    saved: list[int] = []
    monkeypatch.setattr(sanitizers, "RUNS", (RUN,))
    (result,) = sanitizers.check(minutes, name, lambda results: saved.append(len(results)))
    assert saved == [1]
    return result


def test_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = checked(monkeypatch, tool(tmp_path, CLEAN))
    assert (result["state"], result["calls"], result["reports"], result["summary_errors"]) == ("finished", 2, {}, 0)


def test_reports_by_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = checked(monkeypatch, tool(tmp_path, FOUND, "exit 1"))
    assert result["reports"] == {"Invalid __global__ read of size # bytes": 2}
    assert sum(result["host_calls"].values()) == 1 and result["summary_errors"] == 3
    assert len(result["wrong"]) == 1 and result["calls"] == 2 and result["exit_code"] == 1
    assert len(sanitizers.read(RACES)["reports"]) == 1 and sanitizers.read(RACES)["summary_errors"] == 1


@pytest.mark.parametrize(
    ("output", "reason"),
    [("========= Error: Device not supported. Please refer to the documentation\n", "Device not supported"), ("", "no output")],
)
def test_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, reason: str) -> None:
    result = checked(monkeypatch, tool(tmp_path, output, "exit 255"))
    assert result["state"] == "not run" and reason in result["reason"] and "reports" not in result
    missing = checked(monkeypatch, None)
    assert missing["state"] == "not run" and "not installed" in missing["reason"]


def test_a_run_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it had said counts, and nothing of it is left running."""
    name = tool(tmp_path, CLEAN.splitlines()[1] + "\n", f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    result = checked(monkeypatch, name, minutes=0.03)
    assert (result["state"], result["calls"], result["exit_code"]) == ("time is up", 1, None)
    stat = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    # Gone, or dead and not yet collected by whoever collects orphans here.
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_it_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    before = sanitizers.find()
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    assert sanitizers.find() == before
    name = tool(tmp_path / "cuda" / "bin", "Version 2025.3.1 (build 1)\n")
    assert sanitizers.find() == name and sanitizers.version_of(name) == "Version 2025.3.1 (build 1)"
