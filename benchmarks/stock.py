"""What SGLang 0.5.23 runs for the same calls, through the functions and arguments of its own backends.

What a step prepares once for all layers (page tables, suffix tables, masks, plans) is prepared before the call; a cast that
a backend does in every layer is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.arms import Arm, Call, Unavailable
from benchmarks.inputs import Inputs
from benchmarks.points import DRAFT_STEP, TREE_DEPTH

#: The largest table that a backend's metadata may need here.
MOST_TABLE_BYTES = 16 << 30
#: Masks and index lists of the largest points come to gigabytes.
MOST_MASK_BYTES = 16 << 30


def cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    return cache.view(-1, page_size, *cache.shape[1:])


def page_table(inputs: Inputs, extra: int = 0) -> torch.Tensor:
    """int32 [bs, pages]: a backend's own copy of the rows, as wide as the longest prefix and `extra` tokens need."""
    width = -(-(max(inputs.lengths) + extra) // inputs.point.page_size)
    return inputs.table[inputs.row_ids.long(), :width].contiguous()


def full_mask(inputs: Inputs) -> torch.Tensor:
    """bool, flat: per request W rows of L + W, the prefix all visible."""
    assert inputs.mask is not None
    width = inputs.point.width
    if sum(width * (length + width) for length in inputs.lengths) > MOST_MASK_BYTES:
        raise Unavailable("a FULL_MASK beyond 16 GB")
    parts = []
    for request, length in enumerate(inputs.lengths):
        ones = torch.ones(width, length, dtype=torch.bool, device=inputs.q.device)
        parts.append(torch.cat([ones, inputs.mask[request]], 1).flatten())
    return torch.cat(parts)


def prefix_slots(inputs: Inputs, starts: list[int] | None = None, extra: int = 0) -> torch.Tensor:
    """int64, flat: slots of each request's positions from its start (0) to L + extra."""
    first = starts or [0] * len(inputs.lengths)
    rows = zip(inputs.slots, first, inputs.lengths, strict=True)
    return torch.cat([row[start : length + extra] for row, start, length in rows]).contiguous()


def _fa_arguments(inputs: Inputs, version: int, sequences: int) -> tuple[Any, dict[str, Any]]:
    """The function, and what all of a backend's calls pass: scales for an FP8 cache, which FA3 takes with Q in FP8."""
    point = inputs.point
    if version == 4 and point.cache == "e4m3":
        raise Unavailable("FlashAttention 4 takes an FP8 cache on SM100 only")
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    options: dict[str, Any] = {"softmax_scale": inputs.sm_scale, "softcap": 0.0, "num_splits": 0, "ver": version}
    if point.cache == "e4m3" and version == 3:
        for name, scale in (("k_descale", inputs.k_scale), ("v_descale", inputs.v_scale)):
            options[name] = torch.full((1,), scale, device=inputs.q.device).expand(sequences, point.kv_heads)
    return flash_attn_with_kvcache, options


def _query(inputs: Inputs, version: int) -> Callable[[], torch.Tensor]:
    """Q as the backend passes it; the cast is part of every layer."""
    if inputs.point.cache == "e4m3" and version == 3:
        return lambda: inputs.q.to(inputs.k.dtype)
    return lambda: inputs.q


def fa_prefix(inputs: Inputs, version: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """The prefix pass of the cascade: (out, lse [Hq, T]) of one layer; without sinks, which would count twice."""
    point = inputs.point
    if point.window >= 0:
        raise Unavailable("FlashAttention's prefix pass has one window for all rows of a request")
    attend, options = _fa_arguments(inputs, version, point.batch)
    table, query = page_table(inputs), _query(inputs, version)
    starts = torch.arange(0, point.batch * point.width + 1, point.width, dtype=torch.int32, device=table.device)
    starts_k = cumulative(inputs.prefix_lens)

    def call(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = attend(
            query(), paged(inputs.k[layer], point.page_size), paged(inputs.v[layer], point.page_size), page_table=table,
            cache_seqlens=inputs.prefix_lens, cu_seqlens_q=starts, cu_seqlens_k_new=starts_k, max_seqlen_q=point.width,
            causal=False, window_size=(-1, -1), return_softmax_lse=True, **options,
        )  # fmt: skip
        return out, lse

    return call


def prefix_pass(inputs: Inputs) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """FA3's prefix pass; on a CPU, where a dry run wants what is merged into it to run, plain PyTorch in its place."""
    if inputs.q.device.type == "cuda":
        return fa_prefix(inputs, version=3)
    if inputs.point.window >= 0:
        raise Unavailable("FlashAttention's prefix pass has one window for all rows of a request")
    point, group = inputs.point, inputs.point.q_heads // inputs.point.kv_heads

    def call(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for request, length in enumerate(inputs.lengths):
            slots = inputs.slots[request, :length]
            k, v = (cache[layer, slots].float().repeat_interleave(group, 1) for cache in (inputs.k, inputs.v))
            q = inputs.q[request * point.width : (request + 1) * point.width].float()
            scores = torch.einsum("ihd,jhd->hij", q, k) * (inputs.sm_scale * inputs.k_scale)
            outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v) * inputs.v_scale)
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs).to(inputs.q.dtype), torch.cat(lses, 1)

    return call


def suffix_table(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T, W] slots of the drafts that each row sees, visible ones first, and their number."""
    point, device = inputs.point, inputs.q.device
    if inputs.draft_slots is not None:
        slots = inputs.draft_slots.flatten(0, 1)
        return slots, torch.full((len(slots),), DRAFT_STEP + 1, dtype=torch.int32, device=device)
    assert inputs.mask is not None
    columns = inputs.prefix_lens.long()[:, None] + torch.arange(point.width, device=device)
    slots = inputs.slots.gather(1, columns)[:, None].expand(-1, point.width, -1)
    order = torch.where(inputs.mask, 0, point.width) + torch.arange(point.width, device=device)
    visible = slots.gather(2, order.argsort(-1)).flatten(0, 1).int().contiguous()
    return visible, inputs.mask.sum(-1).flatten().int()


def fa_cascade(version: int) -> Callable[[Inputs], Call]:
    """Trees and draft branches: the prefix, then each row as a sequence of its own, then a merge of both."""

    def build(inputs: Inputs) -> Call:
        from sgl_kernel import merge_state_v2

        if inputs.point.window >= 0:
            if inputs.point.kind == "draft":
                raise Unavailable("the cascade of a draft decode passes the window to both passes")
            return _fa_expanded(inputs, version)
        if inputs.sinks is not None:
            raise Unavailable("the cascade adds the sink in both passes")
        prefix = fa_prefix(inputs, version)
        table, lens = suffix_table(inputs)
        attend, options = _fa_arguments(inputs, version, len(table))
        query, starts_k = _query(inputs, version), cumulative(lens)
        starts = torch.arange(len(table) + 1, dtype=torch.int32, device=table.device)

        def call(layer: int) -> torch.Tensor:
            out, lse = prefix(layer)
            suffix, suffix_lse, *_ = attend(
                query(), paged(inputs.k[layer], 1), paged(inputs.v[layer], 1), page_table=table, cache_seqlens=lens,
                cu_seqlens_q=starts, cu_seqlens_k_new=starts_k, max_seqlen_q=1, causal=False, window_size=(-1, -1),
                return_softmax_lse=True, **options,
            )  # fmt: skip
            merged: torch.Tensor = merge_state_v2(out, lse.T.contiguous(), suffix, suffix_lse.T.contiguous())[0]
            return merged

        return call

    return build


def _fa_expanded(inputs: Inputs, version: int) -> Call:
    """Trees with a window: one pass, each row a sequence of its own over its prefix and its drafts."""
    point = inputs.point
    if point.page_size > 1:
        raise Unavailable("no windows for trees with pages")
    suffix, suffix_lens = suffix_table(inputs)
    width = max(inputs.lengths) + point.width
    if len(suffix) * width * 4 > MOST_TABLE_BYTES:
        raise Unavailable(f"a page table of {len(suffix)} x {width} entries")
    prefix_lens = inputs.prefix_lens.repeat_interleave(point.width)
    lens = prefix_lens + suffix_lens
    table = torch.zeros(len(suffix), width, dtype=torch.int32, device=inputs.q.device)
    table[:, : width - point.width] = page_table(inputs).repeat_interleave(point.width, 0)
    columns = prefix_lens.long()[:, None] + torch.arange(point.width, device=table.device)
    table.scatter_(1, columns, suffix)
    attend, options = _fa_arguments(inputs, version, len(suffix))
    options |= {} if inputs.sinks is None else {"sinks": inputs.sinks.to(inputs.q.dtype)}
    query, starts_k = _query(inputs, version), cumulative(lens)
    starts = torch.arange(len(suffix) + 1, dtype=torch.int32, device=table.device)

    def call(layer: int) -> torch.Tensor:
        out: torch.Tensor = attend(
            query(), paged(inputs.k[layer], 1), paged(inputs.v[layer], 1), page_table=table, cache_seqlens=lens,
            cu_seqlens_q=starts, cu_seqlens_k_new=starts_k, max_seqlen_q=1, causal=True, window_size=(point.window, 0),
            **options,
        )  # fmt: skip
        return out

    return call


def fa_chain(version: int) -> Callable[[Inputs], Call]:
    """A chain: one causal call over prefix and drafts."""

    def build(inputs: Inputs) -> Call:
        point = inputs.point
        attend, options = _fa_arguments(inputs, version, point.batch)
        options |= {} if inputs.sinks is None else {"sinks": inputs.sinks.to(inputs.q.dtype)}
        table, lens, query = page_table(inputs, point.width), inputs.prefix_lens + point.width, _query(inputs, version)
        starts = torch.arange(0, point.batch * point.width + 1, point.width, dtype=torch.int32, device=table.device)
        starts_k = cumulative(lens)
        window = (point.window, 0) if point.window >= 0 else (-1, -1)

        def call(layer: int) -> torch.Tensor:
            out: torch.Tensor = attend(
                query(), paged(inputs.k[layer], point.page_size), paged(inputs.v[layer], point.page_size), page_table=table,
                cache_seqlens=lens, cu_seqlens_q=starts, cu_seqlens_k_new=starts_k, max_seqlen_q=point.width, causal=True,
                window_size=window, **options,
            )  # fmt: skip
            return out

        return call

    return build


def fa(version: int) -> Callable[[Inputs], Call]:
    return lambda inputs: (fa_chain if inputs.point.kind == "chain" else fa_cascade)(version)(inputs)


def fa_prefix_alone(inputs: Inputs) -> Call:
    prefix = fa_prefix(inputs, 3)
    return lambda layer: prefix(layer)[0]


def upstream_gather(inputs: Inputs) -> Call:
    """FA3's prefix pass and upstream's fused suffix kernel over the gathered drafts, which it uses for one algorithm only."""
    from sglang.kernels.ops.attention.suffix_attention_merge import merge_suffix_attention_in_place

    if inputs.point.cache != "bf16" or inputs.sinks is not None:
        raise Unavailable("upstream's suffix kernel takes no FP8 cache and no sinks")
    prefix = prefix_pass(inputs)
    table, lens = suffix_table(inputs)
    depth = min(TREE_DEPTH, table.shape[1]) if inputs.point.kind == "tree" else table.shape[1]

    def call(layer: int) -> torch.Tensor:
        out, lse = prefix(layer)
        merged: torch.Tensor = merge_suffix_attention_in_place(
            inputs.q, inputs.k[layer], inputs.v[layer], table[:, :depth], lens, out, lse, inputs.sm_scale
        )
        return merged

    return call


FLASH_ATTENTION = (
    Arm("fa3", "stock", fa(3), ("tree", "chain", "draft"), fp8_products=True),
    Arm("fa4", "stock", fa(4), ("tree", "chain", "draft"), fp8_products=True),
    Arm("fa3_prefix", "yardstick", fa_prefix_alone, ("tree",), prefix_only=True, fp8_products=True),
    Arm("fa3+upstream_gather", "yardstick", upstream_gather, ("tree",)),
)
