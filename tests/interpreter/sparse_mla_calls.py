"""Calls of sparse MLA decode into buffers that show a write where there should be none."""

from __future__ import annotations

from typing import Any

import torch

from sglang_specverify.kernels.sparse_mla.decode import deepseek_v41_decode
from sglang_specverify.kernels.sparse_mla.splits import SparseConfig, deepseek_v41_decode_workspace_size

GUARD = 0xA5
#: Few enough keys a tile for several tiles and parts.
SMALL = SparseConfig(rows=16, keys=16, reduce_rows=16)


def guarded(call: dict[str, Any], splits: int | None, config: SparseConfig | None = SMALL) -> tuple[torch.Tensor, torch.Tensor]:
    """The call's results; they start as NaN in buffers with guards, and so does a workspace that is as large as it must be."""
    batch, queries, heads, _ = call["q"].shape
    device = call["q"].device
    out = torch.full((batch, queries, heads + 1, 528), float("nan"), dtype=torch.bfloat16, device=device)
    lse = torch.full((batch, queries, heads + 3), float("nan"), device=device)
    topk = call["main_indices"].shape[2] if "main_indices" in call else 0
    window = call["swa_indices"].shape[2]
    size = deepseek_v41_decode_workspace_size(batch, topk, queries=queries, heads=heads, window=window, splits=splits)
    space = torch.full((size + 64,), GUARD, dtype=torch.uint8, device=device)
    space[:size] = 0xFF
    own, own_lse = out[:, :, :heads, :512], lse[:, :, :heads]
    given = deepseek_v41_decode(**call, out=own, lse=own_lse, workspace=space[:size], splits=splits, config=config)
    assert given[0] is own and given[1] is own_lse
    assert bool((space[size:] == GUARD).all()), "beyond the workspace"
    assert bool(out[:, :, heads:].isnan().all()) and bool(out[..., 512:].isnan().all()), "beyond out"
    assert bool(lse[:, :, heads:].isnan().all()), "beyond lse"
    return own, own_lse
