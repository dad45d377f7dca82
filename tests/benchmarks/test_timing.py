"""How arms take turns, and how their times are summarised; nothing here waits for a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import timing
from benchmarks.timing import Replay


def scripted(name: str, log: list[str], times: list[float], rounds: int) -> Replay:
    left = iter(times)

    def run() -> float:
        log.append(name)
        return next(left)

    return Replay(run, calls=5, rounds=rounds)


def test_arms_take_turns_and_the_first_changes() -> None:
    log: list[str] = []
    arms = {
        "a": scripted("a", log, [99, 1, 2, 3], 3),
        "b": scripted("b", log, [98, 4, 5, 6], 3),
        "c": scripted("c", log, [97, 7, 8, 9], 3),
    }
    times = timing.alternate(arms)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"
    assert times == {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}


def test_an_arm_with_fewer_rounds_stops_early() -> None:
    log: list[str] = []
    arms = {"a": scripted("a", log, [0, 1, 2, 3], 3), "slow": scripted("s", log, [0, 9], 1)}
    assert timing.alternate(arms) == {"a": [1, 2, 3], "slow": [9]}
    assert "".join(log) == "as" + "as" + "a" + "a"


def test_nothing_to_time() -> None:
    assert timing.alternate({}) == {}


def test_a_summary_is_the_median_and_the_spread_of_the_middle() -> None:
    times = [float(n) for n in range(1, 12)]
    assert timing.summarise(times[::-1], 7) == timing.Timing(us=6.0, spread=8.0, rounds=11, calls=7)
    # One outlier in eleven moves neither.
    assert timing.summarise([*times[:-1], 1000.0], 7).us == 6.0
    assert timing.summarise([*times[:-1], 1000.0], 7).spread == 8.0
    assert timing.summarise([3.0], 1) == timing.Timing(3.0, 0.0, 1, 1)


def test_calls_fill_a_replay_and_visit_every_layer_unless_that_takes_too_long() -> None:
    assert timing.calls_for(100.0, 1) == 15
    assert timing.calls_for(100.0, 60) == 60
    assert timing.calls_for(1000.0, 60) == 20
    assert timing.calls_for(1e6, 60) == 1
    assert timing.calls_for(1.0, 1) == timing.MOST_CALLS


def test_what_python_takes_to_enqueue_a_call_is_no_part_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 10 us on the device and 500 in Python: a graph of it lasts what one should last."""
    captured: list[list[int]] = []

    def graph_of(call: Callable[[int], Any], layers: Sequence[int]) -> Callable[[], float]:
        captured.append(list(layers))
        return lambda: 10.0 * len(layers)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(timing.torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(timing.torch.cuda, "stream", lambda chosen: nullcontext())
    monkeypatch.setattr(timing, "_captured", graph_of)
    monkeypatch.setattr(timing, "elapsed_us", lambda work: work())
    replay = timing.capture(lambda layer: 500.0, 4)
    assert captured[0] == [3]
    assert replay.calls == len(captured[1]) == round(timing.REPLAY_US / 10.0)
    assert captured[1][:5] == [0, 1, 2, 3, 0]
    assert replay.run() == 10.0
