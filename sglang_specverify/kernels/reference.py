"""FP64 reference of verify and draft-decode attention, in plain PyTorch.

    s(i, k)  = cap(sm_scale * k_scale * q_i . k_k),  cap(s) = softcap * tanh(s / softcap), or s where softcap is 0
    lse(i)   = log sum over visible k of exp(s(i, k))
    out(i)   = v_scale * sum over visible k of exp(s(i, k)) * v_k / (exp(lse(i)) + exp(sink))

A row without a visible key has lse -inf and out 0. Keys are taken by cache slot, FP8 values exactly as they are. One
request is computed at a time, all its heads and keys at once, from what `reference_keys.py` says of its keys: on a GPU a
request is some thirty launches and one wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_specverify.kernels.arguments import (
    CommonArguments,
    DraftArguments,
    Problem,
    Scale,
    VerifyArguments,
    check_draft_decode,
    check_verify,
)
from sglang_specverify.kernels.reference_keys import Keys, is_empty, keys_and_values, raise_for, requests_of
from sglang_specverify.kernels.variants import check_variant

#: Scores held at once, as FP64 numbers: 64 MiB. Longer problems are cut into blocks of query rows.
MAX_SCORES = 1 << 23

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def verify_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    row_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
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
    variant: str = "reference",
    plan: object = None,
    workspace: object = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`verify_attention` in FP64; arguments, result and errors are documented there.

    Runs on any device, reads lengths on the host, and so cannot be captured into a graph. `out` may also be FP32 or
    FP64, `lse` FP64. Deterministic always; `variant`, `plan` and `workspace` change nothing.
    """
    check_variant(variant)
    arguments = VerifyArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, table=table, row_ids=row_ids, prefix_lens=prefix_lens, page_size=page_size,
        num_draft_tokens=num_draft_tokens, q_offsets=q_offsets, slot_map=slot_map, mask=mask, mask_layout=mask_layout,
        mask_offsets=mask_offsets, positions=positions, window=window, softcap=softcap, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale, sm_scale=sm_scale, deterministic=deterministic, out=out, lse=lse, return_lse=return_lse,
    )  # fmt: skip
    return run_verify(arguments, check_verify(arguments))


def draft_decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    row_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    topk: int,
    step: int,
    page_size: int = 1,
    slot_map: torch.Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sm_scale: float | None = None,
    deterministic: bool = False,
    variant: str = "reference",
    plan: object = None,
    workspace: object = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`draft_decode_attention` in FP64; see there, and `verify_attention_reference` for what the reference adds."""
    check_variant(variant)
    arguments = DraftArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, table=table, row_ids=row_ids, prefix_lens=prefix_lens, page_size=page_size,
        draft_slots=draft_slots, topk=topk, step=step, slot_map=slot_map, window=window, softcap=softcap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale, deterministic=deterministic, out=out, lse=lse,
        return_lse=return_lse,
    )  # fmt: skip
    return run_draft_decode(arguments, check_draft_decode(arguments))


@torch.no_grad()
def run_verify(a: VerifyArguments, problem: Problem) -> Result:
    """The body of `verify_attention_reference`, for arguments that were checked."""
    return _run(a, problem)


@torch.no_grad()
def run_draft_decode(a: DraftArguments, problem: Problem) -> Result:
    """The body of `draft_decode_attention_reference`, for arguments that were checked."""
    return _run(a, problem)


def _run(a: VerifyArguments | DraftArguments, problem: Problem) -> Result:
    out, lse = _outputs(a, problem)
    for start, keys in requests_of(a, problem):
        for low, part in blocks_of(keys, problem):
            _attend(a, problem, start + low, part, out, lse)
    return (out, lse) if a.return_lse else out


def blocks_of(keys: Keys, problem: Problem) -> Iterator[tuple[int, Keys]]:
    """The rows of one request in blocks that bound the scores held at once: the first row of each, and its keys."""
    rows, count = keys.visible.shape
    block = max(1, MAX_SCORES // max(1, problem.q_heads * count))
    for low in range(0, rows, block):
        yield low, Keys(keys.slots, keys.visible[low : low + block], keys.source)


def _outputs(a: CommonArguments, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's outputs, or new ones whose padding rows say "no key": 0 and -inf."""
    out, lse = a.out, a.lse
    if out is None:
        out = a.q.new_zeros(problem.rows, problem.q_heads, problem.v_head_dim)
    if lse is None:
        lse = torch.full((problem.rows, problem.q_heads), -torch.inf, dtype=torch.float32, device=problem.device)
    return out, lse


def _attend(a: CommonArguments, problem: Problem, start: int, keys: Keys, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write some rows of one request, from row `start` on."""
    rows, count = keys.visible.shape
    if count == 0 or is_empty(a):
        # Nothing can be seen; `raise_for` finds what is.
        raise_for(a, keys)
        out[start : start + rows] = 0
        lse[start : start + rows] = -torch.inf
        return
    k, v, bad = keys_and_values(a, keys)
    # One look at the device for both questions.
    outside, unbounded = torch.stack([bad, ~v.isfinite().all()]).tolist()
    if outside:
        raise_for(a, keys)
    if unbounded and rows > 1:
        # A weight of 0 does not keep NaN or Inf out of a sum, so each row takes its own keys only.
        for row, own in enumerate(keys.visible):
            _attend(a, problem, start + row, Keys(keys.slots[own], own[own][None], keys.source), out, lse)
        return
    q = a.q[start : start + rows].to(torch.float64)
    scores = scores_of(q, k, keys.visible, per_head(a.k_scale, problem) * problem.sm_scale, problem.softcap)
    result, logs = weighed(scores, v, a.sinks)
    result = result * per_head(a.v_scale, problem).repeat_interleave(problem.group)[:, None]
    out[start : start + rows] = result.to(out.dtype)
    lse[start : start + rows] = logs.to(lse.dtype)


def scores_of(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: torch.Tensor, softcap: float) -> torch.Tensor:
    """FP64 [Hkv, group, rows, n], -inf where not visible; q [rows, Hq, D], k [n, Hkv, D], visible [rows, n], scale [Hkv]."""
    (rows, q_heads, _), (count, heads, _) = q.shape, k.shape
    group = q_heads // heads
    q = q.view(rows, heads, group, -1).permute(1, 2, 0, 3).reshape(heads, group * rows, -1)
    scores = (q @ k.permute(1, 2, 0)).view(heads, group, rows, count) * scale.view(-1, 1, 1, 1)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~visible, -torch.inf)


def weighed(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 [rows, Hq, Dv] and [rows, Hq]: sums of the values [n, Hkv, Dv], weighed, and LSEs of scores [Hkv, group, rows, n]."""
    heads, group, rows, _ = scores.shape
    peak = scores.amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True)
    denominator = total
    if sinks is not None:
        denominator = total + torch.exp(sinks.to(torch.float64).view(heads, group, 1, 1) - peak)
    weights = (weights / denominator).masked_fill(total == 0, 0.0)
    result = weights.view(heads, group * rows, -1) @ values.permute(1, 0, 2)
    return result.view(heads * group, rows, -1).transpose(0, 1), (peak + total.log()).view(heads * group, rows).T


def per_head(scale: Scale, problem: Problem) -> torch.Tensor:
    """FP64 [Hkv]."""
    if not isinstance(scale, torch.Tensor):
        return torch.full((problem.kv_heads,), scale, dtype=torch.float64, device=problem.device)
    return scale.to(torch.float64).view(-1).expand(problem.kv_heads)
