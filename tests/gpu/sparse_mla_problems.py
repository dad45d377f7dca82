"""Problems of sparse MLA decode with random bytes, for a GPU and for Triton's interpreter: what is not to be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_specverify.kernels.sparse_mla.formats import FORMATS, allocate_cache, row_addressing
from sglang_specverify.kernels.sparse_mla.reference import Reference, reference_decode


@dataclass(frozen=True)
class Problem:
    """Sizes and kinds of one call; see `deepseek_v41_decode`.

    Attributes:
        shared: one window list for all rows of a request, each row its own range of it where `starts`.
        shared_main: one main list likewise, without starts.
        lens: random lengths, some of them 0; else all entries.
        missing: share of list entries that are -1 or beyond the pool.
        pad: bytes between pages.
    """

    batch: int = 1
    queries: int = 1
    heads: int = 64
    window: int = 128
    topk: int = 512
    shared: bool = False
    starts: bool = False
    shared_main: bool = False
    lens: bool = True
    missing: float = 0.1
    swa_format: str = "swa_mxfp8"
    swa_page_rows: int = 64
    main_page_rows: int = 64
    swa_layout: str = "block_split"
    main_layout: str = "block_split"
    pad: int = 0
    sink: bool = True
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def build(p: Problem, device: str) -> dict[str, Any]:
    """Keyword arguments of `deepseek_v41_decode`."""
    g = torch.Generator().manual_seed(p.seed)
    rows = 4 * p.window + 70
    swa_lists, main_lists = 1 if p.shared else p.queries, 1 if p.shared_main else p.queries
    swa = _lists(p, swa_lists, p.window, rows, g)
    main = _lists(p, main_lists, p.topk, rows, g)
    call: dict[str, Any] = {
        "q": torch.randn(p.batch, p.queries, p.heads, 512, generator=g).to(torch.bfloat16),
        "swa_cache": _cache(p.swa_format, rows, p.swa_page_rows, p.swa_layout, p.pad, swa, g),
        "swa_indices": swa,
        "sink": _sinks(p.heads, g) if p.sink else None,
        "swa_format": p.swa_format,
        "swa_page_rows": p.swa_page_rows,
        "swa_layout": p.swa_layout,
    }
    if p.topk:
        call |= {
            "main_cache": _cache("main_kv_fp4", rows, p.main_page_rows, p.main_layout, p.pad, main, g),
            "main_indices": main,
            "main_page_rows": p.main_page_rows,
            "main_layout": p.main_layout,
        }
    if p.starts:
        call["swa_starts"] = torch.arange(p.queries, dtype=torch.int32).expand(p.batch, -1).contiguous()
        call["swa_lens"] = torch.full((p.batch, p.queries), p.window - p.queries + 1, dtype=torch.int32)
    if p.lens:
        most = p.window + 3
        lens = torch.randint(0, most, (p.batch, p.queries), generator=g, dtype=torch.int32)
        call["swa_lens"] = torch.minimum(lens, call["swa_lens"]) if p.starts else lens
        if p.topk:
            call["main_lens"] = torch.randint(-1, p.topk + 3, (p.batch, p.queries), generator=g, dtype=torch.int32)
    return {name: moved(value, device) if isinstance(value, torch.Tensor) else value for name, value in call.items()} | p.extra


def moved(value: torch.Tensor, device: str) -> torch.Tensor:
    """`value` on a device, with the same gaps between pages, which `to` alone closes."""
    if value.is_contiguous():
        return value.to(device)
    size = sum((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True)) + 1
    whole = torch.as_strided(value, (size,), (1,))
    return whole.to(device).as_strided(value.shape, value.stride())


def oracle(call: dict[str, Any]) -> Reference:
    """The FP64 result; ranges of shared lists become lists of each row's own."""
    names = ("out", "lse", "workspace", "splits", "config")
    call = {name: value for name, value in call.items() if name not in names}
    starts = call.pop("swa_starts", None)
    if starts is not None:
        batch, queries = call["q"].shape[:2]
        shared = call["swa_indices"]
        width = shared.shape[2]
        at = starts.long()[:, :, None] + torch.arange(width, device=shared.device)
        own = shared.expand(batch, queries, width).gather(2, at.clamp_max(width - 1))
        call["swa_indices"] = own.masked_fill(at >= width, -1).contiguous()
    return reference_decode(call.pop("q"), call.pop("swa_cache"), call.pop("swa_indices"), call.pop("main_cache", None),
                            call.pop("main_indices", None), **call)  # fmt: skip


def _lists(p: Problem, lists: int, width: int, rows: int, g: torch.Generator) -> torch.Tensor:
    """Slots, some of them twice, some -1, some beyond every pool."""
    slots = torch.randint(0, rows, (p.batch, lists, width), generator=g, dtype=torch.int32)
    chance = torch.rand(slots.shape, generator=g)
    slots[chance < p.missing / 2] = -1
    slots[(chance >= p.missing / 2) & (chance < p.missing)] = 2**31 - 1
    return slots


def _cache(name: str, rows: int, page_rows: int, layout: str, pad: int, lists: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Random finite rows at the slots of `lists`, NaN bytes everywhere else, the gaps between pages included."""
    kind = FORMATS[name]
    pages = -(-rows // page_rows)
    # Strides are multiples of 16.
    stride = (page_rows * kind.row_bytes + pad + 15) // 16 * 16
    cache = allocate_cache(kind, pages, page_rows, "cpu", stride)
    torch.as_strided(cache, (pages * stride,), (1,)).fill_(0xFF)
    slots = lists.unique()
    fill_rows(cache, name, page_rows, layout, slots[(slots >= 0) & (slots < pages * page_rows)].long(), g)
    return cache


def fill_rows(cache: torch.Tensor, name: str, page_rows: int, layout: str, slots: torch.Tensor, g: torch.Generator) -> None:
    """Random finite rows at `slots`, int64 [n] of the pool; `g` is a generator of the CPU."""
    kind = FORMATS[name]
    if kind.name == "main_kv_fp4":
        values = torch.randint(0, 256, (len(slots), kind.value_bytes), generator=g, dtype=torch.uint8)
        # Scales 2^-3 to 2, some subnormal, some negative.
        scales = torch.randint(0x20, 0x40, (len(slots), kind.scale_bytes), generator=g, dtype=torch.uint8)
        odd = torch.rand(scales.shape, generator=g)
        scales = torch.where(odd < 0.1, scales & 7, torch.where(odd > 0.9, scales | 0x80, scales))
    else:
        values = torch.randint(0, 256, (len(slots), kind.value_bytes), generator=g, dtype=torch.uint8)
        values = torch.where((values & 0x7F) > 0x44, values & 0xBF, values)
        scales = torch.randint(125, 129, (len(slots), kind.scale_bytes), generator=g, dtype=torch.uint8)
    v_at, s_at = places(name, page_rows, layout, slots)
    page = slots // page_rows
    cache[page[:, None], v_at] = values.to(cache.device)
    if kind.scale_bytes:
        cache[page[:, None], s_at] = scales.to(cache.device)


def places(name: str, page_rows: int, layout: str, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in their pages the bytes of rows lie: int64 [n, value bytes] and [n, scale bytes]."""
    kind = FORMATS[name]
    row = (slots % page_rows)[:, None]
    v_base, v_row, s_base, s_row = row_addressing(kind, page_rows, layout)
    v_at = v_base + row * v_row + torch.arange(kind.value_bytes, device=slots.device)
    return v_at, s_base + row * s_row + torch.arange(kind.scale_bytes, device=slots.device)


def _sinks(heads: int, g: torch.Generator) -> torch.Tensor:
    """Ordinary ones, one of -inf, one of +inf and a large one."""
    sink = torch.randn(heads, generator=g) * 3
    sink[:4] = torch.tensor([float("-inf"), float("inf"), 80.0, -80.0])
    return sink
