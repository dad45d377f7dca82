"""Two attention results over disjoint keys, merged into the result over both.

    m   = max(lse_a, lse_b),   w_a = exp(lse_a - m),   w_b = exp(lse_b - m)
    out = (w_a * out_a + w_b * out_b) / (w_a + w_b)
    lse = m + log(w_a + w_b)

which is the composition of attention states (FlashInfer, arXiv:2501.01005, section 2.2). A state of no keys is the neutral
element: its LSE is -inf, or +inf, which is how FlashAttention 2 marks a row without keys; no finite scores reach +inf. Its
output is undefined memory and is not read. Two of them merge to (0, -inf).
"""

from __future__ import annotations

import torch

from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton

#: Types of a state's output.
STATES = (torch.bfloat16, torch.float16, torch.float32)

#: Elements of `out` that a program makes: 16 a thread with 4 warps of 32.
_ELEMENTS = 2048


@torch.no_grad()
def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states a and b, row by row and head by head, in FP32.

    A sink may be in neither state: add it to the merged one.

    Args:
        out_a, out_b: [T, Hq, Dv] bf16, fp16 or fp32, each its own type and row and head strides, last stride 1.
        lse_a, lse_b: FP32 [T, Hq], any strides: natural logarithm over the visible keys; -inf or +inf for no keys, whose
            output may hold anything. NaN gives NaN.
        out: where the merged output goes, like out_a, which it may be; a new tensor of out_a's type where None.
        lse: where the merged LSE goes, FP32 [T, Hq] with any strides; it may be lse_a. A new tensor where None.

    Returns:
        (out, lse); (0, -inf) where both states are empty.

    Raises:
        ArgumentError: a shape, type, device or stride that cannot be served; nothing was written.
    """
    out, lse = _check(out_a, lse_a, out_b, lse_b, out, lse, STATES, (torch.float32,))
    if uses_triton(out.device):
        merge_states_launch(out_a, lse_a, out_b, lse_b, out, lse, arch_of(out.device)).run()
        return out, lse
    return _run_reference(out_a, lse_a, out_b, lse_b, out, lse)


@torch.no_grad()
def merge_states_reference(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` in FP64, rounded once; outputs and LSEs may be FP64 too. Runs on any device."""
    lses = (torch.float32, torch.float64)
    out, lse = _check(out_a, lse_a, out_b, lse_b, out, lse, checks.FLOATS, lses)
    return _run_reference(out_a, lse_a, out_b, lse_b, out, lse)


def merge_fp64(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula on FP64 copies: out [..., Dv], lse [...]."""
    lses = torch.stack([lse_a.double(), lse_b.double()])
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    peak = lses.amax(dim=0)
    weights = torch.exp(lses - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weights.sum(dim=0)
    empty = total == 0
    values = torch.stack([out_a.double(), out_b.double()]).masked_fill((lses == -torch.inf)[..., None], 0.0)
    shares = weights / total.masked_fill(empty, 1.0)
    return (shares[..., None] * values).sum(dim=0), (peak + total.log()).masked_fill(empty, -torch.inf)


def _run_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    merged, merged_lse = merge_fp64(out_a, lse_a, out_b, lse_b)
    return out.copy_(merged), lse.copy_(merged_lse)


def merge_states_launch(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    arch: str,
) -> Launch:
    """The launch that computes `merge_states` on checked arguments of an architecture."""
    import triton

    from sglang_specverify.kernels.merge_kernel import merge_states_kernel

    rows, heads, dim = out.shape
    block_dv = triton.next_power_of_2(max(dim, 1))
    block_rows = max(1, _ELEMENTS // block_dv)
    arguments = {
        "out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse, "rows": rows, "heads": heads,
        "a_row": out_a.stride(0), "a_head": out_a.stride(1), "b_row": out_b.stride(0), "b_head": out_b.stride(1),
        "out_row": out.stride(0), "out_head": out.stride(1), "lse_a_row": lse_a.stride(0), "lse_a_head": lse_a.stride(1),
        "lse_b_row": lse_b.stride(0), "lse_b_head": lse_b.stride(1), "lse_row": lse.stride(0), "lse_head": lse.stride(1),
    }  # fmt: skip
    return Launch(
        kernel=merge_states_kernel,
        grid=(triton.cdiv(rows * heads, block_rows), 1, 1),
        arguments=arguments,
        constants={"DV": dim, "BLOCK_ROWS": block_rows, "BLOCK_DV": block_dv},
        options={"num_warps": 2 if arch.startswith("gfx") else 4},
    )


def _check(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    states: tuple[torch.dtype, ...],
    lses: tuple[torch.dtype, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check all and give the outputs, made where the caller has none."""
    rows, heads, dim = checks.tensor("out_a", out_a, ("T", "Hq", "Dv"), states, unit_last=True).shape
    device = out_a.device
    checks.tensor("lse_a", lse_a, (rows, heads), lses, device)
    checks.tensor("out_b", out_b, (rows, heads, dim), states, device, unit_last=True)
    checks.tensor("lse_b", lse_b, (rows, heads), lses, device)
    if out is not None:
        checks.output("out", checks.tensor("out", out, (rows, heads, dim), states, device, unit_last=True))
    if lse is not None:
        checks.output("lse", checks.tensor("lse", lse, (rows, heads), lses, device))
    out = torch.empty((rows, heads, dim), dtype=out_a.dtype, device=device) if out is None else out
    return out, torch.empty((rows, heads), dtype=lse_a.dtype, device=device) if lse is None else lse
