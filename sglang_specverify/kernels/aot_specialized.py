"""Launches of the kernel with specialised warps to compile ahead of time: every shape that it serves, on its one architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from sglang_specverify.kernels.aot_cases import Case, configured, meta
from sglang_specverify.kernels.arguments import VerifyArguments
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.run import own_plan
from sglang_specverify.kernels.specialized import ARCH, refusal, specialized_launch

_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class SpecializedCase:
    """One call: that of a case of the fused kernel, with sinks or without."""

    call: Case
    sinks: bool = False

    @property
    def name(self) -> str:
        return self.call.name.replace(" fused ", " specialized ") + " sinks" * self.sinks

    @property
    def arch(self) -> str:
        return self.call.arch

    def configured(self) -> tuple[LaunchConfig, int, str]:
        """The launch configuration, the spilled bytes that it accepts, and where both stand."""
        return configured(self.arch, "specialized", self.call.facts())

    def launch(self, config: LaunchConfig) -> Launch:
        """The launch with tensors on the "meta" device."""
        a, problem = self.call.arguments()
        assert isinstance(a, VerifyArguments)
        if self.sinks:
            a = replace(a, sinks=meta(problem.q_heads, dtype=torch.float32))
        assert refusal(a, problem, self.arch) is None
        out = meta(problem.rows, problem.q_heads, problem.v_head_dim, dtype=a.q.dtype)
        lse = meta(problem.rows, problem.q_heads, dtype=torch.float32) if a.return_lse else None
        plan, _ = own_plan(a, problem, config, divide=False)
        return specialized_launch(a, problem, out, lse, config, programs=_MULTIPROCESSORS, plan=plan)


def specialized(arch: str, *, short: bool = False) -> Iterator[SpecializedCase]:
    """Every shape, or with `short` so many that each property has each value; none where there is no such kernel."""
    if arch != ARCH:
        return
    kinds: tuple[Literal["chain", "qlen_only", "full_mask"], ...] = ("chain", "qlen_only", "full_mask")
    features, groups = ("plain", "page_64", "large_pool"), (4, 8, 1, 5)
    everything = product(kinds, (64, 128), ("bf16", "fp16"), features)
    for turn, (kind, dim, cache, feature) in enumerate(everything):
        if not short or turn % 5 == 0:
            case = Case(arch, "fused", kind, (dim, dim), cache, 256, groups[turn % len(groups)], feature)
            yield SpecializedCase(case, sinks=turn % 2 == 1)
