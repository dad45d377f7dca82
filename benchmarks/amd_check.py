"""Does the plugin compute the right thing on this AMD GPU, and how fast: one file to send back.

    python -m benchmarks.amd_check --out amd-check.json                 on a gfx950 or gfx942 machine with SGLang's ROCm packages
    python -m benchmarks.amd_check --out amd-check.json --minutes 20    with more of the benchmark's points
    TRITON_INTERPRET=1 python -m benchmarks.amd_check --dry-run --out dry.json          the same path without a GPU

First `tests.gpu.backend_parity`, in a process of its own: the backends over triton and, where it is installed, aiter, eager and
in graphs, against the FP64 reference. Then points of `benchmarks.verify_attention`: the plugin's kernels beside SGLang's Triton
kernels and aiter's unified attention, each output held to FP64 before it is timed. The file carries versions, hardware, date,
command, every row of both, and what failed. Exits with 1 if anything did, and with 2 where the machine is no AMD one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import measure, points, record, timing
from benchmarks.arms import OURS, Arm
from benchmarks.points import Point
from benchmarks.stock_aiter import AITER
from benchmarks.stock_triton import STOCK
from benchmarks.verify_attention import run
from sglang_specverify.hardware import detect

_ROOT = Path(__file__).parents[1]
#: The arms that exist on AMD: none of FlashAttention's and FlashInfer's, nor the kernel for SM90.
_ARMS = ("fused", "fused_split", "triton", "upstream_splitkv")
ARMS: tuple[Arm, ...] = (*(arm for arm in (*OURS, *STOCK) if arm.name in _ARMS), *AITER)
#: Seconds after which parity is taken to hang; on an H200 it takes one minute.
_LONGEST_PARITY = 1800
#: What parity runs without a GPU, where every case takes seconds.
_DRY_CASE = "aiter chain"


def chosen() -> Iterator[Point]:
    """Chains, trees and draft steps, short and long, in the order of what they tell."""
    for batch, length in ((8, 2048), (1, 8192), (32, 8192), (1, 32768), (32, 384)):
        yield Point("chain", batch, 4, length)
        yield Point("tree", batch, 16, length)
        yield Point("draft", batch, 4, length)
        yield Point("chain", batch, 4, length, cache="e4m3", page_size=16)
    yield Point("tree", 8, 64, 2048)
    yield Point("chain", 8, 4, 2048, q_heads=32, kv_heads=2, head_dim=256, cache="e4m3", page_size=16)
    yield Point("chain", 8, 4, 8192, window=127, sinks=True)


def main(
    out: Annotated[Path, typer.Option(help="Result file to write, after every point.")],
    minutes: Annotated[float, typer.Option(help="Start no point after this many minutes.")] = 9.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="On a CPU: tiny points, no timing.")] = False,
) -> None:
    """Parity first, then points until the time is used up; a line for each."""
    machine, begin = detect(), time.monotonic()
    if machine.vendor != "amd" and not dry_run:
        typer.echo(f"this is {machine.display}, no AMD GPU; --dry-run takes the same path without one", err=True)
        raise typer.Exit(2)
    results: dict[str, Any] = {"machine": _machine(), "parity": _parity(_DRY_CASE if dry_run else ""), "points": []}
    record.write(out, results)
    where = torch.device("cpu" if dry_run else "cuda")
    ceilings = None if dry_run else timing.ceilings(where)
    results["ceilings"] = None if ceilings is None else ceilings.as_dict()

    def one(point: Point) -> dict[str, Any]:
        row = measure.measure(point, ARMS, ceilings, where)
        typer.echo(f"{point.name}: {_line(row)}")
        return row

    run(points.tiny() if dry_run else chosen(), results["points"], one, lambda: record.write(out, results), begin + 60 * minutes)
    results["failures"] = failures(results)
    record.write(out, results)
    typer.echo(f"{len(results['failures'])} failures; {time.monotonic() - begin:.0f} s; send back {out}")
    for failure in results["failures"]:
        typer.echo(f"  {failure}")
    raise typer.Exit(int(bool(results["failures"])))


def _machine() -> dict[str, Any]:
    """What an AMD machine has beside what every result file says."""

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {"hip": torch.version.hip, "aiter": of("amd-aiter") or of("aiter")}


def _parity(case: str) -> dict[str, Any]:
    """The rows of `tests.gpu.backend_parity` for the cases whose name has `case` in it, those it did not come to, and why."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "tests.gpu.backend_parity", *(["--case", case] if case else []), "--out", str(rows)]
        try:
            done = subprocess.run(
                command, cwd=_ROOT, capture_output=True, text=True, errors="replace", check=False, timeout=_LONGEST_PARITY
            )
        except subprocess.TimeoutExpired:
            ended = f"not done after {_LONGEST_PARITY} s"
        else:
            typer.echo(done.stdout.rstrip())
            # It exits with 1 where a row failed, which the row says; a fault of the GPU ends it in other ways.
            ended = f"exit code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}" if done.returncode else ""
        if not rows.exists():
            return {"rows": [], "not_run": [], "why": ended or "it wrote no file"}
        found: dict[str, Any] = json.loads(rows.read_text())
        # Without a GPU nothing is timed, and JSON has no word for a number that is none.
        kept = [{name: value for name, value in row.items() if value == value} for row in found["rows"]]
        return {"device": found["device"], "rows": kept, "not_run": found["not run"], "why": ended}


#: How an arm begins to say that it is not for a point.
_DECLINES = "ArgumentError: variant"


def failures(results: dict[str, Any]) -> list[str]:
    """Each row of parity that is not ok, what it did not come to, and each arm of the plugin's that is wrong, or raised."""
    parity = results["parity"]
    found = [f"parity, {row['case']}, page {row['page_size']}, {row['cache']}: {row['result']}" for row in parity["rows"]
             if row["result"] != "ok"]  # fmt: skip
    if not parity["rows"]:
        found.append(f"parity did not run: {parity.get('why') or 'no case was chosen'}")
    elif parity.get("not_run"):
        found.append(f"parity ended before {', '.join(parity['not_run'])}: {parity['why']}")
    for row in results["points"]:
        if "why" in row:
            found.append(f"{row['name']}: {row['why']}")
        found += [f"{row['name']}: {name}: {arm['why']}" for name, arm in row.get("arms", {}).items()
                  if arm["group"] == "ours" and "why" in arm and not arm["why"].startswith(_DECLINES)]  # fmt: skip
    return found


def _line(row: dict[str, Any]) -> str:
    arms = [
        f"{name} {arm['cold']['us']:.1f} us" if "cold" in arm else f"{name} {arm.get('why', 'right')}"
        for name, arm in row["arms"].items()
    ]
    return ", ".join(arms)


if __name__ == "__main__":
    typer.run(main)
