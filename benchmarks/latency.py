"""What a divided prefix of few requests takes, with its parts combined by the last program or by a second launch, beside FA3.

    python -m benchmarks.latency --out latency.json [--seconds 90] [--ablations] [--before before.py]
    python -m benchmarks.latency --point "L 8192" --config block_n=64,num_stages=5 --out latency.json
    TRITON_INTERPRET=1 python -m benchmarks.latency --device cpu --out dry.json

where `git show COMMIT:sglang_specverify/kernels/fused_kernel.py > before.py` makes the last file, a kernel to be timed as well.

Needs a GPU and no SGLang; FlashAttention 3 is an arm where it can be imported. Every arm is held to FP64 before it is timed, and
all arms of a point are timed in turn (`benchmarks.timing`), on one layer ("warm", in the L2 cache) and over many ("cold"), and
where one layer is larger than the cache on that alone ("cold").
Kernels compile before that, in several processes. What is cut off at the end of the time is cut off for all arms.

Ablations are plans that were tampered with, so that programs leave out a part of their work: their outputs are wrong, and only
the time that they take means anything.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gate, inputs, record, timing
from benchmarks.arms import Arm, Call
from benchmarks.latency_arms import ABLATIONS, LONGER, changes_of, planned
from benchmarks.measure import why
from benchmarks.points import Point
from benchmarks.stock import FLASH_ATTENTION
from benchmarks.wide_trees import POINTS as WIDE_TREES
from benchmarks.wide_trees import TREE_TILE, arms_of
from sglang_specverify.errors import ArgumentError, show_without_traceback

#: (bs, L, W, query heads, KV heads), in the order in which they are measured, the drafts behind the first five.
_CHAINS = (
    (1, 8192, 4, 32, 8), (1, 4096, 8, 32, 8), (1, 4096, 4, 32, 8), (1, 4096, 4, 128, 8), (1, 4096, 4, 8, 1),
    (1, 4096, 4, 64, 8), (1, 1024, 4, 32, 8), (4, 2048, 4, 32, 8), (4, 8192, 4, 32, 8), (1, 32768, 4, 32, 8), (8, 4096, 4, 32, 8),
)  # fmt: skip
_DRAFTS = ((1, 2048, 8), (4, 2048, 8), (1, 8192, 8), (4, 8192, 8), (1, 2048, 16), (4, 2048, 16), (1, 8192, 16), (4, 8192, 16))
_CHAIN_POINTS = tuple(Point("chain", bs, w, length, q_heads=q, kv_heads=kv) for bs, length, w, q, kv in _CHAINS)
POINTS = (
    *_CHAIN_POINTS[:5],
    *(Point("draft", batch, topk, length) for batch, length, topk in _DRAFTS[:4]),
    *(Point("tree", 1, width, 8192) for width in (16, 32)),
    *_CHAIN_POINTS[5:],
    *(Point("draft", batch, topk, length) for batch, length, topk in _DRAFTS[4:]),
    *WIDE_TREES,
)
_SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 32}
#: For a dry run: prefixes that the interpreter's plan divides.
TINY = (Point("chain", 1, 4, 530, **_SHAPE), Point("draft", 2, 3, 300, **_SHAPE), Point("tree", 1, 5, 270, **_SHAPE))
#: Few rounds: points are many.
_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("latency.json"), help="result file, written after every point")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no point after this")
    parser.add_argument("--before", type=Path, help="a fused_kernel.py of another commit, to be timed as the arm `before`")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run, in Triton's interpreter")
    parser.add_argument("--ablations", action="store_true", help="time what is left where chains leave out a part of their work")
    parser.add_argument("--kind", choices=("chain", "draft", "tree"), help="only points of this kind")
    parser.add_argument("--point", default="", help="only points whose name has this in it")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="NAME=NUMBER,...: the fused kernel launched otherwise, as one arm more; repeatable",
    )
    parser.add_argument("--compile", metavar="N/OF", help="run every OFth point once, from the Nth on, untimed, and stop")
    options = parser.parse_args()
    begin = time.monotonic()
    device = torch.device(options.device)
    kernel = None if options.before is None else kernel_of(options.before)
    tiny = device.type != "cuda"
    points = [point for point in (TINY if tiny else POINTS) if options.kind in (None, point.kind) and options.point in point.name]
    if not points:
        raise ArgumentError("point", repr(options.point), "a part of the name of a point, of `--kind` if that is given")
    configs = {text: changes_of(text) for text in options.config}
    if options.compile:
        first, step = map(int, options.compile.split("/"))
        for point in points[first::step]:
            made = inputs.make(point, device, most_layers=1)
            for _, build in ours(made, kernel, configs).values():
                # What does not fit the device is said where it is measured.
                with contextlib.suppress(Exception):
                    build()(0)
        return
    jobs = [] if tiny else _compilers(sys.argv[1:], len(points))
    results: dict[str, Any] = {"points": []}
    _wait(jobs, begin + 0.5 * options.seconds)
    print(f"compiled ahead: {time.monotonic() - begin:.0f} s", flush=True)
    for point in points:
        if time.monotonic() - begin > options.seconds:
            print("out of time before", point.name, flush=True)
            break
        row = measure(point, kernel, device, ablations=options.ablations, configs=configs)
        results["points"].append(row)
        print(*lines(row), f"  ({time.monotonic() - begin:.0f} s)", sep="\n", flush=True)
        record.write(options.out, results)


def _compilers(arguments: list[str], points: int) -> list[subprocess.Popen[bytes]]:
    """Processes that compile what this call measures: one for each processor but two, and no more than points."""
    count = max(1, min(points, (os.cpu_count() or 1) - 2))
    command = [sys.executable, "-m", "benchmarks.latency", *arguments]
    return [subprocess.Popen([*command, "--compile", f"{number}/{count}"]) for number in range(count)]


def _wait(jobs: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all is compiled; what is not done in time is ended, and compiles where it runs."""
    for job in jobs:
        try:
            job.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        if job.returncode:
            print("compiling failed:", " ".join(map(str, job.args)), flush=True)  # type: ignore[arg-type]


def ours(
    made: inputs.Inputs, before: Any = None, configs: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, tuple[str, Callable[[], Call]]]:
    """Where each of this project's arms stands in a row of results, and how it is built.

    Args:
        before: the fused kernel of another commit, or None.
        configs: by name, what launches of further arms have other than the tables say.
    """
    builders: dict[str, tuple[str, Callable[[], Call]]] = {
        "default": ("arms", lambda: planned(made)),
        "last": ("arms", lambda: planned(made, combine="last")),
        "launch": ("arms", lambda: planned(made, combine="launch")),
        # The second launch begins when the first has ended: what its early start is worth.
        "launch in order": ("arms", lambda: planned(made, combine="launch", early=False)),
        # A part more costs a launch less than it costs one program.
        f"launch, parts of {LONGER} keys": ("arms", lambda: planned(made, combine="launch", least=LONGER)),
    }
    if before is not None:
        builders["before"] = ("arms", lambda: planned(made, combine="last", kernel=before))
    for name, changes in (configs or {}).items():
        builders[name] = ("arms", lambda changes=changes: planned(made, changes=changes))  # type: ignore[misc]
    return builders | {name: ("arms", build) for name, build in arms_of(made).items()}


def measure(
    point: Point,
    before: Any,
    device: torch.device,
    *,
    ablations: bool = False,
    configs: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """A row of results: of each arm its error against FP64, and microseconds warm and cold, or why there are none.

    Args:
        before: the fused kernel of another commit, or None.
        ablations: of chains also what is left without a part of their work.
        configs: as `ours` takes them.
    """
    made = inputs.make(point, device)
    row: dict[str, Any] = {"name": point.name, "point": point.as_dict(), "layers": made.layers, "arms": {}, "ablations": {}}
    samples = gate.samples(made)
    builders = ours(made, before, configs)
    for arm in _stock(point, device):
        builders[arm.name] = ("arms", lambda arm=arm: arm.build(made))  # type: ignore[misc]
    if ablations and point.kind == "chain":
        for name, tamper in ABLATIONS.items():
            builders[name] = ("ablations", lambda tamper=tamper: planned(made, combine="last", tamper=tamper))  # type: ignore[misc]
    calls: dict[str, Call] = {}
    for name, (group, build) in builders.items():
        found: dict[str, Any] = {}
        row[group][name] = found
        try:
            call = build()
            out = call(0)
            if group == "arms":
                found["error"] = gate.error(made, out, samples)
                if not found["error"] <= gate.LIMIT:
                    found["why"] = "wrong"
                    continue
        except Exception as failure:
            found["why"] = why(failure)
            continue
        calls[name] = call
    if device.type == "cuda":
        for state, layers in states(made.layers).items():
            _time(row, builders, calls, state, layers)
        torch.cuda.synchronize()
    return row


def states(layers: int) -> dict[str, int]:
    """Over how many layers a point is timed, by state of the cache. One layer that is larger than the cache has no warm one."""
    return {"cold": layers} if layers == 1 else {"warm": 1, "cold": layers}


def _time(row: dict[str, Any], builders: dict[str, Any], calls: dict[str, Call], state: str, layers: int) -> None:
    replays: dict[str, timing.Replay] = {}
    for name, call in calls.items():
        try:
            replays[name] = replace(timing.capture(call, layers), rounds=_ROUNDS)
        except Exception as failure:
            row[builders[name][0]][name]["why"] = f"not captured: {why(failure)}"
    for name, times in timing.alternate(replays).items():
        row[builders[name][0]][name][state] = timing.summarise(times, replays[name].calls).as_dict()
    del replays
    gc.collect()


def _stock(point: Point, device: torch.device) -> list[Arm]:
    # Without a GPU a package of that name stands in for SGLang's own, and its FlashAttention is none.
    if device.type != "cuda" or importlib.util.find_spec("sgl_kernel") is None:
        return []
    return [arm for arm in (*FLASH_ATTENTION, TREE_TILE) if arm.name in ("fa3", TREE_TILE.name) and point.kind in arm.kinds]


def kernel_of(path: Path) -> Any:
    """The fused kernel in another file."""
    spec = importlib.util.spec_from_file_location("fused_kernel_before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.verify_attention_kernel


def lines(row: dict[str, Any]) -> list[str]:
    """The arms of a point, the fastest first, and its ablations."""

    def us(found: dict[str, Any]) -> str:
        times = [
            f"{state} {found[state]['us']:7.2f} ±{found[state]['spread']:.2f}" for state in ("warm", "cold") if state in found
        ]
        return ", ".join(times) or found.get("why") or (f"error {found['error']:.4f}" if "error" in found else "ran")

    def order(item: tuple[str, dict[str, Any]]) -> float:
        return float(item[1].get("cold", {"us": 1e9})["us"])

    out = [row["name"]]
    for group in ("arms", "ablations"):
        arms = sorted(row[group].items(), key=order) if group == "arms" else row[group].items()
        out += [f"  {name:38} {us(found)}" for name, found in arms]
    return out


if __name__ == "__main__":
    show_without_traceback()
    main()
