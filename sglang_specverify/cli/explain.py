"""`specverify explain`: which kernel a described server would run, and why not another."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_specverify import flags
from sglang_specverify.cli.describe import Explanation, Row
from sglang_specverify.cli.describe import explain as work_out
from sglang_specverify.hardware import from_name, names


def explain(
    context: typer.Context,
    model: Annotated[str | None, typer.Option("--model", help="A model's directory, or its config.json.")] = None,
    hardware: Annotated[str, typer.Option("--hardware", help=f"auto, or one of: {', '.join(names())}.")] = "auto",
    aiter: Annotated[
        bool | None,
        typer.Option("--aiter/--no-aiter", help="Count aiter as installed; left out: this machine, or yes for another."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Explain base and kernels for a model and a server line. Needs no GPU, no SGLang and no weights.

    Example: specverify explain --model DIR --hardware H200 -- --speculative-algorithm EAGLE --max-running-requests 8
    """
    if aiter is None:
        aiter = find_spec("aiter") is not None if hardware == "auto" else True
    installed = frozenset({"aiter"} if aiter else ())
    explanation = work_out(model, from_name(hardware), list(context.args), flags.read(), installed)
    if as_json:
        typer.echo(json.dumps(explanation.as_dict(), indent=2))
    else:
        render(explanation, Console())


def render(explanation: Explanation, console: Console) -> None:
    """Print `explanation`: the base, then one block for each mode."""
    machine, server = explanation.hardware, explanation.server
    name = "" if machine.name in (machine.arch, machine.display) else f" ({machine.name})"
    console.print(Text(f"{', '.join(explanation.model.architectures)} on {machine.display}{name}", style="bold"))
    if server.algorithm is not None:
        tree = f"tree, topk {server.topk}" if server.topk > 1 else "chain, topk 1"
        steps = f"{server.num_steps} steps, {server.num_draft_tokens} draft tokens"
        console.print(Text(f"{server.algorithm}: {tree}, {steps}, page size {server.page_size}"))
    console.print()
    console.print(Text.assemble(("base ", ""), (explanation.base.base, "bold green"), f": {explanation.base.reason}"))
    for rejected in explanation.base.rejected:
        console.print(Text(f"  not {rejected.name}: {rejected.reason}", style="dim"))
    console.print()
    table = Table(show_lines=True, expand=True)
    for column, ratio in (("mode", None), ("layers", 4), ("kernel", None), ("reason", 6), ("rejected", 6)):
        table.add_column(column, overflow="fold", ratio=ratio, no_wrap=ratio is None)
    for row in explanation.rows:
        decision = row.decision
        rejected_text = "\n".join(f"{item.name}: {item.reason}" for item in decision.rejected)
        style = "green" if decision.served else "yellow" if decision.claimed else ""
        table.add_row(
            Text(row.mode.value),
            Text(layers_text(row)),
            Text(decision.kernel, style=style),
            Text(decision.reason),
            Text(rejected_text, style="dim"),
        )
    if explanation.rows:
        console.print(table)
    for line in () if explanation.sparse is None else explanation.sparse.lines():
        console.print(Text(line))
    for note in explanation.notes:
        console.print(Text(f"note: {note}"))
    if explanation.refused:
        console.print(Text(f"this server would not start: {explanation.refused}", style="bold red"))


def layers_text(row: Row) -> str:
    """The layers of a row for people: how many, what kind, which sizes."""
    facts = row.layers.facts
    parts = [f"{row.layers.count} × {facts.kind.value}"]
    if facts.q_heads:
        value_dim = "" if facts.v_head_dim == facts.head_dim else f"/{facts.v_head_dim}"
        parts.append(f"{facts.q_heads}:{facts.kv_heads} heads, dim {facts.head_dim}{value_dim}")
    if facts.window >= 0:
        parts.append(f"window {facts.window}")
    if facts.softcap:
        parts.append(f"soft cap {facts.softcap:g}")
    if facts.has_sinks:
        parts.append("sinks")
    if facts.unknown:
        parts.append(f"sets {', '.join(sorted(facts.unknown))}")
    return ("draft: " if row.model == "draft" else "") + ", ".join(parts)
