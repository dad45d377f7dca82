"""`specverify checkpoint`: how the MTP part of a checkpoint will be built, module by module, and which witness said so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_specverify import flags
from sglang_specverify.mtp import quark
from sglang_specverify.mtp.decide import Built, Plan, read_plan
from sglang_specverify.mtp.names import TARGETS


def checkpoint(
    directory: Annotated[Path, typer.Argument(help="A checkpoint's directory: config.json and safetensors files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, each stored module by itself.")] = False,
) -> None:
    """Show how the MTP part of a checkpoint will be built, and what said so. Needs no GPU and no SGLang; reads no weight.

    The witness is the safetensors files' headers: types, shapes and scale tensors. config.json is shown beside it, and where it
    disagrees. A contradictory checkpoint of Quark's is an error that names the tensors.
    """
    plan, served = read_plan(directory), flags.read()
    if as_json:
        typer.echo(json.dumps(as_dict(plan, served), indent=2))
    else:
        render(plan, served, Console())


def outcome(plan: Plan, served: flags.Flags) -> str:
    """Who builds the MTP part, and why."""
    if not plan.built:
        return "no MTP tensors: nothing to load"
    if not plan.config.is_quark:
        return f"quantisation {plan.config.method}, not quark: left to SGLang"
    if not set(plan.config.architectures) & set(TARGETS):
        return f"{', '.join(plan.config.architectures) or 'no architecture'}, not Qwen3.5: left to SGLang"
    if served.disable or not served.mtp:
        name = "DISABLE=1" if served.disable else "MTP=0"
        return f"left to SGLang, which goes by the exclude list: {flags.PREFIX}{name}"
    reason = quark.unservable(plan)
    return f"left to SGLang: {reason}" if reason else "with --attention-backend specverify, built as the files hold it"


def _config_says(built: Built, plan: Plan) -> str:
    if built.note:
        return built.note
    if not plan.config.is_quark or not built.quantizable:
        return ""
    entry = plan.config.excluded_by(built.stored[0].canonical)
    return f"the same: {built.type}" if entry is None else f"the same: excluded by {entry!r}"


def _witness(built: Built) -> str:
    """What the headers say: for several tensors, of the first one, and how many there are."""
    files = sorted({module.parts["weight"].file for module in built.stored})
    many = f"{len(built.stored)} weights, the first " if len(built.stored) > 1 else ""
    return f"{many}{built.stored[0].evidence}; {files[0]}" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def as_dict(plan: Plan, served: flags.Flags) -> dict[str, Any]:
    """Everything, for a program: each built module with the stored ones that it is made of."""
    return {
        "checkpoint": str(plan.directory),
        "architectures": list(plan.config.architectures),
        "quantisation": plan.config.method,
        "mtp": plan.kind,
        "outcome": outcome(plan, served),
        "modules": [
            {
                "module": built.name,
                "type": built.type,
                "quantizable": built.quantizable,
                "config": _config_says(built, plan),
                "disagrees": bool(built.note),
                "stored": [
                    {
                        "module": module.name,
                        "type": module.type,
                        "scales": module.granularity,
                        "witness": module.evidence,
                        "file": module.parts["weight"].file,
                    }
                    for module in built.stored
                ],
            }
            for built in plan.built
        ],
    }


def render(plan: Plan, served: flags.Flags, console: Console) -> None:
    """Print the plan: what the checkpoint is, one row for each module that SGLang builds, and who builds it."""
    console.print(Text(f"{', '.join(plan.config.architectures) or 'unknown architecture'} in {plan.directory}", style="bold"))
    console.print(Text(f"quantisation {plan.config.method}; MTP: {plan.kind}"))
    if plan.built:
        table = Table(box=SIMPLE, pad_edge=False, expand=True)
        for column, ratio in (("module", 5), ("type", None), ("witness: the headers", 6), ("config.json", 5)):
            table.add_column(column, overflow="fold", ratio=ratio, no_wrap=ratio is None)
        for built in plan.built:
            style = "yellow" if built.note else ""
            said = _config_says(built, plan) or ("SGLang never quantises it" if plan.config.is_quark else "")
            table.add_row(Text(built.name), Text(built.type, style="green"), Text(_witness(built)), Text(said, style=style))
        console.print(table)
    console.print(Text(outcome(plan, served)))
