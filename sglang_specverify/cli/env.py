"""`specverify env`: every environment variable the plugin reads, and SGLang's own that it honours."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_specverify import flags
from sglang_specverify.flags import FLAGS, UPSTREAM_SWITCHES, Flag

_UPSTREAM_TITLE = "SGLang's own switches, honoured with their meaning"


def markdown() -> str:
    """The page docs/flags.md: names, types, defaults and meanings, the same on every machine."""
    return "\n".join(
        [
            "# Flags",
            "",
            "Written by `specverify env --markdown`. A value that does not parse, and a `SGLANG_SPECVERIFY_*` name that does",
            "not exist, are errors at start-up.",
            "",
            *_rows(FLAGS),
            "",
            f"## {_UPSTREAM_TITLE}",
            "",
            *_rows(UPSTREAM_SWITCHES),
            "",
        ]
    )


def _rows(group: tuple[Flag, ...]) -> list[str]:
    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    return [
        "| variable | type | default | meaning |",
        "|---|---|---|---|",
        *(f"| `{flag.name}` | {cell(flag.type)} | `{flag.default}` | {cell(flag.meaning)} |" for flag in group),
    ]


def env(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/flags.md: no current values.")] = False,
) -> None:
    """Show the plugin's environment variables: current value, default, type and meaning."""
    if as_markdown:
        typer.echo(markdown(), nl=False)
        return
    console = Console()
    for title, group in (("Flags of this plugin", FLAGS), (_UPSTREAM_TITLE, UPSTREAM_SWITCHES)):
        table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
        for name in ("variable, and what it takes", "value", "default"):
            table.add_column(name, no_wrap=True)
        table.add_column("meaning", ratio=1)
        for flag in group:
            current = os.environ.get(flag.name, "unset")
            row = (f"{flag.name}\n  {flag.type}", current, flag.default, flag.meaning)
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    # After the table, so that a user sees what a wrong value should have been.
    flags.read()
