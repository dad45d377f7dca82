"""Where the GPU time of a verify step goes, kernel by kernel, in engines through the plugin and through SGLang's own backends.

    python -m benchmarks.end_to_end_profile --scenario 128x16 --input 128 --concurrency 32 --out profile.json
    python -m benchmarks.end_to_end_profile --dry-run --out dry.json

The engines of `benchmarks.end_to_end`, resident at once. Each decodes a batch from its prefix cache, and SGLang's own profiler
records some of its steps on the device, drafting included. A profiled step is slower than another one: what counts here are
shares and differences.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import end_to_end_plan as plan
from benchmarks import record, shapes
from benchmarks.end_to_end import broken_off_after, cells_of
from benchmarks.end_to_end_run import Clock, Run
from benchmarks.engines import OURS, Engine
from sglang_specverify.demo import processes
from sglang_specverify.errors import SpecverifyError

#: A kernel belongs to the first group of which a pattern is found in its name.
GROUPS: dict[str, str] = {
    "attention": r"flash::|verify_attention|specialized_kernel|tree_suffix|draft_decode|merge_attn|merge_states|combine_parts|"
    r"_fwd_kernel|_extend_attention|BatchPrefill|prepare_step",
    "matrix products": r"gemm|nvjet|xmma|cublas|matmul",
    "sampling, top k": r"(?i)softmax|topk|sort|argmax|scan|sample",
    "copies": r"(?i)memcpy|memset|copy|gather|index|scatter|CatArray",
}
#: Kernels of each arm that a table names.
MOST_KERNELS = 40


def group_of(name: str) -> str:
    """The group of a kernel by its name; "other" for what none takes."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")


def groups(kernels: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of each group, the longest first."""
    found = Counter[str]()
    for kernel in kernels:
        found[group_of(kernel["name"])] += kernel["ms"]
    return dict(found.most_common())


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, duration)."""
    total, end = 0.0, float("-inf")
    for begin, length in sorted(spans):
        total += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total


def summarize(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """What the device did in `steps` recorded steps, for each of them in milliseconds.

    Raises:
        SpecverifyError: no event of the device is among them.
    """
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event]
    if not found:
        raise SpecverifyError("the trace holds nothing of a device", "profile on a machine with a GPU")
    time_of, count_of = Counter[str](), Counter[str]()
    for event in found:
        time_of[event["name"]] += event["dur"]
        count_of[event["name"]] += 1
    begin = min(event["ts"] for event in found)
    end = max(event["ts"] + event["dur"] for event in found)
    each = 1e-3 / steps
    return {
        "steps": steps,
        "span_ms": (end - begin) * each,
        "busy_ms": busy((event["ts"], event["dur"]) for event in found) * each,
        "kernels": [
            {"name": name, "ms": spent * each, "launches": count_of[name] / steps} for name, spent in time_of.most_common()
        ],
    }


def profile(
    engine: Engine, cell: plan.Cell, vocabulary: int, steps: int, folder: Path, *, gpu: bool, seconds: float
) -> dict[str, Any]:
    """Fill the prefix cache, then decode the same batch again and record `steps` of its steps."""
    batch = plan.prompts(cell, vocabulary)
    warm = engine.generate(batch, cell.output, seconds=seconds)
    wanted = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU" if gpu else "CPU"], "with_stack": False}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, batch, cell.output, seconds)
        time.sleep(0.3 * warm.seconds)  # past the prompt, and the batch is whole
        engine.server.post("/start_profile", wanted, timeout=seconds)
        round_ = answer.result()
    events = read_trace(folder, engine.server.name)
    return {"ms_a_step_unprofiled": warm.ms_per_step, "ms_a_step": round_.ms_per_step, **summarize(events, steps)}


def read_trace(folder: Path, name: str, seconds: float = 60.0) -> list[dict[str, Any]]:
    """The events of the one trace in `folder`, which is still being written at first.

    Raises:
        SpecverifyError: none that is whole comes.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for trace in folder.rglob("*.trace.json.gz"):
            with contextlib.suppress(EOFError, OSError, ValueError):
                return list(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
        time.sleep(0.5)
    raise SpecverifyError(f"SGLang wrote no trace of the {name}", "read its log")


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Groups, then the largest kernels, of all arms beside each other."""
    arms = list(results)
    shown = Table("of a step, ms", *arms)
    for name in ("ms_a_step_unprofiled", "span_ms", "busy_ms"):
        shown.add_row(name, *(f"{results[arm][name]:.2f}" for arm in arms))
    shares = {arm: groups(results[arm]["kernels"]) for arm in arms}
    for group in dict.fromkeys(name for arm in arms for name in shares[arm]):
        shown.add_row(f"= {group}", *(f"{shares[arm].get(group, 0.0):.2f}" for arm in arms))
    rows: dict[str, dict[str, str]] = {}
    largest = Counter[str]()
    for arm in arms:
        for kernel in results[arm]["kernels"]:
            largest[kernel["name"]] = max(largest[kernel["name"]], kernel["ms"])
            rows.setdefault(kernel["name"], {})[arm] = f"{kernel['ms']:.2f} ({kernel['launches']:.1f}×)"
    for name, cells in sorted(rows.items(), key=lambda row: -largest[row[0]])[:MOST_KERNELS]:
        shown.add_row(name[:70], *(cells.get(arm, "") for arm in arms))
    return shown


def main(
    out: Annotated[Path, typer.Option(help="Result file to write.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(shapes.SHAPES)}.")] = "qwen3-8b",
    scenario: Annotated[str, typer.Option(help="WxTOPK, chain or off.")] = "128x16",
    arm: Annotated[list[str] | None, typer.Option(help="Stock backend; several times.")] = None,
    length: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 4,
    minutes: Annotated[float, typer.Option(help="Give up after so long.")] = 8.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="A tiny model: does everything work?")] = False,
) -> None:
    """Profile engines."""
    if dry_run:
        shape, scenario, length, concurrency = "tiny", "4x2", 8, 2
    arms = [*(arm or (["triton"] if dry_run else ["fa3"])), OURS]
    chosen = plan.scenario(scenario)
    [cell] = cells_of(chosen, [length], [concurrency], dry_run=False)
    if dry_run:  # a step takes seconds where kernels run in Triton's interpreter
        cell, steps = plan.Cell(length, concurrency, 10), 1
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, processes.stopping_on_signals(), broken_off_after(60 * minutes):
        settings = {"shape": shape, "scenario": scenario, "input": length, "concurrency": concurrency, "dry_run": dry_run}
        run = Run(shapes.get(shape), arms[:-1], 1, Clock(60 * minutes), 300.0, out, Path(root), settings)
        engines = {name: run.engine(chosen, name, [cell]) for name in arms}
        try:
            for engine in engines.values():
                engine.start()
            for engine in engines.values():
                engine.ready(run.clock.left() - 20.0)
                run.say(f"the {engine.server.name} answers")
            for name, engine in engines.items():
                folder = Path(root) / f"traces-{name}"
                folder.mkdir()
                try:
                    found[name] = profile(
                        engine, cell, run.shape.prompt_vocabulary, steps, folder, gpu=not dry_run, seconds=120.0
                    )
                except SpecverifyError as error:
                    if not dry_run or "nothing of a device" not in str(error):
                        raise
                    found[name] = {"error": str(error)}
                run.say(f"{name}: recorded")
                record.write(out, {"kind": "profile", "settings": settings, "arms": found})
        finally:
            for engine in engines.values():
                engine.stop()
    if not dry_run:
        Console(width=150).print(table(found))


if __name__ == "__main__":
    typer.run(main)
