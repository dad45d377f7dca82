"""Tables in README.md and docs/ that are made from result files.

    python -m benchmarks.docs            writes them anew
    python -m benchmarks.docs --check    exits with 1 where a page says something else than its files

A page has them between `<!-- made from FILE: BLOCK -->` and `<!-- end -->`; where there is no such file yet, it says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import (
    end_to_end_profile,
    end_to_end_tables,
    gpu_tables,
    kernel_profile_counters,
    sparse_mla_tables,
    tree_families,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/chains.md", "docs/kernels.md", "docs/sparse-mla.md", "docs/trees.md")
#: What stands in the place of a table without its result file.
NOT_RUN = "**Not run.**"
_BLOCK = re.compile(r"(<!-- made from (?P<file>[\w.-]+): (?P<block>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


#: (batch, W, L) of the kernel table, with 32 query heads on 8 KV heads of 128, bf16, page size 1.
_POINTS = (
    (1, 32, 8192),
    (1, 32, 32768),
    (1, 64, 128),
    (1, 64, 2048),
    (1, 64, 8192),
    (1, 64, 32768),
    (8, 64, 384),
    (8, 64, 2048),
    (8, 64, 16384),
    (32, 64, 2048),
    (32, 128, 128),
    (32, 128, 2048),
)
_FAMILY = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "cache": "bf16", "page_size": 1, "window": -1, "sinks": False}


def kernels(results: dict[str, Any]) -> list[str]:
    """One layer's verify of a tree: the variant that is selected beside the tile and SGLang's two."""
    lines = ["| requests | W | L | selected | its µs | tile | stock fa3 | stock triton |", "|---|---|---|---|---|---|---|---|"]
    rows = {
        (point["batch"], point["width"], point["length"]): row
        for row in results["points"]
        if (point := row["point"])["kind"] == "tree" and not point["mixed"] and _FAMILY.items() <= point.items()
    }
    for key in _POINTS:
        row = rows[key]
        cells = [*key, row["selected"]]
        cells += [f"{row['arms'][arm]['cold']['us']:.1f}" for arm in (row["selected"], "fa3+tree_suffix", "fa3", "triton")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def memory(results: dict[str, Any]) -> list[str]:
    """Bytes of tree masks in two running servers."""
    size, shape, servers = results["size"], results["shape"], results["servers"]
    said = {name: sum(mask["bytes"] for mask in servers[f"memory-{name}"]["masks"]) for name in ("plugin", "stock")}
    return [
        f"Read from running servers, {size['requests']} requests, W {shape['tree_tokens']}, context {size['context']}: "
        f"{said['plugin'] / 1e6:.2f} MB of masks with the plugin, {said['stock'] / 1e6:.0f} MB without."
    ]


def parity(results: dict[str, Any]) -> list[str]:
    """Greedy tokens of speculative servers beside plain ones. Why a server failed stands below the table."""
    lines = [
        "| server | verify ran on | tokens equal | wrong | runs undecided | accept length | stock's |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = []
    for row in results["rows"]:
        name, tokens, accept = row["row"]["name"], row.get("tokens"), row.get("accept length")
        problems = [*row.get("problems", ()), *([row["error"]] if row.get("error") else [])]
        if not problems and tokens is None:
            problems = ["no tokens were compared"]
        if problems:
            failed.append(f"FAILED: {name}: {'; '.join(' '.join(problem.split()) for problem in problems)}")
        counts, lengths = " | | ", " | "
        if tokens is not None:
            counts = f"{tokens['compared']} | {tokens['wrong']} | {tokens['undecided']} of {tokens['runs']}"
        if accept is not None:
            lengths = f"{accept['comparable']:.2f} | {accept['stock, comparable']:.2f}"
        verify = ", ".join(row.get("kernels", {}).get("target_verify", ()))
        lines.append(f"| {name}{' **FAILED**' if problems else ''} | {verify} | {counts} | {lengths} |")
    for text in failed:
        lines += ["", text]
    if results["not run"]:
        lines += ["", f"Not run: {', '.join(results['not run'])}."]
    return lines


#: What a soak counts by the name of the variant or operation that was called.
_SOAKED = ("fused", "fused_split", "specialized", "specialized_split", "deterministic", "merge")


def soak(results: dict[str, Any]) -> list[str]:
    """How many random cases ran on each variant; a step's plan chooses among them itself."""
    counts = results["counts"]
    each = [f"{name} {counts.get(name, 0)}" for name in _SOAKED]
    shared = sum(count for name, count in counts.items() if name.startswith("planned"))
    cases = f"{results['cases']} random cases, {results['outside_their_bound']} outside their bound"
    return [f"{cases}: {', '.join(each)}, plans shared by a step {shared}."]


#: (batch, L) of the table of chains: W 4, `_FAMILY`.
_CHAINS = (
    (1, 1024),
    (1, 8192),
    (1, 32768),
    (1, 131072),
    (1, 1048576),
    (4, 4096),
    (4, 131072),
    (16, 8192),
    (16, 65536),
    (64, 16384),
)


def chains(results: dict[str, Any]) -> list[str]:
    """One layer's verify of a chain of 4: what is selected, and a split by a request's own length, beside SGLang's."""
    arms = ("deterministic", "fa3", "triton", "upstream_splitkv")
    lines = [
        "| requests | L | selected | its µs | TB/s | deterministic | stock fa3 | stock triton | its split-KV |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = {
        (point["batch"], point["length"]): row
        for row in results["points"]
        if (point := row["point"])["kind"] == "chain"
        and point["width"] == 4
        and not point["mixed"]
        and _FAMILY.items() <= point.items()
    }
    for key in _CHAINS:
        row = rows[key]
        ours = row["arms"][row["selected"]]["cold"]["us"]
        cells = [*key, row["selected"], f"{ours:.1f}", f"{row['bytes'] / ours / 1e6:.2f}"]
        cells += [f"{row['arms'][arm]['cold']['us']:.1f}" if "cold" in row["arms"].get(arm, {}) else "" for arm in arms]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def determinism(results: dict[str, Any]) -> list[str]:
    """Rows of a request alone and in batches, compared bit by bit."""
    found = [check for check in results["checks"] if check["name"].startswith("rows alone and in batches")]
    requests, differ = sum(check["requests"] for check in found), sum(check["different"] for check in found)
    without, batches = sum(check["different_without_the_flag"] for check in found), sum(check["batches"] for check in found)
    return [
        f"{requests} requests of {len(found)} kinds, each alone and in some of {batches} batches: the rows of {differ} differ "
        f"in any bit. Without the flag, of {without}."
    ]


def sanitizers(results: dict[str, Any]) -> list[str]:
    """What compute-sanitizer said of a sweep over the kernels, by the classes of `tests.interpreter.ordered`."""
    lines = ["| checker | sweep | calls | errors | dispatch | hand-overs | state |", "|---|---|---|---|---|---|---|"]
    for run in results["runs"]:
        if run["checker"] == "none":
            continue
        classes = run.get("classes", {})
        counts = " | ".join(str(classes.get(name, "-")) for name in ("errors", "dispatch", "hand-overs"))
        lines.append(f"| {run['checker']} | {run['sweep']} | {run.get('calls', 0)} | {counts} | {run['state']} |")
    return lines


def backends(results: dict[str, Any]) -> list[str]:
    """How many rows of `tests.gpu.backend_parity` were inside their bound."""
    rows = results["rows"]
    good = sum(row["result"] == "ok" for row in rows)
    kernels_ = ", ".join(sorted({row["kernel"] for row in rows if "kernel" in row}))
    return [f"{good} of {len(rows)} rows inside their bound, on {kernels_}."]


def profile(results: dict[str, Any]) -> list[str]:
    """What a step's time on the device goes to, arm beside arm."""
    arms = results["arms"]
    shares = {arm: end_to_end_profile.groups(found["kernels"]) for arm, found in arms.items()}
    lines = [f"| of a step, ms | {' | '.join(arms)} |", "|---|" + "---|" * len(arms)]
    for name in dict.fromkeys(name for share in shares.values() for name in share):
        lines.append(f"| {name} | {' | '.join(f'{share.get(name, 0.0):.1f}' for share in shares.values())} |")
    spans = " | ".join(f"{found['span_ms']:.1f}" for found in arms.values())
    return [*lines, f"| from the first to the last | {spans} |"]


BLOCKS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "backends": backends,
    "chains": chains,
    "compile all": gpu_tables.compile_all,
    "determinism": determinism,
    "deterministic server": gpu_tables.deterministic_server,
    "dsv4 seam": gpu_tables.dsv4_seam,
    "end to end": end_to_end_tables.trees,
    "end to end clocks": end_to_end_tables.clocks,
    "end to end other": end_to_end_tables.others,
    "end to end summary": end_to_end_tables.summary,
    "endurance": gpu_tables.endurance,
    "kernel profile": kernel_profile_counters.table,
    "kernels": kernels,
    "latency": gpu_tables.latency,
    "latency of chains": gpu_tables.latency_of_chains,
    "latency of trees": gpu_tables.latency_of_trees,
    "long context engines": end_to_end_tables.long_contexts,
    "memory": memory,
    "parity": parity,
    "profile": profile,
    "sanitizers": sanitizers,
    "soak": soak,
    "sparse mla": sparse_mla_tables.peers,
    "sparse mla profile": sparse_mla_tables.profile,
    "sparse mla rows": sparse_mla_tables.rows_of_drafts,
    "sparse mla cases": gpu_tables.sparse_mla_cases,
    "sparse mla variants": sparse_mla_tables.variants,
    "tree families": tree_families.table,
}


def made(text: str) -> str:
    """A page with its tables as the result files have them."""

    def fill(match: re.Match[str]) -> str:
        file, block = RESULTS / match["file"], BLOCKS[match["block"]]
        lines = block(json.loads(file.read_text())) if file.exists() else [NOT_RUN]
        return match[1] + "\n".join(lines) + "\n" + match[4]

    return _BLOCK.sub(fill, text)


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where a page differs.")] = False,
) -> None:
    """Make the tables anew."""
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        if made(text) != text:
            stale.append(name)
            if not check:
                page.write_text(made(text))
    typer.echo(f"{'differs' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    raise typer.Exit(int(check and bool(stale)))


if __name__ == "__main__":
    typer.run(main)
