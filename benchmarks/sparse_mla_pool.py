"""Pools that all arms of `benchmarks.sparse_mla` share, made of the same bf16 rows, and the lists of one point over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks import sparse_mla_v4 as v4
from benchmarks.sparse_mla_points import DIM, MAIN_ROWS, SWA_ROWS, Point, layers
from sglang_specverify.kernels.sparse_mla import FORMATS, allocate_cache, decode_rows, deepseek_v41_quantize_cache

PAGE_ROWS = 64
#: Rows that are drawn and written at once.
CHUNK = 1 << 15


@dataclass(frozen=True)
class Pool:
    """The same rows in the bytes that each arm reads: 528 and 288 a row, and twice 584.

    Attributes:
        swa, main: uint8 [pages, page_bytes], `swa_mxfp8` and `main_kv_fp4`, block split.
        v4_swa, v4_main: uint8 [pages, rows, 1, 584].
    """

    swa: torch.Tensor
    main: torch.Tensor
    v4_swa: torch.Tensor
    v4_main: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.swa.device


@dataclass(frozen=True)
class Inputs:
    """What all arms of a point read. Slots are drawn without repetition, so that the calls of a graph share no row.

    Attributes:
        q: bf16 [B, Sq, H, 512]; sink: FP32 [H].
        windows: int32 [layers, B, window + Sq - 1], the slots of consecutive positions; row i's window begins at i.
        selected: int32 [layers, B, Sq, K], or [layers, B, 1, K] where the rows of a request share a list.
    """

    point: Point
    pool: Pool
    q: torch.Tensor
    sink: torch.Tensor
    windows: torch.Tensor
    selected: torch.Tensor

    @property
    def layers(self) -> int:
        return self.windows.shape[0]

    def own_windows(self, layer: int) -> torch.Tensor:
        """int32 [B, Sq, window]: each query row's own list."""
        return self.windows[layer].unfold(1, self.point.window, 1).contiguous()

    def keys(self, layer: int, row: int, *, v4_bytes: bool) -> torch.Tensor:
        """FP64 [window + K, 512]: the keys of one query row, as the bytes of either kind mean them."""
        batch, query = divmod(row, self.point.queries)
        window = self.windows[layer, batch, query : query + self.point.window]
        chosen = self.selected[layer, batch, 0 if self.point.shared else query]
        if v4_bytes:
            return torch.cat([v4.read(self.pool.v4_swa, window), v4.read(self.pool.v4_main, chosen)])
        found = [decode_rows(self.pool.swa, window, "swa_mxfp8", PAGE_ROWS)]
        return torch.cat([*found, decode_rows(self.pool.main, chosen, "main_kv_fp4", PAGE_ROWS)])


def make_pool(device: torch.device, main_rows: int = MAIN_ROWS, swa_rows: int = SWA_ROWS) -> Pool:
    """Standard normal rows, rounded to bf16 and from there to each format."""
    swa, v4_swa = _cache("swa_mxfp8", swa_rows, device, seed=1)
    main, v4_main = _cache("main_kv_fp4", main_rows, device, seed=2)
    return Pool(swa, main, v4_swa, v4_main)


def _cache(name: str, rows: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator(device=device).manual_seed(seed)
    cache = allocate_cache(FORMATS[name], rows // PAGE_ROWS, PAGE_ROWS, device)
    other = v4.allocate(rows // PAGE_ROWS, PAGE_ROWS, device)
    for first in range(0, rows, CHUNK):
        count = min(CHUNK, rows - first)
        source = torch.randn(count, DIM, generator=g, device=device).to(torch.bfloat16)
        pages = slice(first // PAGE_ROWS, (first + count) // PAGE_ROWS)
        deepseek_v41_quantize_cache(source, name, PAGE_ROWS, cache[pages])
        v4.write(other, pages.start, source)
    return cache, other


def inputs_over(pool: Pool, point: Point) -> Inputs:
    """Lists, q and sink of a point.

    Raises:
        ValueError: the pools are too small for two calls with rows of their own.
    """
    g = torch.Generator(device=pool.device).manual_seed(1000 + point.rows + point.topk)
    swa_rows, main_rows = len(pool.swa) * PAGE_ROWS, len(pool.main) * PAGE_ROWS
    count = layers(point, main_rows, swa_rows)

    def drawn(rows: int, *shape: int) -> torch.Tensor:
        number = torch.Size(shape).numel()
        return torch.randperm(rows, generator=g, device=pool.device)[:number].to(torch.int32).view(shape)

    q = torch.randn(point.batch, point.queries, point.heads, DIM, generator=g, device=pool.device).to(torch.bfloat16)
    sink = torch.randn(point.heads, generator=g, device=pool.device)
    windows = drawn(swa_rows, count, point.batch, point.window + point.queries - 1)
    selected = drawn(main_rows, count, point.batch, 1 if point.shared else point.queries, point.topk)
    return Inputs(point, pool, q, sink, windows, selected)
