"""Serve on this machine's hardware with and without speculation, and compare greedy tokens.

    python -m benchmarks.serving_parity --out benchmarks/results/serving-parity-<machine>.json

On a GPU the servers run SGLang's real packages, CUDA graphs and overlap schedule included. What the result file
says of each case: tokens equal or not and up to where compared, accept length, and which kernel ran in which
mode and why; modes without a kernel of the plugin on this hardware run SGLang's own, and are listed so.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import record
from sglang_specverify.demo import models
from sglang_specverify.demo import run as demo
from sglang_specverify.demo.server import Server
from sglang_specverify.hardware import detect
from tests.parity import ask
from tests.parity.cover import CASES, Case
from tests.parity.servers import Probed, environment, write_plugin

PROBE = Path(__file__).parent.parent / "tests" / "parity" / "probe.py"


def cases() -> tuple[Case, ...]:
    """A tree on single slots and a chain on pages; in bfloat16 on a GPU, whose FlashAttention has no float32."""
    chosen = (CASES[0], replace(CASES[5], page_size=64))
    return tuple(replace(case, dtype="bfloat16") if detect().has_gpu else case for case in chosen)


def main(
    out: Annotated[Path, typer.Option(help="Result file to write.")],
    server_arguments: Annotated[str, typer.Option(help="More arguments for every server, in one string.")] = "",
) -> None:
    """Run the demonstration, then two speculative servers through the plugin and one without speculation."""
    extra = server_arguments.split()
    results: dict[str, Any] = {"demo": demonstration(), "server_arguments": extra, "cases": []}
    record.write(out, results)
    with tempfile.TemporaryDirectory(prefix="specverify-") as folder:
        root = Path(folder)
        probe = write_plugin(root, "specverify_parity_probe", PROBE)
        want = {}
        for case in cases():
            if case.dtype not in want:
                want[case.dtype] = baseline(case.dtype, root, extra)
            results["cases"].append(run(case, want[case.dtype], root, probe, extra))
            record.write(out, results)
    typer.echo(out.read_text())
    equal = [results["demo"]["tokens_equal"], *(case["tokens_equal"] for case in results["cases"])]
    raise typer.Exit(0 if all(equal) else 1)


def demonstration() -> dict[str, Any]:
    """`specverify demo` with its defaults: whether all tokens were equal, and what it printed."""
    console = Console(record=True, width=160)
    equal = demo.run(demo.Options(), console)
    return {"tokens_equal": equal, "printed": console.export_text().splitlines()}


def _model(kind: str, dtype: str, root: Path) -> str:
    return str(models.build(kind, root / f"{kind}-{dtype}", dtype))


def baseline(dtype: str, root: Path, extra: list[str]) -> list[ask.Answer]:
    """SGLang's own non-speculative greedy tokens, over fa3 or SGLang's own choice."""
    backend = ["--attention-backend", "fa3"] if detect().family == "sm90" else []
    arguments = ["--model-path", _model("target", dtype, root), "--dtype", dtype, *backend, *extra]
    with Server(arguments, stock=True, environment=environment()) as server:
        typer.echo(f"baseline {dtype} serves")
        return [ask.generate(server, ids, margins=True) for ids in ask.prompts()]


def run(case: Case, want: list[ask.Answer], root: Path, probe: str, extra: list[str]) -> dict[str, Any]:
    """One speculative server: alone, all at once, and again from the prefix cache."""
    directory = root / case.name
    directory.mkdir()
    draft = None if case.draft is None else _model(case.draft, case.dtype, root)
    arguments = ["--model-path", _model("target", case.dtype, root), *case.arguments(draft), *extra]
    watched = environment(probe, PARITY_PROBE=str(directory))
    result, folder = ask.Comparison(), str(root)
    with Server(arguments, environment=watched) as server:
        typer.echo(f"{case.name} serves")
        probed = Probed(server, directory)
        prompts, noise = ask.prompts(), ask.NOISE[case.dtype]
        result.add(ask.generate(server, prompts[1]), want[1], noise)
        for _ in range(2):
            answers = ask.generate_all(server, prompts)
            for got, wanted in zip(answers, want, strict=True):
                result.add(got, wanted, noise)
        paths = probed.paths()
        info = server.get("/server_info")
    return {
        "case": case.name,
        "server": [Path(argument).name if argument.startswith(folder) else argument for argument in arguments],
        "tokens_equal": result.differences == 0,
        **vars(result),
        "accept_length": sum(answer.meta["spec_accept_length"] for answer in answers) / len(answers),
        "accepted_at_depth_2_or_more": sum(len(path) >= 2 for path in paths),
        "of_these_not_through_the_first_branch": sum(any(path[1:]) for path in paths if len(path) >= 2),
        "distinct_tokens": len({token for answer in answers for token in answer.tokens}),
        "specverify": info["internal_states"][0]["specverify"],
        "base": info["attention_backend"],
    }


if __name__ == "__main__":
    typer.run(main)
