"""Draw a result file of `benchmarks.end_to_end`: tokens/s through the plugin over each stock arm's, for every configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.end_to_end_report import Pair, pairs, trees
from sglang_specverify.errors import SpecverifyError


def panels(found: Sequence[Pair], guessed: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str], list[int], list[int]]:
    """Stock arms, scenarios, inputs and concurrencies, of measurements and estimates."""
    places = [(pair.stock, *pair.place) for pair in found]
    places += [(row["stock"], row["scenario"], row["input"], row["concurrency"]) for row in guessed]
    stocks, names = {place[0]: None for place in places}, {place[1] for place in places}
    return list(stocks), sorted(names), sorted({place[2] for place in places}), sorted({place[3] for place in places})


def values(
    found: Sequence[Pair], guessed: Sequence[Mapping[str, Any]], stock: str, scenario: str
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """(input, concurrency) to ratio: measured ones, and estimates where nothing was measured."""
    measured = {pair.place[1:]: pair.ratio for pair in found if pair.stock == stock and pair.place[0] == scenario}
    rows = [row for row in guessed if row["stock"] == stock and row["scenario"] == scenario]
    estimated = {(row["input"], row["concurrency"]): row["estimated_ratio"] for row in rows}
    return measured, {place: ratio for place, ratio in estimated.items() if place not in measured}


def draw(results: Mapping[str, Any], out: Path, guessed: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the picture: a panel for each stock arm and scenario; estimates are hatched and carry a tilde.

    Trees alone, where there are any: other scenarios have cells of their own, which a grid over all would leave mostly empty.

    Raises:
        SpecverifyError: no matplotlib here, or nothing measured.
    """
    every = pairs(results)
    found = trees(every) or every
    if not found:
        raise SpecverifyError("the file holds no valid measurement", "see what its cells say")
    pyplot = plots.pyplot()
    from matplotlib import colors
    from matplotlib.patches import Rectangle

    stocks, names, inputs, counts = panels(found, guessed)
    size = (1.6 + 2.3 * len(names), 1.2 + 2.1 * len(stocks))
    figure, axes = pyplot.subplots(len(stocks), len(names), figsize=size, layout="constrained", squeeze=False)
    norm = colors.LogNorm(1 / 1.6, 1.6)
    for line, stock in enumerate(stocks):
        for column, name in enumerate(names):
            axis = axes[line][column]
            measured, estimated = values(found, guessed, stock, name)
            both = {**measured, **estimated}
            axis.imshow(
                [[both.get((length, count), math.nan) for length in inputs] for count in counts],
                cmap="RdYlGn", norm=norm, origin="lower", aspect="auto",
            )  # fmt: skip
            for y, count in enumerate(counts):
                for x, length in enumerate(inputs):
                    place = (length, count)
                    if place in estimated:
                        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor="0.7", linewidth=0))
                    if place in both:
                        text = f"~{both[place]:.2f}" if place in estimated else f"{both[place]:.3f}"
                        axis.text(x, y, text, ha="center", va="center", fontsize=8)
            axis.set_xticks(range(len(inputs)), [str(length) for length in inputs])
            axis.set_yticks(range(len(counts)), [str(count) for count in counts])
            axis.set_title(f"{name} against {stock}", fontsize=9)
            if line == len(stocks) - 1:
                axis.set_xlabel("input tokens")
            if column == 0:
                axis.set_ylabel("concurrency")
    shape, hardware = results["settings"]["shape"], results["hardware"]["name"]
    note = "; hatched and ~: estimates" if guessed else ""
    figure.suptitle(f"tokens/s through the plugin over stock, {shape}, {hardware}{note}", fontsize=10)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
