"""The arguments of `verify_attention` and `draft_decode_attention`, and every check of them.

Shapes, dtypes, devices and strides are checked everywhere. Values (lengths, offsets, row ids) are checked only where
the tensors lie on the CPU: elsewhere a look at them would wait for the device, which a captured graph forbids.
Nothing is computed or written before all checks have passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks

MASK_LAYOUTS = ("qlen_only", "full_mask")

#: A per-head factor: a number, a tensor of one element, or a tensor [Hkv].
Scale = float | torch.Tensor

#: chain: j <= i. qlen_only and full_mask: a tree, by where its mask keeps the bits. branches: draft decode.
Kind = Literal["chain", "qlen_only", "full_mask", "branches"]


@dataclass(frozen=True)
class CommonArguments:
    """What both operations take; the fields are those of `verify_attention` with the same names."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    row_ids: torch.Tensor
    prefix_lens: torch.Tensor
    page_size: int
    slot_map: torch.Tensor | None
    window: int
    softcap: float
    sinks: torch.Tensor | None
    k_scale: Scale
    v_scale: Scale
    sm_scale: float | None
    deterministic: bool
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool


@dataclass(frozen=True)
class VerifyArguments(CommonArguments):
    """Arguments of `verify_attention` as they came."""

    num_draft_tokens: int | None
    q_offsets: torch.Tensor | None
    mask: torch.Tensor | None
    mask_layout: str
    mask_offsets: torch.Tensor | None
    positions: torch.Tensor | None


@dataclass(frozen=True)
class DraftArguments(CommonArguments):
    """Arguments of `draft_decode_attention` as they came."""

    draft_slots: torch.Tensor
    topk: int
    step: int


@dataclass(frozen=True)
class Problem:
    """A validated call, in plain values.

    Attributes:
        kind: which drafts a row sees.
        batch: requests, bs.
        rows: rows of q, T; those past the real ones are padding.
        queries: query rows a request has: W, or topk; where ragged, the most it may have, None if not told.
        ragged: whether `q_offsets` says which rows belong to a request.
        group: query heads per KV head.
    """

    kind: Kind
    batch: int
    rows: int
    queries: int | None
    ragged: bool
    q_heads: int
    kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    page_size: int
    window: int
    softcap: float
    sm_scale: float
    out_dtype: torch.dtype
    device: torch.device


def kind_of(mask: torch.Tensor | None, mask_layout: str) -> Kind:
    """The kind of a verify call. Raises `ArgumentError` for a layout that does not exist."""
    if mask_layout not in MASK_LAYOUTS:
        raise ArgumentError("mask_layout", repr(mask_layout), " or ".join(MASK_LAYOUTS))
    return "chain" if mask is None else "qlen_only" if mask_layout == "qlen_only" else "full_mask"


def check_verify(a: VerifyArguments) -> Problem:
    """Check every argument of `verify_attention`; see there for what each one is.

    Raises:
        ArgumentError: naming the argument, what came and what is allowed.
    """
    problem = _check_common(a, kind_of(a.mask, a.mask_layout), a.num_draft_tokens, ragged=a.q_offsets is not None)
    queries = _check_queries(a, problem)
    check_mask(problem, a.mask, a.mask_offsets)
    _check_positions(a, problem)
    if checks.on_cpu(a.q):
        checks.table_values(a.table, a.row_ids, a.prefix_lens, a.prefix_lens.long() + queries, a.page_size)
        if a.mask is not None and a.mask_offsets is not None:
            checks.mask_values(a.mask, a.mask_offsets, a.prefix_lens, queries)
    return problem


def check_draft_decode(a: DraftArguments) -> Problem:
    """Check every argument of `draft_decode_attention`; see there for what each one is.

    Raises:
        ArgumentError: naming the argument, what came and what is allowed.
    """
    checks.integer("topk", a.topk, 1)
    checks.integer("step", a.step, 0)
    problem = _check_common(a, "branches", a.topk, ragged=False)
    shape: tuple[int | str, ...] = (problem.batch, a.topk, "steps")
    checks.tensor("draft_slots", a.draft_slots, shape, checks.INTS, problem.device)
    if a.step >= a.draft_slots.shape[2]:
        raise ArgumentError("step", a.step, f"less than the {a.draft_slots.shape[2]} steps of draft_slots")
    _check_row_count("topk", problem.batch * a.topk, problem.rows)
    if checks.on_cpu(a.q):
        checks.table_values(a.table, a.row_ids, a.prefix_lens, a.prefix_lens.long(), a.page_size)
    return problem


def _check_common(a: CommonArguments, kind: Kind, queries: int | None, *, ragged: bool) -> Problem:
    q = checks.tensor("q", a.q, ("T", "Hq", "D"), checks.FLOATS, unit_last=True)
    rows, q_heads, head_dim = q.shape
    cache = (*checks.FLOATS, *checks.FP8)
    k = checks.tensor("k_cache", a.k_cache, ("slots", "Hkv", head_dim), cache, q.device, unit_last=True)
    slots, kv_heads = k.shape[:2]
    v = checks.tensor("v_cache", a.v_cache, (slots, kv_heads, "Dv"), cache, q.device, unit_last=True)
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ArgumentError("q", f"{q_heads} query heads for {kv_heads} KV heads", "a whole number of query heads per KV head")
    if head_dim == 0:
        raise ArgumentError("q", "head dim 0", "a head dim of at least 1")
    checks.tensor("table", a.table, ("rows", "width"), (torch.int32,), q.device, unit_last=True)
    lens = checks.tensor("prefix_lens", a.prefix_lens, ("bs",), checks.INTS, q.device, unit_last=True)
    checks.tensor("row_ids", a.row_ids, (len(lens),), (torch.int32,), q.device, unit_last=True)
    checks.integer("page_size", a.page_size, 1)
    if a.slot_map is not None:
        checks.tensor("slot_map", a.slot_map, ("n",), checks.INTS, q.device, unit_last=True)
    checks.integer("window", a.window, -1)
    if a.sinks is not None:
        checks.tensor("sinks", a.sinks, (q_heads,), checks.SINKS, q.device, unit_last=True)
    checks.scale("k_scale", a.k_scale, kv_heads, q.device)
    checks.scale("v_scale", a.v_scale, kv_heads, q.device)
    checks.flag("deterministic", a.deterministic)
    checks.flag("return_lse", a.return_lse)
    if a.out is not None:
        checks.output("out", checks.tensor("out", a.out, (rows, q_heads, v.shape[2]), checks.FLOATS, q.device, unit_last=True))
    if a.lse is not None:
        # FP64 is for the reference: a GPU kernel computes no more than FP32 and refuses it.
        checks.output("lse", checks.tensor("lse", a.lse, (rows, q_heads), (torch.float32, torch.float64), q.device))
    return Problem(
        kind=kind,
        batch=len(lens),
        rows=rows,
        queries=queries,
        ragged=ragged,
        q_heads=q_heads,
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        head_dim=head_dim,
        v_head_dim=v.shape[2],
        page_size=a.page_size,
        window=a.window,
        softcap=checks.number("softcap", a.softcap, 0.0),
        sm_scale=head_dim**-0.5 if a.sm_scale is None else checks.number("sm_scale", a.sm_scale),
        out_dtype=q.dtype if a.out is None else a.out.dtype,
        device=q.device,
    )


def _check_row_count(argument: str, need: int, rows: int) -> None:
    if need > rows:
        raise ArgumentError(argument, f"{need} query rows in all", f"at most the {rows} rows of q")


def _check_queries(a: VerifyArguments, problem: Problem) -> torch.Tensor | int:
    """How many query rows each request has: int64 [bs] where ragged, else W. Ragged counts off the CPU are not made: 0."""
    if a.num_draft_tokens is not None:
        checks.integer("num_draft_tokens", a.num_draft_tokens, 1)
    if a.q_offsets is None:
        if a.num_draft_tokens is None:
            raise ArgumentError("num_draft_tokens", "None without q_offsets", "W, or q_offsets for ragged rows")
        _check_row_count("num_draft_tokens", problem.batch * a.num_draft_tokens, problem.rows)
        return a.num_draft_tokens
    counts = check_offsets(a.q_offsets, problem.batch, a.num_draft_tokens, problem.device)
    if counts is None:
        return 0
    _check_row_count("q_offsets", int(a.q_offsets[-1]), problem.rows)
    return counts


def check_offsets(q_offsets: torch.Tensor, batch: int, most: int | None, device: torch.device) -> torch.Tensor | None:
    """Rows of each request, int64 [bs], at most `most`; None off the CPU, where to make them could be launches in a graph."""
    checks.tensor("q_offsets", q_offsets, (batch + 1,), (torch.int32,), device, unit_last=True)
    if not checks.on_cpu(q_offsets):
        return None
    counts = q_offsets.long().diff()
    if (r := checks.first_row((q_offsets[:-1] < 0) | (counts < 0))) is not None:
        came = f"rows {int(q_offsets[r])} to {int(q_offsets[r + 1])} for request {r}"
        raise ArgumentError("q_offsets", came, "row numbers from 0 on that never fall")
    if most is not None and (r := checks.first_row(counts > most)) is not None:
        raise ArgumentError("q_offsets", f"request {r} of {int(counts[r])} rows", f"at most num_draft_tokens, {most}")
    return counts


def check_mask(problem: Problem, mask: torch.Tensor | None, mask_offsets: torch.Tensor | None) -> None:
    """Type, shape and device of a mask and its offsets, for the layout that `problem.kind` names."""
    if mask_offsets is not None and problem.kind != "full_mask":
        raise ArgumentError("mask_offsets", f"a value with a {problem.kind} mask", "None: only full_mask has offsets")
    if mask is None:
        return
    if problem.kind == "qlen_only" and (problem.ragged or problem.queries is None):
        raise ArgumentError("mask_layout", "qlen_only with q_offsets", "full_mask: ragged requests have no common W")
    checks.tree_mask(mask, problem.kind, mask_offsets, problem.batch, problem.queries or 0, problem.device)
    if mask_offsets is not None:
        checks.tensor("mask_offsets", mask_offsets, (problem.batch + 1,), (torch.int64,), problem.device, unit_last=True)


def _check_positions(a: VerifyArguments, problem: Problem) -> None:
    if a.positions is None:
        # An idle batch has no row whose position would be missed.
        if problem.window >= 0 and problem.kind != "chain" and problem.batch > 0:
            raise ArgumentError(
                "positions", "None with a window and a tree", "the position of every draft token: L plus its depth"
            )
        return
    checks.tensor("positions", a.positions, ("bs*W",), checks.INTS, problem.device, unit_last=True)
    need = 0
    if not problem.ragged and problem.queries is not None:
        need = problem.batch * problem.queries
    elif a.q_offsets is not None and checks.on_cpu(a.q_offsets):
        need = int(a.q_offsets[-1])
    if len(a.positions) < need:
        raise ArgumentError("positions", f"{len(a.positions)} entries", f"{need} or more, one for each query row")
