"""Tables of sparse MLA decode for `benchmarks.docs`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.sparse_mla_points import BATCHES, TOPKS, WINDOW, Point
from benchmarks.sparse_mla_report import OTHERS, OURS, chains, times_faster, us
from sglang_specverify.kernels.sparse_mla.launches import config_of
from sglang_specverify.kernels.sparse_mla.splits import SparseConfig, divide

#: What `tests.gpu.sparse_mla_smoke` times: one query row of 64 heads, on a device of 132 multiprocessors.
HEADS, PROGRAMS = 64, 132


def chosen(batch: int, topk: int) -> tuple[SparseConfig, int]:
    """(launch options, parts of the keys) that the kernel takes at a point on an H200."""
    config = config_of("sm_90", batch, PROGRAMS, WINDOW + topk)
    division = divide(batch, 1, HEADS, WINDOW, topk, config, PROGRAMS, packed=False, shared_main=True)
    return config, division.splits


def ran_with(options: dict[str, Any], config: SparseConfig) -> bool:
    """Whether a variant of a result file is `config`; an option that its version did not have was off."""
    own = asdict(config)
    return all(options.get(name, False) == (list(value) if isinstance(value, tuple) else value)
               for name, value in own.items() if name != "costs")  # fmt: skip


def variants(results: dict[str, Any]) -> list[str]:
    """Each point of a smoke run: what the rule takes there, beside the fastest of all variants and the Triton source."""
    lines = [
        "| requests | K | keys a tile | parts | µs warm | cold | fastest variant | undivided | Triton source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    points: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in results["times"]:
        options = results["variants"][row["variant"]]
        points.setdefault((row["K"], row["B"]), []).append(row | {"options": options, "ours": options["specialized"]})
    for (topk, batch), rows in sorted(points.items()):
        ours = [row for row in rows if row["ours"]]
        config, parts = chosen(batch, topk)
        taken = next((row for row in ours if row["parts"] == parts and ran_with(row["options"], config)), None)
        whole = min((row["warm"] for row in ours if row["parts"] == 1), default=None)
        triton = min((row["warm"] for row in rows if not row["ours"]), default=None)
        times = [taken and taken["warm"], taken and taken["cold"], min(row["warm"] for row in rows), whole, triton]
        cells = [batch, topk, config.keys, parts, *("not run" if us is None else f"{us:.1f}" for us in times)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def peers(results: dict[str, Any]) -> list[str]:
    """`benchmarks.sparse_mla`, 64 heads and one query row: µs warm / cold of each arm, and how much faster than FlashMLA."""
    arms = (OURS, *(name for name in OTHERS if name != "rows apart"))
    lines = [f"| requests | K | {' | '.join(arms)} | flashmla / ours |", "|---" * (len(arms) + 3) + "|"]
    rows = {Point(**row["point"]): row for row in results["points"]}
    for topk in sorted(TOPKS):
        for batch in BATCHES:
            row = rows.get(Point(batch, topk), {})
            cells = [_both(us(row, arm, "warm"), us(row, arm, "cold"), 1) for arm in arms]
            ratio = _both(times_faster(row, "warm"), times_faster(row, "cold"), 2)
            lines.append(f"| {batch} | {topk} | {' | '.join(cells)} | {ratio} |")
    return lines


def rows_of_drafts(results: dict[str, Any]) -> list[str]:
    """The same run, several query rows a request, cold: rows in shared tiles beside rows in tiles of their own."""
    lines = [
        "| requests, K, heads, rows | µs | as separate requests / that | flashmla / that | that / one row |",
        "|---|---|---|---|---|",
    ]
    return lines + [f"| {' | '.join(cells)} |" for cells in chains(results, "cold")]


def profile(results: dict[str, Any]) -> list[str]:
    """Cycles of the steps of a tile, medians, and what ncu says of the whole kernel."""
    lines = ["| who | cycles of a tile |", "|---|---|"]
    for who in ("lead", "producer"):
        steps, at = results["clocks"][who]["steps"], results["clocks"][who]["at"]
        cycles = [round(median(row[n + 1] - row[n] for row in at)) for n in range(len(steps))]
        whole = round(median(after[0] - before[0] for before, after in pairwise(at)))
        text = ", ".join(f"{step} {n}" for step, n in zip(steps, cycles, strict=True))
        lines.append(f"| {who} | {text}; from tile to tile {whole} |")
    found = "; ".join(f"{name} {value}" for name, value in results["ncu"].items())
    return [*lines, "", f"Of the whole kernel, by ncu: {found}."]


def _both(warm: float | None, cold: float | None, digits: int) -> str:
    """Two states of the cache in one cell."""
    return "not run" if warm is None or cold is None else f"{warm:.{digits}f} / {cold:.{digits}f}"
