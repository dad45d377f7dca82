"""Command-line options that benchmarks of kernels share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Result file to write, after every point.")]
Minutes = Annotated[float, typer.Option(help="Start no point after this many minutes.")]
Resume = Annotated[Path | None, typer.Option(help="Keep the points of this result file, if it exists, and measure the others.")]
NewArms = Annotated[
    bool, typer.Option("--new-arms", help="Measure selected points of the resumed file anew if they lack arms of this run.")
]
Skip = Annotated[list[str] | None, typer.Option(help="An arm to leave out; repeatable.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Tiny points, no timing: are all arms right?")]
