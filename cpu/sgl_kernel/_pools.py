"""Slots, rows and accepted tokens: the bookkeeping around a verify step. Everything writes in place.

`req_to_token` is int32 [requests, longest context]: row r, column p holds the KV slot of position p of request r.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor


def _ranges(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the cells [start[i], end[i]) of every row i, packed row by row: two int64 [total]."""
    start, count = start.long(), (end.long() - start.long()).clamp(min=0)
    rows = torch.repeat_interleave(torch.arange(count.numel()), count)
    first = torch.cumsum(count, 0) - count
    columns = torch.arange(rows.numel()) - first[rows] + start[rows]
    return rows, columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, _width: int
) -> None:
    """Write the packed slots `out_cache_loc` into columns [start, end) of each request's row."""
    rows, columns = _ranges(start, end)
    req_to_token[req_pool_indices.long()[rows], columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, _width: int
) -> None:
    """Read columns [start, end) of each request's row into the packed `out_cache_loc`."""
    rows, columns = _ranges(start, end)
    out_cache_loc[: rows.numel()] = req_to_token[req_pool_indices.long()[rows], columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    width: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the topk * num_steps slots that follow each request's prefix, step varying fastest."""
    start = seq_lens.long()
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, start + topk * num_steps, out_cache_loc, width)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy slot src_loc[i] to slot tgt_loc[i] in every buffer.

    Args:
        data_ptrs: addresses of the K and V buffers of all layers, as integers.
        strides: bytes of one slot in each buffer.
        tgt_loc, src_loc: integer [n]. The two sets may overlap: everything is read before anything is written.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.numpy(), src_loc.numpy()
    slots = int(max(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_ubyte * (slots * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(slots, stride)
        buffer[target] = buffer[source]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """The last accepted token of each request: accept_tokens is [bs, accept_stride], accept_lens >= 1 counts it."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: last.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the slots of the accepted nodes; -1 in accept_index stands for none."""
    index = accept_index.reshape(-1)
    index = index[index >= 0].long()
    accept_out_cache_loc[: index.numel()] = out_cache_loc[index].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor, start_loc: Tensor, seq_lens: Tensor, topk_index: Tensor, select_index: Tensor | None = None
) -> None:
    """Shift each request's ids left by one and put its new token at the end, or at row select_index[i] where given."""
    news = topk_index.reshape(-1)
    for i, (start, count) in enumerate(zip(start_loc.tolist(), seq_lens.tolist(), strict=True)):
        if count <= 0:
            continue
        input_ids[start : start + count - 1] = input_ids[start + 1 : start + count].clone()
        last = start + count - 1 if select_index is None else int(select_index[i])
        input_ids[last] = news[i].to(input_ids.dtype)
