"""Sparse MLA decode and its quantiser in the sweep for memory checkers: small calls of both kernels, judged on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch

from tests.gpu.sparse_mla_problems import Problem, build, moved, oracle

#: Kind of call, format of the window's rows, and the call. Lists hold -1 and slots beyond the pool, pages lie apart.
CALLS = (
    ("one row", "swa_mxfp8", Problem(2, 1, 64, 70, 40, pad=48, seed=1)),
    ("one row, interleaved", "swa_fp8", Problem(1, 1, 16, 70, 40, swa_format="swa_fp8", swa_layout="interleaved", seed=2)),
    ("chain", "swa_mxfp8", Problem(2, 6, 16, 69, 40, shared=True, starts=True, main_page_rows=61, seed=3)),
    ("window alone", "swa_mxfp8", Problem(2, 1, 128, 40, 0, missing=0.5, seed=4)),
)


def calls(device: str) -> Iterator[tuple[str, str, str, str, Callable[[], None]]]:
    """(operation, kind, cache, label, run) of each."""
    for kind, cache, p in CALLS:
        # The first goes to the kernel with specialised warps where the hardware has it.
        yield "specialized_sparse", kind, cache, "divided", lambda p=p: _decode(p, device, torch.bfloat16, 2)
        yield "specialized_sparse", kind, cache, "whole", lambda p=p: _decode(p, device, torch.bfloat16, 1)
        yield "sparse_decode", kind, cache, "divided", lambda p=p: _decode(p, device, torch.float8_e4m3fn, 2)
        yield "sparse_decode", kind, cache, "whole", lambda p=p: _decode(p, device, torch.float8_e4m3fn, 1)
    for name in ("main_kv_fp4", "swa_mxfp8", "swa_fp8"):
        yield "sparse_quantize", name, name, "with slots", lambda name=name: _quantize(name, device)


def _decode(p: Problem, device: str, query: torch.dtype, splits: int) -> None:
    from sglang_specverify.kernels.sparse_mla.bounds import rejections
    from sglang_specverify.kernels.sparse_mla.decode import deepseek_v41_decode
    from sglang_specverify.kernels.sparse_mla.splits import deepseek_v41_decode_workspace_size

    call = build(p if device != "cpu" else replace(p, batch=1, queries=min(p.queries, 2), heads=16, window=20), "cpu")
    call["q"] = call["q"].to(query)
    batch, queries, heads, _ = call["q"].shape
    sizes = {"queries": queries, "heads": heads, "window": call["swa_indices"].shape[2], "splits": splits}
    # What nobody wrote is told by initcheck: the workspace is left as it comes.
    space = torch.empty(deepseek_v41_decode_workspace_size(batch, p.topk, **sizes), dtype=torch.uint8, device=device)
    there = {name: moved(value, device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    out, lse = deepseek_v41_decode(**there, workspace=space, splits=splits)
    wrong = rejections(out.cpu(), lse.cpu(), oracle(call))
    assert not wrong, "; ".join(wrong)


def _quantize(name: str, device: str) -> None:
    from sglang_specverify.kernels.sparse_mla import quantize
    from sglang_specverify.kernels.sparse_mla.formats import allocate_cache

    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(9))
    slots = torch.tensor([3, 70, -1, 0, 127, 128, 64, 5, 2], dtype=torch.int32)
    caches = []
    for where in (device, "cpu"):
        cache = allocate_cache(name, 2, 64, where)
        with mock.patch.object(quantize, "uses_triton", (lambda _: False) if where == "cpu" else quantize.uses_triton):
            quantize.deepseek_v41_quantize_cache(x.to(where), name, 64, cache, slots.to(where))
        caches.append(cache.cpu())
    assert torch.equal(*caches), "the bytes differ from the CPU's"
