"""One point of sparse MLA decode: hold every arm to an FP64 oracle over the bytes that it reads, then time those that pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import timing
from benchmarks.measure import time_arms, why
from benchmarks.sparse_mla_arms import SCALE, SELECTED, Arm, Call, Output
from benchmarks.sparse_mla_points import Point
from benchmarks.sparse_mla_pool import Inputs, Pool, inputs_over
from sglang_specverify.kernels.sparse_mla import Reference
from sglang_specverify.kernels.sparse_mla.bounds import rejections, relative_l2

#: Query rows that are held to the oracle, spread over all of them.
SAMPLES = 24
#: What is read between two replays that are to find nothing in the cache: several times the largest L2 cache.
FLUSH_BYTES = 256 << 20


def repair_interpreter(device: torch.device) -> None:
    """On a CPU, before any arm runs: Triton's interpreter computes with no bf16 until it is repaired."""
    if device.type == "cpu":
        # Not imported elsewhere: in one process the interpreter and the compiler exclude each other.
        from tests.interpreter import repair

        repair.apply()


def measure(point: Point, arms: Sequence[Arm], ceilings: timing.Ceilings | None, pool: Pool) -> dict[str, Any]:
    """A row of results, in the form of `benchmarks.measure`. Without ceilings nothing is timed."""
    made = inputs_over(pool, point)
    row: dict[str, Any] = {
        "name": point.name,
        "point": point.as_dict(),
        "bytes": point.bytes,
        "flops": point.flops,
        "layers": made.layers,
        "selected": SELECTED,
        "arms": {},
    }
    calls: dict[str, Callable[[int], Any]] = {}
    oracles = {kind: oracles_of(made, v4_bytes=kind) for kind in {arm.v4_bytes for arm in arms}}
    for arm in arms:
        found: dict[str, Any] = {"group": arm.group}
        row["arms"][arm.name] = found
        try:
            call = arm.build(made)
            wrong, found["error"] = check(call, made, oracles[arm.v4_bytes])
        except Exception as failure:
            found["why"] = why(failure)
            continue
        if wrong:
            found["why"] = f"wrong: {wrong[0]}"
        else:
            calls[arm.name] = call
    if ceilings is not None:
        row["floor_us"] = point.work.floor_us(ceilings.bytes_per_s, ceilings.flops_per_s)
        flush = torch.ones(FLUSH_BYTES // 4, device=pool.device)
        time_arms(row, calls, made.layers, ("warm", "cold"), lambda call, layers: _replay(call, layers, flush))
    if pool.device.type == "cuda":
        # A kernel that read out of bounds shows here at the latest, and takes all that follows with it.
        torch.cuda.synchronize()
    return row


def sampled(rows: int) -> list[int]:
    """Query rows to look at: the first, the last, and some between."""
    count = min(SAMPLES, rows)
    return sorted({i * (rows - 1) // max(count - 1, 1) for i in range(count)})


def oracle(made: Inputs, layer: int, *, v4_bytes: bool) -> Reference:
    """FP64 results of the sampled query rows, [1, rows, H, 512], by the formulas of `sparse_mla.reference`."""
    point, chosen = made.point, sampled(made.point.rows)
    keys = torch.stack([made.keys(layer, row, v4_bytes=v4_bytes) for row in chosen])
    q = made.q.view(point.rows, point.heads, -1)[chosen].double()
    z = SCALE * (q @ keys.transpose(1, 2))
    lse = torch.logsumexp(z, dim=2)
    total = torch.logaddexp(lse, made.sink.double())[..., None]
    weights = torch.exp(z - total)
    peak = torch.exp(z.amax(dim=2, keepdim=True) - total)
    parts = weights @ keys, lse, weights @ keys.abs(), peak * keys.abs().sum(dim=1, keepdim=True)
    valid = torch.ones(1, len(chosen), keys.shape[1], dtype=torch.bool, device=keys.device)
    return Reference(*(part[None] for part in parts), valid)  # type: ignore[call-arg]


def oracles_of(made: Inputs, *, v4_bytes: bool) -> dict[int, Reference]:
    """Of the first layer and of the last: an arm that takes the lists of another one is wrong in one of them."""
    return {layer: oracle(made, layer, v4_bytes=v4_bytes) for layer in (0, made.layers - 1)}


def check(call: Call, made: Inputs, oracles: dict[int, Reference]) -> tuple[list[str], float]:
    """(what is wrong, the larger relative L2 error). Outputs may be rounded once more than this project's, as bf16 partials."""
    wrong, worst = [], 0.0
    chosen = sampled(made.point.rows)
    for layer, reference in oracles.items():
        found: Output = call(layer)
        out = found.out[:, : made.point.heads]
        if not bool(out.isfinite().all()):
            wrong.append(f"layer {layer}: an output that is not finite")
        lse = reference.lse if found.lse is None else found.lse[chosen][None]
        out = out[chosen][None]
        wrong += [f"layer {layer}: {text}" for text in rejections(out, lse, reference, bf16_partials=found.lse is None)]
        worst = max(worst, relative_l2(out, reference))
    return wrong, worst


def _replay(call: Callable[[int], Any], layers: int, flush: torch.Tensor) -> timing.Replay:
    """A captured arm; for more than one layer the L2 cache is read full of other things before each replay."""
    replay = timing.capture(call, layers)
    if layers == 1:
        return replay

    def cold() -> float:
        torch.sum(flush)
        return replay.run()

    return replace(replay, run=cold)
