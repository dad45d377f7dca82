"""FP64 reference of verify and draft-decode attention, in plain PyTorch.

    s(i, k)  = cap(sm_scale * k_scale * q_i . k_k),  cap(s) = softcap * tanh(s / softcap), or s where softcap is 0
    lse(i)   = log sum over visible k of exp(s(i, k))
    out(i)   = v_scale * sum over visible k of exp(s(i, k)) * v_k / (exp(lse(i)) + exp(sink))

A row without a visible key has lse -inf and out 0. Keys are taken by cache slot, FP8 values exactly as they are. One
request is computed at a time, all its heads and keys at once, from a list of keys and a bool matrix [W, keys]:
everything that tells a chain, a tree and draft branches apart is in how those two are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.arguments import (
    CommonArguments,
    DraftArguments,
    Problem,
    Scale,
    VerifyArguments,
    check_draft_decode,
    check_verify,
)
from sglang_specverify.kernels.variants import check_variant

#: Scores held at once, as FP64 numbers: 64 MiB. Longer problems are cut into blocks of query rows.
MAX_SCORES = 1 << 23

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Keys:
    """The keys that some row of one request may see.

    Attributes:
        slots: int64 [n], before `slot_map`; may hold anything where `visible` has no row.
        visible: bool [rows, n].
        source: the argument that the last entries came from, for error messages.
    """

    slots: torch.Tensor
    visible: torch.Tensor
    source: str


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
    out, lse = _outputs(a, problem)
    if problem.batch == 0:
        return (out, lse) if a.return_lse else out
    w = problem.queries or 0
    starts = [r * w for r in range(problem.batch + 1)] if a.q_offsets is None else a.q_offsets.tolist()
    lens, table_rows = a.prefix_lens.tolist(), a.row_ids.tolist()
    mask_starts = None if a.mask_offsets is None else a.mask_offsets.tolist()
    for r, prefix in enumerate(lens):
        start, stop = starts[r], starts[r + 1]
        tree = _tree_mask(a, problem, r, prefix, stop - start, 0 if mask_starts is None else mask_starts[r])
        keys = _verify_keys(a, problem, a.table[table_rows[r]], prefix, start, stop, tree)
        _attend(a, problem, start, keys, out, lse)
    return (out, lse) if a.return_lse else out


@torch.no_grad()
def run_draft_decode(a: DraftArguments, problem: Problem) -> Result:
    """The body of `draft_decode_attention_reference`, for arguments that were checked."""
    out, lse = _outputs(a, problem)
    if problem.batch == 0:
        return (out, lse) if a.return_lse else out
    table_rows = a.row_ids.tolist()
    branch = torch.arange(a.topk, device=problem.device)
    for r, prefix in enumerate(a.prefix_lens.tolist()):
        first = 0 if a.window < 0 else max(0, prefix + a.step - a.window)
        position = torch.arange(first, prefix + a.step + 1, device=problem.device)
        shared = position[position < prefix]
        steps = position[position >= prefix] - prefix
        own = a.draft_slots[r, :, steps].long()
        slots = torch.cat([_table_slots(a, a.table[table_rows[r]], shared), own.flatten()])
        owner = branch.repeat_interleave(len(steps))
        everybody = torch.ones(a.topk, len(shared), dtype=torch.bool, device=problem.device)
        visible = torch.cat([everybody, owner == branch[:, None]], dim=1)
        _attend(a, problem, r * a.topk, _Keys(slots, visible, "table or draft_slots"), out, lse)
    return (out, lse) if a.return_lse else out


def _outputs(a: CommonArguments, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's outputs, or new ones whose padding rows say "no key": 0 and -inf."""
    out, lse = a.out, a.lse
    if out is None:
        out = a.q.new_zeros(problem.rows, problem.q_heads, problem.v_head_dim)
    if lse is None:
        lse = torch.full((problem.rows, problem.q_heads), -torch.inf, dtype=torch.float32, device=problem.device)
    return out, lse


def _tree_mask(a: VerifyArguments, problem: Problem, r: int, prefix: int, w: int, start: int) -> torch.Tensor:
    """bool [W, W]: which drafts of request `r` each of its drafts sees."""
    if a.mask is None:
        return torch.ones(w, w, dtype=torch.bool, device=problem.device).tril()
    if problem.kind == "qlen_only":
        return a.mask.flatten()[r * w * w : (r + 1) * w * w].view(w, w) != 0
    # The columns of the prefix only set the stride: the prefix is visible whatever they hold.
    return a.mask[start : start + w * (prefix + w)].view(w, prefix + w)[:, prefix:] != 0


def _verify_keys(
    a: VerifyArguments, problem: Problem, table_row: torch.Tensor, prefix: int, start: int, stop: int, tree: torch.Tensor
) -> _Keys:
    """Prefix and drafts of one request, without the prefix positions that lie before every row's window."""
    w = stop - start
    if problem.kind == "chain" or a.positions is None:
        draft_positions = torch.arange(prefix, prefix + w, device=problem.device)
    else:
        draft_positions = a.positions[start:stop].long()
    first = 0
    if problem.window >= 0 and w > 0:
        first = min(prefix, max(0, int(draft_positions.min()) - problem.window))
    index = torch.arange(first, prefix + w, device=problem.device)
    key_positions = torch.cat([index[: prefix - first], draft_positions])
    visible = torch.ones(w, len(index), dtype=torch.bool, device=problem.device)
    visible[:, prefix - first :] = tree
    if problem.window >= 0:
        visible &= key_positions >= draft_positions[:, None] - problem.window
    return _Keys(_table_slots(a, table_row, index), visible, "table")


def _table_slots(a: CommonArguments, table_row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """int64: the cache slots of the tokens number `index` of one request, before `slot_map`."""
    if a.page_size == 1:
        return table_row.index_select(0, index).long()
    return table_row.index_select(0, index // a.page_size).long() * a.page_size + index % a.page_size


def _attend(a: CommonArguments, problem: Problem, start: int, keys: _Keys, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the rows of one request, from row `start` on, in blocks that bound the scores held at once."""
    rows, count = keys.visible.shape
    block = max(1, MAX_SCORES // max(1, problem.q_heads * count))
    for low in range(0, rows, block):
        part = _Keys(keys.slots, keys.visible[low : low + block], keys.source)
        _attend_block(a, problem, start + low, part, out, lse)


def _attend_block(a: CommonArguments, problem: Problem, start: int, keys: _Keys, out: torch.Tensor, lse: torch.Tensor) -> None:
    rows = keys.visible.shape[0]
    seen = keys.visible.any(dim=0)
    visible = keys.visible[:, seen]
    slots = _cache_slots(a, keys.slots[seen], keys.source)
    values = _gather(a.v_cache, slots)
    if rows > 1 and not bool(values.isfinite().all()):
        # A weight of 0 does not keep NaN or Inf out of a sum, so each row takes its own keys only.
        for row in range(rows):
            single = _Keys(keys.slots, keys.visible[row : row + 1], keys.source)
            _attend_block(a, problem, start + row, single, out, lse)
        return
    stop = start + rows
    if len(slots) == 0:
        out[start:stop] = 0
        lse[start:stop] = -torch.inf
        return

    heads, group = problem.kv_heads, problem.group
    q = a.q[start:stop].to(torch.float64).reshape(rows, heads, group, -1).permute(1, 2, 0, 3).reshape(heads, group * rows, -1)
    k = _gather(a.k_cache, slots).permute(1, 2, 0)
    scores = (q @ k).view(heads, group, rows, -1) * (_scale(a.k_scale, problem) * problem.sm_scale)
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)

    peak = scores.amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True)
    denominator = total
    if a.sinks is not None:
        denominator = total + torch.exp(a.sinks.to(torch.float64).view(heads, group, 1, 1) - peak)
    weights = (weights / denominator).masked_fill(total == 0, 0.0)
    result = weights.view(heads, group * rows, -1) @ values.permute(1, 0, 2) * _scale(a.v_scale, problem).view(-1, 1, 1)
    out[start:stop] = result.view(problem.q_heads, rows, -1).transpose(0, 1).to(out.dtype)
    lse[start:stop] = (peak + total.log()).view(problem.q_heads, rows).T.to(lse.dtype)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """FP64 [n, Hkv, head dim]. FP8 is gathered as bytes: not every device selects rows of an 8-bit float."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8).index_select(0, slots).view(cache.dtype).to(torch.float64)
    return cache.index_select(0, slots).to(torch.float64)


def _scale(scale: Scale, problem: Problem) -> torch.Tensor:
    """FP64 [Hkv, 1, 1, 1]."""
    value = torch.as_tensor(scale, dtype=torch.float64, device=problem.device)
    return value.expand(problem.kv_heads).view(-1, 1, 1, 1) if value.numel() == 1 else value.view(-1, 1, 1, 1)


def _cache_slots(a: CommonArguments, slots: torch.Tensor, source: str) -> torch.Tensor:
    """Visible slots as rows of the cache, or an error where one is none."""
    if a.slot_map is not None:
        _check_range(source, slots, len(a.slot_map), "an entry of slot_map")
        slots, source = a.slot_map[slots].long(), "slot_map"
    _check_range(source, slots, len(a.k_cache), "a slot of the cache")
    return slots


def _check_range(source: str, slots: torch.Tensor, count: int, what: str) -> None:
    bad = (slots < 0) | (slots >= count)
    if bool(bad.any()):
        raise ArgumentError(source, f"slot {int(slots[bad][0])} for a visible key", f"{what}: 0 to {count - 1}")
