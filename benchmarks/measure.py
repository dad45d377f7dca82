"""One point of the comparison: build every arm, hold its output to the gate, and time those that pass against each other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import gate, inputs, timing
from benchmarks.arms import Arm, Call, Unavailable, selected
from benchmarks.points import Point

#: The second capture of an arm: how far two runs of the same thing lie apart.
AGAIN = " (again)"
#: An arm slower than the fastest by this factor decides nothing: few rounds say how slow it is.
HOPELESS = 8.0
#: Seconds of preparing and first calling an arm from which on they are kept: it compiled something.
SLOW_TO_PREPARE = 1.0
#: An arm that fails after so many seconds failed to compile: it would again at every point of the family.
SLOW_TO_FAIL = 5.0
#: Why such arms failed in this process, by arm, kind and family.
_FAILED: dict[tuple[str, str, str], str] = {}


def measure(
    point: Point,
    arms: Sequence[Arm],
    ceilings: timing.Ceilings | None,
    device: torch.device,
    states: Sequence[str] = ("warm", "cold"),
) -> dict[str, Any]:
    """A row of results; see `benchmarks/README.md`. Without ceilings, as on a CPU, nothing is timed."""
    made = inputs.make(point, device)
    row: dict[str, Any] = {
        "name": point.name,
        "point": point.as_dict(),
        "bytes": made.work.bytes,
        "flops": made.work.flops,
        "layers": made.layers,
        "selected": None,
        "arms": {},
    }
    try:
        row["selected"], row["reason"] = selected(made)
    except Exception as failure:
        row["reason"] = why(failure)
    calls: dict[str, Call] = {}
    chosen = gate.samples(made)
    for arm in arms:
        if point.kind in arm.kinds:
            row["arms"][arm.name] = check(arm, made, chosen, calls)
    if ceilings is not None:
        row["floor_us"] = made.work.floor_us(ceilings.bytes_per_s, ceilings.flops_per_s)
        time_arms(row, calls, made.layers, states)
    if device.type == "cuda":
        # A kernel that read out of bounds shows here at the latest, and takes all that follows with it.
        torch.cuda.synchronize()
    return row


def check(arm: Arm, made: inputs.Inputs, chosen: list[gate.Sample], calls: dict[str, Call]) -> dict[str, Any]:
    """Build and run an arm once; it joins `calls` where its output is right.

    `prepare_s` says how long that took where it was long, whatever came of it. What took long to fail is not tried again for
    other points of the same kind and family, unless memory was short.
    """
    family = (arm.name, made.point.kind, made.point.family)
    if family in _FAILED:
        return {"group": arm.group, "why": _FAILED[family]}
    begin = time.monotonic()
    found = _checked(arm, made, chosen, calls)
    seconds = time.monotonic() - begin
    raised = "why" in found and "error" not in found
    if raised and seconds >= SLOW_TO_FAIL and "OutOfMemory" not in found["why"]:
        _FAILED[family] = f"as at {made.point.name}: {found['why']}"[:200]
    return found | ({"prepare_s": round(seconds, 1)} if seconds >= SLOW_TO_PREPARE else {})


def _checked(arm: Arm, made: inputs.Inputs, chosen: list[gate.Sample], calls: dict[str, Call]) -> dict[str, Any]:
    limit = gate.FP8_LIMIT if arm.fp8_products and made.point.cache == "e4m3" else gate.LIMIT
    try:
        call = arm.build(made)
        found = gate.error(made, call(0), chosen, prefix_only=arm.prefix_only)
    except Exception as failure:
        return {"group": arm.group, "why": why(failure)}
    if not found <= limit:
        return {"group": arm.group, "error": found, "why": f"wrong: relative error {found:.3g}, allowed {limit}"}
    calls[arm.name] = call
    return {"group": arm.group, "error": found}


def time_arms(
    row: dict[str, Any],
    calls: dict[str, Call],
    layers: int,
    states: Sequence[str],
    capture: Callable[[Call, int], timing.Replay] | None = None,
) -> None:
    """Add `warm` and `cold` to the arms of `calls`. `capture` makes the replays, `timing.capture` where None."""
    capture = capture or timing.capture
    if row["selected"] in calls:
        calls[row["selected"] + AGAIN] = calls[row["selected"]]
        row["arms"][row["selected"] + AGAIN] = {"group": "again"}
    if layers == 1:
        row["note"] = "one layer is more than the cache holds: measured once for both states"
    for state in states if layers > 1 else states[:1]:
        replays: dict[str, timing.Replay] = {}
        for name, call in calls.items():
            try:
                replays[name] = capture(call, layers if state == "cold" else 1)
            except Exception as failure:
                row["arms"][name]["why"] = f"not captured: {why(failure)}"
        for name, times in timing.alternate(hurried(replays)).items():
            found = timing.summarise(times, replays[name].calls).as_dict()
            row["arms"][name] |= {each: found for each in ((state,) if layers > 1 else states)}
        del replays
        gc.collect()


def hurried(replays: dict[str, timing.Replay]) -> dict[str, timing.Replay]:
    """Few rounds for what is far behind: they say how slow it is."""
    first = {name: replay.run() for name, replay in replays.items() if replay.rounds > timing.SLOW_ROUNDS}
    slow = {name for name, us in first.items() if us > HOPELESS * min(first.values())}
    return {n: replace(each, rounds=timing.SLOW_ROUNDS) if n in slow else each for n, each in replays.items()}


def why(failure: Exception) -> str:
    """One line: a person reads it beside numbers."""
    text = str(failure).strip().splitlines()
    first = text[0] if text else ""
    return first[:200] if isinstance(failure, Unavailable) else f"{type(failure).__name__}: {first}"[:200]
