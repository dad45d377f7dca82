"""aiter's attention in plain PyTorch, FP64 inside, for SGLang's backend class on a machine without ROCm.

Each function has the name, the arguments and the meaning that aiter's own has, refuses what that one refuses or what would lead
it out of its tensors, and leaves alone what that one leaves alone: rows of `out` that no request covers stay as they were. A
wrong length, table or scale therefore shows as a wrong number, and a wrong address as an `IllegalAccess`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Entries that a tile of aiter's kernels may read behind the last that counts.
_PARTITION = 256

#: The name of every call since `install`, and its arguments that are no tensors, or are lengths.
calls: list[tuple[str, dict[str, Any]]] = []


class IllegalAccess(AssertionError):
    """The real kernel would read beside its tensors."""


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(f"aiter refuses: {text}")


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Rows q [n, Hq, D] at the end of the keys k [len, Hkv, D], causal, `left` keys beside their own or -1: [n, Hq, Dv]."""
    n, heads, length = q.shape[0], q.shape[1], k.shape[0]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    place, at = length - n + torch.arange(n)[:, None], torch.arange(length)
    seen = at <= place
    if left >= 0:
        seen &= at >= place - left
    scores = scores.masked_fill(~seen, -torch.inf)
    total = torch.logsumexp(scores, dim=2)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double()[:, None])
    weights = torch.exp(scores - total[..., None]).nan_to_num(0.0)
    # A key that a row may not see has no part in it, whatever lies there.
    return torch.einsum("htn,nhd->thd", weights, v.nan_to_num(0.0) if not bool(seen.all()) else v)


def _one(factor: torch.Tensor | float | None) -> float:
    if factor is None:
        return 1.0
    _check(not isinstance(factor, torch.Tensor) or factor.numel() == 1, "a scale of more than one element")
    return float(factor)


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q, out [T, Hq, D and Dv]; k, v [pages, page, Hkv, D and Dv]; request r's rows stand at the end of its `seqused_k[r]` keys.

    A window (left, 0) has `left` keys beside a row's own. With `max_seqlen_q` 1 row r is request r, and the offsets are not read.
    """
    calls.append(("unified_attention", {
        "lens": seqused_k.tolist(), "address": seqused_k.data_ptr(), "window": window_size, "width": block_table.shape[1],
        "max_seqlen_q": max_seqlen_q, "softcap": softcap, "sinks": sinks is not None, "q": q.dtype, "table": block_table.clone(),
    }))  # fmt: skip
    _check(causal, "attention that is not causal")
    _check(q.dim() == out.dim() == 3 and k.dim() == v.dim() == 4, "q and out of three, caches of four dimensions")
    _check(q.shape[1] % k.shape[2] == 0, "query heads in no whole ratio to KV heads")
    _check(k.shape[:3] == v.shape[:3] and q.shape[2] == k.shape[3] and out.shape[2] == v.shape[3], "head dims that differ")
    _check(block_table.dtype == cu_seqlens_q.dtype == torch.int32, "tables and offsets that are not 32-bit")
    # Its addresses have the type of the lengths: 32 bits wrap in a cache of 2 GiB.
    _check(seqused_k.dtype == torch.int64, "lengths that are not 64-bit")
    _check(block_table.stride(1) == 1, "a table whose entries do not lie side by side")
    _check(sinks is None or sinks.shape == (q.shape[1],), "sinks of another number than query heads")
    _check((k.dtype in _FP8) == (k_descale is not None) == (v_descale is not None), "scales for a cache that has none, or none")
    _check(q_descale is None or q.dtype in _FP8, "a scale for a Q that is not quantised")
    _check(q.dtype not in _FP8 or q_descale is not None, "a quantised Q without a scale")
    _check(max_seqlen_k == block_table.shape[1] * k.shape[1], "another longest length than the table holds")
    page, factor = k.shape[1], softmax_scale * _one(q_descale) * _one(k_descale)
    if len(block_table) < len(seqused_k):
        raise IllegalAccess("fewer rows in the table than lengths")
    for r, length in enumerate(seqused_k.tolist()):
        first, last = (r, r + 1) if max_seqlen_q == 1 else cu_seqlens_q[r : r + 2].tolist()
        _check(last - first <= max_seqlen_q and last <= len(q), "more rows than were announced")
        slots = _slots(block_table[r], length, page, k.shape[0])
        keys, values = (cache.reshape(-1, *cache.shape[2:])[slots].float() for cache in (k, v))
        rows = q[first:last].float()
        out[first:last] = _attend(rows, keys, values * _one(v_descale), factor, window_size[0], softcap, sinks).to(out.dtype)
    return out


def _slots(row: torch.Tensor, length: int, page: int, pages: int) -> torch.Tensor:
    """The slots of `length` positions by one row of a table."""
    if not 0 <= length <= len(row) * page:
        raise IllegalAccess(f"{length} positions by a row of {len(row)} pages of {page}")
    # Whole tiles of entries are read as pages before anything is masked.
    if bool(((row < 0) | (row >= pages)).any()):
        raise IllegalAccess(f"page {int(row[(row < 0) | (row >= pages)][0])} of {pages}")
    at = torch.arange(length)
    return row[at // page].long() * page + at % page


def paged_attention_ragged(
    out: torch.Tensor,
    workspace_buffer: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    block_size: int,
    max_num_partitions: int,
    alibi_slopes: None,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    fp8_out_scale: None = None,
    partition_size: int = _PARTITION,
) -> torch.Tensor:
    """One row a request over the slots `kv_page_indices[kv_indptr[r] : kv_indptr[r + 1]]`; no window and no sinks."""
    calls.append(("paged_attention_ragged", {"lens": kv_indptr.diff().tolist(), "q": query.dtype}))
    _check(block_size == 1 and kv_cache_layout == "NHD", "pages and layouts that SGLang does not use")
    _check(kv_cache_dtype == ("fp8_e4m3" if key_cache.dtype in _FP8 else "auto"), "another cache than its name says")
    _check(query.shape[2] == key_cache.shape[3] == value_cache.shape[3] == out.shape[2], "a head dim of V of its own")
    _check(partition_size == _PARTITION and kv_indptr.dtype == kv_page_indices.dtype == torch.int32, "other types than its own")
    rows, heads, dim = query.shape
    needed = rows * heads * max_num_partitions * (4 * dim + 8)
    if workspace_buffer.numel() < needed or len(kv_indptr) < rows + 1:
        raise IllegalAccess("a workspace or offsets for fewer rows")
    for r in range(rows):
        first, last = kv_indptr[r : r + 2].tolist()
        if last - first > max_num_partitions * _PARTITION or last > len(kv_page_indices):
            raise IllegalAccess(f"{last - first} positions beyond the partitions or the list")
        slots = kv_page_indices[first:last].long()
        keys, values = (cache[slots, 0].float() for cache in (key_cache, value_cache))
        one = _attend(query[r : r + 1].float(), keys, values * _one(v_scale), scale * _one(k_scale), -1, logits_soft_cap, None)
        out[r : r + 1] = one.to(out.dtype)
    return out


def mha_batch_prefill_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    logits_soft_cap: float,
    alibi_slopes: None,
    return_lse: bool,
    return_attn_probs: bool,
    window_size: tuple[int, int],
    sink_ptr: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> torch.Tensor:
    """Ragged rows at the end of the slots of their requests; caches [slots, Hkv, D]."""
    calls.append(("mha_batch_prefill_func", {"lens": kv_indptr.diff().tolist(), "window": window_size}))
    _check(causal and not return_lse and not return_attn_probs, "what SGLang does not ask for")
    _check(q.shape[2] <= 256 and q.shape[2] == k.shape[-1] == v.shape[-1], "head dims over 256, or one of V's own")
    out = torch.full((q.shape[0], q.shape[1], v.shape[-1]), torch.nan, dtype=torch.bfloat16 if q.dtype in _FP8 else q.dtype)
    factor = q.shape[2] ** -0.5 * _one(q_descale) * _one(k_descale)
    for r in range(len(kv_indptr) - 1):
        (first, last), (begin, end) = cu_seqlens_q[r : r + 2].tolist(), kv_indptr[r : r + 2].tolist()
        _check(last - first <= max_seqlen_q and end - begin <= max_seqlen_k, "more than was announced")
        slots = kv_page_indices[begin:end].long()
        keys, values = (cache.reshape(-1, *cache.shape[-2:])[slots].float() for cache in (k, v))
        rows = q[first:last].float()
        one = _attend(rows, keys, values * _one(v_descale), factor, window_size[0], logits_soft_cap, sink_ptr)
        out[first:last] = one.to(out.dtype)
    return out


def scaled_fp8_quant(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q by a given scale, saturated."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (q.float() / _one(scale)).clamp(-most, most).to(torch.float8_e4m3fn), scale


def _unknown(*_: Any, **__: Any) -> Any:
    raise AssertionError("not part of the stand-in")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it where SGLang's backend looks for aiter, which it does by the names of its own module."""
    from sglang.srt.layers.attention import aiter_backend

    calls.clear()
    for function in (unified_attention, paged_attention_ragged, mha_batch_prefill_func, scaled_fp8_quant):
        monkeypatch.setattr(aiter_backend, function.__name__, function, raising=False)
    monkeypatch.setattr(aiter_backend, "reset_verify_attn_plan_cache", lambda: None, raising=False)
    for name in ("flash_attn_varlen_func", "mla_decode_fwd", "mla_prefill_fwd", "unified_attention_3d_mtp_func"):
        monkeypatch.setattr(aiter_backend, name, _unknown, raising=False)


def lens_of(name: str) -> list[list[int]]:
    """The lengths of each call of that name."""
    return [arguments["lens"] for called, arguments in calls if called == name]
