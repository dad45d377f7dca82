"""Tables of whole engines; `docs.py` puts them where pages ask for them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import end_to_end_plan as plan
from benchmarks import end_to_end_report as report
from benchmarks import long_context_engines_plan as long_plan
from benchmarks.end_to_end_report import Pair


def summary(results: dict[str, Any]) -> list[str]:
    """The tree configurations in a sentence for each stock arm."""
    found = report.trees(report.pairs(results))
    if not found:
        return ["No configuration was measured."]
    stocks = sorted({pair.stock for pair in found})
    said = [_sentence(f"stock {stock}", [pair for pair in found if pair.stock == stock]) for stock in stocks]
    several = [pair for pair in report.against_best(found) if sum(other.place == pair.place for other in found) > 1]
    return said + ([_sentence("the best of them", several, ", where more than one was measured")] if several else [])


def _sentence(what: str, found: Sequence[Pair], where: str = "") -> str:
    ratios = [pair.ratio for pair in found]
    middle, ends = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{middle:.2f} times the tokens/s of {what} in the median of {len(ratios)} configurations{where}, {ends}."


def trees(results: dict[str, Any]) -> list[str]:
    """Tokens per second of each configuration with a tree, and the ratio to every stock arm that was measured beside it."""
    found = report.trees(report.pairs(results))
    stocks = sorted({pair.stock for pair in found})
    heads = " | ".join(f"{stock} | specverify | ratio" for stock in stocks)
    lines = [f"| W × topk | input | requests | {heads} |", "|---|---|---|" + "---|---|---|" * len(stocks)]
    by_place = {(pair.place, pair.stock): pair for pair in found}
    longer: set[tuple[int, int]] = set()
    uneven = False
    for place in dict.fromkeys(sorted(pair.place for pair in found)):
        cells = [place[0].replace("x", " × "), str(place[1]), str(place[2])]
        for stock in stocks:
            pair = by_place.get((place, stock))
            cells += ["", "", ""] if pair is None else _speeds(pair)
            longer |= set() if pair is None or not _is_longer(pair) else {(pair.row["output"], pair.row["concurrency"])}
            uneven |= pair is not None and not plan.is_even(pair.row)
        lines.append("| " + " | ".join(cells) + " |")
    repetitions = sorted({len(pair.theirs["each_tokens_per_s"]) for pair in found})
    rounds = " or ".join(map(str, repetitions))
    said = [f"Medians of {rounds} rounds; in brackets how far rounds of one arm lie apart, the wider of both."]
    for requests in sorted({requests for _, requests in longer}):
        marks = ", ".join(f"\\*{output}" for output, others in sorted(longer) if others == requests)
        said.append(
            f"{marks}: answers of so many tokens, where the others at {requests} requests have {plan.OUTPUTS[requests]} and the "
            "step that extends the prompts weighs more."
        )
    return [*lines, "", " ".join(said + ([_UNEVEN] if uneven else []))]


_UNEVEN = (
    "†: SGLang's freeze of Python's garbage collector at an engine's start succeeded in one of the two alone, or it is not known "
    "whether in both. What that is worth was not measured."
)


def _speeds(pair: Pair) -> list[str]:
    mark = ("" if plan.is_even(pair.row) else " †") + (f" \\*{pair.row['output']}" if _is_longer(pair) else "")
    speeds = [f"{arm['tokens_per_s']:.0f}" for arm in (pair.theirs, pair.ours)]
    return [*speeds, f"{pair.ratio:.2f} ({pair.spread:.1%}){mark}"]


def _is_longer(pair: Pair) -> bool:
    """Whether its answers are longer than those of other configurations with as many requests."""
    return bool(pair.row["output"] > plan.OUTPUTS.get(pair.row["concurrency"], pair.row["output"]))


_NAMES = {
    "off": "no speculation",
    "chain": "chain of 4",
    "chain-few": "chain of 4, servers for 8 requests",
    "pressure": "W 64, topk 8, pages of 64, a pool that runs full",
}


def others(results: dict[str, Any]) -> list[str]:
    """Chains, no speculation, and a pool that is too small: beside stock, with how far rounds of one arm lie apart."""
    found = [pair for pair in report.pairs(results) if pair not in report.trees([pair])]
    if not found:
        return ["**Not run.**"]
    lines = [
        "| | input | requests | stock | its tokens/s | specverify | ratio | rounds of an arm differ by | p50 / p95 s | stock's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in found:
        scenario, length, requests = pair.place
        cells = [_NAMES.get(scenario, scenario), str(length), str(requests), pair.stock, *_speeds(pair)[:2], f"{pair.ratio:.3f}"]
        cells += [f"{pair.spread:.1%}"]
        cells += [f"{arm['latency_p50_s']:.2f} / {arm['latency_p95_s']:.2f}" for arm in (pair.ours, pair.theirs)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def clocks(results: dict[str, Any]) -> list[str]:
    """At which clock and power the largest configuration ran, beside each stock arm, where it was read."""
    lines = []
    for pair in report.trees(report.pairs(results)):
        read = [_device(arm) for arm in (pair.theirs, pair.ours)]
        if pair.place == report.LARGEST and all(read):
            lines.append(f"W 128, topk 16, input 128, 32 requests: stock {pair.stock} {read[0]}; specverify beside it {read[1]}.")
    return lines or ["**Not read.**"]


def _device(arm: Any) -> str:
    found = [each for each in arm.get("device", ()) if each is not None]
    if not found:
        return ""
    clock, power = (statistics.median(each[name] for each in found) for name in ("sm_mhz", "watts"))
    return f"{clock:.0f} MHz at {power:.0f} W"


def long_contexts(results: dict[str, Any]) -> list[str]:
    """Engines that verify chains over long contexts."""
    arms = [name for name in long_plan.ARMS if any(name in cell["arms"] for cell in results["cells"])]
    lines = [f"| context | requests | {' | '.join(arms)} |", "|---|---|" + "---|" * len(arms)]
    failed = []
    for cell in results["cells"]:
        cells = [str(cell["length"]), str(cell["batch"])]
        for name in arms:
            found = cell["arms"].get(name, {})
            if "error" in found:
                failed.append(f"{cell['name']}, {name}: {' '.join(found['error'].split())[:200]}")
            cells.append(f"{found['tokens_per_s']:.0f} ({found['ms_per_step']:.1f} ms)" if "tokens_per_s" in found else "not run")
        lines.append("| " + " | ".join(cells) + " |")
    faults = [
        f"{name} does not count: {text}" for name, engine in results["engines"].items() for text in engine.get("faults", ())
    ]
    return [*lines, "", *(f"- {text}" for text in [*long_plan.verdicts(results["cells"]), *failed, *faults])]
