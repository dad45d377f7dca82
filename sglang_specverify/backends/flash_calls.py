"""The plugin's calls of FlashAttention, through SGLang's own wrapper of FA3 and FA4: the prefix, and each row's own drafts.

Which arguments of `flash_attn_with_kvcache` go together (SGLang 0.5.22 and 0.5.23; a cache in pages, no new keys):

- q [T, Hq, D] with `cu_seqlens_q` int32 [B + 1] and `max_seqlen_q`: B sequences of any lengths, LSE [Hq, T]. FA3 and FA4.
- q [B, S, Hq, D] without `cu_seqlens_q`: S rows of each sequence, LSE [B, Hq, S]. The plugin uses it with FA4 alone, and only
  where the call has no soft cap, which FA4 makes a score modifier of, and no scale tensor.
- caches [pages, page, Hkv, D], last stride 1, of q's type; `page_table` int32 [B, n], last stride 1; `cache_seqlens` int32 [B].
  Entries of the table behind a sequence's length are not read.
- `k_descale` and `v_descale` FP32 [B, Hkv] with an FP8 cache and q, and with no other.
- FA4 with `num_splits` 0 divides by the size of the whole pool, as no longest sequence is named: a short list asks for 1.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention import flashattention_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view

from sglang_specverify.backends.steps import Step

#: FP32 scales of K and V of each sequence and KV head, [B, Hkv] both; None without.
Scales = tuple[torch.Tensor, torch.Tensor] | None


def attend_prefix(
    step: Step,
    layer: RadixAttention,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: Scales,
    *,
    version: int,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows over their request's prefix: out [T, Hq, Dv] and LSE [T, Hq].

    Args:
        q: [T, Hq, D] as the cache is represented; rows past the real ones come out as 0.
        keys, values: the cache, [pages, page, Hkv, D].
        scales: of at least `step.rows` sequences.
        version: 3 or 4.
        num_splits: as SGLang's backend passes it.
    """
    out, lse, *_ = flashattention_backend.flash_attn_with_kvcache(
        q=q,
        page_table=step.full.table,
        cache_seqlens=step.prefix_lens,
        cu_seqlens_q=step.flash_offsets,
        max_seqlen_q=step.num_draft_tokens,
        num_splits=num_splits,
        **_common(layer, keys, values, scales, step.rows, version),
    )
    rows = step.rows * (step.num_draft_tokens or 0)
    if out.shape[0] > rows:
        out[rows:].zero_()
    return out, lse.transpose(0, 1)


def attend_own_drafts(
    step: Step, layer: RadixAttention, q: torch.Tensor, pool: Any, scales: Scales, *, depth: int, version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each real row over the drafts that it sees, as a sequence of its own: out [N, Hq, Dv] and LSE [N, Hq], N = rows * W.

    Args:
        q: [T, Hq, D] as the cache is represented, T >= N.
        pool: where the layer's keys and values are, read by slot: as pages of one.
        scales: of N sequences.
        depth: the most drafts that a row sees.
        version: 3 or 4.
    """
    assert step.plans is not None and step.plans.suffix is not None and step.own_offsets is not None
    slots, lens = step.plans.suffix
    n = slots.shape[0]
    buffers = zip(
        pool.get_kv_buffer(layer.layer_id),
        (layer.tp_k_head_num, layer.tp_v_head_num),
        (layer.head_dim, layer.v_head_dim),
        strict=True,
    )
    keys, values = (paged_kv_view(buffer, 1, heads, dim) for buffer, heads, dim in buffers)
    fixed = takes_fixed_length(version, float(layer.logit_cap or 0.0), scales)
    rows = q[:n].unsqueeze(1) if fixed else q[:n]
    out, lse, *_ = flashattention_backend.flash_attn_with_kvcache(
        q=rows,
        page_table=slots[:, :depth],
        cache_seqlens=lens,
        cu_seqlens_q=None if fixed else step.own_offsets,
        max_seqlen_q=1,
        num_splits=1,
        **_common(layer, keys, values, scales, n, version),
    )
    return (out.squeeze(1), lse.squeeze(2)) if fixed else (out, lse.transpose(0, 1))


def takes_fixed_length(version: int, softcap: float, scales: Scales) -> bool:
    """Whether a call of one row a sequence goes in FA4's layout without row offsets, [N, 1, Hq, D]."""
    return version == 4 and softcap == 0.0 and scales is None


def _common(
    layer: RadixAttention, keys: torch.Tensor, values: torch.Tensor, scales: Scales, sequences: int, version: int
) -> dict[str, Any]:
    """What both calls pass alike. No sinks: they would count once for each call."""
    descales = {} if scales is None else {"k_descale": scales[0][:sequences], "v_descale": scales[1][:sequences]}
    return {
        "k_cache": keys,
        "v_cache": values,
        "softmax_scale": layer.scaling,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": float(layer.logit_cap or 0.0),
        "return_softmax_lse": True,
        "ver": version,
        **descales,
    }
