"""What `benchmarks.long_context_engines` measures: arms, cells, what is made of two answers, and what is aimed at."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import shapes
from benchmarks.end_to_end_plan import spread
from benchmarks.engines import OURS, Round, Setup
from sglang_specverify.errors import SpecverifyError

#: Arms by name: what `Setup.arm` takes, and the base of the plugin's.
ARMS: dict[str, tuple[str, str | None]] = {
    "fa3": ("fa3", None),
    "specverify-fa3": (OURS, "fa3"),
    "specverify-triton": (OURS, "triton"),
    "triton": ("triton", None),
}
#: As many engines as fit beside each other with a pool of 128 k tokens each.
RESIDENT = 3
LENGTHS, BATCHES = (131072, 32768), (1, 4)
#: Tokens at the end of a prompt that are its own.
TAIL = 8
#: Seconds by which the longer answer of a round is behind the shorter, about.
ROUND_SECONDS = 1.0
#: Tokens that the pool holds beside the shared prefix: answers, drafts, and what the prefix cache keeps of earlier answers.
SLACK = 8192
HOW = {
    "weights": "made up (--load-format dummy); speed depends on shapes only",
    "accept_length": "simulated: every verify step of every arm yields 3 tokens",
    "prefix": f"requests of a batch share all but the last {TAIL} tokens of their prompts, from the prefix cache: they read the "
    "same keys and values, which is kinder to the L2 cache than requests of their own would be, to every arm alike",
    "timing": "difference of the latencies of two answers of different lengths to the same prompts, by the server's clock: the "
    "step that extends by the end of the prompt is in neither",
}


@dataclass(frozen=True)
class Answers:
    """Tokens of answers, in whole steps of 3.

    Attributes:
        short: of the shorter answer of a round.
        probe: how many more the longer one has until the speed of an arm is known.
        least, most: how many more afterwards.
    """

    short: int = 12
    probe: int = 12
    least: int = 24
    most: int = 240

    def more(self, probe: Sample) -> int:
        """Tokens of each request that take about `ROUND_SECONDS`."""
        steps = round(ROUND_SECONDS * probe.steps / probe.seconds)
        return 3 * max(self.least // 3, min(self.most // 3, steps))


#: A step takes seconds where kernels run in Triton's interpreter.
TINY_ANSWERS = Answers(3, 6, 6, 6)


@dataclass(frozen=True)
class Cell:
    length: int
    batch: int

    @property
    def name(self) -> str:
        return f"context {self.length} batch {self.batch}"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """The beginning of one text for all cells, and a few tokens of each request's own."""
        source, own = random.Random(5), random.Random(self.batch)
        common = [source.randrange(vocabulary) for _ in range(self.length - TAIL)]
        return [[*common, *(own.randrange(vocabulary) for _ in range(TAIL))] for _ in range(self.batch)]


@dataclass(frozen=True)
class Sample:
    """Decoding between the ends of two answers: seconds, requests, tokens of all of them, verify steps of one."""

    seconds: float
    requests: int
    tokens: int
    steps: int
    cached: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def between(short: Round, long: Round) -> Sample:
    """What the longer answer needed beyond the shorter.

    Raises:
        SpecverifyError: it did not take longer, so that the difference says nothing.
    """
    seconds, steps = long.seconds - short.seconds, max(long.steps) - max(short.steps)
    if seconds <= 0 or steps <= 0:
        raise SpecverifyError(f"{steps} more steps took {seconds:.4f} s", "let answers be longer")
    return Sample(seconds, len(long.completion), sum(long.completion) - sum(short.completion), steps, min(short.cached))


def summary(samples: Sequence[Sample], more: int) -> dict[str, Any]:
    speeds = [sample.tokens_per_s for sample in samples]
    return {
        "tokens_per_s": round(statistics.median(speeds), 3),
        "each_tokens_per_s": [round(speed, 3) for speed in speeds],
        "spread": round(spread(speeds), 5),
        "ms_per_step": round(statistics.median(sample.seconds / sample.steps for sample in samples) * 1e3, 4),
        "accept_length": round(statistics.mean(sample.tokens / sample.requests / sample.steps for sample in samples), 4),
        "more_tokens": more,
        "prompt_tokens_from_cache": [sample.cached for sample in samples],
    }


def phases(arms: Sequence[str], resident: int) -> list[list[str]]:
    """Arms that run beside each other, in the order of `ARMS`: those that are compared closely before the slow one."""
    ordered = [name for name in ARMS if name in arms]
    return [ordered[first : first + resident] for first in range(0, len(ordered), resident)]


def line(row: Mapping[str, Any]) -> str:
    parts = []
    for name, arm in row["arms"].items():
        if "error" in arm:
            parts.append(f"{name} [{arm['error'].splitlines()[0][:80]}]")
        else:
            parts.append(f"{name} {arm['tokens_per_s']:.1f} tokens/s ({arm['ms_per_step']:.2f} ms a step)")
    return f"{row['name']}: {' | '.join(parts)}"


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was aimed at: 5 times stock triton at 128 k, and not slower than stock fa3 beyond what repetitions differ by."""
    found = []
    for row in rows:
        arms = {name: arm for name, arm in row["arms"].items() if "tokens_per_s" in arm}
        for name in ("specverify-triton", "specverify-fa3"):
            for stock, least in (("triton", 5.0 if row["length"] >= 131072 else None), ("fa3", 1.0)):
                if name in arms and stock in arms:
                    ratio = arms[name]["tokens_per_s"] / arms[stock]["tokens_per_s"]
                    noise = max(arms[name]["spread"], arms[stock]["spread"]) if stock == "fa3" else 0.0
                    aim = (
                        "" if least is None else f", {'pass' if ratio >= least - noise else 'FAIL'} (aim {least:g}, ±{noise:.1%})"
                    )
                    found.append(f"{row['name']}: {name} is {ratio:.3f} times stock {stock}{aim}")
    return found


def unserved(setup: Setup, stats: Mapping[str, Any]) -> list[str]:
    """Over triton the plugin serves every chain; over FlashAttention it may leave chains to it."""
    if setup.arm != OURS or stats["specverify"] is None:
        return []
    rows = [row for row in stats["specverify"]["routes"] if row["mode"] == "target_verify" and row["calls"] > 0]
    if not rows:
        return ["no verify is recorded"]
    theirs = [row["reason"] for row in rows if row["kernel"] == "stock"]
    return [f"verify ran on SGLang's own kernel: {reason}" for reason in theirs] if setup.base == "triton" else []


def model_of(name: str) -> shapes.Shape:
    """A shape with positions for long contexts: Qwen3-8B's own end at 40960, and rotary tables are as long as they say.

    Raises:
        ArgumentError: there is no such shape.
    """
    shape, positions = shapes.get(name), 16384 if name == "tiny" else 262144
    target, draft = ({**config, "max_position_embeddings": positions} for config in (shape.target, shape.draft))
    return replace(shape, name=f"{shape.name}-long", target=target, draft=draft)
