"""Time arms against each other: each one's calls captured in a CUDA graph, replayed in turn within one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: What one replay should last: long against the start of a graph, short against a change of the clock.
REPLAY_US = 1500.0
#: The most that one replay may last where only more calls would visit every layer.
LONGEST_REPLAY_US = 20_000.0
#: Python prepares every captured call.
MOST_CALLS = 256
ROUNDS = 9
#: Rounds of an arm so slow that nine would take seconds.
SLOW_US, SLOW_ROUNDS = 100_000.0, 3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of all rounds, the distance from their 10th to their 90th percentile."""

    us: float
    spread: float
    rounds: int
    calls: int

    def as_dict(self) -> dict[str, float]:
        return {"us": round(self.us, 3), "spread": round(self.spread, 3), "rounds": self.rounds, "calls": self.calls}


@dataclass(frozen=True)
class Replay:
    """A captured arm: `run` replays it once and returns microseconds for each of its `calls`."""

    run: Callable[[], float]
    calls: int
    rounds: int = ROUNDS


def alternate(replays: dict[str, Replay]) -> dict[str, list[float]]:
    """Replay all arms in turn until each has its rounds.

    Every round starts with another arm, so that none always runs behind the same one. The first replay of each arm is
    not counted.
    """
    for replay in replays.values():
        replay.run()
    times: dict[str, list[float]] = {name: [] for name in replays}
    names = list(replays)
    for turn in range(max((replay.rounds for replay in replays.values()), default=0)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn < replays[name].rounds:
                times[name].append(replays[name].run())
    return times


def summarise(times: Sequence[float], calls: int) -> Timing:
    ordered = sorted(times)
    if len(ordered) == 1:
        return Timing(ordered[0], 0.0, 1, calls)
    tenths = statistics.quantiles(ordered, n=10, method="inclusive")
    return Timing(statistics.median(ordered), tenths[8] - tenths[0], len(ordered), calls)


def calls_for(one_us: float, layers: int) -> int:
    """Calls in one graph: enough to last `REPLAY_US`, and to visit every layer where that does not take too long."""
    by_time = max(1, round(REPLAY_US / one_us))
    by_layers = min(layers, max(1, round(LONGEST_REPLAY_US / one_us)))
    return min(max(by_time, by_layers), MOST_CALLS)


def capture(call: Callable[[int], Any], layers: int) -> Replay:
    """Capture `call(0)`, `call(1)`, … over `layers` layers and round again. A capture of one call says how many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    # Replayed: of a call that is not captured, events would also see how long Python takes to enqueue it.
    probe = _captured(call, [layers - 1])
    one = min(elapsed_us(probe) for _ in range(3))
    calls = calls_for(one, layers)
    replay = _captured(call, [number % layers for number in range(calls)])
    return Replay(lambda: elapsed_us(replay) / calls, calls, ROUNDS if one < SLOW_US else SLOW_ROUNDS)


def _captured(call: Callable[[int], Any], layers: Sequence[int]) -> Callable[[], None]:
    """Replays one call for each of `layers`, of one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(layer)
    return graph.replay


def elapsed_us(work: Callable[[], Any]) -> float:
    """Microseconds on the device of what `work` enqueues."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches where nothing else limits it: a copy's read and write bytes, and a matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def as_dict(self) -> dict[str, float]:
        return {"copy_tb_per_s": round(self.bytes_per_s / 1e12, 3), "matmul_tflops": round(self.flops_per_s / 1e12, 1)}


def ceilings(device: torch.device) -> Ceilings:
    """Measured on `device`: a copy of 2 GiB, and a bf16 product of 8192 x 8192 matrices."""
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    copy = _median(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = _median(lambda: torch.mm(a, b, out=out))
    return Ceilings(2 * source.nbytes / copy * 1e6, 2 * 8192**3 / product * 1e6)


def _median(work: Callable[[], Any]) -> float:
    work()
    return statistics.median(elapsed_us(work) for _ in range(ROUNDS))
