"""What the pictures of result files share: matplotlib, which is for development alone, heat maps, and where numbers come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sglang_specverify.errors import SpecverifyError

#: The text of a cell by its row, column and value.
Text = Callable[[int, int, float], str]
#: The colour of that text by the value.
Shade = Callable[[float], str]


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files.

    Raises:
        SpecverifyError: no matplotlib here.
    """
    try:
        import matplotlib
    except ImportError:
        raise SpecverifyError("matplotlib is not installed", "pip install -r requirements/dev.txt") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def two_places(row: int, column: int, value: float) -> str:
    return f"{value:.2f}"


def heatmap(
    panel: Any,
    cells: Sequence[Sequence[float]],
    columns: Sequence[str],
    rows: Sequence[str],
    *,
    colormap: str,
    norm: Any,
    text: Text = two_places,
    shade: Shade = lambda value: "black",
    size: int = 8,
) -> Any:
    """Draw `cells`, a line for each of `rows`, with its text in each; NaN stays empty. Returns the image, for a colour bar."""
    image = panel.imshow(cells, cmap=colormap, norm=norm, aspect="auto")
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            if not math.isnan(value):
                panel.text(x, y, text(y, x, value), ha="center", va="center", fontsize=size, color=shade(value))
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    return image


def provenance(results: dict[str, Any]) -> str:
    """Hardware, versions and date of a result file, in a line."""
    machine, versions = results.get("hardware", {}), results.get("versions", {})
    return f"{machine.get('name')}, SGLang {versions.get('sglang')}, Triton {versions.get('triton')}, {results.get('date')}"
