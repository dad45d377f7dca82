"""The drafts of a verify as one tensor-core tile under the mask, merged in place into a prefix result.

    out = (exp(lse_p) out_p + sum over visible drafts of exp(s) v_scale v) / (exp(lse_p) + sum of exp(s) + exp(sink))
    lse = log(exp(lse_p) + sum over visible drafts of exp(s))

The prefix result is another kernel's, usually FlashAttention's: without sinks, and within the window where there is one.
"""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.kernels.arguments import Problem, Scale, VerifyArguments, check_verify
from sglang_specverify.kernels.fused import check_plan, fused_launch, refusal
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton
from sglang_specverify.kernels.plan import Plan
from sglang_specverify.kernels.run import config_of, own_plan


def tree_suffix_merge(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    row_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    *,
    page_size: int = 1,
    num_draft_tokens: int | None = None,
    q_offsets: torch.Tensor | None = None,
    slot_map: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_layout: str = "qlen_only",
    mask_offsets: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sm_scale: float | None = None,
    deterministic: bool = False,
    plan: Plan | None = None,
) -> None:
    """Attend the drafts of each request and merge them into `prefix_out` and `prefix_lse`, which are overwritten.

    Args:
        prefix_out: [T, Hq, Dv] bf16, fp16 or fp32, any row and head stride: the attention of every row over its prefix,
            times v_scale, without sinks; not read where its LSE is -inf.
        prefix_lse: FP32 [T, Hq], any strides: natural logarithm, -inf (or +inf, as some kernels write it) where a row saw no
            key of the prefix.
        plan: made by `plan_verify_attention` for these shapes and masks; one is made for this call where None.

    All others are those of `verify_attention`; rows past the real ones are neither read nor written. A chain is the
    triangular mask, with `mask` None. Needs Triton: on a CPU its interpreter.

    Raises:
        ArgumentError: an argument that cannot be served; nothing was written.
        SpecverifyError: the kernel does not run here, or does not take these types.
    """
    a = VerifyArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, table=table, row_ids=row_ids, prefix_lens=prefix_lens, page_size=page_size,
        num_draft_tokens=num_draft_tokens, q_offsets=q_offsets, slot_map=slot_map, mask=mask, mask_layout=mask_layout,
        mask_offsets=mask_offsets, positions=positions, window=window, softcap=softcap, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale, sm_scale=sm_scale, deterministic=deterministic, out=prefix_out, lse=prefix_lse, return_lse=True,
    )  # fmt: skip
    for name, value in (("prefix_out", prefix_out), ("prefix_lse", prefix_lse)):
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(name, type(value).__name__, "a tensor: the result of the prefix")
    problem = check_verify(a)
    device = problem.device
    if not uses_triton(device):
        raise SpecverifyError(
            f"tree_suffix_merge is a Triton kernel, and none run on {device.type} here",
            "use CUDA tensors, or set TRITON_INTERPRET=1 before triton is imported",
        )
    if reason := refusal(a, problem, arch_of(device)):
        raise SpecverifyError(f"tree_suffix_merge does not take this call: {reason}", "use the types it takes")
    if problem.batch > 0:
        for launch in tree_suffix_launches(a, problem, arch_of(device), plan):
            launch.run()


def tree_suffix_launches(a: VerifyArguments, problem: Problem, arch: str, plan: Plan | None = None) -> list[Launch]:
    """The launch of a checked call, and before it that of a plan where one is needed and none came."""
    assert a.out is not None
    config = config_of("tree_suffix", arch, problem, a.k_cache.dtype, a.q.dtype, deterministic=a.deterministic)
    before: list[Launch] = []
    if plan is not None:
        check_plan(plan, a, problem, deterministic=plan.shape.deterministic)
    else:
        plan, before = own_plan(a, problem, config, divide=False)
    return [*before, fused_launch(a, problem, a.out, a.lse, config, arch, plan=plan, merge=True)]
