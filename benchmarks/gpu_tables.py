"""Tables of what `tests/gpu` ran on a GPU, and of what was compiled for one; `docs.py` puts them where pages ask for them."""

from __future__ import annotations

from typing import Any

from sglang_specverify.kernels.targets import TARGETS

#: So many launches with a problem are named below a table.
_SHOWN = 8


def sparse_mla_cases(results: dict[str, Any]) -> list[str]:
    """Checks of sparse MLA decode by row, beside each other for the two types of queries, and the random calls."""
    rows = {(row["query"], row["row"]): row for row in results["rows"]}
    queries = sorted({query for query, _ in rows})
    names = list(dict.fromkeys(name for _, name in rows))
    heads = [f"{query} Q: {_kernels([rows[key] for key in rows if key[0] == query])}" for query in queries]
    lines = [f"| checks against the oracle | {' | '.join(heads)} |", "|---|" + "---|" * len(queries)]
    for name in names:
        cells = [_checks(rows.get((query, name))) for query in queries]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    cells = [_checks(results["random"].get(query)) for query in queries]
    lines.append(f"| random calls | {' | '.join(cells)} |")
    wrong = [f"{row['query']}, {row['row']}: {text}" for row in results["rows"] for text in row["problems"]]
    wrong += [f"{query}, random calls: {text}" for query, one in results["random"].items() for text in one["problems"]]
    return lines + _below([*wrong, *results["processes that failed"]], results["not run"])


def dsv4_seam(results: dict[str, Any]) -> list[str]:
    """Rows of the seam into SGLang's dsv4 backend."""
    lines = ["| SGLang's dsv4 backend | checks | |", "|---|---|---|"]
    for row in results["rows"]:
        state = {True: "ok", False: "**FAILED**", None: f"not run: {row['reason']}"}[row["ok"]]
        lines.append(f"| {row['name']} | {row['checks']} | {state} |")
    wrong = [f"{row['name']}: {' '.join(row['reason'].split())}" for row in results["rows"] if row["ok"] is False]
    return lines + _below(wrong, results["not run"])


def deterministic_server(results: dict[str, Any]) -> list[str]:
    """Requests alone and in batches, of each server."""
    lines = [
        "| server | requests | batches | answers compared | requests that differ | that differ when sampled with a seed |",
        "|---|---|---|---|---|---|",
    ]
    wrong = []
    for name, server in results["servers"].items():
        wrong += [f"{name}: {' '.join(problem.split())}" for problem in server["problems"]]
        greedy, sampled = server.get("greedy"), server.get("sampled with a seed", {})
        if greedy is None:
            lines.append(f"| {name} **FAILED** | | | | | |")
            continue
        failed = " **FAILED**" if server["problems"] else ""
        counts = [greedy[key] for key in ("of", "batches", "compared", "differing requests")]
        seeded = f"{sampled['differing requests']} of {sampled['of']}" if "of" in sampled else "not run"
        lines.append(f"| {name}{failed} | {' | '.join(map(str, counts))} | {seeded} |")
    return lines + _below(wrong, [])


def endurance(results: dict[str, Any]) -> list[str]:
    """Servers under minutes of mixed load."""
    lines = [
        "| server | requests | failed | tokens equal | wrong | answers undecided | kinds of requests |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, server in results["servers"].items():
        tokens = server.get("tokens")
        failed = " **FAILED**" if server["problems"] else ""
        if tokens is None:
            lines.append(f"| {name}{failed} | | | | | | |")
            continue
        counts = [server["requests"], len(server["failed"]), *(tokens[key] for key in ("compared", "wrong", "undecided"))]
        kinds = ", ".join(f"{kind} {count}" for kind, count in server["kinds"].items() if ", " not in kind)
        lines.append(f"| {name}{failed} | {' | '.join(map(str, counts))} | {kinds} |")
    return lines + _below([" ".join(problem.split()) for problem in results.get("problems", ["it did not end"])], [])


def compile_all(results: dict[str, Any]) -> list[str]:
    """Launches compiled ahead of time, by architecture; below them those with a problem, the first of many."""
    lines = [
        "| architecture | launches compiled | with a problem | with accepted spills | most registers | most shared KB |",
        "|---|---|---|---|---|---|",
    ]
    for arch, row in results["architectures"].items():
        failed = f"**{row['problems']}**" if row["problems"] else "0"
        counts = row["launches"], failed, row["accepted_spills"], row["registers"], row["shared_bytes"] // 1024
        lines.append(f"| {arch} | {' | '.join(map(str, counts))} |")
    wrong = [f"{name}: {'; '.join(texts)}" for name, texts in results["problems"].items()]
    if len(wrong) > _SHOWN:
        wrong[_SHOWN:] = [f"{len(wrong) - _SHOWN} others"]
    missing = [arch for arch in TARGETS if arch not in results["architectures"]]
    if results["only"] is not None:
        missing.append(f'launches whose name does not hold "{results["only"]}"')
    return lines + _below(wrong, missing, "Not compiled as a whole")


def latency(results: dict[str, Any]) -> list[str]:
    """Short divided prefixes, cold: who combines their parts, beside FlashAttention."""
    arms = {
        "the last program": ("last", "default"),
        "a second launch": ("launch", "launch, parts of 128 keys"),
        "stock fa3": ("fa3",),
    }
    lines = [f"| call | {' | '.join(arms)} | fa3 / second launch |", "|---|" + "---|" * (len(arms) + 1)]
    for row in results["points"]:
        times = {}
        for head, names in arms.items():
            # Of names that mean the same, the one that this file has; of a launch the parts that are shipped.
            found = [row["arms"][name]["cold"]["us"] for name in names if "cold" in row["arms"].get(name, {})]
            times[head] = found[-1] if found else None
        launch, stock = times["a second launch"], times["stock fa3"]
        ratio = "" if launch is None or stock is None else f"{stock / launch:.2f}"
        cells = ["" if us is None else f"{us:.1f}" for us in times.values()]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {ratio} |")
    return lines


def _times(name: str, found: list[float | None]) -> str:
    """A row of microseconds; what was not timed is left empty."""
    return f"| {name} | " + " | ".join("" if us is None else f"{us:.1f}" for us in found) + " |"


def latency_of_chains(results: dict[str, Any]) -> list[str]:
    """Chains by the launch that the tables say, K and V in the cache and not, beside FlashAttention."""
    columns = [(arm, state) for state in ("warm", "cold") for arm in ("default", "fa3")]
    heads = [f"{'fused_split' if arm == 'default' else 'stock fa3'}, {state}" for arm, state in columns]
    lines = [f"| call | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for row in results["points"]:
        found = [row["arms"].get(arm, {}).get(state, {}).get("us") for arm, state in columns]
        lines.append(_times(row["name"], found))
    return lines


def latency_of_trees(results: dict[str, Any]) -> list[str]:
    """Trees over short divided prefixes, cold: both kernels with each way to combine parts, beside FlashAttention."""
    arms = {
        "fused, last program": "last",
        "fused, second launch": "launch",
        "specialized, last program": "specialized, last",
        "specialized, second launch": "specialized, launch, parts of 256 keys",
        "tile": "fa3+tree_suffix",
        "stock fa3": "fa3",
    }
    lines = [f"| call | {' | '.join(arms)} |", "|---|" + "---|" * len(arms)]
    for row in results["points"]:
        found = [row["arms"].get(name, {}).get("cold", {}).get("us") for name in arms.values()]
        lines.append(_times(row["name"], found))
    return lines


def _kernels(rows: list[dict[str, Any]]) -> str:
    """The kernels that attended; the reducer is every one's."""
    return ", ".join(sorted({name for row in rows for name in row["kernels"]} - {"combine_kernel"}))


def _checks(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return f"{row['checks']}{' **FAILED**' if row['problems'] else ''}"


def _below(wrong: list[str], missing: list[str], what: str = "Not run") -> list[str]:
    lines = [line for text in wrong for line in ("", f"FAILED: {text}")]
    return [*lines, "", f"{what}: {', '.join(missing)}."] if missing else lines
