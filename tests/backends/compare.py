"""Run a layer of a batch, and compare: with SGLang's own backend, with an independent sum, and key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from tests.backends.batches import Batch, Key
from tests.backends.engine import Engine

#: Half a unit in the last place of the output's type, relative to the largest value that went into it; FP32 also has its
#: conversion from FP64 and nothing else, since the reference computes in FP64. Doubled for a rounding at a tie.
OURS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: SGLang's Triton kernels sum a few hundred products in FP32.
STOCK = 2e-5
#: The plugin's Triton kernels too, and round the weights to Q's type for their product with V, and the result to it again. The
#: bound is relative to the largest output, and the sum of the weights times |V| is a few times that.
KERNELS = {torch.float32: STOCK, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass
class Inputs:
    """Q, K and V of one layer's call, and its keyword arguments."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    more: dict[str, Any]

    def of(self, rows: int) -> Inputs:
        return Inputs(self.q[:rows], self.k[:rows], self.v[:rows], self.more)


def inputs(engine: Engine, forward: ForwardBatch, *, probe: bool = False, sinks: bool = False, pad: int = 0) -> Inputs:
    """Random Q, K and V of the batch's tokens, and `pad` rows of NaN past them. `probe`: Q is 0 and V says its slot."""
    s, rows = engine.setup, len(forward.out_cache_loc)
    k, v = engine.fresh_kv(forward.out_cache_loc, one_hot=probe)
    q = torch.zeros(rows, s.q_heads, s.head_dim, dtype=s.dtype) if probe else engine.normal(rows, s.q_heads, s.head_dim)
    q, k, v = (torch.cat([x, torch.full((pad, *x.shape[1:]), torch.nan, dtype=x.dtype)]) for x in (q, k, v))
    more = {"sinks": engine.sinks()} if sinks or s.sinks is not None else {}
    return Inputs(q.flatten(1), k, v, more)


def run(backend: Any, layer: RadixAttention, forward: ForwardBatch, x: Inputs, **more: Any) -> torch.Tensor:
    """One layer through SGLang's own dispatch: [T, Hq, Dv]."""
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        # Backends may scale K and V in place on their way into the cache.
        out = layer(x.q.clone(), x.k.clone(), x.v.clone(), forward, **x.more, **more)
    return out.view(-1, layer.tp_q_head_num, layer.v_head_dim)


def cache_of(engine: Engine, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's K and V as stored times their scales, FP64, indexed by full-pool slot."""
    # Not by the pool's own way from a layer's number to its place.
    pool, number = (engine.pool.full_kv_pool, engine.layers.index(layer)) if engine.hybrid else (engine.pool, layer.layer_id)
    k, v = (buffer.double() for buffer in pool.get_kv_buffer(number))
    if layer.k_scale is not None:
        k, v = k * layer.k_scale_float, v * layer.v_scale_float
    if engine.is_window_pool and engine.pool.layers_mapping[layer.layer_id][1]:
        # The map's last entry is its answer to "no slot".
        to_window = engine.pool.full_to_swa_index_mapping[:-1]
        k, v = k[to_window], v[to_window]
    return k, v


def seen(keys: list[Key], position: int, window: int) -> list[int]:
    """The slots among `keys` that a row at `position` sees through `window`."""
    return [slot for at, slot in keys if window < 0 or at >= position - window]


def expected(engine: Engine, layer: RadixAttention, batch: Batch, x: Inputs) -> torch.Tensor:
    """Attention row by row over the listed keys, FP64 [T, Hq, Dv]; K and V are read from the cache."""
    k, v = cache_of(engine, layer)
    group = layer.tp_q_head_num // layer.tp_k_head_num
    rows = []
    for t, (keys, position) in enumerate(zip(batch.keys, batch.positions, strict=True)):
        slots = seen(keys, position, layer.sliding_window_size)
        q = x.q[t].view(layer.tp_q_head_num, -1).double()
        scores = torch.einsum("hd,nhd->hn", q, k[slots].repeat_interleave(group, dim=1)) * layer.scaling
        if layer.logit_cap > 0:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        if "sinks" in x.more:
            scores = torch.cat([scores, x.more["sinks"].double()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : len(slots)]
        rows.append(torch.einsum("hn,nhd->hd", weights, v[slots].repeat_interleave(group, dim=1)))
    return torch.stack(rows)


def assert_close(out: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    """Within `relative` of the largest expected value of the row's head."""
    error = (out.double() - want).abs()
    bound = relative * want.abs().amax(dim=-1, keepdim=True) + 1e-12
    bad = ~(error <= bound)  # NaN is bad
    worst = float(error.nan_to_num(torch.inf).max())
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} elements off, the worst by {worst:.3g}"


def limit(backend: Any, dtype: torch.dtype) -> float:
    """How far an output of `backend` may be off, relative to the largest one: see `assert_close`."""
    ours = getattr(backend, "full_attn_backend", backend)
    return (KERNELS if ours.routes.on_device else OURS)[dtype]


def assert_sees(engine: Engine, layer: RadixAttention, batch: Batch, out: torch.Tensor, relative: float) -> None:
    """`out` is of a probe: each row weighs exactly its keys, all the same, each once, within `relative`."""
    for t, (keys, position) in enumerate(zip(batch.keys, batch.positions, strict=True)):
        slots = seen(keys, position, layer.sliding_window_size)
        want = torch.zeros(out.shape[2], dtype=torch.float64)
        want[slots] = 1.0 / len(slots)
        for head in range(out.shape[1]):
            got = out[t, head].double()
            wrong = (~((got - want).abs() <= relative / len(slots))).nonzero().flatten().tolist()  # NaN is wrong
            assert not wrong, f"row {t} head {head}: the weights of slots {wrong[:8]} are wrong; {len(slots)} are visible"


def kernels(report: list[dict[str, Any]]) -> dict[str, set[str]]:
    """mode -> the kernels that ran it, out of a routes report."""
    ran: dict[str, set[str]] = {}
    for row in report:
        if row["calls"]:
            ran.setdefault(row["mode"], set()).add(row["kernel"])
    return ran
