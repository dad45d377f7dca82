"""Translate a call of SGLang's `_flash_mla_with_kvcache` into one of `deepseek_v41_decode`: facts for the route, then arguments.

As SGLang 0.5.23's dsv4 backend makes it (`_forward_attention`), T rows of queries, each a batch entry of its own:

    q [T, 1, H, 512] bf16, H padded to 64 or to the model's heads; attn_sink FP32 [H]; softmax_scale
    k_cache [pages, page rows, 1, bytes of a row], the padding between pages in its first stride alone
    indices int32 [T, 1, n] slots of the window, topk_length int32 [T]
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length: the same of the selected rows, or None
    block_table, cache_seqlens None; is_fp8_kvcache True; tile_scheduler_metadata a schedule of FlashMLA's own

The last dimension of a cache's view is not the stride of its values: within a page the scales of all rows lie behind the
values of all rows, unless the pool is interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_specverify.routing.sparse_mla import HEAD_DIM, MAX_ROWS, ROW_BYTES, SparseCall

_ENCODINGS = {size: name for name, size in ROW_BYTES.items()}
#: Bytes that divide what the kernel reads and writes: addresses and strides.
_ALIGNMENT = 16
#: What SGLang passes and the kernel reads; a schedule is FlashMLA's alone.
_READ = frozenset({
    "q", "k_cache", "head_dim_v", "softmax_scale", "is_fp8_kvcache", "indices", "topk_length", "attn_sink", "extra_k_cache",
    "extra_indices_in_kvcache", "extra_topk_length", "tile_scheduler_metadata",
})  # fmt: skip
_NEEDED = ("q", "k_cache", "indices", "softmax_scale")


def read_call(arguments: Mapping[str, Any]) -> SparseCall:
    """What the route may know of a call, from its keyword arguments. Looks at shapes, dtypes and strides, at no value."""
    given = {name: value for name, value in arguments.items() if value is not None and value is not False}
    unknown = set(given) - _READ
    unknown |= {f"no {name}" for name in _NEEDED if name not in given}
    if given.get("is_fp8_kvcache") is not True:
        unknown.add("a cache that is not quantised")
    if given.get("head_dim_v", HEAD_DIM) != HEAD_DIM:
        unknown.add(f"head_dim_v {given['head_dim_v']}")
    q, cache, extra = given.get("q"), given.get("k_cache"), given.get("extra_k_cache")
    if (extra is None) != (given.get("extra_indices_in_kvcache") is None):
        unknown.add("one of extra_k_cache and extra_indices_in_kvcache alone")
    window = "none" if cache is None else _encoding(cache)
    if q is None or cache is None or q.dim() != 4:
        return SparseCall(window, unknown=frozenset(unknown | {"q of other than four dimensions"}))
    unknown |= _odd_tensors(given, q)
    return SparseCall(
        window=window,
        extra=None if extra is None else _encoding(extra),
        heads=q.shape[2],
        queries=q.shape[1],
        head_dim=q.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        unknown=frozenset(unknown),
    )


def kernel_arguments(arguments: Mapping[str, Any], *, interleaved: bool) -> dict[str, Any]:
    """Arguments of `deepseek_v41_decode` for a call that the route gave to it. Copies nothing."""
    layout = "interleaved" if interleaved else "block_split"
    cache, extra, sink = arguments["k_cache"], arguments.get("extra_k_cache"), arguments.get("attn_sink")
    found: dict[str, Any] = {
        "q": arguments["q"],
        "sink": None if sink is None else sink.detach(),
        "bmm1_scale": float(arguments["softmax_scale"]),
        "swa_cache": _pages(cache),
        "swa_indices": arguments["indices"],
        "swa_lens": arguments.get("topk_length"),
        "swa_page_rows": cache.shape[1],
        "swa_layout": layout,
    }
    if extra is not None:
        found |= {
            "main_cache": _pages(extra),
            "main_indices": arguments["extra_indices_in_kvcache"],
            "main_lens": arguments.get("extra_topk_length"),
            "main_page_rows": extra.shape[1],
            "main_layout": layout,
        }
    return found


def _encoding(cache: torch.Tensor) -> str:
    size = cache.shape[-1] * cache.element_size()
    return _ENCODINGS.get(size, f"{size} bytes")


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, bytes of a page] over the same memory, with the same stride from page to page."""
    pages, rows, _, size = cache.shape
    return cache.view(torch.uint8).as_strided((pages, rows * size), (cache.stride(0), 1))


def _odd_tensors(given: Mapping[str, Any], q: torch.Tensor) -> set[str]:
    """What of a call's tensors is not as SGLang passes it, in words."""
    odd = set()
    if q.shape[0] > MAX_ROWS:
        odd.add(f"more than {MAX_ROWS} rows")
    if not _vectors(q, q.stride()[:-1]) or q.stride(-1) != 1:
        odd.add("q in strides that 16 bytes do not divide")
    for name in ("k_cache", "extra_k_cache"):
        cache = given.get(name)
        if cache is None:
            continue
        whole = cache.dim() == 4 and cache.shape[2] == 1 and cache.element_size() == 1
        if not whole or (cache.stride(1), cache.stride(3)) != (cache.shape[3], 1):
            odd.add(f"{name} that is no view [pages, page rows, 1, bytes] of bytes")
        elif not _vectors(cache, (cache.stride(0),)):
            odd.add(f"{name} with pages at an address that 16 does not divide")
    for name in ("indices", "extra_indices_in_kvcache"):
        lists = given.get(name)
        shape = None if lists is None else tuple(lists.shape[:-1])
        if lists is not None and (lists.dtype != torch.int32 or shape != (q.shape[0], 1) or lists.stride(-1) != 1):
            odd.add(f"{name} that is no int32 [T, 1, n]")
    for name in ("topk_length", "extra_topk_length"):
        lens = given.get(name)
        if lens is not None and (lens.dtype != torch.int32 or tuple(lens.shape) != (q.shape[0],)):
            odd.add(f"{name} that is no int32 [T]")
    sink = given.get("attn_sink")
    if sink is not None and (tuple(sink.shape) != (q.shape[2],) or sink.dtype != torch.float32 or sink.stride(0) != 1):
        odd.add("attn_sink that is no FP32 [H]")
    return odd


def _vectors(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    sizes = zip(tensor.shape, strides, strict=False)
    whole = all(size == 1 or stride * tensor.element_size() % _ALIGNMENT == 0 for size, stride in sizes)
    return whole and (tensor.device.type == "meta" or tensor.data_ptr() % _ALIGNMENT == 0)
