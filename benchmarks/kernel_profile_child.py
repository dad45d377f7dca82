"""One process of `benchmarks.kernel_profile`: check a call, run it once for a profiler, or measure the device's ceilings.

python -m benchmarks.kernel_profile_child JOB.json REPORT.json cuda
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gate, inputs, kernel_profile_sparse, sparse_mla_measure, timing
from benchmarks.arms import OURS, Arm, selected, variant
from benchmarks.measure import why
from benchmarks.points import Point
from benchmarks.stock_triton import STOCK

ARMS: dict[str, Arm] = {arm.name: arm for arm in (*OURS, *STOCK)}
#: The variant that `variant="auto"` takes.
SELECTED = "selected"


def run(job: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """Do a job.

    Args:
        job: `do` is "ceilings", "check" or "profile"; the last two have a `point` and an `arm`, and `of`, "dense" or "sparse".

    Returns:
        Ceilings; of a check the variant, its work and error or `why` it is not to be profiled; of a profile nothing.
    """
    if job["do"] == "ceilings":
        return timing.ceilings(device).as_dict()
    if job["of"] == "sparse":
        own = kernel_profile_sparse.ARMS[job["arm"]]
        over = kernel_profile_sparse.make(job["point"], device)
        if job["do"] == "check":
            return kernel_profile_sparse.checked(own, over)
        profiled(own.build(over), device)
        return None
    # One layer: the profiler flushes the caches itself, and has less memory to save and restore.
    made = inputs.make(Point(**job["point"]), device, most_layers=1)
    name = selected(made)[0] if job["arm"] == SELECTED else job["arm"]
    # Where nothing is compiled or interpreted, the reference is selected, which is no arm of a comparison.
    arm = ARMS[name] if name in ARMS else Arm(name, "ours", variant(name), ("tree", "chain", "draft"))
    if job["do"] == "profile":
        profiled(arm.build(made), device)
        return None
    return checked(arm, made)


def checked(arm: Arm, made: inputs.Inputs) -> dict[str, Any]:
    """Run the call, and hold its output to FP64."""
    row: dict[str, Any] = {"variant": arm.name, "bytes": made.work.bytes, "flops": made.work.flops}
    try:
        if made.point.kind not in arm.kinds:
            raise ValueError(f"{arm.name} is no arm for a {made.point.kind}")
        row["error"] = gate.error(made, arm.build(made)(0), gate.samples(made), prefix_only=arm.prefix_only)
    except Exception as failure:
        return {**row, "why": why(failure)}
    limit = gate.FP8_LIMIT if arm.fp8_products and made.point.cache == "e4m3" else gate.LIMIT
    if not row["error"] <= limit:
        row["why"] = f"wrong: relative error {row['error']:.3g}, allowed {limit}"
    return row


def profiled(call: Callable[[int], Any], device: torch.device) -> None:
    """Run a call twice, for what only the first one does, and then once between the profiler's start and stop."""
    for _ in range(2):
        call(0)
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    # What was only needed to make the inputs need not be saved and restored.
    torch.cuda.empty_cache()
    torch.cuda.profiler.start()
    call(0)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    path, report, device = sys.argv[1:]
    job = json.loads(Path(path).read_text())
    if job.get("of") == "sparse":
        sparse_mla_measure.repair_interpreter(torch.device(device))
    found = run(job, torch.device(device))
    if found is not None:
        Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
