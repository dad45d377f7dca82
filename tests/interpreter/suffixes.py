"""Calls of `gather_suffix_merge` for its tests: arguments, the exact result in FP64 with its bounds, and the comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_specverify.kernels.gather_suffix import gather_suffix_merge
from tests.kernels.cases import generator
from tests.kernels.oracle import rounding

from .bounds import ROUNDOFF
from .calls import guarded, guarded_lse, launches, names, to_device

State = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A call, described.

    Attributes:
        lens: suffix length of each row; -1 for padding.
        prefix: LSE of the prefixes: "some" finite ones, "none" (-inf), "inf" (+inf), or "mixed"; empty ones' outputs are NaN.
        holes: whether some listed entries are -1.
    """

    seed: int = 0
    lens: tuple[int, ...] = (1, 3, 0, 9)
    depth: int = 9
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    q_type: torch.dtype = torch.bfloat16
    cache_type: torch.dtype = torch.bfloat16
    out_type: torch.dtype = torch.bfloat16
    k_scale: float | str = 1.0
    v_scale: float | str = 1.0
    sm_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    prefix: str = "some"
    holes: bool = False
    strided: bool = False
    lse_layout: str = "rows"
    extra_rows: int = 1

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def _scale(kind: float | str, heads: int, gen: torch.Generator) -> float | torch.Tensor:
    if kind == "scalar":
        return torch.tensor(0.75)
    return torch.rand(heads, generator=gen) + 0.5 if kind == "heads" else float(kind)


def build(c: Case) -> dict[str, Any]:
    """Arguments on the CPU. Slots that no row lists are NaN; entries that do not count lie outside the cache."""
    gen = generator(c.seed)
    rows, keys = len(c.lens), sum(max(0, n) for n in c.lens)
    slots = torch.randperm(keys + 4, generator=gen)
    suffix_slots = torch.full((rows, c.depth + 2 * c.strided), 1 << 30, dtype=torch.int32)[:, : c.depth]
    used: list[int] = []
    for row, n in enumerate(c.lens):
        for column in range(n):
            # Rows of a tree share ancestors: every third key is one of the row's before it.
            shared = used and column % 3 == 2
            slot = used[int(torch.randint(0, len(used), (), generator=gen))] if shared else int(slots[len(used)])
            used += [] if shared else [slot]
            suffix_slots[row, column] = slot
        if c.holes and n > 1:
            suffix_slots[row, int(torch.randint(0, n, (), generator=gen))] = -1
    gap = 3 * c.strided
    both = torch.full((len(slots), c.kv_heads, c.head_dim + c.v_head_dim + gap), math.nan)
    both[used, :, : c.head_dim + c.v_head_dim] = torch.randn(len(used), c.kv_heads, c.head_dim + c.v_head_dim, generator=gen)
    both = both.to(c.cache_type)
    k, v = both[..., : c.head_dim], both[..., c.head_dim : c.head_dim + c.v_head_dim]
    total = rows + c.extra_rows
    q = torch.randn(total, c.q_heads + c.strided, c.head_dim + 5 * c.strided, generator=gen).to(c.q_type)
    out = torch.randn(total, c.q_heads, c.v_head_dim, generator=gen).to(c.out_type)
    lse = torch.randn(total, c.q_heads, generator=gen) * 2
    marks = {"some": [0.0], "none": [-math.inf], "inf": [math.inf], "mixed": [0.0, -math.inf, math.inf]}[c.prefix]
    mark = torch.tensor(marks)[torch.randint(0, len(marks), lse.shape, generator=gen)]
    out[mark != 0], lse[mark != 0] = math.nan, mark[mark != 0]
    return {
        "q": q[:, : c.q_heads, : c.head_dim], "k_cache": k if c.strided else k.contiguous(),
        "v_cache": v if c.strided else v.contiguous(), "suffix_slots": suffix_slots,
        "suffix_lens": torch.tensor(c.lens, dtype=torch.int32), "prefix_out": out, "prefix_lse": lse,
        "k_scale": _scale(c.k_scale, c.kv_heads, gen), "v_scale": _scale(c.v_scale, c.kv_heads, gen), "sm_scale": c.sm_scale,
        "softcap": c.softcap, "sinks": torch.randn(c.q_heads, generator=gen) if c.sinks else None,
    }  # fmt: skip


@dataclass(frozen=True)
class Exact:
    """FP64 [T, Hq, Dv] and [T, Hq]; rows that are padding hold NaN."""

    out: torch.Tensor
    lse: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor


def exact(a: dict[str, Any]) -> Exact:
    """The formula with one sum over the row's keys and the prefix as one more key, row by row, and the bounds of a kernel.

    The terms of the bounds are those of `bounds.py`: delta for the LSE; for the output twice that (exponential and
    denominator), P's roundoff on the suffix's part, FP32 sums of at most 256 terms, and 2**-22 of whatever is
    scaled to base 2: the prefix's LSE and the sink. The prefix's output is exact as it came.
    """
    rows, q_heads, _ = a["q"].shape
    kv_heads, v_dim = a["v_cache"].shape[1:]
    group = q_heads // kv_heads
    scale = a["sm_scale"] if a["sm_scale"] is not None else a["q"].shape[2] ** -0.5
    k_scale, v_scale = (torch.as_tensor(a[n], dtype=torch.float64).expand(kv_heads) for n in ("k_scale", "v_scale"))
    roundoff, tiny = ROUNDOFF[a["q"].dtype]
    blank = torch.full((rows, q_heads, v_dim), math.nan, dtype=torch.float64)
    result = Exact(blank, blank[..., 0].clone(), blank.clone(), blank[..., 0].clone())
    for row, n in enumerate(a["suffix_lens"].tolist()):
        if n < 0:
            continue
        slots = [slot for slot in a["suffix_slots"][row, :n].tolist() if slot >= 0]
        for h in range(q_heads):
            g = h // group
            k, v = (a[name][slots, g] if a[name].element_size() > 1 else a[name].view(torch.uint8)[slots, g].view(a[name].dtype)
                    for name in ("k_cache", "v_cache"))  # fmt: skip
            k, v, q = k.double() * k_scale[g], v.double() * v_scale[g], a["q"][row, h].double()
            scores = k @ q * scale
            size = float((k.abs() @ q.abs() * abs(scale)).max()) if slots else 0.0
            if a["softcap"] > 0:
                scores = a["softcap"] * torch.tanh(scores / a["softcap"])
            before = a["prefix_lse"][row, h].double()
            if not before.isinf():
                scores, v = torch.cat([scores, before[None]]), torch.cat([v, a["prefix_out"][row, h].double()[None]])
            if len(scores) == 0:
                result.out[row, h], result.lse[row, h], result.out_bound[row, h], result.lse_bound[row, h] = 0, -math.inf, 0, 0
                continue
            lse = scores.logsumexp(0)
            bottom = lse if a["sinks"] is None else torch.logaddexp(lse, a["sinks"][h].double())
            weights = (scores - bottom).exp()
            terms = (weights[:, None] * v.abs())[: len(slots)].sum(0), weights @ v.abs()
            delta = 1e-5 + 2.0**-21 * size + 2.0**-22 * float(before.abs().nan_to_num(0.0, posinf=0.0))
            sink = 0.0 if a["sinks"] is None else 2.0**-22 * float(a["sinks"][h].abs())
            relative = math.expm1(2 * delta) + sink + 2 * 2.0**-23 * 256
            result.out[row, h], result.lse[row, h] = weights @ v, lse
            result.out_bound[row, h] = relative * terms[1] + roundoff * terms[0] + tiny * v[: len(slots)].abs().sum(0)
            result.lse_bound[row, h] = delta
    return result


def assert_close(out: torch.Tensor, lse: torch.Tensor, want: Exact) -> None:
    """Every element of every row that is not padding within its bound and its type's rounding; no keys gives (0, -inf)."""
    real = ~want.lse.isnan()
    empty = want.lse == -math.inf
    assert torch.equal((lse == -math.inf) & real, empty), "rows without keys"
    assert not bool(out[empty].any()), "rows without keys must be 0"
    bound = want.out_bound + rounding(want.out.abs() + want.out_bound, out.dtype)
    off = ~((out.double() - want.out).abs() <= bound) & real[..., None]
    assert not bool(off.any()), f"out is off: {int(off.sum())} elements, first at {off.nonzero()[0].tolist()}"
    bound = want.lse_bound + rounding(want.lse, lse.dtype)
    off = ~((lse.double() - want.lse).abs() <= bound) & real & ~empty
    assert not bool(off.any()), f"lse is off: {int(off.sum())} elements, first at {off.nonzero()[0].tolist()}"


def run(a: dict[str, Any], device: str, *, strided: bool = False, lse_layout: str = "rows") -> State:
    """Run the kernel in place on guarded copies of the prefix's result; (out, lse) on the CPU.

    Raises:
        AssertionError: another kernel ran, or something was written that is no real row.
    """
    rows, heads, dim = a["prefix_out"].shape
    out = guarded(rows, heads, dim, a["prefix_out"].dtype, device, strided=strided)
    lse = guarded_lse(rows, heads, device, layout=lse_layout)
    real = torch.zeros(rows, dtype=torch.bool, device=device)
    real[: len(a["suffix_lens"])] = a["suffix_lens"].to(device) >= 0
    for buffer, source in ((out, a["prefix_out"]), (lse, a["prefix_lse"])):
        buffer.view[real] = source.to(device)[real]
    with launches() as seen:
        got = gather_suffix_merge(**{**to_device(a, device), "prefix_out": out.view, "prefix_lse": lse.view})
    assert names(seen) == ["gather_suffix_merge_kernel"]
    assert got[0] is out.view and got[1] is lse.view
    assert out.untouched(real) and lse.untouched(real), "written where no row is"
    return out.view.cpu(), lse.view.cpu()


def check(c: Case, device: str) -> State:
    """Run a described call and compare."""
    a = build(c)
    out, lse = run(a, device, strided=c.strided, lse_layout=c.lse_layout)
    assert_close(out, lse, exact(a))
    return out, lse
