"""A slow second opinion: verify and draft-decode attention in Python floats, one key at a time, and the error bounds.

Nothing is shared with the package. Each row's keys are listed one by one as (position, cache slot) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[int, int]

#: Unit roundoff of FP64.
U = 2.0**-53

#: Half a unit in the last place, relative and at the bottom of the range, of each output type.
HALF_ULP = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float64: (0.0, 0.0),
}


@dataclass
class Expected:
    """What the operation gives, and what its errors scale with.

    Attributes:
        out, lse: FP64 [T, Hq, Dv] and [T, Hq]; NaN in rows that belong to no request.
        sensitivity: FP64 [T, Hq, Dv], sum of w |v|.
        score_size: FP64 [T, Hq], the largest scale * sum of |q_d k_d| over the visible keys.
        sink_size: FP64 [Hq], |sink|; 0 without.
        keys: the visible keys of each row.
    """

    out: torch.Tensor
    lse: torch.Tensor
    sensitivity: torch.Tensor
    score_size: torch.Tensor
    sink_size: torch.Tensor
    keys: dict[int, list[Key]]
    head_dim: int


def slot_of(a: dict[str, Any], r: int, index: int) -> int:
    page = a.get("page_size", 1)
    slot = int(a["table"][a["row_ids"][r], index // page])
    return slot * page + index % page if page > 1 else slot


def row_range(a: dict[str, Any], r: int) -> tuple[int, int]:
    if a.get("q_offsets") is not None:
        return int(a["q_offsets"][r]), int(a["q_offsets"][r + 1])
    return r * a["num_draft_tokens"], (r + 1) * a["num_draft_tokens"]


def sees(a: dict[str, Any], r: int, i: int, j: int) -> bool:
    """Whether draft i of request r sees draft j, window aside."""
    if a.get("mask") is None:
        return j <= i
    first, last = row_range(a, r)
    w = last - first
    if a.get("mask_layout", "qlen_only") == "qlen_only":
        return a["mask"].reshape(-1)[(r * w + i) * w + j].item() != 0
    n = int(a["prefix_lens"][r])
    return a["mask"][int(a["mask_offsets"][r]) + i * (n + w) + n + j].item() != 0


def verify_keys(a: dict[str, Any], r: int, i: int) -> list[Key]:
    """Position and slot of each key that draft i of request r sees."""
    n = int(a["prefix_lens"][r])
    first, last = row_range(a, r)

    def position(j: int) -> int:
        return n + j if a.get("mask") is None or a.get("positions") is None else int(a["positions"][first + j])

    keys = [(p, slot_of(a, r, p)) for p in range(n)]
    keys += [(position(j), slot_of(a, r, n + j)) for j in range(last - first) if sees(a, r, i, j)]
    if a.get("window", -1) >= 0:
        keys = [key for key in keys if key[0] >= position(i) - a["window"]]
    return keys


def draft_keys(a: dict[str, Any], r: int, b: int) -> list[Key]:
    n, t = int(a["prefix_lens"][r]), a["step"]
    keys = [(p, slot_of(a, r, p)) for p in range(n)]
    keys += [(n + s, int(a["draft_slots"][r, b, s])) for s in range(t + 1)]
    if a.get("window", -1) >= 0:
        keys = [key for key in keys if key[0] >= n + t - a["window"]]
    return keys


def _per_head(scale: float | torch.Tensor, heads: int) -> list[float]:
    if isinstance(scale, torch.Tensor):
        values = scale.double().reshape(-1).tolist()
        return values * heads if len(values) == 1 else values
    return [float(scale)] * heads


def _expect(a: dict[str, Any], rows: dict[int, list[Key]], sink_times: int) -> Expected:
    q, k, v = (a[name].double().tolist() for name in ("q", "k_cache", "v_cache"))
    count, q_heads, dim = a["q"].shape
    kv_heads, v_dim = a["v_cache"].shape[1:]
    mapping = a["slot_map"].tolist() if a.get("slot_map") is not None else None
    scale = a.get("sm_scale") if a.get("sm_scale") is not None else 1.0 / math.sqrt(dim)
    cap = a.get("softcap", 0.0)
    k_scales, v_scales = _per_head(a.get("k_scale", 1.0), kv_heads), _per_head(a.get("v_scale", 1.0), kv_heads)
    sinks = a["sinks"].tolist() if a.get("sinks") is not None else None

    blank = torch.full((count, q_heads, v_dim), torch.nan, dtype=torch.float64)
    result = Expected(blank, blank[..., 0].clone(), blank.clone(), blank[..., 0].clone(),
                      torch.tensor([abs(s) for s in sinks or [0.0] * q_heads]).double(), rows, dim)  # fmt: skip
    for row, keys in rows.items():
        for h in range(q_heads):
            g = h * kv_heads // q_heads
            scores, sizes, slots = [], [0.0], [mapping[s] if mapping else s for _, s in keys]
            for slot in slots:
                products = [x * y for x, y in zip(q[row][h], k[slot][g], strict=True)]
                score = math.fsum(products) * scale * k_scales[g]
                scores.append(cap * math.tanh(score / cap) if cap else score)
                sizes.append(abs(scale * k_scales[g]) * math.fsum(map(abs, products)))
            result.score_size[row, h] = max(sizes)
            if not keys:
                result.out[row, h], result.sensitivity[row, h], result.lse[row, h] = 0.0, 0.0, -math.inf
                continue
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            total = math.fsum(weights)
            result.lse[row, h] = top + math.log(total)
            if sinks:
                total += sink_times * math.exp(sinks[h] - top)
            for d in range(v_dim):
                terms = [w / total * v[slot][g][d] for w, slot in zip(weights, slots, strict=True)]
                result.out[row, h, d] = v_scales[g] * math.fsum(terms)
                result.sensitivity[row, h, d] = abs(v_scales[g]) * math.fsum(map(abs, terms))
    return result


def verify(
    a: dict[str, Any], keys_of: Callable[[dict[str, Any], int, int], list[Key]] = verify_keys, *, sink_times: int = 1
) -> Expected:
    """Verify attention for the arguments `a`. `keys_of` and `sink_times` let a test put a fault in."""
    rows = {}
    for r in range(len(a["prefix_lens"])):
        first, last = row_range(a, r)
        for i in range(last - first):
            rows[first + i] = keys_of(a, r, i)
    return _expect(a, rows, sink_times)


def draft_decode(a: dict[str, Any]) -> Expected:
    rows = {r * a["topk"] + b: draft_keys(a, r, b) for r in range(len(a["prefix_lens"])) for b in range(a["topk"])}
    return _expect(a, rows, 1)


def fp64_relative(expected: Expected) -> torch.Tensor:
    """[T, Hq]: how far two FP64 computations of the same weights may differ, relatively.

    A score of D products is off by (D + a few) u S with S = scale * sum |q_d k_d|, whatever the cap (its slope is at
    most 1); its exponential by that much relatively, and by u |s - max| <= 2 u S for the subtraction, u |sink| where a
    sink takes part. The sum over n keys adds n u, numerator and denominator make it twice, two computations four times.
    """
    size = 1 + expected.score_size + expected.sink_size
    keys = torch.zeros(len(size), 1, dtype=torch.float64)
    for row, seen in expected.keys.items():
        keys[row] = len(seen)
    return 4 * U * ((expected.head_dim + 16) * size + keys)


def rounding(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of `dtype` at `value`.

    2**-16 of it is for going through FP32 on the way to 16 bits, as PyTorch's conversion from FP64 does: a tie that the
    first rounding made may go to the wrong side.
    """
    relative, bottom = HALF_ULP[dtype]
    return (value.abs() * relative + bottom) * (1 + 2.0**-12)


def assert_matches(out: torch.Tensor, lse: torch.Tensor, expected: Expected, *, relative: float = 0.0) -> None:
    """Every element of every real row within its bound, and -inf where nothing is visible.

    The bound of an output is `weights * sum w|v|` and its type's rounding; with `relative` (what a kernel that rounds
    its weights declares, 2**-8 for bf16) that is added to the weights. The LSE's is `weights`, or for such a kernel
    1e-5 + 2**-21 S, and its type's rounding.
    """
    real = sorted(expected.keys)
    weights = fp64_relative(expected)
    out_bound = (weights + relative)[..., None] * expected.sensitivity
    out_bound = out_bound + rounding(expected.out.abs() + out_bound, out.dtype)
    lse_bound = weights + (1e-5 + 2.0**-21 * expected.score_size if relative else 0.0)
    lse_bound = lse_bound + rounding(expected.lse, lse.dtype)
    empty = expected.lse[real] == -math.inf
    assert torch.equal(lse[real] == -math.inf, empty), "rows without a visible key"
    assert not out[real][empty].any(), "a row without a visible key must be 0"
    _within("out", out[real], expected.out[real], out_bound[real])
    _within("lse", lse[real][~empty], expected.lse[real][~empty], lse_bound[real][~empty])


def _within(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    error = (got.double() - want).abs()
    bad = ~(error <= bound)  # NaN is bad
    assert not bad.any(), f"{name}: {int(bad.sum())} elements off, the first by {error[bad][0]:.3g}, bound {bound[bad][0]:.3g}"
