"""Builds the launch of the kernel with specialised warps; `specialized_kernel.py` holds the kernel."""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments
from sglang_specverify.kernels.fused import Split, factors, packed_rows, strides_of, tree_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig, has_dependent_launch
from sglang_specverify.kernels.plan import Plan

#: The one architecture whose asynchronous matrix instructions the kernel is written in.
ARCH = "sm_90"
HEAD_DIMS = (64, 128)
#: Query rows of a program, in two consumers.
BLOCK_M = 128
#: Copies are of 16 bytes, which Triton must see in strides and addresses.
_ALIGNED = 16


def refusal_of_layers(problem: Problem, q_dtype: torch.dtype, cache_dtype: torch.dtype, arch: str) -> str | None:
    """Why the kernel serves no call of such layers on `arch` ("none": the interpreter), or None: what a plan knows of them."""
    if arch != ARCH:
        return f"it is written for {ARCH}, and this is {'an interpreter' if arch == 'none' else arch}"
    if problem.kind == "branches":
        return "it knows no branches of a draft decode"
    if q_dtype not in (torch.bfloat16, torch.float16):
        return f"q is {checks.names((q_dtype,))}, and it takes bfloat16 and float16"
    if cache_dtype != q_dtype:
        return f"the cache is {checks.names((cache_dtype,))}, and it takes q's type"
    if problem.head_dim != problem.v_head_dim or problem.head_dim not in HEAD_DIMS:
        return f"head dims {problem.head_dim} and {problem.v_head_dim}, and it takes 64 or 128 for both"
    if problem.ragged:
        return "the requests have different numbers of rows"
    if problem.window >= 0:
        return "the layer has a window"
    return None


def refusal(a: VerifyArguments | DraftArguments, problem: Problem, arch: str) -> str | None:
    """Why the kernel does not serve a checked call on `arch` ("none": the interpreter), or None; looks at no tensor's values."""
    for cache in (a.k_cache, a.v_cache):
        layers = refusal_of_layers(problem, a.q.dtype, cache.dtype, arch)
        if layers is not None:
            return layers
    if problem.out_dtype != a.q.dtype:
        return f"out is {checks.names((problem.out_dtype,))}, and it writes q's type"
    if problem.softcap > 0.0:
        return "the scores are capped"
    if a.slot_map is not None:
        return "slots are mapped to another pool"
    if isinstance(a.k_scale, torch.Tensor) or isinstance(a.v_scale, torch.Tensor):
        return "scales are tensors"
    numbers = factors(a, problem)
    if numbers.score <= 0.0:
        return "the scale of the scores is not positive in FP32"
    if not numbers.finite:
        return "a scale is infinite in FP32"
    if a.lse is not None and a.lse.dtype != torch.float32:
        return "the LSE is not FP32"
    for name, given in (("q", a.q), ("k_cache", a.k_cache), ("v_cache", a.v_cache), ("out", a.out)):
        if given is not None and not is_aligned(given):
            return f"strides or address of {name} are not multiples of {_ALIGNED} elements"
    return None


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the kernel's copies of 16 bytes can read it, strides and address."""
    at = 0 if tensor.device.type == "meta" else tensor.data_ptr()
    return at % 16 == 0 and all(stride % _ALIGNED == 0 for stride in tensor.stride()[:-1])


def tiles_of(problem: Problem) -> int:
    """Row tiles of one KV head of one request."""
    return -(-packed_rows(problem) // BLOCK_M)


def specialized_launch(
    a: VerifyArguments,
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: LaunchConfig,
    *,
    programs: int,
    plan: Plan | None = None,
    split: Split | None = None,
) -> Launch:
    """The launch that serves a checked call that `refusal` lets pass; `combine_parts.py` says whether another one follows it.

    Args:
        programs: multiprocessors of the device; each keeps one program.
        plan: the step's packed masks, for a tree.
        split: divide the prefix as its plan says, which was made for this kernel.

    Raises:
        ArgumentError: a configuration that the kernel is not written for; with one place in a ring it would wait for ever.
    """
    if (config.block_m, config.num_warps) != (BLOCK_M, 4) or config.block_n not in (64, 128) or config.num_stages < 2:
        raise ArgumentError("config", str(config), f"block_m {BLOCK_M}, block_n 64 or 128, num_warps 4, num_stages 2 or more")
    from sglang_specverify.kernels.specialized_kernel import specialized_kernel

    tiles, tree, numbers = tiles_of(problem), tree_of(problem), factors(a, problem)
    # Of one part of the prefix of every request: the plan knows how many parts there are.
    items = tiles * problem.kv_heads * (problem.batch if split is None else 1)
    most = items if split is None else items * split.plan.capacity
    by_launch = split is not None and split.plan.combined_by_launch
    return Launch(
        kernel=specialized_kernel,
        grid=(min(programs, most), 1, 1),
        arguments={
            "q": a.q,
            "k": a.k_cache,
            "v": a.v_cache,
            "table": a.table,
            "row_ids": a.row_ids,
            "prefix_lens": a.prefix_lens,
            "tree_bits": None if tree is None or plan is None else plan.bits,
            "tree_seen": None if tree is None or plan is None else plan.seen,
            "sinks": a.sinks,
            "out": out,
            "lse": lse,
            "plan": None if split is None else split.plan.buffer,
            "partial_out": None if split is None else split.partial_out,
            "partial_lse": None if split is None else split.partial_lse,
            "items": items,
            "tiles": tiles,
            "heads": problem.kv_heads,
            "queries": problem.queries,
            "tree_words": 1 if tree is None else tree.words,
            "scale": numbers.score,
            "out_scale": numbers.out,
            **strides_of(a, out, lse),
            "items_at": 0 if split is None else split.plan.items_at,
            "counters_at": 0 if split is None else split.plan.counters_at,
        },
        constants={
            "TREE": tree is not None,
            "GROUP": problem.group,
            "D": problem.head_dim,
            "PAGE_SIZE": problem.page_size,
            "HAS_SINKS": a.sinks is not None,
            "HAS_LSE": lse is not None,
            "SPLIT": split is not None,
            "LAST": not by_launch,
            "PDL": by_launch and has_dependent_launch(ARCH),
            "BLOCK_N": config.block_n,
            "STAGES": config.num_stages,
            "Q_BUFFERS": 2,
            # With 128 on average, these leave the two groups that copy 40 each.
            "CONSUMER_REGISTERS": 216,
        },
        options={"num_warps": config.num_warps, "maxnreg": config.max_registers},
    )
