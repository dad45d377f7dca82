"""FlashAttention's paged call in plain PyTorch, FP64 inside, for SGLang's backend class on a machine without CUDA.

It is what `sgl_kernel.flash_attn` offers by the same names; whatever it does not know is an error, so that a new argument shows.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

#: The keyword arguments of every call since `install`, tensors left out.
calls: list[dict[str, Any]] = []


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    cu_seqlens_k_new: torch.Tensor | None = None,
    num_splits: int = 0,
    scheduler_metadata: None = None,
    sinks: torch.Tensor | None = None,
    out: None = None,
    ver: int = 3,
) -> Any:
    """out [T, Hq, Dv] and, where asked for, LSE [Hq, T]; caches [pages, page, Hkv, D]; a row without a key is 0 and +inf."""
    calls.append({"causal": causal, "window": window_size, "softcap": softcap, "sinks": sinks is not None, "q": q.dtype,
                  "rows": max_seqlen_q, "lse": return_softmax_lse, "ver": ver})  # fmt: skip
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32, "FlashAttention takes 32-bit tables"
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    kind = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    result = torch.full((q.shape[0], q.shape[1], v_cache.shape[3]), torch.nan, dtype=kind)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for r, length in enumerate(cache_seqlens.tolist()):
        first, last = cu_seqlens_q[r : r + 2].tolist()
        assert last - first <= max_seqlen_q
        at = torch.arange(length)
        slots = page_table[r, at // page].long() * page + at % page
        k, v = (cache.reshape(-1, *cache.shape[2:])[slots].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache))
        for factor, of in ((k_descale, k), (v_descale, v)):
            if factor is not None:
                of.mul_(factor[r].double().repeat_interleave(group)[:, None])
        scores = torch.einsum("thd,nhd->htn", q[first:last].double(), k) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        where = length - (last - first) + torch.arange(last - first)[:, None]
        seen = torch.ones(last - first, length, dtype=torch.bool)
        if causal:
            seen &= at <= where
        if window_size[0] >= 0:
            seen &= at >= where - window_size[0]
        scores = scores.masked_fill(~seen, -torch.inf)
        total = torch.logsumexp(scores, dim=2)
        lse[:, first:last] = torch.where(total == -torch.inf, math.inf, total)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None])
        weights = torch.exp(scores - total[..., None]).nan_to_num(0.0)
        result[first:last] = torch.einsum("htn,nhd->thd", weights, v)
    return (result, lse) if return_softmax_lse else result


def _unknown(*_: Any, **__: Any) -> Any:
    raise AssertionError("not part of the stand-in")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it where SGLang's backend looks for FlashAttention."""
    calls.clear()
    module = ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        setattr(module, name, _unknown)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    from sglang.srt.layers.attention import flashattention_backend

    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", flash_attn_with_kvcache)
