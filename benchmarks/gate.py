"""Whether an arm's output is right at all, in FP64 on a few rows; what is wrong is not timed.

This finds a variant that read the wrong keys, not one that rounds badly: the tests hold the kernels to derived bounds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from benchmarks.inputs import Inputs
from benchmarks.points import DRAFT_STEP

#: Relative error of a row. Rounding P and the output to bf16 gives 0.002 to 0.003; one planted key too many or too few
#: gives 0.03 and more.
LIMIT = 0.01
#: Where Q, P or both are FP8 as well: their rounding alone is 0.03 to 0.06 of a value.
FP8_LIMIT = 0.15


@dataclass(frozen=True)
class Sample:
    """One row of one head: `out[row, head]` with row counted over all requests."""

    request: int
    row: int
    head: int


def samples(inputs: Inputs, count: int = 8, seed: int = 0) -> list[Sample]:
    """The first row, the last, and others at random."""
    point, draw = inputs.point, random.Random(seed)
    cells = [(0, 0, 0), (point.batch - 1, point.width - 1, point.q_heads - 1)]
    while len(cells) < count:
        cells.append((draw.randrange(point.batch), draw.randrange(point.width), draw.randrange(point.q_heads)))
    return [Sample(request, request * point.width + row, head) for request, row, head in cells]


def expected(inputs: Inputs, sample: Sample, *, prefix_only: bool = False) -> torch.Tensor:
    """FP64 [D]: what layer 0 gives for that row.

    Args:
        prefix_only: over all of the prefix and nothing else, as FlashAttention's prefix pass does.
    """
    point, request = inputs.point, sample.request
    length, local = inputs.lengths[request], sample.row - request * point.width
    position = int(inputs.positions[sample.row])
    seen = inputs.slots[request, :length]
    if point.window >= 0 and not prefix_only:
        seen = seen[max(0, position - point.window) :]
    if prefix_only:
        slots = seen
    elif inputs.mask is not None:
        row = inputs.mask[request, local]
        if point.window >= 0:
            row = row & (inputs.positions.view(point.batch, -1)[request] >= position - point.window)
        slots = torch.cat([seen, inputs.slots[request, length : length + point.width][row]])
    else:
        assert inputs.draft_slots is not None
        slots = torch.cat([seen, inputs.draft_slots[request, local, : DRAFT_STEP + 1].long()])
    kv_head = sample.head // (point.q_heads // point.kv_heads)
    k = inputs.k[0, slots, kv_head].to(inputs.q.dtype).double()
    v = inputs.v[0, slots, kv_head].to(inputs.q.dtype).double()
    scores = k @ inputs.q[sample.row, sample.head].double() * (inputs.sm_scale * inputs.k_scale)
    if inputs.sinks is not None and not prefix_only:
        scores = torch.cat([scores, inputs.sinks[sample.head].double()[None]])
    weights = scores.softmax(0)[: len(slots)]
    return weights @ v * inputs.v_scale


def error(inputs: Inputs, out: torch.Tensor, chosen: list[Sample], *, prefix_only: bool = False) -> float:
    """The largest relative error of the chosen rows; infinite where any output is not finite."""
    rows = inputs.point.batch * inputs.point.width
    if not bool(torch.isfinite(out[:rows]).all()):
        return float("inf")
    worst = 0.0
    for sample in chosen:
        want = expected(inputs, sample, prefix_only=prefix_only)
        got = out[sample.row, sample.head].double()
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst
