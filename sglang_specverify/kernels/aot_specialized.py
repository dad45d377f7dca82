"""Launches of the kernel with specialised warps to compile ahead of time: every shape that it serves, on its one architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from sglang_specverify.kernels.aot_cases import Case, configured, meta
from sglang_specverify.kernels.arguments import VerifyArguments
from sglang_specverify.kernels.combine_parts import combinations
from sglang_specverify.kernels.fused import split_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.run import own_plan
from sglang_specverify.kernels.specialized import ARCH, refusal, specialized_launch

_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class SpecializedCase:
    """One call: that of a case of the fused kernel, with sinks or without, its prefix divided or not.

    Attributes:
        combine: who combines the parts, one of `COMBINATIONS`; as the table says where empty.
    """

    call: Case
    sinks: bool = False
    divide: bool = False
    combine: str = ""

    @property
    def name(self) -> str:
        own = " specialized_split " if self.divide else " specialized "
        return self.call.name.replace(" fused ", own) + " sinks" * self.sinks + (f" by {self.combine}" if self.combine else "")

    @property
    def arch(self) -> str:
        return self.call.arch

    def configured(self) -> tuple[LaunchConfig, int, str]:
        """The launch configuration, the spilled bytes that it accepts, and where both stand."""
        config, spills, source = configured(self.arch, "specialized", replace(self.call.facts(), split=self.divide))
        return replace(config, combine=self.combine or config.combine), spills, source

    def launch(self, config: LaunchConfig) -> Launch:
        """The launch of attention with tensors on the "meta" device."""
        return self.launches(config)[0]

    def launches(self, config: LaunchConfig) -> list[Launch]:
        """That one, and behind it one that combines parts where `config` has such."""
        a, problem = self.call.arguments()
        assert isinstance(a, VerifyArguments)
        if self.sinks:
            a = replace(a, sinks=meta(problem.q_heads, dtype=torch.float32))
        assert refusal(a, problem, self.arch) is None
        out = meta(problem.rows, problem.q_heads, problem.v_head_dim, dtype=a.q.dtype)
        lse = meta(problem.rows, problem.q_heads, dtype=torch.float32) if a.return_lse else None
        plan, _ = own_plan(a, problem, config, divide=self.divide, programs=_MULTIPROCESSORS, kernel="specialized")
        split = split_of(plan, None, problem.device) if self.divide and plan is not None else None
        first = specialized_launch(a, problem, out, lse, config, programs=_MULTIPROCESSORS, plan=plan, split=split)
        return [first, *combinations(a, problem, out, lse, ARCH, split)]


def specialized(arch: str, *, short: bool = False) -> Iterator[SpecializedCase]:
    """Every shape, or with `short` so many that each property has each value; none where there is no such kernel."""
    if arch != ARCH:
        return
    kinds: tuple[Literal["chain", "qlen_only", "full_mask"], ...] = ("chain", "qlen_only", "full_mask")
    dims, caches, features, groups = (64, 128), ("bf16", "fp16"), ("plain", "page_64", "large_pool"), (4, 8, 1, 5)
    if short:
        for k in range(9):
            case = Case(
                arch, "fused", kinds[k % 3], (dims[k % 2], dims[k % 2]), caches[k // 3 % 2], 256, groups[k % 4], features[k // 3]
            )
            yield SpecializedCase(case, sinks=k % 5 in (1, 2, 3), divide=k % 4 in (1, 2))
        # Of one request, whose few rows the table has combined by a launch; FP16 and pages, of which more registers spill.
        yield SpecializedCase(Case(arch, "fused", "full_mask", (128, 128), "fp16", 256, 4, "page_64", batch=1), divide=True)
        return
    for turn, (kind, dim, cache, feature) in enumerate(product(kinds, dims, caches, features)):
        case = Case(arch, "fused", kind, (dim, dim), cache, 256, groups[turn % len(groups)], feature)
        yield from (SpecializedCase(case, sinks=turn % 2 == 1, divide=divide) for divide in (False, True))
        # One request has few rows: there the table itself has them combined by a launch for head dims of 128.
        few, combine = replace(case, batch=1), "launch" if dim == 64 else ""
        yield SpecializedCase(few, sinks=turn % 2 == 1, divide=True, combine=combine)
