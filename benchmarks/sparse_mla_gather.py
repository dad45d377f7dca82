"""Rows of the window and selected rows, read by a list and written as bf16: the first pass of a two-pass decode."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.sparse_mla_points import DIM, MAIN_BYTES, SWA_BYTES
from benchmarks.sparse_mla_pool import PAGE_ROWS, Inputs
from sglang_specverify.kernels.sparse_mla.rows_kernel import UNDO, main_rows, window_rows

#: Rows that one program writes.
BLOCK = 16


@triton.jit
def gather_kernel(
    swa, main, windows, selected, out, swa_page, main_page, rows, window, topk, window_stride, selected_stride, undo,
    BLOCK: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """bf16 [rows, window + topk, 512]; a program writes BLOCK of the window's rows or BLOCK selected ones of one query row."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, 512)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    at = out + row.to(tl.int64) * (window + topk) * 512
    if block * BLOCK < window:
        valid = entry < window
        slot = tl.load(windows + row * window_stride + entry, mask=valid, other=0)
        near = window_rows(swa, slot, valid, swa_page, 0, 512, BLOCK, 32, PAGE_ROWS, 512, PAGE_ROWS * 512, 16)
        near = (near.to(tl.float32) * undo).to(tl.bfloat16)
        tl.store(at + entry[:, None] * 512 + column[None, :], near, mask=valid[:, None])
    else:
        entry -= tl.cdiv(window, BLOCK) * BLOCK
        valid = entry < topk
        slot = tl.load(selected + row.to(tl.int64) * selected_stride + entry, mask=valid, other=0)
        far = main_rows(main, slot, valid, main_page, 0, 32, BLOCK, PAGE_ROWS, 256, PAGE_ROWS * 256, 32)
        far = (far.to(tl.float32) * undo).to(tl.bfloat16)
        tl.store(at + (window + entry[:, None]) * 512 + column[None, :], far, mask=valid[:, None])


def gather(inputs: Inputs, windows: torch.Tensor, selected: torch.Tensor, out: torch.Tensor) -> None:
    """Write the keys of all query rows.

    Args:
        windows, selected: int32 [rows, window] and [rows, K].
        out: bf16 [rows, window + K, 512].
    """
    point, pool = inputs.point, inputs.pool
    assert out.shape == (point.rows, point.keys, DIM) and (SWA_BYTES, MAIN_BYTES) == (528, 288)
    grid = (point.rows, triton.cdiv(point.window, BLOCK) + triton.cdiv(point.topk, BLOCK))
    gather_kernel[grid](
        pool.swa, pool.main, windows, selected, out, pool.swa.stride(0), pool.main.stride(0), point.rows, point.window,
        point.topk, windows.stride(0), selected.stride(0), UNDO, BLOCK=BLOCK, PAGE_ROWS=PAGE_ROWS, num_warps=4,
    )  # fmt: skip
