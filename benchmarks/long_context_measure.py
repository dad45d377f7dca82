"""One long chain: hold every arm to FP64 and to each other, then time those that pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import gate, timing
from benchmarks.arms import Arm, Call, selected
from benchmarks.inputs import Inputs
from benchmarks.long_context_arms import step
from benchmarks.long_context_points import states
from benchmarks.long_context_pool import Pool, beyond_32_bits, inputs_over, last_element
from benchmarks.measure import time_arms, why
from benchmarks.points import Point

#: Rows of one head that are held to FP64: of a prefix of a million each one reads a quarter of a gigabyte.
SAMPLES = 6
#: All rows of two arms lie this many limits apart at most: both round, and the worst of thousands of rows is looked at.
APART = 2
#: A call as long as this is timed as it is: its launch does not show, and a captured one would have to run twice more.
EAGER_US = 20_000.0
#: Layers that share a plan, as in Qwen3-8B, where they do not take longer than a replay may.
STEP_LAYERS = 36

Wanted = list[tuple[gate.Sample, torch.Tensor]]


def measure(
    point: Point, arms: Sequence[Arm], ceilings: timing.Ceilings | None, pool: Pool, *, with_step: bool
) -> dict[str, Any]:
    """A row of results, in the form of `benchmarks.measure` with `last_element`, `beyond_32_bits` and perhaps `step` more.

    Args:
        ceilings: None where nothing is to be timed.
        with_step: also what the metadata of a step costs.
    """
    with inputs_over(pool, point) as made:
        row: dict[str, Any] = {
            "name": point.name,
            "point": point.as_dict(),
            "bytes": made.work.bytes,
            "flops": made.work.flops,
            "layers": made.layers,
            "last_element": last_element(made),
            "beyond_32_bits": beyond_32_bits(made),
            "selected": None,
            "arms": {},
        }
        try:
            row["selected"], row["reason"] = selected(made)
        except Exception as failure:
            row["reason"] = why(failure)
        wanted = [(sample, gate.expected(made, sample)) for sample in gate.samples(made, SAMPLES)]
        calls = _check(row, made, arms, wanted)
        if ceilings is not None:
            row["floor_us"] = made.work.floor_us(ceilings.bytes_per_s, ceilings.flops_per_s)
            time_arms(row, calls, made.layers, states(point), replay_of)
        if with_step:
            row["step"] = _step(row, made, wanted, timed=ceilings is not None)
        del calls
    if pool.k.device.type == "cuda":
        # A kernel that read out of bounds shows here at the latest, and takes all that follows with it.
        torch.cuda.synchronize()
    return row


def limit_of(arm: Arm, point: Point) -> float:
    return gate.FP8_LIMIT if arm.fp8_products and point.cache == "e4m3" else gate.LIMIT


def error(made: Inputs, out: torch.Tensor, wanted: Wanted) -> float:
    """The largest relative error of the rows in `wanted`; infinite where any output is not finite."""
    if not bool(torch.isfinite(out[: made.point.batch * made.point.width]).all()):
        return float("inf")
    return max(float((out[s.row, s.head].double() - want).norm() / want.norm()) for s, want in wanted)


def apart(out: torch.Tensor, other: torch.Tensor) -> float:
    """The largest relative distance of a row of a head in one output from the same in another."""
    a, b = out.float(), other.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def _check(row: dict[str, Any], made: Inputs, arms: Sequence[Arm], wanted: Wanted) -> dict[str, Call]:
    """Build and run every arm once. FP64 sees a few rows of each; all others are held to the first arm that is right."""
    calls: dict[str, Call] = {}
    first: torch.Tensor | None = None
    for arm in arms:
        limit = limit_of(arm, made.point)
        found: dict[str, Any] = {"group": arm.group}
        row["arms"][arm.name] = found
        try:
            call = arm.build(made)
            out = call(0)
            found["error"] = error(made, out, wanted)
            if first is not None:
                found["apart"] = apart(out, first)
        except Exception as failure:
            found["why"] = why(failure)
            continue
        if not found["error"] <= limit:
            found["why"] = f"wrong: relative error {found['error']:.3g}, allowed {limit}"
        elif not found.get("apart", 0.0) <= APART * limit:
            found["why"] = f"wrong: {found['apart']:.3g} from another variant in some row, allowed {APART * limit:g}"
        else:
            calls[arm.name] = call
            first = out.clone() if first is None else first
    return calls


def replay_of(call: Call, layers: int) -> timing.Replay:
    """A captured arm, or the arm as it is where one call outlasts a replay."""
    once = timing.elapsed_us(lambda: call(0))
    if once >= EAGER_US:
        return timing.Replay(lambda: timing.elapsed_us(lambda: call(0)), 1, timing.SLOW_ROUNDS)
    return timing.capture(call, layers)


def _step(row: dict[str, Any], made: Inputs, wanted: Wanted, *, timed: bool) -> dict[str, Any]:
    """What the step's one launch of metadata costs, alone and in the graph of its layers."""
    try:
        prepare, attend = step(made, str(row["selected"]))
        prepare()
        found: dict[str, Any] = {"error": error(made, attend(0), wanted)}
        if not found["error"] <= gate.LIMIT:
            return found | {"why": "wrong"}
        if not timed:
            return found
        us = max(1.0, timing.elapsed_us(lambda: attend(0)))
        count = max(1, min(STEP_LAYERS, round(timing.LONGEST_REPLAY_US / us)))

        def layers(first: Callable[[], None] | None) -> Callable[[int], None]:
            def run(_: int) -> None:
                if first is not None:
                    first()
                for number in range(count):
                    attend(number % made.layers)

            return run

        forms: dict[str, Callable[[int], None]] = {"with_plan": layers(prepare), "without_plan": layers(None)}
        forms["plan"] = lambda _: prepare()
        replays = {name: timing.capture(form, 1) for name, form in forms.items()}
        times = timing.alternate(replays)
        return found | {"layers": count} | {n: timing.summarise(t, replays[n].calls).as_dict() for n, t in times.items()}
    except Exception as failure:
        return {"why": why(failure)}


def read_ceiling(device: torch.device) -> float:
    """Bytes a second that a sum reads, over 4 GiB: a long chain writes next to nothing, so a copy is no ceiling for it."""
    source = torch.ones(1 << 30, device=device)
    out = torch.empty((), device=device)
    times = [timing.elapsed_us(lambda: torch.sum(source, dim=0, out=out)) for _ in range(timing.ROUNDS + 1)]
    return source.nbytes / statistics.median(times[1:]) * 1e6
