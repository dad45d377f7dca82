"""How far a sparse MLA decode kernel may lie from the FP64 oracle, and the gates that say what is wrong with a result.

Unit roundoffs (half a spacing, relative to the lower end of a binade): E4M3 2^-4, BF16 2^-8, FP32 2^-24. S and U are the
oracle's sensitivity and underflow, see `reference.py`.

A kernel that rounds its weights P to type T, accumulates in FP32 and rounds once to BF16 has

    |out - out*| <= (u_T + u_BF16 + 1e-5) S + 1e-6

because rounding P changes weight k by at most u_T w_k, so the sum by at most u_T S; the output's rounding changes it by
u_BF16 |out| <= u_BF16 S; an FP32 partial output rounded to BF16 between split and reducer is one more u_BF16 S. Products of these
are within the sum, because a rounding error is at most u / (1 + u). 1e-5 S is what FP32 leaves: exponentials (relative 2^-22),
sums, the rescaling between tiles. 1e-6 is for outputs near zero. BF16 has FP32's exponents, so no weight that counts underflows
in it.

P in E4M3 is stored as 448 exp(z - m): below its smallest normal number half a spacing is 2^-10, so a weight exp(z - L) changes by
up to 2^-10 / 448 * exp(m - L) absolutely, whatever it is, which summed over the keys is 2^-10 / 448 * U. m may be the maximum of
the keys so far, or of a part of them: it is no more than that of all, which U has.

The products q K are exact in FP32 and scores are sums of 512 of them: no bound on their accumulation is part of this; that
is what the LSE gate measures.
"""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla.reference import CONTRACTS, Reference

U_E4M3, U_BF16 = 2.0**-4, 2.0**-8

#: What FP32 arithmetic leaves, relative to S, and for outputs near zero.
FP32_SHARE, ABSOLUTE = 1e-5, 1e-6

#: Half the spacing of E4M3's subnormal numbers, over the 448 that P is scaled by.
E4M3_UNDERFLOW = 2.0**-10 / 448

#: Absolute error of an LSE of ordinary size. A key of average weight that is missing or counted in error among n moves it by 1/n.
LSE_ABSOLUTE = 1e-5

#: Relative error of an LSE whose spacing in FP32 is not small against 1e-5 (from |lse| = 42 on): four roundings of 2^-24 each,
#: of the scaled score, its product with log2 e, the sum of maximum and logarithm, and the product with ln 2.
LSE_RELATIVE = 2.0**-22

#: Relative L2 error over a whole output. One rounding with spacing d at significand 1 leaves d / sqrt(12) times the RMS of 1 / s
#: over significands s spread log-uniformly over [1, 2), sqrt(3 / (8 ln 2)) = 0.736: 1.7e-3 for BF16, 2.7e-2 for E4M3. With
#: independent keys it carries over to the output: P and output in BF16 2.3e-3, with BF16 partials 2.9e-3; P in E4M3 2.7e-2. The
#: gates are about twice that.
RELATIVE_L2 = {"exact": 5e-3, "e4m3": 5.4e-2}


def output_bound(
    reference: Reference, contract: str = "exact", *, bf16_partials: bool = False, typical: bool = False
) -> torch.Tensor:
    """FP64 [B, Sq, H, 512]: how far each element of a BF16 output may lie from `reference.out`.

    Args:
        contract: "exact" for P in BF16, "e4m3" for P in E4M3.
        bf16_partials: whether the outputs of splits are kept in BF16.
        typical: for the exact contract, the sharper (2^-8 + 1e-5) S + 1e-6, which two roundings of up to 2^-8 each can exceed in
            the worst case and do not for many keys of like weight, where the errors of P average out. Not with BF16 partials.

    Raises:
        ArgumentError: there is no such bound.
    """
    if contract not in CONTRACTS:
        raise ArgumentError("contract", repr(contract), " or ".join(CONTRACTS))
    if typical and (contract != "exact" or bf16_partials):
        raise ArgumentError("typical", "True", "False for the e4m3 contract and for BF16 partials")
    if contract == "e4m3":
        # 3 * 2^-8 and not 2: room for BF16 partials in every case, a sixth of what P has.
        share = U_E4M3 + 3 * U_BF16 + FP32_SHARE
        return share * reference.sensitivity + E4M3_UNDERFLOW * reference.underflow + ABSOLUTE
    roundings = 1 if typical else 3 if bf16_partials else 2
    return (roundings * U_BF16 + FP32_SHARE) * reference.sensitivity + ABSOLUTE


def lse_bound(reference: Reference) -> torch.Tensor:
    """FP64 [B, Sq, H]: how far an FP32 LSE may lie from a finite `reference.lse`; an infinite one must be met exactly."""
    return (LSE_RELATIVE * reference.lse.abs()).clamp_min(LSE_ABSOLUTE)


def relative_l2(out: torch.Tensor, reference: Reference) -> float:
    """|out - out*| / |out*| over all elements at which out* is finite; 0 where both are 0."""
    finite = reference.out.isfinite()
    error, size = (out.double() - reference.out)[finite].norm(), reference.out[finite].norm()
    return float(error / size) if float(size) > 0 else float("inf") if float(error) > 0 else 0.0


def rejections(
    out: torch.Tensor,
    lse: torch.Tensor,
    reference: Reference,
    contract: str = "exact",
    *,
    bf16_partials: bool = False,
    typical: bool = False,
    l2: bool = True,
) -> list[str]:
    """What is wrong with a result, one line for each gate that it fails; empty where it is accepted.

    Args:
        out: [B, Sq, H, 512], as the kernel wrote it.
        lse: [B, Sq, H], likewise.
        bf16_partials, typical: see `output_bound`.
        l2: also the relative L2 error; its gate holds for keys that do not cancel each other and outputs that are not all tiny.
    """
    bound = output_bound(reference, contract, bf16_partials=bf16_partials, typical=typical)
    found = _beyond("out", out, reference.out, bound) + _beyond("lse", lse, reference.lse, lse_bound(reference))
    if out.shape != reference.out.shape:
        return found
    limit = RELATIVE_L2[contract]
    # Written so that NaN fails.
    if l2 and not (measured := relative_l2(out, reference)) <= limit:
        found.append(f"out: relative L2 error {measured:.3g}, allowed {limit:.3g}")
    return found


def _beyond(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> list[str]:
    if got.shape != want.shape:
        return [f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"]
    value = got.double()
    near = (value - want).abs() <= bound
    # A row that reads NaN gives NaN, and an infinity is met exactly: their difference is NaN and fails above.
    right = torch.where(want.isfinite(), near, (value == want) | (value.isnan() & want.isnan()))
    if bool(right.all()):
        return []
    excess = ((value - want).abs() / bound).masked_fill(right, -1.0).nan_to_num(nan=torch.inf)
    at = torch.unravel_index(excess.argmax(), want.shape)
    place = f"worst at {[int(i) for i in at]}: {value[at]:.6g} for {want[at]:.6g} ± {bound[at]:.3g}"
    return [f"{name}: {int((~right).sum())} of {right.numel()} beyond the bound, {place}"]
