"""Whether a server's answers are right: tokens, accept length, and which kernels ran. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving_farm import Answer
from benchmarks.serving_rows import Row
from tests.parity.ask import NOISE

#: How much an accept length may be off, beyond two standard errors where those are more; and the share of requests with the stock
#: server's own tokens that it takes to say so.
ACCEPT_BOUND, LEAST_COMPARABLE = 0.01, 0.25
#: Distinct tokens that make an answer worth comparing, over all requests.
LEAST_DISTINCT = 8
#: Share of the tokens that must have been compared before runs stopped at margins below the noise.
LEAST_COMPARED = 0.3


@dataclass
class Tally:
    """How far runs agreed with the non-speculative ones.

    A run is compared up to its first difference: past one whose margin is below the noise two right runs may part, and it counts
    as undecided; any other is wrong.
    """

    runs: int = 0
    tokens: int = 0
    compared: int = 0
    undecided: int = 0
    wrong: int = 0
    #: The widest margin at which a run counted as undecided, and the narrowest of those that were wrong.
    widest_undecided: float = 0.0
    first_wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, got: Sequence[int], want: Answer, noise: float, *, length: int | None, what: str) -> str:
        """Compare one run, which should have `length` tokens.

        None is for one that was cut off: any number is right, also a few more than were asked for, which a step may have drafted.

        Returns:
            "equal", "undecided" or "wrong".
        """
        self.runs += 1
        self.tokens += len(got)
        for place, (ours, theirs, margin) in enumerate(zip(got, want.tokens, want.margins, strict=False)):
            if ours != theirs:
                if margin < noise:
                    self.undecided += 1
                    self.widest_undecided = max(self.widest_undecided, margin)
                    return "undecided"
                return self._wrong(what, place, f"token {ours} in place of {theirs}, margin {margin:.3f}")
            self.compared += 1
        if length is not None and len(got) != length:
            return self._wrong(what, len(got), f"{len(got)} tokens in place of {length}")
        return "equal"

    def _wrong(self, what: str, place: int, how: str) -> str:
        self.wrong += 1
        if len(self.first_wrong) < 8:
            self.first_wrong.append({"request": what, "at": place, "what": how})
        return "wrong"


def noise_of(cache: str, dtype: str, measured: float) -> float:
    """The margin under which two right runs may choose differently.

    Without FP8 it is derived from the rounding of the type (`tests.parity.ask`). With an e4m3 cache no useful bound can be
    derived: a key near the middle of two of its values may be rounded to either, by a sixteenth of itself, and where a softmax is
    sharp one such key decides. So there it is twice the largest difference that SGLang's own margins show between two right
    computations, decoding an answer and a prefill of the same tokens, over all tokens of all prompts. Both round the weights of
    the softmax to FP8 too, often to the same values, and the plugin does not: by 0.026 of each (RMS). In a margin that has a
    spread of 1 and comes through two layers, four times that is 0.15; with what the type itself does it is never less than 0.5.
    """
    return NOISE[dtype] if cache == "bf16" else max(2.0 * NOISE[dtype], 2.0 * measured)


def largest_difference(decoded: Sequence[Sequence[float]], prefilled: Sequence[Sequence[float]]) -> float:
    """The largest difference between two runs' margins of the same tokens."""
    pairs = [(a, b) for one, other in zip(decoded, prefilled, strict=True) for a, b in zip(one, other, strict=True)]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens for each verify step."""
    steps = sum(answer.meta.get("spec_verify_ct", 0) for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / steps if steps else 0.0


def accept_lengths(ours: Sequence[Answer], stock: Sequence[Answer]) -> dict[str, float]:
    """Of all requests, and of those whose tokens are equal in both: those alone must have been drafted alike."""
    equal = [(mine, theirs) for mine, theirs in zip(ours, stock, strict=bool(stock)) if mine.tokens == theirs.tokens]
    # Equal tokens, so the accept length differs as the steps do.
    steps = [[answer.meta.get("spec_verify_ct", 0) for answer in pair] for pair in equal]
    apart = [mine - theirs for mine, theirs in steps]
    mean = sum(apart) / max(1, len(apart))
    error = math.sqrt(sum((one - mean) ** 2 for one in apart)) / max(1, sum(theirs for _, theirs in steps))
    return {
        "all": accept_length(ours),
        "stock, all": accept_length(stock),
        "comparable requests": len(equal) / max(1, len(ours)),
        "comparable": accept_length([mine for mine, _ in equal]),
        "stock, comparable": accept_length([theirs for _, theirs in equal]),
        "standard error": error * accept_length([theirs for _, theirs in equal]),
    }


def accept_problem(lengths: dict[str, float]) -> str | None:
    """Why the accept length is not the stock backend's, or None."""
    if lengths["comparable requests"] < LEAST_COMPARABLE:
        return (
            f"only {lengths['comparable requests']:.0%} of requests have the stock server's tokens: no accept length to compare"
        )
    mine, theirs = lengths["comparable"], lengths["stock, comparable"]
    if theirs <= 0 or abs(mine - theirs) > max(ACCEPT_BOUND * theirs, 2 * lengths["standard error"]):
        return f"accept length {mine:.3f}, the stock backend's {theirs:.3f}, standard error {lengths['standard error']:.3f}"
    return None


def paths_summary(paths: Sequence[Sequence[int]]) -> dict[str, int]:
    deep = [path for path in paths if len(path) >= 2]
    return {
        "verified": len(paths),
        "accepted at depth 2 or more": len(deep),
        "of these not through the first branch": sum(any(path[1:]) for path in deep),
    }


def kernels_of(routes: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Calls by mode and kernel, of what ran."""
    found: dict[str, dict[str, int]] = {}
    for route in routes:
        if route["calls"]:
            calls = found.setdefault(route["mode"], {})
            calls[route["kernel"]] = calls.get(route["kernel"], 0) + route["calls"]
    return found


def kernel_problems(row: Row, kernels: dict[str, dict[str, int]]) -> list[str]:
    """Modes that a kernel of the plugin had to serve and did not, or not alone."""
    problems = []
    for mode in row.served:
        ran = kernels.get(mode, {})
        if not ran or "stock" in ran:
            problems.append(f"{mode} ran on {', '.join(ran) or 'nothing'}")
    return problems


def path_problems(row: Row, paths: dict[str, int]) -> list[str]:
    """Why the accepted paths say nothing of the mask: with no draft accepted every mask passes."""
    if not paths["accepted at depth 2 or more"]:
        return ["no draft was accepted at depth 2"]
    if row.shape == "tree" and not paths["of these not through the first branch"]:
        return ["no accepted branch but the first at depth 2"]
    return []


def tally_problems(tally: Tally) -> list[str]:
    problems = [f"{tally.wrong} of {tally.runs} runs have wrong tokens"] if tally.wrong else []
    if tally.compared < max(1, LEAST_COMPARED * tally.tokens):
        problems.append(
            f"of {tally.tokens} tokens {tally.compared} were compared: {tally.undecided} runs met a margin below the noise"
        )
    return problems


def verdict(result: dict[str, Any]) -> str:
    """One line of a row."""
    if "tokens" not in result:
        return f"FAIL {'; '.join(result['problems'])}"
    tokens, lengths = result["tokens"], result["accept length"]
    ran = ", ".join(f"{mode} {'+'.join(kernels)}" for mode, kernels in result["kernels"].items() if mode != "prefill")
    counts = result["probe"]["counts"]
    variants = "".join(f", {name} {count}" for name, count in sorted(counts.items()) if name.startswith("variant"))
    faults = "".join(f", {name}: {found['wrong']}/{found['of']} wrong" for name, found in result["faults"].items())
    return (
        f"{'FAIL ' + '; '.join(result['problems']) if result['problems'] else 'ok'} | {tokens['compared']} tokens equal, "
        f"{tokens['undecided']} of {tokens['runs']} runs undecided, accept {lengths['comparable']:.3f} (stock "
        f"{lengths['stock, comparable']:.3f}, standard error {lengths['standard error']:.3f}, on "
        f"{lengths['comparable requests']:.0%}) | {ran}{variants}{faults}"
    )
