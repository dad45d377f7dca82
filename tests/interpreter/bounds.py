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

import math
from dataclasses import dataclass
from typing import Any

import torch

from sglang_specverify.kernels import draft_decode_attention_reference, verify_attention_reference
from tests.kernels.oracle import rounding

#: Unit roundoff of P's type, which is q's, and the least spacing of its numbers, halved (FP32's is flushed to 0).
ROUNDOFF = {
    torch.bfloat16: (2.0**-8, 2.0**-126),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-126),
}

#: The largest of many numbers, as their log-sum-exp at this many times their size, divided by it: too large by at most
#: log(n) / 64.
SHARP = 64.0

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


def expect(arguments: dict[str, Any], *, splits: int = 1) -> Expected:
    """The exact result of `verify_attention` or `draft_decode_attention`, and its bounds. `splits`: the most of a request."""
    a = arguments
    out, lse = call_reference(a)
    scale = a["sm_scale"] if a.get("sm_scale") is not None else a["q"].shape[2] ** -0.5
    values = {"v_cache": _magnitude(a["v_cache"]), "v_scale": abs(a.get("v_scale", 1.0))}
    sensitivity, _ = call_reference(a, **values)
    magnitudes = {"q": _magnitude(a["q"]), "k_cache": _magnitude(a["k_cache"]), "k_scale": abs(a.get("k_scale", 1.0))}
    _, sharp = call_reference(a, **magnitudes, sm_scale=SHARP * abs(scale), softcap=0.0, sinks=None)
    mean, log_count = call_reference(a, **values, q=torch.zeros_like(a["q"]), sinks=None)
    keys = log_count.exp()

    delta = 1e-5 + 2.0**-21 * (sharp / SHARP).clamp(min=0.0)
    roundoff, tiny = ROUNDOFF[a["q"].dtype]
    relative = roundoff + torch.expm1(2 * delta) + _accumulation(keys, splits) + _in_base_2(a.get("sinks"))
    out_bound = relative[..., None] * sensitivity
    if a["q"].dtype == torch.float16:
        _, peak = call_reference(a, sm_scale=SHARP * scale, softcap=SHARP * a.get("softcap", 0.0), sinks=None)
        out_bound += (tiny * keys * (peak / SHARP - _with_sinks(lse, a)).exp())[..., None] * mean
    return Expected(out, lse, out_bound, delta, sensitivity)


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


def _magnitude(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float64).abs()


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
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    numbers = f"got {float(got[at]):.9g}, exact {float(want[at]):.9g}, allowed error {float(allowed[at]):.3g}"
    return float(ratio[at]), f"{name}{list(at)}: {numbers}; {int((ratio > 1).sum())} elements outside"


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
