"""Launches of a call with a configuration that is given and not looked up: for compiling ahead of time and for tuning."""

from __future__ import annotations

import torch

from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments
from sglang_specverify.kernels.fused import fused_launch, split_of, tree_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.plan import Plan, plan_launch, with_buffer
from sglang_specverify.kernels.run import masks_of, shape_of


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
    """The attention launch of a checked call, the last one, and before it that of a step's plan where it needs one.

    Args:
        out, lse: written in place; with `merge` they hold the prefix's result.
        divide: divide the prefix over programs.
        programs: programs that run at once; what the device has where None.
    """
    tree, plan, split, before = tree_of(problem), None, None, []
    if divide or tree is not None:
        shape = shape_of(problem, config, deterministic=a.deterministic, programs=programs)
        plan = with_buffer(Plan(a.prefix_lens, problem.batch, shape, problem.window, divide, tree), problem.device, None)
        before = [plan_launch(a.prefix_lens, a.row_ids, plan, masks_of(a, problem))]
        split = split_of(plan, None, problem.device) if divide else None
    return [*before, fused_launch(a, problem, out, lse, config, arch, plan=plan, split=split, merge=merge)]
