"""Sparse MLA decode on a bare GPU host: gates against the FP64 oracle, then times of every launch variant. No pytest, no SGLang.

    python -m tests.gpu.sparse_mla_smoke [--out FOLDER] [--seconds 100] [--only NAME,NAME]

Each variant is gated, and timed only if it passes, in a process of its own: they compile at the same time, and one that hangs or
dies costs only itself. Times are medians over replays of CUDA graphs of many calls: warm, on one set of lists, and cold, where
the calls of a graph read different rows, together four times what the L2 cache holds. Everything is printed as it comes and
lands in FOLDER/sparse-mla-smoke.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.sparse_mla import arguments
from sglang_specverify.kernels.sparse_mla.arguments import DecodeArguments
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.kernels.sparse_mla.decode import Buffers, decode_launches, deepseek_v41_decode, division_of
from sglang_specverify.kernels.sparse_mla.splits import SparseConfig, deepseek_v41_decode_workspace_size, workspace_bytes
from tests.gpu.sparse_mla_problems import Problem, build, oracle

_HOPPER = SparseConfig(keys=64, num_warps=4, specialized=True, pdl=True)
_NARROW = replace(_HOPPER, keys=32, num_stages=4)
_TRITON = SparseConfig(pdl=True)
#: Launch options by name, and parts of the keys where they are not the division's own.
VARIANTS: dict[str, tuple[SparseConfig, int | None]] = {
    "hopper": (_HOPPER, None),
    **{f"hopper {n} part{'s' * (n > 1)}": (_HOPPER, n) for n in (1, 2, 3, 4, 5)},
    "hopper 32 keys": (_NARROW, None),
    **{f"hopper 32 keys {n} part{'s' * (n > 1)}": (_NARROW, n) for n in (1, 2, 4, 5, 10)},
    "hopper no pdl": (replace(_HOPPER, pdl=False), None),
    "hopper reduce 1x256": (replace(_HOPPER, reduce_columns=256, reduce_warps=2), None),
    "triton 16 4w 4v": (replace(_TRITON, keys=16, num_warps=4, value_parts=4), None),
    "triton 16 4w 2v": (replace(_TRITON, keys=16, num_warps=4, value_parts=2, reduce_columns=128), None),
    "triton 16 8w 2v 1s": (replace(_TRITON, keys=16, num_warps=8, value_parts=2, num_stages=1, reduce_columns=128), None),
    "triton 16 4w 2v 1s": (replace(_TRITON, keys=16, num_warps=4, value_parts=2, num_stages=1, reduce_columns=128), None),
}

#: Wide and narrow, parts and none, every feature: on rows of the size that is timed, and packed.
GATES = (
    Problem(1, 1, 64, 128, 512),
    Problem(3, 1, 64, 128, 128, seed=1),
    Problem(2, 1, 64, 128, 0, lens=False, sink=False, seed=2),
    Problem(2, 6, 16, 133, 96, shared=True, starts=True, seed=3),
    Problem(2, 4, 16, 131, 192, shared=True, starts=True, shared_main=True, swa_format="swa_fp8", seed=4),
    Problem(3, 2, 128, 128, 64, swa_page_rows=61, main_page_rows=256, swa_layout="interleaved", main_layout="interleaved", pad=48,
            seed=5),
    Problem(150, 1, 64, 128, 512, seed=6),
)  # fmt: skip
BATCHES, TOPKS = (1, 8, 32, 64, 128), (512, 128, 0)
_L2 = 60 << 20


def gate(config: SparseConfig, splits: int | None, device: str, problems: tuple[Problem, ...]) -> list[str]:
    """What is wrong, over all problems; outputs start as NaN, and so does the workspace, which is no larger than it must be."""
    found = []
    for p in problems:
        call = build(p, device)
        out = torch.full(call["q"].shape, float("nan"), dtype=torch.bfloat16, device=device)
        lse = torch.full(call["q"].shape[:3], float("nan"), device=device)
        sizes = {"queries": p.queries, "heads": p.heads, "window": p.window, "splits": splits}
        needed = deepseek_v41_decode_workspace_size(p.batch, p.topk, **sizes)
        space = torch.full((needed,), 0xFF, dtype=torch.uint8, device=device)
        deepseek_v41_decode(**call, out=out, lse=lse, workspace=space, splits=splits, config=config)
        where = f"B{p.batch} Sq{p.queries} H{p.heads} W{p.window} K{p.topk}"
        first = (out.clone(), lse.clone())
        found += [f"{where}: {text}" for text in rejections(out, lse, oracle(call))]
        deepseek_v41_decode(**call, out=out, lse=lse, workspace=space, splits=splits, config=config)
        if not (torch.equal(out, first[0]) and torch.equal(lse, first[1])):
            found.append(f"{where}: a second call differs")
    return found


def timed_call(batch: int, topk: int, device: str, calls: int, seed: int) -> list[dict[str, Any]]:
    """Arguments of `calls` calls that differ in their lists alone; no lengths are short, nothing is missing."""
    g = torch.Generator(device=device).manual_seed(seed)
    swa_pages, main_pages = 1 << 12, 1 << 14
    swa = torch.randint(0x20, 0x40, (swa_pages, 64 * 528), generator=g, dtype=torch.uint8, device=device)
    swa[:, 64 * 512 :] = 127
    main = torch.randint(0x20, 0x40, (main_pages, 64 * 288), generator=g, dtype=torch.uint8, device=device)
    same = {
        "q": torch.randn(batch, 1, 64, 512, generator=g, device=device).to(torch.bfloat16),
        "sink": torch.randn(64, generator=g, device=device),
        "lens": torch.full((batch, 1), 128, dtype=torch.int32, device=device),
        "limits": torch.full((batch, 1), topk, dtype=torch.int32, device=device),
    }

    def lists(pages: int, width: int) -> torch.Tensor:
        return torch.randint(0, pages * 64, (batch, 1, width), generator=g, dtype=torch.int32, device=device)

    return [
        {**same, "swa": swa, "main": main, "swa_list": lists(swa_pages, 128), "main_list": lists(main_pages, topk)}
        for _ in range(calls)
    ]


def graph_of(calls: list[dict[str, Any]], repeats: int, config: SparseConfig, splits: int | None) -> tuple[Any, int, int]:
    """(a captured graph, calls in it, parts of the keys)."""
    launches = []
    for call in calls:
        q = call["q"]
        swa = arguments.check_pool("swa", q, call["swa"], call["swa_list"], "swa_mxfp8", 64, "block_split", call["lens"])
        main = None
        if call["main_list"].shape[2]:
            main = arguments.check_pool(
                "main", q, call["main"], call["main_list"], "main_kv_fp4", 64, "block_split", call["limits"]
            )
        a = DecodeArguments(q, swa, main, call["sink"], 512**-0.5, 1.0)
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count
        division = division_of(a, config, programs, a.packed, splits)
        if not launches:
            out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
            needed = workspace_bytes(a.batch, division)
            space = torch.empty(needed, dtype=torch.uint8, device=q.device) if needed else None
        launches.append(decode_launches(a, Buffers(out, lse, space), config, division, arch_of(q.device)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[0]:
            launch.run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for pair in launches:
                for launch in pair:
                    launch.run()
    # The graph holds addresses, not tensors.
    return (graph, (out, lse, space, calls)), repeats * len(launches), division.splits


def microseconds(graph: Any, calls: int, samples: int = 15) -> float:
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def time_variants(names: list[str], device: str, deadline: float) -> None:
    """Every point with every variant, point by point, so that what is cut off at the deadline is cut off for all."""
    for topk in TOPKS:
        for batch in BATCHES:
            size = batch * (128 * 528 + topk * 288)
            calls = timed_call(batch, topk, device, min(max(4 * _L2 // size, 4), 1000), seed=batch + topk)
            for name in names:
                config, splits = VARIANTS[name]
                if time.monotonic() > deadline:
                    print("CUT off at", name, batch, topk, flush=True)
                    return
                if splits is not None and splits * batch > 160:
                    continue
                point: dict[str, Any] = {"variant": name, "B": batch, "K": topk}
                for kind, chosen, repeats in (("warm", calls[:1], 32), ("cold", calls, 1)):
                    graph, number, parts = graph_of(chosen, repeats, config, splits)
                    point |= {kind: round(microseconds(graph[0], number), 2), "parts": parts}
                    del graph
                print("TIME", json.dumps(point), flush=True)


def child(names: list[str], what: str, device: str, seconds: float) -> None:
    start = time.monotonic()
    if what == "time":
        time_variants(names, device, start + seconds)
        return
    for name in names:
        config, splits = VARIANTS[name]
        # All of them where the kernel's code is new; where only its options are, what is timed.
        found = gate(
            config,
            splits,
            device,
            GATES if name in ("hopper", "hopper 32 keys", "triton 16 4w 4v") else (GATES[0], GATES[2], GATES[6]),
        )
        print("GATE", json.dumps({"variant": name, "wrong": found, "seconds": round(time.monotonic() - start, 1)}), flush=True)
        if device == "cuda" and not found:
            # The shapes that are timed, compiled here where many do it at once.
            for topk in TOPKS:
                for batch in (1, 128):
                    graph_of(timed_call(batch, topk, device, 1, 0), 1, config, splits)


def _start(name: str, what: str, device: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.sparse_mla_smoke", "--child", name, "--what", what, "--device", device,
               "--seconds", str(seconds)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """What it printed, and why it failed; it is ended if it is not done in time."""
    try:
        printed, errors = process.communicate(timeout=max(seconds, 0.1))
        return printed, "" if process.returncode == 0 else f"exit code {process.returncode}: {errors.strip()[-600:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate()
        return printed, f"not done in time: {errors.strip()[-300:]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--child")
    parser.add_argument("--what", default="gate")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.child:
        child(options.child.split(","), options.what, options.device, options.seconds)
        return
    start = time.monotonic()
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "gates": [], "times": [],
                              "variants": {name: asdict(config) for name, (config, _) in VARIANTS.items()}}  # fmt: skip
    path = Path(options.out) / "sparse-mla-smoke.json"

    def keep(text: str, error: str, name: str) -> None:
        for line in text.splitlines():
            kind, _, rest = line.partition(" ")
            if kind in ("GATE", "TIME"):
                result["gates" if kind == "GATE" else "times"].append(json.loads(rest))
                print(line, flush=True)
        if error and not (text.startswith("GATE") and "not done" in error):
            result["gates"].append({"variant": name, "wrong": [error]})
            print("FAIL", name, error, flush=True)
        path.write_text(json.dumps(result, indent=1))

    names = options.only.split(",")
    gates = {name: _start(name, "gate", "cuda", 0.0) for name in names}
    for name, process in gates.items():
        keep(*_finish(process, start + 0.6 * options.seconds - time.monotonic()), name)
    failed = {entry["variant"] for entry in result["gates"] if entry["wrong"]}
    passed = [name for name in names if name not in failed]
    print(f"gated in {time.monotonic() - start:.0f} s; passed: {', '.join(passed) or 'none'}", flush=True)
    for group in ("hopper", "triton"):
        chosen = [name for name in passed if name.startswith(group)]
        left = start + options.seconds - time.monotonic()
        if chosen and left > 8:
            share = left * (0.65 if group == "hopper" and len(chosen) < len(passed) else 1.0)
            keep(*_finish(_start(",".join(chosen), "time", "cuda", share - 7.0), share + 4.0), group)
    best: dict[tuple[int, int], tuple[float, str]] = {}
    for point in result["times"]:
        key, found = (point["B"], point["K"]), (point["warm"], point["variant"])
        best[key] = min(best.get(key, found), found)
    for (batch, topk), (warm, name) in sorted(best.items()):
        print(f"B {batch:4d}  K {topk:4d}  {warm:8.2f} us  {name}", flush=True)
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
