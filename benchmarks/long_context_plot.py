"""Draw a result file of `benchmarks.long_context`: achieved bandwidth over batch and length, and against SGLang's kernels.

    python -m benchmarks.long_context_plot long.json long.png

Each cell is the fastest of this project's forms, with K and V not in the L2 cache. Needs matplotlib.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import plots
from benchmarks.aims import Row
from benchmarks.long_context_points import BATCHES, LENGTHS, WIDTH, chain
from benchmarks.long_context_report import STOCK, ceiling, of_ceiling, tb_per_s

Value = Callable[[Row], float | None]


def plane(results: dict[str, Any], value: Value) -> list[list[float]]:
    """Values of the plane's points, a line for each batch and a column for each length; NaN where not measured."""
    rows = {row["name"]: Row(row, "cold", "best") for row in results["points"]}
    lines = []
    for batch in BATCHES:
        line = []
        for length in LENGTHS:
            row = rows.get(chain(batch, length).name)
            found = None if row is None else value(row)
            line.append(math.nan if found is None else found)
        lines.append(line)
    return lines


def ratio_to(*names: str) -> Value:
    """Times that this project is faster than the fastest of some arms."""
    return lambda row: row.ratio(row.stock(*names), row.ours)


def draw(results: dict[str, Any], out: Path) -> None:
    """Write the picture.

    Raises:
        SpecverifyError: no matplotlib here.
    """
    pyplot = plots.pyplot()
    from matplotlib import colors

    most = ceiling(results)
    shares = plane(results, lambda row: of_ceiling(row, most))
    rates = plane(results, tb_per_s)
    known = "unknown" if most is None else f"{most:.2f} TB/s"
    panels = [
        (f"achieved TB/s, and its share of the ceiling ({known})", shares, "viridis", colors.Normalize(0, 1)),
        ("best of stock fa3 and triton / ours", plane(results, ratio_to(*STOCK)), "RdYlGn", colors.LogNorm(1 / 2, 2)),
        ("stock triton / ours", plane(results, ratio_to("triton")), "viridis", colors.LogNorm(1, 100)),
        ("upstream's split-KV / ours", plane(results, ratio_to("upstream_splitkv")), "viridis", colors.LogNorm(1, 10)),
    ]

    def rate_and_share(row: int, column: int, share: float) -> str:
        return f"{rates[row][column]:.2f}\n{share:.0%}"

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for panel, (title, lines, colormap, norm) in zip(axes.flat, panels, strict=True):
        image = plots.heatmap(
            panel, lines, [short(length) for length in LENGTHS], [str(batch) for batch in BATCHES], colormap=colormap, norm=norm,
            text=rate_and_share if lines is shares else plots.two_places,
            shade=partial(_shade, norm) if colormap == "viridis" else lambda value: "black",
        )  # fmt: skip
        panel.set_title(title)
        panel.set_xlabel("prefix tokens")
        panel.set_ylabel("requests")
        figure.colorbar(image, ax=panel)
    what = f"chain verify, W {WIDTH}, 32/8 heads of 128, bf16, one layer, K and V not in the L2 cache"
    figure.suptitle(f"{what}\n{plots.provenance(results)}")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _shade(norm: Any, value: float) -> str:
    """Of text on a dark cell."""
    return "white" if norm(value) < 0.6 else "black"


def short(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"


def main(
    file: Annotated[Path, typer.Argument(help="A result file.")],
    out: Annotated[Path, typer.Argument(help="The picture, .png.")],
) -> None:
    """Draw bandwidth and ratios over batch and length."""
    draw(json.loads(file.read_text()), out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
