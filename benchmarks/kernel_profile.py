"""What holds the calls that missed an aim: each one alone under Nsight Compute, beside its roofline.

    python -m benchmarks.kernel_profile --out kernel-profile.json
    python -m benchmarks.kernel_profile --only sparse --out kernel-profile-sparse.json
    python -m benchmarks.kernel_profile --call "chain bs 1 W 4 L 8192 (32/8/128) = fused_split" --out kernel-profile.json
    python -m benchmarks.kernel_profile --call "B 128 K 512 H 64 Sq 1 = specverify" --out kernel-profile-sparse.json
    TRITON_INTERPRET=1 python -m benchmarks.kernel_profile --device cpu --out dry.json

Needs a GPU, `ncu` in PATH and the right to read the GPU's counters, which only root has on most machines; SGLang for its own arms
only, and `sgl-flash-mla` for FlashMLA's. First every call runs in a process of its own, all at once: kernels compile, and outputs
are held to FP64. Then each runs by itself under `ncu`, which repeats a launch for all counters: with every cache flushed before,
clocks as they are and no launch beside another. So tables and a plan are not in a cache, nor are the parts that a second launch
combines, unlike where calls are timed. Calls come in their order of importance; what fails is a row with the reason.

A dry run without a GPU takes the same path with tiny points, if something in PATH answers to `ncu`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import kernel_profile_counters as counting
from benchmarks import record
from benchmarks.kernel_profile_calls import LISTS, Call, parse
from benchmarks.kernel_profile_child import SELECTED
from benchmarks.points import Work
from sglang_specverify.demo import processes
from sglang_specverify.errors import SpecverifyError, show_without_traceback
from sglang_specverify.kernels.variants import VARIANTS

ROOT = Path(__file__).parent.parent
_RESULTS = ROOT / "benchmarks" / "results"
#: Where ceilings are taken from if its hardware is this, so that floors are those of its rows; else they are measured.
CEILINGS = {"dense": _RESULTS / "verify-attention-h200.json", "sparse": _RESULTS / "sparse-mla-peers-h200.json"}
SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "ComputeWorkloadAnalysis", "LaunchStats",
    "Occupancy", "SchedulerStats", "WarpStateStats",
)  # fmt: skip
# Units are named once for all launches of a page.
_ALWAYS = ("--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base")
#: Kernels of the calls that may be profiled, the second launches of some among them; `ncu` looks for these anywhere in a name.
KERNELS = (
    "verify_attention_kernel", "specialized_kernel", "combine_parts_kernel", "hopper_kernel", "decode_kernel", "combine_kernel",
    "FlashAttnFwd", "splitkv_mla",
)  # fmt: skip
#: Options of `ncu`, the second for a version that profiles nothing by the first. Neither names a metric that may be unknown.
#: The second takes the third launch of each kernel, as a call may be several, and two calls come before the one that counts.
WAYS: dict[str, tuple[str, ...]] = {
    "sections between start and stop": (
        *_ALWAYS, "--cache-control", "all", "--target-processes", "application-only", "--profile-from-start", "off",
        *(word for section in SECTIONS for word in ("--section", section)),
        "--metrics", "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum",
    ),
    "all sections of the third launch of each kernel by name": (
        *_ALWAYS, "--set", "full", "--kernel-name-base", "demangled", "--kernel-name", f"regex:{'|'.join(KERNELS)}",
        "--filter-mode", "per-launch-config", "--launch-skip", "2", "--launch-count", "1",
    ),
}  # fmt: skip
#: Share of the time that compiling and checking may take, and seconds in which no child could do anything.
_CHECKING, _TOO_SHORT = 0.4, 3.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="result file, written after every call")
    parser.add_argument("--only", choices=list(LISTS), default="dense", help="whose calls that missed an aim, if none is named")
    parser.add_argument("--call", action="append", help='"NAME OF A POINT = ARM"; repeatable; what missed an aim if left out')
    parser.add_argument("--seconds", type=float, default=280.0, help="all that this may take")
    parser.add_argument("--each", type=float, default=24.0, help="seconds that a call has under ncu, or more if others took less")
    parser.add_argument("--ceilings", type=Path, help="result file whose ceilings hold on its own hardware")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    chosen = parser.parse_args(arguments)
    missed, tiny = LISTS[chosen.only]
    calls = [parse(text) for text in chosen.call] if chosen.call else list(missed if chosen.device == "cuda" else tiny)
    ceilings = chosen.ceilings or CEILINGS["sparse" if all(call.is_sparse for call in calls) else "dense"]
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SpecverifyError("there is no ncu in PATH", "install Nsight Compute, which comes with the CUDA toolkit")
    with processes.stopping_on_signals(), tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), chosen.device)
        results = profile(calls, ncu, children, ceilings, chosen.seconds, chosen.each, chosen.out)
    print(*counting.table(results), sep="\n", flush=True)


def profile(
    calls: Sequence[Call], ncu: str, children: Children, ceilings: Path, seconds: float, each: float, out: Path
) -> dict[str, Any]:
    """Check all calls, profile one after the other, and keep every row at once. Returns the results without their environment."""
    begin = time.monotonic()
    deadline = begin + seconds
    results: dict[str, Any] = {
        "ncu": {"version": version_of(ncu), "options": {name: " ".join(way) for name, way in WAYS.items()}},
        "ceilings": ceilings_of(ceilings, children, deadline),
        "rows": [],
        "not run": [],
    }
    ways = list(WAYS)
    rows = check(calls, children, min(deadline, time.monotonic() + _CHECKING * seconds))
    for number, (call, row) in enumerate(zip(calls, rows, strict=True)):
        left = deadline - time.monotonic()
        if left < _TOO_SHORT:
            results["not run"] = [other.name for other in calls[number:]]
            break
        if "why" not in row:
            limit = min(left, max(each, left / (len(calls) - number)))
            row |= under_ncu(ncu, ways, call, row, children, limit)
            if "why" not in row:
                row |= floor_of(row, results["ceilings"])
                # What served is tried first from now on.
                ways = [row["way"], *(way for way in ways if way != row["way"])]
        results["rows"].append(row)
        print(f"{time.monotonic() - begin:.0f} s, {call.name}: {row.get('why') or row['us']}", flush=True)
        record.write(out, results)
    if results["not run"]:
        record.write(out, results)
    return results


def version_of(ncu: str) -> str:
    """The last line of what it says of itself."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        said = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=10.0).stdout
        return said.strip().splitlines()[-1].strip()
    return "unknown"


def ceilings_of(path: Path, children: Children, deadline: float) -> dict[str, Any]:
    """A copy's TB/s and a matrix product's TFLOP/s: those of an earlier file of the same hardware, or measured now.

    Raises:
        SpecverifyError: they can be neither read nor measured.
    """
    dry = children.device != "cuda"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    # A dry run is of no hardware and times nothing: any ceilings do.
    if earlier.get("ceilings") and (dry or earlier["hardware"]["name"] == record.environment()["hardware"]["name"]):
        return {**earlier["ceilings"], "from": path.name}
    if dry:
        raise SpecverifyError(f"{path} has no ceilings, and a CPU has none to measure", "pass --ceilings with a result file")
    child = children.start("ceilings", {"do": "ceilings"})
    if not child.finish(min(deadline, time.monotonic() + 30.0)) or (found := child.report()) is None:
        raise SpecverifyError(f"ceilings could not be measured: {child.said()}", "pass --ceilings with a result file")
    return {**found, "from": "this run"}


def check(calls: Sequence[Call], children: Children, deadline: float) -> list[dict[str, Any]]:
    """A row of each call, all run at once: its work, the variant, its error against FP64, or why it is not profiled."""
    rows: list[dict[str, Any]] = []
    jobs: list[Child | None] = []
    try:
        for number, call in enumerate(calls):
            start = missing(call, children.device) is None
            jobs.append(children.start(f"check-{number}", call.job("check")) if start else None)
        for call, job in zip(calls, jobs, strict=True):
            row: dict[str, Any] = {"name": call.point.name, "point": call.point.as_dict(), "arm": call.arm, "missed": call.missed}
            if job is None:
                row["why"] = missing(call, children.device)
            elif not job.finish(deadline):
                row["why"] = "it was not compiled and checked in time"
            else:
                row |= job.report() or {"why": f"the check failed: {job.said()}"}
            rows.append(row)
    finally:
        for job in filter(None, jobs):
            job.finish(0.0)
    return rows


def missing(call: Call, device: str) -> str | None:
    """What the arm needs and this environment has not, if there is anything."""
    # Arms of sparse MLA say themselves what they lack.
    own = call.is_sparse or call.arm in (SELECTED, *VARIANTS)
    return None if own or device != "cuda" or importlib.util.find_spec("sglang") else "SGLang is not installed"


def under_ncu(ncu: str, ways: Sequence[str], call: Call, row: dict[str, Any], children: Children, limit: float) -> dict[str, Any]:
    """Microseconds and counters of the variant that was checked, by the first of the ways that profiles it, or why not."""
    begin = time.monotonic()
    failures: dict[str, None] = {}
    for way in ways:
        child = children.start("ncu", call.job("profile", row["variant"]), (ncu, *WAYS[way]))
        if not child.finish(begin + limit):
            return {"why": "; ".join([*failures, f"no profile in {limit:.0f} s"])}
        try:
            found = counting.summarize(counting.read(child.output()))
        except ValueError as failure:
            failures[f"{failure}: {child.said()}"] = None
            continue
        return {**found, "way": way, "seconds": round(time.monotonic() - begin, 1)}
    return {"why": "; ".join(failures)}


def floor_of(row: dict[str, Any], ceilings: dict[str, Any]) -> dict[str, Any]:
    """The roofline of a call at the ceilings, in microseconds, and whether it is of bytes or of FLOPs."""
    work, rates = Work(row["bytes"], row["flops"]), (1e12 * ceilings["copy_tb_per_s"], 1e12 * ceilings["matmul_tflops"])
    return {"floor_us": round(work.floor_us(*rates), 3), "floor": work.bound(*rates)}


@dataclass(frozen=True)
class Child:
    """A process, what it prints, and where it reports."""

    process: subprocess.Popen[bytes]
    log: Path
    report_at: Path

    def finish(self, deadline: float) -> bool:
        """Wait until it ends or the time is over, and end it with its group then; whether it ended by itself."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        finally:
            if self.process.poll() is None:
                self._end()
        return True

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # What it started is in its group, and may outlast it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def said(self) -> str:
        """Why there is no result, in one line."""
        return counting.why_nothing(self.output())

    def report(self) -> dict[str, Any] | None:
        return dict(json.loads(self.report_at.read_text())) if self.report_at.exists() else None


@dataclass(frozen=True)
class Children:
    """Starts processes of `benchmarks.kernel_profile_child`, whose files are in `folder`."""

    folder: Path
    device: str

    def start(self, name: str, job: dict[str, Any], tool: Sequence[str] = ()) -> Child:
        """Start one, under a tool if there is one; a name is used again for the next only."""
        job_at, report, log = (self.folder / f"{name}{end}" for end in (".job", ".json", ".log"))
        job_at.write_text(json.dumps(job))
        report.unlink(missing_ok=True)
        # Numbers as this reads them, and this repository whatever the directory.
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "LC_ALL": "C"}
        command = [*tool, sys.executable, "-m", "benchmarks.kernel_profile_child", str(job_at), str(report), self.device]
        with log.open("wb") as sink:
            return Child(processes.start(command, environment, sink), log, report)


if __name__ == "__main__":
    show_without_traceback()
    main()
