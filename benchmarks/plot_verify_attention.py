"""Draw a result file of `benchmarks.verify_attention`: ours against the best stock kernel, and against the hardware.

    python -m benchmarks.plot_verify_attention verify.json verify.png

One column for each W. Above, how many times faster than the best of SGLang's kernels; below, the floor (bytes and FLOPs over
measured ceilings) as a share of the time. Needs matplotlib.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import plots
from benchmarks.aims import Row, State, Which
from benchmarks.points import BATCHES, LENGTHS, WIDTHS, Point

Value = Callable[[Row], float | None]
#: What each row of panels shows.
PANELS: tuple[tuple[str, Value], ...] = (
    ("best stock / ours", lambda row: row.ratio(row.stock(), row.ours)),
    ("floor / ours", lambda row: row.ratio(row.data.get("floor_us"), row.ours)),
)


def grid(results: dict[str, Any], width: int, value: Value, state: State, which: Which) -> list[list[float]]:
    """Values of the Qwen3-8B shape's trees, a line for each batch and a column for each length; NaN where not measured."""
    rows = {row["name"]: Row(row, state, which) for row in results["points"]}
    cells = []
    for batch in BATCHES:
        found = (rows.get(Point("tree", batch, width, length).name) for length in LENGTHS)
        cells.append([math.nan if row is None else _or_nan(value(row)) for row in found])
    return cells


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def draw(results: dict[str, Any], out: Path, state: State, which: Which) -> None:
    """Write the picture.

    Raises:
        SpecverifyError: no matplotlib here.
    """
    pyplot = plots.pyplot()
    from matplotlib import colors

    figure, axes = pyplot.subplots(2, len(WIDTHS), figsize=(3.2 * len(WIDTHS), 6.4), layout="constrained", squeeze=False)
    scales = (("RdYlGn", colors.LogNorm(1 / 4, 4)), ("viridis", colors.Normalize(0, 1)))
    for line, ((title, value), (colormap, norm)) in enumerate(zip(PANELS, scales, strict=True)):
        for column, width in enumerate(WIDTHS):
            panel, cells = axes[line][column], grid(results, width, value, state, which)
            image = plots.heatmap(
                panel, cells, [_short(length) for length in LENGTHS], [str(batch) for batch in BATCHES],
                colormap=colormap, norm=norm, size=7,
            )  # fmt: skip
            panel.set_title(f"W {width}")
            panel.set_xlabel("prefix tokens")
            panel.set_ylabel("requests" if column == 0 else "")
        figure.colorbar(image, ax=list(axes[line]), label=title)
    what = f"tree verify, 32/8 heads of 128, bf16, one layer, {state} cache, {which} variant"
    figure.suptitle(f"{what}; {plots.provenance(results)}")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def main(
    file: Annotated[Path, typer.Argument(help="A result file.")],
    out: Annotated[Path, typer.Argument(help="The picture, .png.")],
    warm: Annotated[bool, typer.Option(help="K and V in the L2 cache where they fit; else never there.")] = False,
    selected: Annotated[bool, typer.Option(help="The variant that is selected; else the fastest.")] = False,
) -> None:
    """Draw ratios to the best stock kernel and distances to the hardware's floor."""
    draw(json.loads(file.read_text()), out, "warm" if warm else "cold", "selected" if selected else "best")
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
