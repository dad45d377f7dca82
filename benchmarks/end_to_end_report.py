"""Print a result file of `benchmarks.end_to_end`: a row for each cell, what was aimed at, and a picture.

    python -m benchmarks.end_to_end_report e2e.json
    python -m benchmarks.end_to_end_report e2e.json --markdown --plot e2e.png

`--estimates verify-attention.json` adds the goals' other configurations from a kernel grid, each marked as an estimate and none
counted in an aim.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import end_to_end_plan as plan
from benchmarks import record
from benchmarks.engines import OURS
from sglang_specverify.errors import SpecverifyError

COLUMNS = (
    "scenario", "input", "concurrency", "against", "tokens/s", "stock", "ratio", "spread", "p50 s", "p95 s", "stock p50",
    "stock p95", "ms a step", "stock ms",
)  # fmt: skip
#: Least share by which tokens/s may fall without counting as slower, where repetitions spread less than that.
TOLERANCE = 0.005
_SLACK = "0.5 % or the spread"
#: The configuration with a goal of its own.
LARGEST = ("128x16", 128, 32)


@dataclass(frozen=True)
class Pair:
    """One cell: the plugin's arm beside one stock arm, measured in turn."""

    row: Mapping[str, Any]

    @property
    def place(self) -> tuple[str, int, int]:
        return self.row["scenario"], self.row["input"], self.row["concurrency"]

    @property
    def stock(self) -> str:
        return str(self.row["stock"])

    @property
    def ours(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.row["arms"][OURS]
        return found

    @property
    def theirs(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.row["arms"][self.stock]
        return found

    @property
    def ratio(self) -> float:
        """Tokens/s through the plugin over the stock arm's, medians."""
        return float(self.ours["tokens_per_s"] / self.theirs["tokens_per_s"])

    @property
    def spread(self) -> float:
        """How far repetitions of one arm lie apart, the wider of both, as a share of their median."""
        return max(float(self.ours["spread"]), float(self.theirs["spread"]))

    @property
    def noise(self) -> float:
        """What a ratio of equal engines may be off by."""
        return max(self.spread, TOLERANCE)

    @property
    def name(self) -> str:
        return f"{self.row['scenario']} input {self.row['input']} concurrency {self.row['concurrency']} against {self.stock}"


@dataclass(frozen=True)
class Verdict:
    """One aim: what it is about, what came, and the cells where it was missed. `held` is None where too little was measured."""

    what: str
    value: str
    held: bool | None
    missed: tuple[str, ...] = ()


def pairs(results: Mapping[str, Any]) -> list[Pair]:
    """All valid measurements, in the order of scenarios and cells."""
    found = [Pair(row) for row in results["cells"] if plan.counts(row)]
    return sorted(found, key=lambda pair: (pair.stock, pair.row["scenario"], pair.row["input"], pair.row["concurrency"]))


def trees(found: Sequence[Pair]) -> list[Pair]:
    """Those that the goals for trees speak of."""
    return [pair for pair in found if (pair.row["speculation"] or {}).get("topk", 0) > 1 and not pair.row["under_pressure"]]


def against_best(found: Sequence[Pair]) -> list[Pair]:
    """For each configuration the pair with the best stock arm, the one over which the plugin gains least."""
    best: dict[tuple[str, int, int], Pair] = {}
    for pair in found:
        if pair.place not in best or pair.ratio < best[pair.place].ratio:
            best[pair.place] = pair
    return list(best.values())


def verdicts(results: Mapping[str, Any]) -> list[Verdict]:
    """The goals, over what was measured."""
    found = pairs(results)
    on_trees = trees(found)
    fa3 = [pair for pair in on_trees if pair.stock == "fa3"]
    best, lone = against_best(on_trees), _lone(on_trees)
    # In servers for few requests the plugin's kernel verifies chains, and may be faster; elsewhere nothing of the plugin's runs.
    chains = [pair for pair in found if pair.row["scenario"] == "chain-few"]
    plain = [pair for pair in found if pair not in chains and (pair.row["speculation"] or {}).get("topk", 0) <= 1]
    pressed = [pair for pair in found if pair.row["under_pressure"]]
    return [
        _median("against fa3, median", fa3, 1.15),
        _median("against fa3, W 128, topk 16, input 128, concurrency 32", [p for p in fa3 if p.place == LARGEST], 1.20),
        _undecided(_median("against the best stock arm of each configuration, median", best, 1.05), lone),
        _undecided(_each(f"against the best stock arm, none slower by more than {_SLACK}", best, _not_slower, slack=True), lone),
        _each(f"topk 1 and no speculation, within {_SLACK}", plain, lambda p: abs(p.ratio - 1) <= p.noise, slack=True),
        _each(f"topk 1 in servers for few requests, none slower by more than {_SLACK}", chains, _not_slower, slack=True),
        # Not under pressure: a request that was put back counts its steps anew.
        _each("accept length no lower (simulated: a lower one is an error of the run)", on_trees, _accepts),
        _each("requests were retracted in both arms of the run under KV pressure", pressed, _retracted),
    ]


def _lone(found: Sequence[Pair]) -> str:
    """Where only one stock arm was measured, which says nothing of the best one; "" where there are more everywhere."""
    arms: dict[tuple[str, int, int], set[str]] = {}
    for pair in found:
        arms.setdefault(pair.place, set()).add(pair.stock)
    alone = sum(len(each) == 1 for each in arms.values())
    return f"one stock arm measured in {alone} of {len(arms)}" if alone else ""


def _undecided(verdict: Verdict, why: str) -> Verdict:
    """The same without a judgement, if there is a reason."""
    return Verdict(verdict.what, why, None) if why else verdict


def _median(what: str, found: Sequence[Pair], least: float) -> Verdict:
    what = f"{what}: {least - 1:+.0%} or more"
    if not found:
        return Verdict(what, "not measured", None)
    value = statistics.median(pair.ratio for pair in found)
    low = min(found, key=lambda pair: pair.ratio)
    text = f"{value - 1:+.1%} over {len(found)}, least {low.ratio - 1:+.1%}"
    return Verdict(what, text, value >= least, () if value >= least else (low.name,))


def _each(what: str, found: Sequence[Pair], holds: Callable[[Pair], bool], *, slack: bool = False) -> Verdict:
    if not found:
        return Verdict(what, "not measured", None)
    missed = [pair for pair in found if not holds(pair)]
    ratios = f"ratios {min(p.ratio for p in found):.3f} to {max(p.ratio for p in found):.3f}"
    text = f"{len(found) - len(missed)} of {len(found)}, {ratios}"
    if slack:
        text += f", slack {min(p.noise for p in found):.3f} to {max(p.noise for p in found):.3f}"
    return Verdict(what, text, not missed, tuple(f"{p.name}: {p.ratio:.3f} (spread {p.noise:.3f})" for p in missed))


def _not_slower(pair: Pair) -> bool:
    return pair.ratio >= 1 - pair.noise


def _accepts(pair: Pair) -> bool:
    ours, theirs = pair.ours["accept_length"], pair.theirs["accept_length"]
    return ours is not None and theirs is not None and bool(ours >= theirs)


def _retracted(pair: Pair) -> bool:
    return bool(sum(pair.ours["retractions"]) and sum(pair.theirs["retractions"]))


def table(results: Mapping[str, Any], style: box.Box) -> Table:
    found = Table(
        *COLUMNS, title=f"{results['settings']['shape']}: measured, tokens/s through the plugin and through stock", box=style
    )
    for pair in pairs(results):
        ours, theirs = pair.ours, pair.theirs
        scenario, length, concurrency = pair.place
        found.add_row(
            scenario, str(length), str(concurrency), pair.stock, f"{ours['tokens_per_s']:.0f}", f"{theirs['tokens_per_s']:.0f}",
            f"{pair.ratio:.3f}", f"{pair.noise:.3f}", f"{ours['latency_p50_s']:.2f}", f"{ours['latency_p95_s']:.2f}",
            f"{theirs['latency_p50_s']:.2f}", f"{theirs['latency_p95_s']:.2f}", _step(ours), _step(theirs),
        )  # fmt: skip
    return found


def _step(arm: Mapping[str, Any]) -> str:
    return "" if arm["ms_per_step"] is None else f"{arm['ms_per_step']:.2f}"


def remarks(results: Mapping[str, Any]) -> list[str]:
    """What did not count or is not as it should be, and what ran in the plugin's engines."""
    found = []
    for row in results["cells"]:
        name = f"{row['scenario']} input {row['input']} concurrency {row['concurrency']} against {row['stock']}"
        if "error" in row:
            found.append(f"not measured: {name}: {row['error'].splitlines()[0]}")
        for text in row.get("faults", ()):
            found.append(f"does not count: {name}: {text}")
        for arm, measured in row.get("arms", {}).items():
            if not measured["in_lockstep"] and not row["under_pressure"]:
                found.append(f"not in lockstep: {name}: {arm}")
    for row in results["engines"]:
        name = f"{row['scenario']} {row['arm']} (beside {row['stock']})"
        if "error" in row:
            found.append(f"failed: {name}: {row['error'].splitlines()[0]}")
        elif row["arm"] == OURS and row["specverify"] is not None:
            served = {(r["mode"], r["layer"], r["kernel"]) for r in row["specverify"]["routes"] if r["calls"]}
            kernels = "; ".join(f"{mode} of {layer}: {kernel}" for mode, layer, kernel in sorted(served))
            found.append(f"ran: {name}, base {row['specverify']['base']}: {kernels}")
    return list(dict.fromkeys(found))


def show(results: Mapping[str, Any], console: Console | None = None, *, markdown: bool = False) -> None:
    """Print measurements, aims and remarks."""
    console = console or Console(width=200)
    style = box.MARKDOWN if markdown else box.SIMPLE
    console.print(table(results, style))
    for text in remarks(results):
        console.print(text, markup=False, soft_wrap=True)
    if results["settings"]["dry_run"]:
        console.print("a dry run: its numbers say nothing, and no aim is held against them")
        return
    aims = Table("aim", "measured", "", box=style)
    found = verdicts(results)
    for verdict in found:
        aims.add_row(verdict.what, verdict.value, "" if verdict.held is None else "pass" if verdict.held else "FAIL")
    console.print(aims)
    for verdict in found:
        for text in verdict.missed:
            console.print(f"missed: {verdict.what}: {text}", markup=False)


def main(
    file: Annotated[Path, typer.Argument(help="A result file.")],
    markdown: Annotated[bool, typer.Option(help="Tables that a Markdown page takes.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture to write; needs matplotlib.")] = None,
    estimates: Annotated[Path | None, typer.Option(help="Result file of benchmarks.verify_attention to estimate from.")] = None,
    estimates_out: Annotated[Path | None, typer.Option(help="File of its own for the estimates.")] = None,
) -> None:
    """Print a result file against what was aimed at."""
    from benchmarks import end_to_end_plot
    from benchmarks import estimates as from_kernels

    results = json.loads(file.read_text())
    show(results, markdown=markdown)
    guessed = [] if estimates is None else from_kernels.estimate(results, json.loads(estimates.read_text()))
    if guessed:
        from_kernels.show(guessed, Console(width=200), markdown=markdown)
        if estimates_out is not None:
            record.write(estimates_out, {"kind": "ESTIMATES of end to end, not measured", "estimates": guessed})
    try:
        if plot is not None:
            end_to_end_plot.draw(results, plot, guessed)
    except SpecverifyError as error:
        typer.echo(f"no picture: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
