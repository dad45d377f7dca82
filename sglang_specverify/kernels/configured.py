"""Launches of a call with a configuration that is given and not looked up: for compiling ahead of time and for tuning."""

from __future__ import annotations

import torch

from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments
from sglang_specverify.kernels.combine_parts import combinations
from sglang_specverify.kernels.fused import fused_launch, split_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.run import own_plan


def configured_launches(
    a: VerifyArguments | DraftArguments,
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: LaunchConfig,
    arch: str,
    *,
    divide: bool = False,
    merge: bool = False,
    programs: int | None = None,
) -> list[Launch]:
    """The attention launch of a checked call; before it that of a step's plan where it needs one, behind it one that combines.

    Args:
        out, lse: written in place; with `merge` they hold the prefix's result.
        divide: divide the prefix over programs.
        programs: programs that run at once; what the device has where None.
    """
    plan, before = own_plan(a, problem, config, divide=divide, programs=programs)
    split = split_of(plan, None, problem.device) if divide and plan is not None else None
    first = fused_launch(a, problem, out, lse, config, arch, plan=plan, split=split, merge=merge)
    return [*before, first, *combinations(a, problem, out, lse, arch, split)]
