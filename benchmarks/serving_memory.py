"""What a running server holds for tree masks, through the plugin and with SGLang's own backend.

    python -m benchmarks.serving_memory --minutes 4 --out benchmarks/results/serving-memory-<machine>.json
    python -m benchmarks.serving_memory --dry-run --out dry.json      without a GPU: tiny

Both servers capture graphs for 64 requests of 64 draft tokens in a context of 131072 tokens, answer one request, and are then
asked from inside which mask buffers their attention backends hold, and what the process holds on the device.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import record, serving_farm, serving_models
from benchmarks.serving_farm import Probed
from benchmarks.serving_models import Shape
from benchmarks.serving_prompts import draw
from benchmarks.serving_rows import TREE_MODES, Row, Size
from sglang_specverify.demo.processes import stopping_on_signals
from sglang_specverify.hardware import detect

#: Bytes that the plugin's masks may take at batch 64 and 64 draft tokens.
BOUND = 1_000_000


def full_mask_bytes(requests: int, width: int, context: int) -> int:
    """SGLang's FULL_MASK over every draft token's whole context."""
    return requests * width * (context + width)


def measure(row: Row, root: Path, shape: Shape, size: Size, alive: list[Probed], logs: Path | None) -> dict[str, Any]:
    """One server's masks and memory. Never raises: the other one's numbers must not be lost."""
    given: dict[str, Any] = {"row": asdict(row)}
    probed: Probed | None = None
    try:
        probed = Probed(row, root, shape, size)
        alive.append(probed)
        with probed:
            answer = probed.generate(draw([9], seed=0)[0], 16 if size.has_gpu else 4)
            found = probed.ask("masks")
            process = found.pop("pid")  # a number of this machine's own
            given |= {"tokens": len(answer.tokens), "masks": found.pop("masks"), "probe": found, "info": probed.info()}
            given["mask bytes"] = sum(mask["bytes"] for mask in given["masks"])
            given["device bytes of the process"] = serving_farm.device_memory(process)
            given["memory usage"] = probed.server.get("/server_info", timeout=30.0)["internal_states"][0].get("memory_usage")
            given["troubles in the log"] = probed.troubles()
    except Exception as error:
        given["error"] = f"{type(error).__name__}: {error}"[:2000]
    if probed is not None:
        probed.keep_log(logs)
    return given


def problems(plugin: dict[str, Any], stock: dict[str, Any], expected: int, *, has_gpu: bool) -> list[str]:
    """What is not as it should be."""
    found = [f"{one['row']['name']}: {one['error']}" for one in (plugin, stock) if "error" in one]
    if not found:
        if not 0 < plugin["mask bytes"] < BOUND:
            found.append(f"the plugin's masks take {plugin['mask bytes']} bytes, and {BOUND} is the bound")
        if has_gpu and stock["mask bytes"] < expected:
            found.append(f"SGLang's masks take {stock['mask bytes']} bytes, and its FULL_MASK alone should take {expected}")
    return found


def main(
    out: Annotated[Path, typer.Option(help="Result file to write.")],
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes, and keep what there is.")] = 4.0,
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
    dry_run: Annotated[bool, typer.Option(help="A tiny case without a GPU.")] = False,
) -> None:
    """Start both servers, look, write; exits with 1 if the plugin's masks are over the bound."""
    serving_farm.require_plugin()
    has_gpu = detect().has_gpu and not dry_run
    real = replace(serving_models.REAL, topk=8, steps=3, tree_tokens=64)
    shape, size = (real, Size(True, 131072, 65536, 64)) if has_gpu else (serving_models.TINY, Size(False, 512, 4096, 6))
    base = "fa3" if has_gpu else "triton"
    rows = [Row("memory-plugin", "plugin", base=base, served=TREE_MODES), Row("memory-stock", "stock", base=base)]
    expected = full_mask_bytes(size.requests, shape.tree_tokens, size.context)
    results: dict[str, Any] = {"shape": asdict(shape), "size": asdict(size), "FULL_MASK bytes": expected, "servers": {}}
    alive: list[Probed] = []
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="specverify-") as folder:
        for kind in ("target", "mirror"):
            serving_models.build(kind, Path(folder), size.dtype, shape)
        watchdog = threading.Timer(60 * minutes, serving_farm.stop_all, [alive])
        watchdog.start()
        try:
            with ThreadPoolExecutor(2 if has_gpu else 1) as pool, serving_farm.stopping(alive, pool):
                begin = time.monotonic()
                for given in pool.map(lambda row: measure(row, Path(folder), shape, size, alive, logs), rows):
                    results["servers"][given["row"]["name"]] = given
                    said = given.get("error") or f"{given['mask bytes']} bytes of masks: {given['masks']}"
                    typer.echo(f"{time.monotonic() - begin:5.0f} s  {given['row']['name']}: {said}")
                    record.write(out, results)
        finally:
            watchdog.cancel()
    plugin, stock = (results["servers"][row.name] for row in rows)
    found = problems(plugin, stock, expected, has_gpu=has_gpu)
    record.write(out, results | {"problems": found})
    typer.echo("\n".join(found) or "ok")
    raise typer.Exit(int(bool(found)))


if __name__ == "__main__":
    typer.run(main)
