"""Builds the launch of the fused kernel from the arguments of a call; `fused_kernel.py` holds the kernel and its formula."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.arguments import CommonArguments, DraftArguments, Problem, Scale, VerifyArguments
from sglang_specverify.kernels.launch import Launch, LaunchConfig, has_dependent_launch
from sglang_specverify.kernels.plan import Plan, Tree, padded

LOG2_E = math.log2(math.e)
#: Types of Q; a cache has Q's or an FP8 one.
QUERIES = (torch.bfloat16, torch.float16, torch.float32)
_KINDS = {"chain": 0, "qlen_only": 1, "full_mask": 1, "branches": 2}


@dataclass(frozen=True)
class Split:
    """A plan that divides, and the scratch that its parts need."""

    plan: Plan
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


def call_of(problem: Problem, q_dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[object, ...]:
    """What a plan's launch configuration and masks depend on, beside its shape."""
    return problem.kind, problem.ragged, problem.head_dim, problem.page_size, q_dtype, cache_dtype


def check_plan(plan: Plan, a: VerifyArguments | DraftArguments, problem: Problem, *, deterministic: bool) -> None:
    """Raises `ArgumentError` for a plan that was made for another call."""
    call = call_of(problem, a.q.dtype, a.k_cache.dtype)
    if plan.call and plan.call != call:
        names = "(kind, ragged, head dim, page size, dtype of q, of the cache)"
        raise ArgumentError("plan", f"a plan made for {names} = {plan.call}", f"one made for this call's {call}")
    shape = plan.shape
    tree = tree_of(problem)
    names = "(bs, packed rows, Hkv, Dv, window, deterministic, tree)"
    # Packed masks know no window.
    window = plan.window if plan.divides else problem.window
    wanted = (problem.batch, packed_rows(problem), problem.kv_heads, problem.v_head_dim, problem.window, deterministic, tree)
    has = (plan.batch, shape.rows, shape.kv_heads, shape.v_head_dim, window, shape.deterministic, plan.tree)
    if wanted != has:
        raise ArgumentError("plan", f"a plan made for {names} = {has}", f"one made for this call's {wanted}")
    if plan.buffer.device != problem.device:
        raise ArgumentError("plan", f"a plan on {plan.buffer.device}", f"one on q's device, {problem.device}")


def tree_of(problem: Problem) -> Tree | None:
    """The size of a call's packed masks."""
    if problem.kind not in ("qlen_only", "full_mask"):
        return None
    rows = problem.rows if problem.ragged else problem.batch * (problem.queries or 1)
    return Tree(rows, -(-(problem.queries or 1) // 64) + 1)


def split_of(plan: Plan, workspace: torch.Tensor | None, device: torch.device) -> Split:
    """`plan` with its scratch cut from `workspace`, a new one where that is None.

    Raises:
        ArgumentError: a workspace of another type or device, or too small.
    """
    shape = plan.shape
    size = shape.workspace_bytes(plan.batch)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    checks.tensor("workspace", workspace, (f">= {size}",), (torch.uint8,), device)
    misaligned = device.type != "meta" and workspace.data_ptr() % 16 != 0
    if workspace.numel() < size or not workspace.is_contiguous() or misaligned:
        came = f"{workspace.numel()} bytes" + (", not at a multiple of 16" if misaligned else "")
        raise ArgumentError("workspace", came, f"{size} contiguous bytes or more, at a multiple of 16")
    tiles = shape.partial_tiles(plan.batch) * shape.config.block_m
    outs = tiles * padded(shape.v_head_dim) * 4
    return Split(plan, workspace[:outs].view(torch.float32), workspace[outs : outs + tiles * 4].view(torch.float32))


def packed_rows(problem: Problem) -> int:
    """Query rows of a KV head: those of a request times the heads that share it."""
    return (problem.queries or 1) * problem.group


def fused_launch(
    a: VerifyArguments | DraftArguments,
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: LaunchConfig,
    arch: str,
    *,
    plan: Plan | None = None,
    split: Split | None = None,
    merge: bool = False,
) -> Launch:
    """The launch of the fused kernel for a checked call; `combine_parts.py` says whether another one follows it.

    Args:
        out, lse: written in place; with `merge` they hold the prefix's result, and no prefix is read.
        plan: the step's metadata; needed for a tree, whose bits it holds.
        split: divide the prefix as the plan says.
    """
    from sglang_specverify.kernels.fused_kernel import verify_attention_kernel

    verify = a if isinstance(a, VerifyArguments) else None
    draft = a if isinstance(a, DraftArguments) else None
    tiles = -(-packed_rows(problem) // config.block_m)
    k_scale, v_scale = (scale_of(value)[0] for value in (a.k_scale, a.v_scale))
    numbers = factors(a, problem)
    queries = problem.queries or 1
    parts_ahead, combine = _parts_ahead(config, problem.v_head_dim)
    by_launch = split is not None and split.plan.combined_by_launch
    tree = tree_of(problem)
    windowed = problem.window >= 0
    positions = verify.positions if verify is not None and windowed and problem.kind != "chain" else None
    slots = None if draft is None else draft.draft_slots
    return Launch(
        kernel=verify_attention_kernel,
        grid=(tiles, problem.kv_heads, problem.batch if split is None else split.plan.capacity),
        arguments={
            "q": a.q,
            "k": a.k_cache,
            "v": a.v_cache,
            "table": a.table,
            "row_ids": a.row_ids,
            "prefix_lens": a.prefix_lens,
            "q_offsets": None if verify is None else verify.q_offsets,
            "slot_map": a.slot_map,
            "tree_bits": None if plan is None else plan.bits,
            "tree_seen": None if plan is None else plan.seen,
            "positions": positions,
            "draft_slots": slots,
            "sinks": a.sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "out": out,
            "lse": lse,
            "plan": None if split is None else split.plan.buffer,
            "partial_out": None if split is None else split.partial_out,
            "partial_lse": None if split is None else split.partial_lse,
            "queries": queries,
            "tree_words": 1 if tree is None else tree.words,
            "branch_keys": 1 if draft is None else draft.step + 1,
            "window": problem.window,
            "scale": numbers.score,
            "softcap": numbers.cap,
            "out_scale": numbers.out,
            **strides_of(a, out, lse),
            "draft_row": 0 if slots is None else slots.stride(0),
            "draft_branch": 0 if slots is None else slots.stride(1),
            "draft_step": 1 if slots is None else slots.stride(2),
            "counters_at": 0 if split is None else split.plan.counters_at,
        },
        constants={
            "KIND": _KINDS[problem.kind],
            "RAGGED": problem.ragged,
            "GROUP": problem.group,
            "D": problem.head_dim,
            "DV": problem.v_head_dim,
            "PAGE_SIZE": problem.page_size,
            "HAS_SLOT_MAP": a.slot_map is not None,
            "HAS_WINDOW": windowed,
            "HAS_SOFTCAP": problem.softcap > 0,
            "HAS_SINKS": a.sinks is not None,
            "HAS_LSE": lse is not None,
            "K_SCALE": scale_mode(k_scale),
            "V_SCALE": scale_mode(v_scale),
            "BY_FP16": e5m2_by_fp16(arch, a.k_cache, a.v_cache),
            "SPLIT": split is not None,
            "MERGE": merge,
            # A loop of its own for what needs no mask pays where the prefix is long; a window masks everything.
            "PEEL": bool(config.peel) and not merge and not windowed,
            "SIGNED": k_scale is not None or numbers.score <= 0.0,
            "AHEAD": config.max_registers == 0,
            "COMBINE": combine,
            "PARTS_AHEAD": parts_ahead,
            "LAST": not by_launch,
            "PDL": by_launch and has_dependent_launch(arch),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": padded(problem.head_dim),
            "BLOCK_DV": padded(problem.v_head_dim),
        },
        options=config.options(arch),
    )


def _parts_ahead(config: LaunchConfig, v_head_dim: int) -> tuple[bool, int]:
    """Whether the combining program reads four parts ahead: where its registers hold them in FP32 beside their sum and some
    hundred others. And how many it reads behind each other elsewhere: as many as some 96 registers hold.
    """
    registers = config.max_registers or min(255, 65536 // (32 * config.num_warps * config.ctas_per_sm))
    of_sum = config.block_m * padded(v_head_dim) / (32 * config.num_warps)
    ahead = 5 * of_sum <= registers - 104
    return ahead, 1 if ahead else max(1, min(8, int(96 / of_sum)))


def strides_of(a: CommonArguments, out: torch.Tensor, lse: torch.Tensor | None) -> dict[str, int]:
    """Strides of what an attention kernel reads and writes, by its arguments' names."""
    return {
        "q_row": a.q.stride(0),
        "q_head": a.q.stride(1),
        "k_slot": a.k_cache.stride(0),
        "k_head": a.k_cache.stride(1),
        "v_slot": a.v_cache.stride(0),
        "v_head": a.v_cache.stride(1),
        "table_stride": a.table.stride(0),
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "lse_row": 0 if lse is None else lse.stride(0),
        "lse_head": 0 if lse is None else lse.stride(1),
    }


@dataclass(frozen=True)
class Factors:
    """The numbers that a kernel multiplies with, as the FP32 values that reach it: a small one is 0 there, a large one infinite.

    Attributes:
        score: of q . k, in units of log 2; with a soft cap twice as much, over the cap.
        cap: the soft cap in those units.
        out: of the output.
    """

    score: float
    cap: float
    out: float

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (self.score, self.cap, self.out)))


def factors(a: CommonArguments, problem: Problem) -> Factors:
    """Those of a checked call, without what a tensor of scales adds on the device."""
    doubled = 2.0 / problem.softcap if problem.softcap > 0 else 1.0
    score = problem.sm_scale * scale_of(a.k_scale)[1] * doubled * LOG2_E
    return Factors(*map(as_fp32, (score, problem.softcap * LOG2_E, scale_of(a.v_scale)[1])))


def as_fp32(value: float) -> float:
    return ctypes.c_float(value).value


def scale_of(value: Scale) -> tuple[torch.Tensor | None, float]:
    """A tensor to read on the device, or a number to fold in."""
    return (value, 1.0) if isinstance(value, torch.Tensor) else (None, float(value))


def scale_mode(value: torch.Tensor | None) -> Any:
    return 0 if value is None else 1 if value.numel() == 1 else 2


def refusal(a: VerifyArguments | DraftArguments, problem: Problem, arch: str) -> str | None:
    """Why the fused kernel does not serve a checked call on `arch` ("none": the interpreter), or None."""
    if a.q.dtype not in QUERIES:
        return f"q is {checks.names((a.q.dtype,))}, and it takes {checks.names(QUERIES)}"
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        if cache.dtype != a.q.dtype and cache.dtype not in checks.FP8:
            return f"{name} is {checks.names((cache.dtype,))}, and it takes q's type or FP8"
        if cache.dtype in checks.FP8 and arch != "none" and not _fp8_runs(cache.dtype, arch):
            return f"{name} is {checks.names((cache.dtype,))}, which {arch} does not convert"
    if max(problem.head_dim, problem.v_head_dim) > 256:
        return f"head dims {problem.head_dim} and {problem.v_head_dim}, and it takes 256 at most"
    if problem.ragged and problem.queries is None:
        return "q_offsets came without num_draft_tokens, the most rows of a request, which sets the grid"
    if not factors(a, problem).finite:
        return "sm_scale, softcap or a scale makes a factor that is infinite in FP32"
    if problem.out_dtype == torch.float64 or (a.lse is not None and a.lse.dtype != torch.float32):
        return "FP64 outputs, and it computes in FP32"
    return None


def e5m2_by_fp16(arch: str, *caches: torch.Tensor) -> bool:
    """Whether a cache is E5M2 and `arch` has no instruction that makes BF16 of it: `widen_kernel.py` says why that matters."""
    return arch != "gfx950" and any(cache.dtype == torch.float8_e5m2 for cache in caches)


def _fp8_runs(dtype: torch.dtype, arch: str) -> bool:
    fnuz = dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if arch == "gfx942":
        return fnuz or dtype == torch.float8_e5m2
    if arch.startswith("gfx"):
        return not fnuz
    if dtype == torch.float8_e5m2:
        return True
    return not fnuz and arch not in ("sm_80", "sm_86", "sm_87")
