"""The command `specverify`. One module for each subcommand, imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from sglang_specverify import __version__
from sglang_specverify.errors import SpecverifyError

#: Exit code for bad input, as for an unknown option.
BAD_INPUT = 2

#: Subcommand: the function that it is, and what the list of commands says of it.
_COMMANDS = {
    "doctor": ("sglang_specverify.cli.doctor:doctor", "Check versions, hardware, entry point, flags and kernels."),
    "explain": ("sglang_specverify.cli.explain:explain", "Explain base and kernels for a model and a server line."),
    "checkpoint": ("sglang_specverify.cli.checkpoint:checkpoint", "Show how a checkpoint's MTP part will be built."),
    "env": ("sglang_specverify.cli.env:env", "Show the plugin's environment variables."),
    "serve": ("sglang_specverify.cli.serve:serve", "Start SGLang's server with the plugin."),
    "demo": ("sglang_specverify.cli.demo:demo", "Serve a tiny model with and without speculation, and compare."),
    "tune": ("sglang_specverify.cli.tune:tune", "Find the fastest launch configurations on this machine's GPU."),
}
#: Commands that hand arguments on to SGLang.
_PASS_ARGUMENTS_ON: dict[str, dict[str, Any]] = {
    # After "--" everything is SGLang's; before it, a misspelt option is an error.
    "explain": {"allow_extra_args": True},
    "serve": {"allow_extra_args": True, "ignore_unknown_options": True},
}


class _LazyGroup(TyperGroup):
    """A group whose subcommands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, says) for name, (_, says) in _COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, _, function = _COMMANDS[cmd_name][0].partition(":")
        single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        single.command(cmd_name, context_settings=_PASS_ARGUMENTS_ON.get(cmd_name))(
            getattr(importlib.import_module(module), function)
        )
        command = get_command(single)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-specverify {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Attention for speculative decoding in SGLang: what would serve, what is installed, and a server to try it on."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (the process's own when None); leaves through `SystemExit`.

    Exit codes: 0 fine, 1 a check or a comparison failed, 2 bad input.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="specverify")
    except SpecverifyError as error:
        print(f"specverify: error: {error}", file=sys.stderr, flush=True)
        sys.exit(BAD_INPUT)
