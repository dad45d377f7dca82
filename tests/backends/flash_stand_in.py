"""FlashAttention's paged call in plain PyTorch, FP64 inside, for SGLang's backend class on a machine without CUDA.

It is what `sgl_kernel.flash_attn` (version 3) and SGLang's FA4 (version 4) offer by the same names. Whatever it does not know is
an error, so that a new argument shows, and so is what they refuse: see `check`. FP32, which neither takes, passes here, for a
comparison that is finer than BF16; the routes refuse it on a GPU.
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
    cu_seqlens_q: torch.Tensor | None = None,
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
    """out [T, Hq, Dv] and, where asked for, LSE [Hq, T]; caches [pages, page, Hkv, D]; a row without a key is 0 and +inf.

    Without `cu_seqlens_q`: q [B, S, Hq, D], out [B, S, Hq, Dv], LSE [B, Hq, S].
    """
    calls.append({"causal": causal, "window": window_size, "softcap": softcap, "sinks": sinks is not None, "q": q.dtype,
                  "rows": max_seqlen_q, "lse": return_softmax_lse, "ver": ver, "page": k_cache.shape[1], "splits": num_splits,
                  "layout": "fixed" if cu_seqlens_q is None else "varlen", "sequences": len(cache_seqlens),
                  "scales": k_descale is not None, "table": page_table.shape[1]})  # fmt: skip
    check(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softcap, k_descale, v_descale, sinks, ver)
    if cu_seqlens_q is None:
        count, rows = q.shape[:2]
        offsets = torch.arange(count + 1, dtype=torch.int32) * rows
        out, lse = _attend(q.flatten(0, 1), k_cache, v_cache, page_table, cache_seqlens, offsets, softmax_scale, causal,
                           window_size, softcap, k_descale, v_descale, sinks)  # fmt: skip
        result = out.unflatten(0, (count, rows)), lse.unflatten(1, (count, rows)).transpose(0, 1).contiguous()
    else:
        result = _attend(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, causal, window_size,
                         softcap, k_descale, v_descale, sinks)  # fmt: skip
    return result if return_softmax_lse else result[0]


def check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    softcap: float,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    ver: int,
) -> None:
    """Assert what the real ones assert, and that no sequence reads a page that is not there, which they would read."""
    assert ver in (3, 4), f"Unknown flash attention version {ver}"
    batch, fp8 = len(cache_seqlens), q.dtype.itemsize == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype, f"one type for q, K and V: {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
    assert not fp8 or (q.dtype == torch.float8_e4m3fn and ver == 3), "FP8 is e4m3 in FA3, and FA4's needs SM100"
    assert k_cache.dim() == v_cache.dim() == 4 and k_cache.shape[:3] == v_cache.shape[:3], "caches are [pages, page, Hkv, D]"
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1, "the last dimension is contiguous"
    for dim in (q.shape[-1], v_cache.shape[3]):
        assert dim % 8 == 0 and dim <= 256, f"head dim {dim}"
    assert q.shape[-1] == k_cache.shape[3] and q.shape[-2] % k_cache.shape[2] == 0, "heads in a whole ratio, of one dim"
    integers = [page_table, cache_seqlens] + ([] if cu_seqlens_q is None else [cu_seqlens_q])
    assert all(each.dtype == torch.int32 for each in integers), "FlashAttention takes 32-bit tables"
    assert all(each.stride(-1) == 1 for each in integers), "tables are contiguous in the last dimension"
    assert page_table.dim() == 2 and page_table.shape[0] == batch, "one row of the table for each sequence"
    if cu_seqlens_q is None:
        assert q.dim() == 4 and q.shape[0] == batch and q.shape[1] == max_seqlen_q, "without offsets q is [B, S, Hq, D]"
        plain = softcap == 0 and sinks is None and k_descale is None and v_descale is None
        assert ver != 4 or plain, "FA4's fixed-length layout goes with no modifier and no scale tensor"
    else:
        assert q.dim() == 3 and cu_seqlens_q.shape == (batch + 1,), "with offsets q is [T, Hq, D], and they are [B + 1]"
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_q[-1]) <= len(q), "offsets inside q"
    for scale in (k_descale, v_descale):
        assert scale is None or fp8, "descales are only supported for FP8 inputs"
        assert scale is None or (scale.shape == (batch, k_cache.shape[2]) and scale.dtype == torch.float32), "descale [B, Hkv]"
    assert ver != 4 or sinks is None or (sinks.shape == (q.shape[-2],) and sinks.dtype == torch.bfloat16), "FA4's sinks are bf16"
    for row, length in zip(page_table, cache_seqlens.tolist(), strict=True):
        used = row[: -(-length // k_cache.shape[1])]
        assert length <= len(row) * k_cache.shape[1], "a sequence longer than its row of the table"
        assert used.numel() == 0 or (int(used.min()) >= 0 and int(used.max()) < len(k_cache)), "a page that is not there"


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    kind = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    result = torch.full((q.shape[0], q.shape[1], v_cache.shape[3]), torch.nan, dtype=kind)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for r, length in enumerate(cache_seqlens.tolist()):
        first, last = cu_seqlens_q[r : r + 2].tolist()
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
    return result, lse


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
