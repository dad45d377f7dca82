"""What `benchmarks.end_to_end` measures: scenarios, cells, the order of arms, and how much of it is done."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engines import Round, Speculation
from benchmarks.shapes import Shape
from sglang_specverify.errors import ArgumentError

WIDTHS, TOPKS = (64, 128), (4, 8, 16)
INPUTS, CONCURRENCIES = (128, 2048, 8192), (1, 8, 32)
STEPS = 8
CHAIN = Speculation(topk=1, steps=3, width=4)
#: The pairs (W, topk) that are measured unless others are asked for: the ends of the range.
DEFAULT_SCENARIOS = ("128x16", "64x4")
#: Tokens of an answer, so that a round lasts 0.5 to 2.5 s: a step of 32 trees takes ten times as long as one of a single tree.
OUTPUTS = {1: 192, 8: 96, 32: 48}
#: Without a tree steps are short at every concurrency.
PLAIN_OUTPUT = 192
#: What is sure to be enough of one round, by concurrency: a bound for planning, not a prediction.
_ROUND_SECONDS = {1: 1.5, 8: 2.0, 32: 3.5}
#: Tokens a second that an engine extends by, at least.
_PREFILL_RATE = 15000.0
_SEED = 8


@dataclass(frozen=True)
class Cell:
    """Requests of `input` tokens each, `concurrency` at once, answers of `output` tokens."""

    input: int
    concurrency: int
    output: int

    @property
    def name(self) -> str:
        return f"input {self.input} concurrency {self.concurrency}"

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in the grid, whatever its answers: (input, concurrency)."""
        return self.input, self.concurrency


@dataclass(frozen=True)
class Scenario:
    """How engines speculate. `pool_share` below 1 makes their pool smaller than their requests together; `most_requests` is the
    most that run at once, those of the largest cell of the goals or asked for if None."""

    name: str
    speculation: Speculation | None
    page_size: int = 1
    pool_share: float = 1.0
    most_requests: int | None = None

    @property
    def width(self) -> int:
        return 1 if self.speculation is None else self.speculation.width

    @property
    def topk(self) -> int:
        return 0 if self.speculation is None else self.speculation.topk

    @property
    def under_pressure(self) -> bool:
        return self.pool_share < 1


def legal_steps(width: int, topk: int) -> int:
    """Steps for a tree of this width: `STEPS`, or the fewest that propose enough nodes, and no more than a path of it holds.

    The first step proposes topk nodes, each later one topk for each of the topk kept; the root comes on top.
    """
    steps = min(STEPS, width - 1)
    while topk + (steps - 1) * topk * topk < width - 1:
        steps += 1
    return steps


def tree(width: int, topk: int) -> Speculation:
    return Speculation(topk, legal_steps(width, topk), width)


def scenario(name: str) -> Scenario:
    """`WxTOPK` for a tree, `chain` (topk 1, 4 draft tokens), `chain-few` (the same of servers for 8 requests, whose chains over
    FlashAttention are the plugin's), `off`, or `pressure` (a small pool of pages of 64).

    Raises:
        ArgumentError: another name.
    """
    if match := re.fullmatch(r"(\d+)x(\d+)", name):
        width, topk = map(int, match.groups())
        if topk >= 2 and width >= 2:
            return Scenario(name, tree(width, topk))
    elif name == "chain":
        return Scenario(name, CHAIN)
    elif name == "chain-few":
        return Scenario(name, CHAIN, most_requests=8)
    elif name == "off":
        return Scenario(name, None)
    elif name == "pressure":
        return Scenario(name, tree(64, 8), page_size=64, pool_share=0.6)
    raise ArgumentError("scenario", repr(name), "WxTOPK such as 128x16 with topk 2 or more, chain, chain-few, off, pressure")


def refusal(shape: Shape, chosen: Scenario, stock: str) -> str | None:
    """Why SGLang 0.5.23 does not serve this on SM90 over that backend, so that its engine would not start; None where it does."""
    sliding = "sliding_attention" in shape.target.get("layer_types", ())
    if stock == "flashinfer" and sliding:
        return "SGLang serves gpt-oss on fa3, fa4 and triton: flashinfer has no sinks"
    if chosen.topk > 1 and chosen.page_size > 1:
        if stock == "fa4":
            return "SGLang serves trees on pages over fa3, triton and flashinfer alone"
        if stock == "fa3" and sliding:
            return "SGLang's fa3 serves no trees on pages with sliding windows"
    return None


def grid() -> Iterator[tuple[Scenario, Cell]]:
    """All configurations of which the goals speak, 54."""
    for width in WIDTHS:
        for topk in TOPKS:
            yield from ((scenario(f"{width}x{topk}"), cell) for cell in cells(INPUTS, CONCURRENCIES))


def cells(inputs: Iterable[int], concurrencies: Iterable[int], *, plain: bool = False) -> list[Cell]:
    """Every input with every concurrency, the largest first: shorter prompts are beginnings of longer ones (see `prompts`)."""
    return [
        Cell(length, count, PLAIN_OUTPUT if plain else OUTPUTS.get(count, 96))
        for length in sorted(set(inputs), reverse=True)
        for count in sorted(set(concurrencies), reverse=True)
    ]


def places(names: Iterable[str]) -> list[tuple[int, int]]:
    """(input, concurrency) of cells named `INPUTxCONCURRENCY`.

    Raises:
        ArgumentError: another form.
    """
    found = []
    for name in names:
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)):
            raise ArgumentError("cell", repr(name), "INPUTxCONCURRENCY such as 8192x8")
        found.append((int(match[1]), int(match[2])))
    return found


def at(found: Sequence[Cell], chosen: Sequence[tuple[int, int]]) -> list[Cell]:
    """The cells at these places; all if no places are given.

    Raises:
        ArgumentError: no cell is at any of them.
    """
    kept = [cell for cell in found if not chosen or cell.place in chosen]
    if not kept:
        raise ArgumentError("cell", _names(chosen), _names(cell.place for cell in found))
    return kept


def _names(chosen: Iterable[tuple[int, int]]) -> str:
    """As `places` reads them."""
    return ", ".join(f"{length}x{count}" for length, count in chosen)


def with_answers(found: Iterable[Cell], wanted: Iterable[str]) -> list[Cell]:
    """Cells with other lengths of answers, given as `INPUTxCONCURRENCY=TOKENS`. What a cell costs beside its steps is in its time
    once; the longer the answers, the less it weighs.

    Raises:
        ArgumentError: another form, or a cell that is not there.
    """
    cells = list(found)
    for text in wanted:
        match = re.fullmatch(r"(\d+)x(\d+)=([1-9]\d*)", text)
        place, tokens = (tuple(map(int, match.groups()[:2])), int(match[3])) if match else (None, 0)
        if place not in [cell.place for cell in cells]:
            raise ArgumentError("answer", repr(text), f"CELL=TOKENS with one of the cells {_names(cell.place for cell in cells)}")
        cells = [replace(cell, output=tokens) if cell.place == place else cell for cell in cells]
    return cells


def pressure_cell() -> Cell:
    """Short prompts and long answers: all requests are let in, and together they outgrow the pool."""
    return Cell(128, 32, 256)


def prompts(cell: Cell, vocabulary: int) -> list[list[int]]:
    """Random tokens. Prompts of every cell are beginnings of the same few, so that the largest cell fills the cache for all."""
    found = []
    for number in range(cell.concurrency):
        source = random.Random(_SEED * 1000 + number)
        found.append([source.randrange(vocabulary) for _ in range(cell.input)])
    return found


def pool_tokens(chosen: Scenario, todo: Sequence[Cell]) -> int:
    """KV pool that holds the largest cell, with what a step allocates ahead for each request; less under pressure."""
    speculation, page = chosen.speculation, chosen.page_size
    ahead = 0
    if speculation is not None:
        # SGLang reserves pages for each branch of a tree, and twice that, as its overlap schedule runs a step ahead.
        branch = speculation.steps if page == 1 else (speculation.steps // page + 2) * page
        ahead = 2 * max(speculation.width, speculation.topk * branch)
    each = [cell.concurrency * (cell.input + chosen.pool_share * (2 * cell.output + ahead) + 64) for cell in todo]
    return -(-int(max(each)) // page) * page


def order(arms: Sequence[str], repetition: int) -> list[str]:
    """Arms in turn; every repetition starts with another one, so that none always runs behind the same."""
    first = repetition % len(arms)
    return [*arms[first:], *arms[:first]]


def cell_seconds(cell: Cell, repetitions: int, *, first: bool, plain: bool) -> float:
    """More than a cell takes with two engines: the warm-up round, which may extend all prompts, and the repetitions."""
    bounds = [(seconds, OUTPUTS[count]) for count, seconds in _ROUND_SECONDS.items() if count >= cell.concurrency]
    seconds, tokens = bounds[0] if bounds else (_ROUND_SECONDS[32] * cell.concurrency / 32, OUTPUTS[32])
    longer = cell.output / (PLAIN_OUTPUT if plain else tokens)
    extend = cell.input * cell.concurrency / _PREFILL_RATE if first else 0.0
    return 2 * ((repetitions + 1) * seconds * max(longer, 1.0) + extend)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """One arm of one cell: medians over repetitions, and latencies over all requests of all of them."""
    speeds = [r.tokens_per_s for r in rounds]
    latencies = sorted(latency for r in rounds for latency in r.latencies)
    steps = [r.ms_per_step for r in rounds if r.ms_per_step is not None]
    accepts = [r.accept_length for r in rounds if r.accept_length is not None]
    return {
        "tokens_per_s": round(statistics.median(speeds), 3),
        "each_tokens_per_s": [round(speed, 3) for speed in speeds],
        "spread": round(spread(speeds), 5),
        "seconds": [round(r.seconds, 4) for r in rounds],
        "wall_s": [round(r.wall, 4) for r in rounds],
        "latency_p50_s": round(quantile(latencies, 0.5), 4),
        "latency_p95_s": round(quantile(latencies, 0.95), 4),
        "ms_per_step": round(statistics.median(steps), 3) if steps else None,
        "steps": [max(r.steps) for r in rounds if r.steps],
        "in_lockstep": all(len(set(r.steps)) <= 1 for r in rounds),
        "accept_length": round(statistics.mean(accepts), 4) if accepts else None,
        "completion_tokens": sum(sum(r.completion) for r in rounds),
        "prompt_tokens_from_cache": [min(r.cached) for r in rounds],
        "retractions": [r.retracted for r in rounds],
    }


def spread(values: Sequence[float]) -> float:
    """From the least to the most, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of ascending values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tells a measured cell from every other."""
    return tuple(row[name] for name in ("shape", "scenario", "stock", "input", "concurrency"))


#: Python's collector leaves alone what an engine had at its start, by arm in a row's "collector". Older rows have "collecting"
#: where it does not, or do not say.
FROZEN = "frozen"


def is_even(row: Mapping[str, Any]) -> bool:
    """Whether the collector is known to have been alike in both arms. What it costs was not measured."""
    return len(set(row.get("collector", {}).values())) == 1


def engine_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tells what was found out of an engine from that of every other: what it is beside, and how large."""
    sizes = (row["setup"][name] for name in ("pool_tokens", "max_requests", "graph_sizes"))
    return *(row[name] for name in ("shape", "scenario", "stock", "arm")), *sizes


def is_done(row: Mapping[str, Any]) -> bool:
    """Whether `--resume` leaves this row of a result file alone. One with faults was measured; it does not count all the same."""
    return "error" not in row


def counts(row: Mapping[str, Any]) -> bool:
    """Whether this row is a valid measurement."""
    return is_done(row) and not row.get("faults")


def merged(rows: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """`rows` with `new` in place of its earlier self."""
    return [*(row for row in rows if key(row) != key(new)), new]
