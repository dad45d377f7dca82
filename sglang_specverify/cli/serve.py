"""`specverify serve`: SGLang's server with the plugin's choices filled in where the user made none."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from sglang_specverify import flags, upstream
from sglang_specverify.door.resolution import check_plugin_filter
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import Hardware, detect
from sglang_specverify.routing.base import PLUGIN, check_request
from sglang_specverify.routing.launch import check_launch
from sglang_specverify.routing.options import ServerLine, parse

#: What a server without a GPU needs: option and value, and the spellings by which a user may have settled it.
_WITHOUT_GPU: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--device", "cpu"), ("--device",)),
    (
        ("--disable-cuda-graph",),
        ("--disable-cuda-graph", "--cuda-graph-config", "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"),
    ),
    # No CPU computes bfloat16 faster, and float32 leaves the least to rounding.
    (("--dtype", "float32"), ("--dtype",)),
    # SGLang would otherwise reserve most of the machine's memory for its cache.
    (("--max-total-tokens", "4096"), ("--max-total-tokens",)),
    # A bound on top of that. SGLang compares it with memory that other processes take meanwhile, so it leaves room.
    (("--mem-fraction-static", "0.5"), ("--mem-fraction-static",)),
    # Each scheduler that waits for requests would otherwise keep one core busy.
    (("--sleep-on-idle",), ("--sleep-on-idle",)),
)
#: SGLang's CPU engine; Triton's interpreter for what is left to SGLang's Triton backend; and SGLang's choice among drafts not
#: compiled, which at the first request of a server with trees takes a C++ compiler and more time than it saves.
_ENVIRONMENT_WITHOUT_GPU = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}
_ASKS_TO_COMPILE = "--enable-torch-compile"


def command(
    arguments: Sequence[str], hardware: Hardware, environ: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """The process to start for a server with `arguments` on `hardware`.

    Args:
        arguments: SGLang's, as the user gave them; all of them are passed on, in order, before what is filled in.
        hardware: where it will run; `--device cpu` among the arguments counts as no GPU.
        environ: what the user has set already (the process's own environment when None).

    Returns:
        The argument vector, this Python first, and the environment variables to add.

    Raises:
        SpecverifyError: a line that asks for another attention backend, that verify would not reach, or whose schedulers would
            load no plugin.
    """
    environ = os.environ if environ is None else environ
    line = parse(arguments)
    check_launch(line)
    filled = filled_in(line, hardware)
    attention, prefill, decode, draft = line.backends
    asked = PLUGIN if filled[:2] == ["--attention-backend", PLUGIN] else attention
    check_request(asked, prefill, decode, draft, mode=line.mode, speculation=line.algorithm is not None)
    extra = {} if _has_gpu(line, hardware) else dict(_ENVIRONMENT_WITHOUT_GPU)
    if _ASKS_TO_COMPILE in line.switches:
        extra.pop("TORCH_COMPILE_DISABLE", None)
    argv = [sys.executable, "-m", "sglang.launch_server", *arguments, *filled]
    return argv, {name: value for name, value in extra.items() if name not in environ}


def filled_in(line: ServerLine, hardware: Hardware) -> list[str]:
    """The arguments that `command` adds, each one that the user did not settle.

    Raises:
        SpecverifyError: the line names another attention backend and the plugin nowhere.
    """
    added: list[str] = []
    attention = line.backends[0]
    if PLUGIN not in line.backends:
        if attention is not None:
            underneath = f" (SGLANG_SPECVERIFY_BASE={attention} puts it underneath)" if attention in flags.BASES else ""
            raise SpecverifyError(
                f"--attention-backend {attention} conflicts with `specverify serve`, which serves through {PLUGIN}",
                f"leave it out{underneath}, or start `python -m sglang.launch_server` without the plugin",
            )
        added += ["--attention-backend", PLUGIN]
    if not _has_gpu(line, hardware):
        for option, settled in _WITHOUT_GPU:
            if not line.named.intersection(settled):
                added += option
    return added


def _has_gpu(line: ServerLine, hardware: Hardware) -> bool:
    return line.values.get("--device", "cuda" if hardware.has_gpu else "cpu") != "cpu"


def serve(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
) -> None:
    """Start SGLang's server with the plugin. Every argument goes to SGLang; what is missing is filled in and shown.

    Example: specverify serve --model-path DIR --speculative-algorithm EAGLE ...
    """
    arguments = list(context.args)
    upstream.check_version(upstream.installed_version())
    if flags.read().disable:
        typer.echo("specverify: SGLANG_SPECVERIFY_DISABLE=1: SGLang's own code will serve", err=True)
    check_plugin_filter(os.environ.get("SGLANG_PLUGINS", ""))
    line = parse(arguments)
    if not {"--model-path", "--config"} & line.values.keys():
        raise SpecverifyError("no model was named", "add --model-path DIR")
    argv, extra = command(arguments, detect())
    added = [*(f"{name}={value}" for name, value in extra.items()), *_pairs(argv[3 + len(arguments) :])]
    if added:
        typer.echo(f"specverify: filled in {', '.join(added)}", err=True)
    if "--config" in line.values and added:
        typer.echo("specverify: --config is not read for this; what is filled in here goes before it", err=True)
    if dry_run:
        typer.echo(shlex.join([*(f"{name}={value}" for name, value in extra.items()), *argv]))
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, {**os.environ, **extra})


def _pairs(arguments: Sequence[str]) -> list[str]:
    """["--a", "1", "--b"] as ["--a 1", "--b"]."""
    found: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            found.append(argument)
        else:
            found[-1] += f" {argument}"
    return found
