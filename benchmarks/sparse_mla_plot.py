"""Draw a result file of `benchmarks.sparse_mla`: times of each arm over the batch, and the kernel under its roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.sparse_mla_points import BATCHES, TOPKS, Point
from benchmarks.sparse_mla_report import OTHERS, OURS, us

Line = tuple[list[int], list[float]]
#: FLOPs of a byte over which the roof is drawn.
INTENSITIES = (30.0, 1500.0)


def lines(results: dict[str, Any], topk: int) -> dict[str, Line]:
    """Cold times of each arm that was timed over the batch: 64 heads, one query row."""
    rows = {Point(**row["point"]): row for row in results["points"]}
    found: dict[str, Line] = {}
    for arm in (OURS, *OTHERS):
        timed = [(batch, time) for batch in BATCHES
                 if (row := rows.get(Point(batch, topk))) and (time := us(row, arm, "cold")) is not None]  # fmt: skip
        if timed:
            found[arm] = [batch for batch, _ in timed], [time for _, time in timed]
    return found


def achieved(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """(FLOPs of a byte, TFLOP/s) of this project's kernel by kind of point, cold: of bytes and FLOPs that a call needs."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in results["points"]:
        if (time := us(row, OURS, "cold")) is not None:
            point = Point(**row["point"])
            at = row["flops"] / row["bytes"], row["flops"] / time / 1e6
            found.setdefault((point.heads, point.queries), []).append(at)
    return {f"H {heads}, Sq {queries}": at for (heads, queries), at in sorted(found.items())}


def draw(results: dict[str, Any], out: Path) -> None:
    """Write the picture.

    Raises:
        SpecverifyError: no matplotlib here.
    """
    pyplot = plots.pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for panel, topk in zip(axes.flat, TOPKS, strict=False):
        for arm, (batches, times) in lines(results, topk).items():
            panel.loglog(batches, times, marker="o", label=arm, linewidth=2.5 if arm == OURS else 1.2)
        panel.set_title(f"K {topk}, 64 heads, one query row")
        panel.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        panel.set_xlabel("requests")
        panel.set_ylabel("µs of one layer, rows not in the L2 cache")
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    roof = axes.flat[3]
    for kind, values in achieved(results).items():
        roof.loglog(*zip(*values, strict=True), marker="o", linestyle="", label=kind)
    if (most := results.get("ceilings")) is not None:
        # A copy reads and writes at `copy_tb_per_s`; a byte that is read carries `x` FLOPs.
        ridge = most["matmul_tflops"] / most["copy_tb_per_s"]
        corners = (INTENSITIES[0], ridge, max(INTENSITIES[1], ridge))
        heights = [min(x * most["copy_tb_per_s"], most["matmul_tflops"]) for x in corners]
        roof.loglog(corners, heights, color="black", label="a copy's bytes, a product's FLOPs")
    roof.set_title("this project's kernel, all points")
    roof.set_xlabel("FLOPs of a byte")
    roof.set_ylabel("TFLOP/s")
    if roof.get_legend_handles_labels()[0]:
        roof.legend(fontsize=8)
    figure.suptitle(f"sparse MLA decode, window 128, {plots.provenance(results)}")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
