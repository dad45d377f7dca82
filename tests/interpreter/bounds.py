"""How far a kernel's numbers may lie from the exact ones, element by element, and the comparison that enforces it.

Exact means FP64 on the inputs as they are represented (FP8 codes stand for their numbers). With

    s_j      the score of key j after scaling and soft cap, w_j = exp(s_j) / (sum of exp(s) + exp(sink)) its weight,
    A        sum over the visible keys of w_j |v_j|, v_scale in it: what an output's error scales with,
    S        max over the visible keys of sm_scale * k_scale * sum_d |q_d k_jd|: what a score's error scales with,
    B        the keys that a program reads at once, between 16 and 256,

a kernel in FP32 whose matrix products take 16-bit operands errs by at most these:

LSE. Products of 16-bit numbers are exact in FP32. Sums of D of them, the scaling and the change to base 2 lose a few
    2**-23 S, the specification's 2**-21 S. A soft cap does not enlarge a score's error, since its slope is at most 1; its
    own evaluation, the exponential, the sum and the logarithm have absolute errors, the specification's 1e-5.
        delta = 1e-5 + 2**-21 S                                                              |lse - exact| <= delta
Weights. Each score is off by at most delta, so each exp(s) by delta relatively, the denominator too:        2 delta.
    A sink is changed to base 2 in FP32, which is off by 2**-23 |sink|, and the difference to the maximum again:
    2**-22 |sink|. A prefix's LSE that is merged goes the same way: 2**-22 |lse|.
P. exp(s - m) is rounded to q's type before it multiplies V: u_P relatively, the unit roundoff of that type. FP16 has
    2**-25 at the least between its smallest numbers, relative to the row's largest exp(s): that times the sum of |v_j|,
    over the denominator.
c(n). A product P V of a tile sums B terms in FP32 (matrix units may truncate: 2**-23 a term), and each tile after it
    multiplies what came before by exp(m - m'), itself off by 2**-22, and adds: 4 * 2**-23 for each of n / 16 + 1 tiles
    and of the splits at most. Numerator and denominator have it both.
Output. Half a unit in the last place of out's type, at the result.
Prefix. Where a kernel merges into a prefix's output as represented, that output is exact.

The unit roundoff of a type with p bits of significand, the hidden one counted, is 2**-p: 2**-8 for bf16.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch

from sglang_specverify.kernels import draft_decode_attention_reference, verify_attention_reference
from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments, check_draft_decode, check_verify
from sglang_specverify.kernels.reference import blocks_of, per_head, scores_of, weighed
from sglang_specverify.kernels.reference_keys import Keys, is_empty, keys_and_values, requests_of
from tests.kernels.oracle import rounding

#: Unit roundoff of P's type, which is q's, and the least spacing of its numbers, halved (FP32's is flushed to 0).
ROUNDOFF = {
    torch.bfloat16: (2.0**-8, 2.0**-126),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-126),
}

#: Arguments that a reference does not take or that a call of it must replace.
_OURS = ("out", "lse", "return_lse", "variant", "plan", "workspace", "deterministic")


@dataclass(frozen=True)
class Expected:
    """The exact result of a call and the bounds around it, all FP64.

    Attributes:
        out, lse: [T, Hq, Dv] and [T, Hq]; NaN in rows that belong to no request.
        out_bound, lse_bound: of the same shapes, without the rounding to the type of the output.
        sensitivity: A [T, Hq, Dv].
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor
    sensitivity: torch.Tensor


def call_reference(arguments: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 output and LSE for the arguments of either operation; NaN in padding rows."""
    a = {name: value for name, value in {**arguments, **changes}.items() if name not in _OURS}
    operation = draft_decode_attention_reference if "draft_slots" in a else verify_attention_reference
    rows, heads, _ = a["q"].shape
    out = torch.full((rows, heads, a["v_cache"].shape[2]), torch.nan, dtype=torch.float64, device=a["q"].device)
    lse = torch.full((rows, heads), torch.nan, dtype=torch.float64, device=a["q"].device)
    operation(**a, out=out, lse=lse)
    return out, lse


def checked(arguments: dict[str, Any]) -> tuple[VerifyArguments | DraftArguments, Problem]:
    """The arguments of either operation as it checks them, those left out with their defaults."""
    drafting = "draft_slots" in arguments
    operation = draft_decode_attention_reference if drafting else verify_attention_reference
    every = {name: one.default for name, one in inspect.signature(operation).parameters.items()} | arguments
    kind: Any = DraftArguments if drafting else VerifyArguments
    a = kind(**{name: every[name] for name in kind.__dataclass_fields__})
    return a, check_draft_decode(a) if drafting else check_verify(a)


def expect(arguments: dict[str, Any], *, splits: int = 1) -> Expected:
    """The exact result of `verify_attention` or `draft_decode_attention`, and its bounds. `splits`: the most of a request.

    All that is needed of a request is computed at once from one copy of its keys, without a look at the device.
    """
    a, problem = checked({name: value for name, value in arguments.items() if name not in _OURS})
    exact = _Exact.blank(problem)
    parts = [(start + low, part) for start, keys in requests_of(a, problem) for low, part in blocks_of(keys, problem)]
    unusual = [exact.fill(a, problem, start, keys) for start, keys in parts]
    if unusual and bool(torch.stack(unusual).any()):
        # A slot that does not exist, which the reference says better; or NaN or Inf, which a weight of 0 does not keep out.
        call_reference(arguments)
        for start, keys in parts:
            for row, own in enumerate(keys.visible):
                exact.fill(a, problem, start + row, Keys(keys.slots[own], own[own][None], keys.source))

    delta = 1e-5 + 2.0**-21 * exact.score_size
    roundoff, tiny = ROUNDOFF[a.q.dtype]
    relative = roundoff + torch.expm1(2 * delta) + _accumulation(exact.keys, splits) + _in_base_2(a.sinks)
    out_bound = relative[..., None] * exact.sensitivity
    if a.q.dtype == torch.float16:
        out_bound += (tiny * (exact.peak - _with_sinks(exact.lse, arguments)).exp())[..., None] * exact.sum_v
    return Expected(exact.out, exact.lse, out_bound, delta, exact.sensitivity)


@dataclass(frozen=True)
class _Exact:
    """What the bounds are made of, FP64: [T, Hq, Dv] or [T, Hq], NaN in rows that belong to no request.

    Attributes:
        out, lse, sensitivity: as in `Expected`.
        sum_v: sum over the visible keys of |v_j|, v_scale in it.
        score_size: S.
        peak: the largest score of a visible key.
        keys: how many of them there are.
    """

    out: torch.Tensor
    sensitivity: torch.Tensor
    sum_v: torch.Tensor
    lse: torch.Tensor
    score_size: torch.Tensor
    peak: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def blank(cls, problem: Problem) -> _Exact:
        new = {"dtype": torch.float64, "device": problem.device}
        wide, narrow = (problem.rows, problem.q_heads, problem.v_head_dim), (problem.rows, problem.q_heads)
        return cls(*(torch.full(shape, torch.nan, **new) for shape in [wide] * 3 + [narrow] * 4))  # type: ignore[arg-type]

    def fill(self, a: VerifyArguments | DraftArguments, problem: Problem, start: int, keys: Keys) -> torch.Tensor:
        """Write some rows of one request; a bool [], whether a visible key has no slot or the V of one is not finite."""
        rows, count = keys.visible.shape
        here = slice(start, start + rows)
        if count == 0 or is_empty(a):
            for value in (self.out, self.sensitivity, self.sum_v, self.score_size, self.keys):
                value[here] = 0.0
            self.lse[here], self.peak[here] = -math.inf, -math.inf
            return keys.visible.any()
        q, (k, v, nowhere) = a.q[here].to(torch.float64), keys_and_values(a, keys)
        scale, v_scale = (per_head(value, problem) for value in (a.k_scale, a.v_scale))
        scores = scores_of(q, k, keys.visible, scale * problem.sm_scale, problem.softcap)
        both, self.lse[here] = weighed(scores, torch.cat([v, v.abs()], -1), a.sinks)
        v_scale = v_scale.repeat_interleave(problem.group)[:, None]
        self.out[here] = both[..., : problem.v_head_dim] * v_scale
        self.sensitivity[here] = both[..., problem.v_head_dim :] * v_scale.abs()
        self.peak[here] = _by_row(scores.amax(-1))
        sizes = scores_of(q.abs(), k.abs(), keys.visible, (scale * problem.sm_scale).abs(), 0.0)
        self.score_size[here] = _by_row(sizes.amax(-1)).clamp(min=0.0)
        self.keys[here] = keys.visible.sum(1, dtype=torch.float64)[:, None]
        total = (keys.visible.to(torch.float64) @ v.abs().flatten(1)).view(rows, problem.kv_heads, -1)
        self.sum_v[here] = total.repeat_interleave(problem.group, 1) * v_scale.abs()
        return nowhere | ~v.isfinite().all()


def _by_row(value: torch.Tensor) -> torch.Tensor:
    """[rows, Hq] of [Hkv, group, rows]."""
    return value.flatten(0, 1).T


def expect_merged(
    arguments: dict[str, Any], suffix: dict[str, Any], prefix_out: torch.Tensor, prefix_lse: torch.Tensor
) -> Expected:
    """The exact result of `tree_suffix_merge`; `suffix` are the arguments of the drafts alone, without sinks."""
    part = expect(suffix)
    old_lse = prefix_lse.to(torch.float64)
    old_out = prefix_out.to(torch.float64).masked_fill((old_lse == -math.inf)[..., None], 0.0)
    lse = torch.logaddexp(part.lse, old_lse)
    denominator = _with_sinks(lse, arguments)
    shift = denominator.masked_fill(denominator == -math.inf, 0.0)
    new, old = ((value - shift).exp()[..., None] for value in (part.lse, old_lse))
    sensitivity = new * part.sensitivity + old * old_out.abs()
    delta = part.lse_bound + _in_base_2(old_lse.nan_to_num(neginf=0.0))
    # The drafts' part has its own bound, and merging changes the weights of both parts.
    relative = torch.expm1(2 * delta) + _accumulation(torch.ones_like(lse), 1) + _in_base_2(arguments.get("sinks"))
    out_bound = new * part.out_bound + relative[..., None] * sensitivity
    return Expected(new * part.out + old * old_out, lse, out_bound, delta, sensitivity)


def _with_sinks(lse: torch.Tensor, a: dict[str, Any]) -> torch.Tensor:
    return lse if a.get("sinks") is None else torch.logaddexp(lse, a["sinks"].to(torch.float64))


def _in_base_2(value: torch.Tensor | None) -> torch.Tensor | float:
    return 0.0 if value is None else 2.0**-22 * value.to(torch.float64).abs()


def _accumulation(keys: torch.Tensor, splits: int) -> torch.Tensor:
    """c(n), relative."""
    return 2 * 2.0**-23 * (256 + 4 * (keys / 16 + 1 + splits))


def worst(out: torch.Tensor, lse: torch.Tensor | None, expected: Expected) -> tuple[float, str]:
    """The largest error as a multiple of its bound, and where it is. Rows that see no key must be exact."""
    results = [_worst("out", out, expected.out, expected.out_bound, expected.lse)]
    if lse is not None:
        results.append(_worst("lse", lse, expected.lse, expected.lse_bound, expected.lse))
    return max(results)


def _worst(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, lse: torch.Tensor) -> tuple[float, str]:
    if got.shape != want.shape:
        return math.inf, f"{name}: shape {list(got.shape)}, not {list(want.shape)}"
    real, blind = (flag.view(*lse.shape, *[1] * (want.dim() - 2)) for flag in (~lse.isnan(), lse == -math.inf))
    allowed = (bound + rounding(want.abs() + bound, got.dtype)).masked_fill(blind, 0.0)
    # A NaN, and an error where none is allowed, are infinitely many times the bound.
    ratio = torch.where(got == want, 0.0, (got.to(torch.float64) - want).abs() / allowed)
    ratio = ratio.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(~real, 0.0)
    if ratio.numel() == 0:
        return 0.0, f"{name}: no elements"
    at = ratio.argmax()
    # All of them at once: each look waits for the device.
    found = [value.take(at).to(torch.float64) for value in (ratio, got, want, allowed)]
    largest, is_, should, may, place, outside = torch.stack([*found, at.double(), (ratio > 1).sum().double()]).tolist()
    index = [int(i) for i in torch.unravel_index(torch.tensor(int(place)), ratio.shape)]
    numbers = f"got {is_:.9g}, exact {should:.9g}, allowed error {may:.3g}"
    return largest, f"{name}{index}: {numbers}; {int(outside)} elements outside"


def compare(
    arguments: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None = None, *, expected: Expected | None = None,
    splits: int = 1,
) -> float:  # fmt: skip
    """The largest error of a result as a multiple of its bound.

    Raises:
        AssertionError: it is above 1; names the worst element.
    """
    ratio, where = worst(out, lse, expected or expect(arguments, splits=splits))
    assert ratio <= 1, f"{ratio:.3g} times its bound: {where}"
    return ratio
