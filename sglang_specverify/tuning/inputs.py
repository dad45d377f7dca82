"""Tensors of a call to tune, and whether a launch computes it right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_specverify.kernels.aot_cases import cache_type
from sglang_specverify.kernels.arguments import Problem, VerifyArguments, check_verify
from sglang_specverify.kernels.configured import configured_launches
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.reference import run_verify
from sglang_specverify.kernels.run import table_facts
from sglang_specverify.kernels.table_schema import TableFacts
from sglang_specverify.tuning.buckets import KV_HEADS, Call

#: 2^-8 for each of the two roundings to BF16, of the softmax weights and of the result; and one more for summing in FP32 in
#: another order than the reference, which is far smaller. Relative to sum of weight * |v|.
_BOUND = 3 * 2.0**-8


@dataclass(frozen=True)
class Inputs:
    """A call's tensors, and where its result goes. `prefix` holds output and LSE of the prefix alone, for the tree tile."""

    call: Call
    arguments: VerifyArguments
    problem: Problem
    out: torch.Tensor
    lse: torch.Tensor
    prefix: tuple[torch.Tensor, torch.Tensor] | None

    def launches(self, config: LaunchConfig, arch: str) -> list[Launch]:
        """Attention with `config`; before it a plan where the call needs one, behind it what combines where a launch does."""
        divide, merge = self.call.operation == "fused_split", self.prefix is not None
        return configured_launches(self.arguments, self.problem, self.out, self.lse, config, arch, divide=divide, merge=merge)

    def reset(self) -> None:
        """Fill the result with what a launch must overwrite, or must find there."""
        if self.prefix is None:
            self.out.fill_(torch.nan)
            self.lse.fill_(torch.nan)
        else:
            self.out.copy_(self.prefix[0])
            self.lse.copy_(self.prefix[1])


def make(call: Call, device: str, arch: str, seed: int = 0) -> Inputs:
    """Normal values, and slots in no order, as in a pool that has served for a while."""
    arguments = _arguments(call, device, arch, torch.Generator(device).manual_seed(seed))
    problem = check_verify(arguments)
    shape = problem.rows, problem.q_heads
    out = torch.empty(*shape, problem.v_head_dim, dtype=torch.bfloat16, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    prefix = _prefix(arguments) if call.operation == "tree_suffix" else None
    return Inputs(call, arguments, problem, out, lse, prefix)


def facts_of(call: Call, arch: str) -> TableFacts:
    """What the launch tables know of the call: of the same arguments, without memory behind them."""
    a = _arguments(call, "meta", arch, None)
    return table_facts(check_verify(a), a.k_cache.dtype, a.q.dtype, split=call.operation == "fused_split")


def _arguments(call: Call, device: str, arch: str, gen: torch.Generator | None) -> VerifyArguments:
    rows, heads, width = call.batch * call.queries, KV_HEADS * call.group, call.prefix + call.queries
    slots = call.batch * width

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device, dtype=torch.float32)

    cache = torch.bfloat16 if call.cache_bits == 16 else cache_type("e4m3", arch)
    mask = None
    if call.kind == "qlen_only":
        mask = torch.rand(call.batch, call.queries, call.queries, generator=gen, device=device) < 0.3
        mask = mask.tril() | torch.eye(call.queries, dtype=torch.bool, device=device)
    common: dict[str, Any] = {
        "q": normal(rows, heads, call.head_dim).to(torch.bfloat16),
        "k_cache": normal(slots, KV_HEADS, call.head_dim).to(cache),
        "v_cache": normal(slots, KV_HEADS, call.head_dim).to(cache),
        "table": torch.randperm(slots, generator=gen, device=device).to(torch.int32).view(call.batch, width),
        "row_ids": torch.arange(call.batch, device=device, dtype=torch.int32),
        "prefix_lens": torch.full((call.batch,), call.prefix, device=device, dtype=torch.int32),
    }
    return VerifyArguments(
        **common, page_size=1, num_draft_tokens=call.queries, q_offsets=None, slot_map=None, mask=mask, mask_layout="qlen_only",
        mask_offsets=None, positions=None, window=-1, softcap=0.0, sinks=None, k_scale=1.0, v_scale=1.0, sm_scale=None,
        deterministic=False, out=None, lse=None, return_lse=True,
    )  # fmt: skip


def _prefix(a: VerifyArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the prefix alone: a tree in which no draft is visible."""
    assert a.num_draft_tokens is not None
    nothing = torch.zeros(len(a.prefix_lens), a.num_draft_tokens, a.num_draft_tokens, dtype=torch.bool, device=a.q.device)
    alone = replace(a, mask=nothing)
    return _reference(alone)


def _reference(a: VerifyArguments) -> tuple[torch.Tensor, torch.Tensor]:
    result = run_verify(a, check_verify(a))
    assert isinstance(result, tuple)
    return result


@dataclass(frozen=True)
class Expected:
    """What a call must compute: output, LSE, and the sum of weight * |v|, which scales the error that is allowed."""

    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    sensitivity: torch.Tensor

    def problem(self, config: LaunchConfig, arch: str) -> str:
        """Run a launch and say what is wrong with its result; empty where nothing is."""
        self.inputs.reset()
        for launch in self.inputs.launches(config, arch):
            launch.run()
        return compare(self.inputs.out, self.inputs.lse, self)


def expect(inputs: Inputs) -> Expected:
    out, lse = _reference(inputs.arguments)
    a = inputs.arguments
    magnitude = a.v_cache.float().abs().to(a.q.dtype)
    sensitivity, _ = _reference(replace(a, v_cache=magnitude))
    return Expected(inputs, out, lse, sensitivity)


def compare(out: torch.Tensor, lse: torch.Tensor, want: Expected) -> str:
    error, bound = (out.float() - want.out.float()).abs(), _BOUND * want.sensitivity.float() + 1e-6
    # Negated, so that NaN is wrong too.
    if bool((~(error <= bound)).any()):
        return f"wrong output: {float((error / bound).nan_to_num(torch.inf).max()):.1f} times the error allowed"
    if bool((~((lse - want.lse).abs() <= 1e-3)).any()):
        return "wrong LSE"
    return ""
