"""`specverify demo`: a real server with speculation through the plugin, compared with one without."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_specverify import flags, upstream
from sglang_specverify.errors import SpecverifyError


def demo(
    algorithm: Annotated[str, typer.Option(help="STANDALONE, EAGLE, EAGLE3 or NGRAM.")] = "STANDALONE",
    topk: Annotated[int, typer.Option(min=1, max=16, help="Drafts that follow each draft; 1 is a chain.")] = 4,
    steps: Annotated[int, typer.Option(min=1, max=8, help="Steps of the draft, the depth of its tree.")] = 3,
    draft_tokens: Annotated[
        int | None, typer.Option(min=2, max=64, help="Tokens verified at once, the root among them.  [default: 8, or steps + 1]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the speculating server.  [default: a free one]")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the models and the servers' logs.")] = False,
) -> None:
    """Make tiny models, start SGLang with and without speculation through specverify, and compare their greedy tokens.

    Exit code 0 only if every token is equal.
    """
    upstream.check_version(upstream.installed_version())
    flags.read()
    try:
        from sglang_specverify.demo import run
    except ModuleNotFoundError as error:
        raise SpecverifyError(
            f"the demonstration needs {error.name}, which comes with SGLang",
            "run scripts/setup, or install SGLang beside the plugin",
        ) from None
    options = run.Options(algorithm.upper(), topk, steps, draft_tokens, port, keep)
    try:
        equal = run.run(options)
    except KeyboardInterrupt:
        typer.echo("specverify: interrupted; both servers are stopped", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if equal else 1)
