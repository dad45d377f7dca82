"""Launches beside attention itself to compile ahead of time: plans, tables, steps, merges, compactions, suffixes, quantisers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sglang_specverify.kernels.aot_cases import CACHES, DIMS, Case, cache_type, meta
from sglang_specverify.kernels.aot_sparse_mla import ACCEPTED_SPILLS, sparse_mla
from sglang_specverify.kernels.aot_specialized import SpecializedCase
from sglang_specverify.kernels.compact import CompactArguments, compact_visible_slots_launch
from sglang_specverify.kernels.gather_suffix import SuffixArguments, gather_suffix_merge_launch
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.merge import merge_states_launch
from sglang_specverify.kernels.page_table import PageTableArguments, page_table_launch
from sglang_specverify.kernels.plan import Masks, Plan, Shape, Tree, plan_launch, with_buffer
from sglang_specverify.kernels.snapshot import snapshot_table_launch
from sglang_specverify.kernels.sparse_mla.formats import DIM, FORMATS, ROW_LAYOUTS, Format
from sglang_specverify.kernels.sparse_mla.quantize import MIN_AMAX, quantize_cache_launch
from sglang_specverify.kernels.specialized import ARCH, HEAD_DIMS
from sglang_specverify.kernels.step import prepare_step_launch

_BATCH, _CONTEXT = 32, 1 << 17


@dataclass(frozen=True)
class Auxiliary:
    """A launch with its name; `matrix` says whether it multiplies matrices, `spill_bytes` what of a thread may be in memory."""

    name: str
    launch: Launch
    matrix: bool = False
    spill_bytes: int = 0


def auxiliary(arch: str, *, short: bool = False) -> Iterator[Auxiliary]:
    """Every auxiliary kernel on `arch`; with `short` one launch each, no combination, and the gather suffix once a head dim."""
    for build in (_plans, _snapshots, _page_tables, _steps, _merges, _compactions):
        made = list(build(arch))
        yield from made[:1] if short else made
    if not short:
        yield from combinations(arch)
    for number, kind in enumerate(FORMATS.values()):
        made = list(_quantizations(arch, kind))
        yield from made[number % 2 :: len(made)] if short else made
    for name, launch, matrix in sparse_mla(arch, short=short):
        yield Auxiliary(name, launch, matrix, ACCEPTED_SPILLS if matrix else 0)
    for number, dims in enumerate(DIMS):
        yield from _suffixes(
            arch, dims, (("bf16", "e4m3")[number % 2],) if short else CACHES, (True,) if short else (False, True)
        )


def _plans(arch: str) -> Iterator[Auxiliary]:
    for batch, window, deterministic, kind in (
        (_BATCH, -1, False, "full_mask ragged"),
        (_BATCH, -1, False, ""),
        (_BATCH, 4096, True, "qlen_only"),
        (1, -1, True, ""),
        (1, 4096, False, "full_mask"),
        (1024, -1, False, "qlen_only"),
        (1024, 4096, True, "full_mask"),
    ):
        plan, masks = _plan(batch, 8, kind, window=window, deterministic=deterministic)
        name = f"{arch} plan batch{batch}{' window' * (window >= 0)}{' deterministic' * deterministic} {kind or 'chain'}"
        yield Auxiliary(name, plan_launch(meta(batch, dtype=torch.int32), meta(batch, dtype=torch.int32), plan, masks))


def combinations(arch: str) -> Iterator[Auxiliary]:
    """Parts of the fused kernel combined by a launch of their own, and of that with specialised warps where there is one."""
    for dims, rows, batch, feature in (
        ((80, 80), 64, 1, "window_sinks"),
        ((128, 128), 16, 1, "plain"),
        ((128, 128), 64, 32, "head_scales"),
        ((64, 64), 32, 1, "ragged"),
        ((256, 256), 16, 1, "softcap_window"),
    ):
        case = Case(arch, "fused_split", "chain", dims, "bf16", rows, feature=feature, batch=batch)
        launch = case.launches(replace(case.configured()[0], combine="launch"))[-1]
        yield Auxiliary(f"{arch} combine d{dims[0]} rows{rows} batch{batch} {feature}", launch)
    for dim in HEAD_DIMS if arch == ARCH else ():
        wide = SpecializedCase(Case(arch, "fused", "qlen_only", (dim, dim), "bf16", 256), sinks=dim == 128, divide=True)
        launch = wide.launches(replace(wide.configured()[0], combine="launch"))[-1]
        yield Auxiliary(f"{arch} combine d{dim} rows256{' sinks' * wide.sinks} of specialized_split", launch)


def _plan(
    batch: int, w: int, kind: str, *, window: int = -1, deterministic: bool = False, divide: bool = True
) -> tuple[Plan, Masks | None]:
    """`kind`: a mask's layout, "ragged" behind it where rows are, or neither for a chain."""
    config = LaunchConfig(block_m=16, block_n=64, num_warps=4, num_stages=2)
    shape = Shape(rows=2 * w, kv_heads=8, v_head_dim=128, config=config, programs=264, deterministic=deterministic)
    lens, full = meta(batch, dtype=torch.int32), kind.startswith("full_mask")
    if not kind:
        return with_buffer(Plan(lens, batch, shape, window, divide, None), lens.device, None), None
    masks = Masks(
        mask=meta(1 << 20, dtype=torch.bool) if full else meta(batch, w, w, dtype=torch.bool),
        full=full,
        offsets=meta(batch + 1, dtype=torch.int64) if full else None,
        q_offsets=meta(batch + 1, dtype=torch.int32) if "ragged" in kind else None,
        queries=w,
    )
    plan = Plan(lens, batch, shape, window, divide, Tree(batch * w, -(-w // 64) + 1))
    return with_buffer(plan, lens.device, None), masks


def _steps(arch: str) -> Iterator[Auxiliary]:
    for batch, w, page_size, mapped, kind, divide in (
        (_BATCH, 128, 1, True, "full_mask", True),
        (_BATCH, 128, 1, False, "qlen_only", True),
        (_BATCH, 8, 64, True, "full_mask ragged", True),
        (1, 4, 1, False, "", True),
        (256, 64, 1, False, "full_mask", True),
        (1024, 64, 64, True, "qlen_only", True),
        (1024, 256, 1, True, "full_mask", False),
        (1024, 4, 1, False, "", False),
    ):
        plan, masks = _plan(batch, w, kind, divide=divide)
        tables = [meta(batch, _CONTEXT // page_size, dtype=torch.int32) for _ in range(2)]
        launch = prepare_step_launch(
            meta(4096, _CONTEXT, dtype=torch.int32), meta(batch, dtype=torch.int64), meta(batch, dtype=torch.int64), plan, masks,
            table=tables[0], page_size=page_size, slot_map=meta(1 << 20, dtype=torch.int64) if mapped else None,
            window_table=tables[1] if mapped else None, extra=w, q_offsets=None if masks is None else masks.q_offsets,
        )  # fmt: skip
        name = f"{arch} step batch{batch} W{w} page{page_size}{' map' * mapped}{' divide' * divide} {kind or 'chain'}"
        yield Auxiliary(name, launch)


def _snapshots(arch: str) -> Iterator[Auxiliary]:
    for page_size, mapped in ((1, False), (64, False), (1, True), (64, True)):
        slot_map = meta(1 << 20, dtype=torch.int64) if mapped else None
        tensors = meta(4096, _CONTEXT, dtype=torch.int32), meta(_BATCH, dtype=torch.int64), meta(_BATCH, dtype=torch.int64)
        out = meta(_BATCH, _CONTEXT // page_size, dtype=torch.int32)
        launch = snapshot_table_launch(*tensors, page_size, slot_map, out, arch)
        yield Auxiliary(f"{arch} snapshot page{page_size}{' map' * mapped}", launch)


def _page_tables(arch: str) -> Iterator[Auxiliary]:
    """The shortest list has the ragged source with a window pool and lengths, which is every part of the kernel but the rows."""
    for page_size, ragged, mapped in (
        (16, True, True), (1, True, False), (64, True, False), (1, False, False), (16, False, True), (64, False, True),
    ):  # fmt: skip
        tables = [meta(_BATCH, _CONTEXT // page_size, dtype=torch.int32) for _ in range(2)]
        rows = {
            "row_ids": meta(_BATCH, dtype=torch.int64),
            "lens": meta(_BATCH, dtype=torch.int64),
            "extra": 4,
        }
        a = PageTableArguments(
            source=meta(_BATCH * _CONTEXT, dtype=torch.int32) if ragged else meta(4096, _CONTEXT, dtype=torch.int32),
            page_size=page_size,
            table=tables[0],
            window_table=tables[1] if mapped else None,
            slot_map=meta(1 << 20, dtype=torch.int64) if mapped else None,
            row_lens=meta(_BATCH, dtype=torch.int64) if ragged else None,
            **({"starts": meta(_BATCH + 1, dtype=torch.int32)} if ragged else rows),
        )
        name = f"{arch} page_table page{page_size} {'ragged lengths' if ragged else 'rows'}{' map' * mapped}"
        yield Auxiliary(name, page_table_launch(a, arch))


def _merges(arch: str) -> Iterator[Auxiliary]:
    for dtype in (torch.bfloat16, torch.float16):
        for _, dim in DIMS:
            outs = [meta(_BATCH, 32, dim, dtype=dtype) for _ in range(3)]
            lses = [meta(_BATCH, 32, dtype=torch.float32) for _ in range(3)]
            launch = merge_states_launch(outs[0], lses[0], outs[1], lses[1], outs[2], lses[2], arch)
            yield Auxiliary(f"{arch} merge d{dim} {str(dtype).removeprefix('torch.')}", launch)


def _compactions(arch: str) -> Iterator[Auxiliary]:
    for width in (64, 4, 256):
        for full in (False, True):
            for mapped in (False, True):
                a = CompactArguments(
                    mask=meta(_BATCH * width * width, dtype=torch.uint8),
                    mask_offsets=meta(_BATCH + 1, dtype=torch.int64) if full else None,
                    table=meta(_BATCH, _CONTEXT, dtype=torch.int32),
                    row_ids=meta(_BATCH, dtype=torch.int32),
                    prefix_lens=meta(_BATCH, dtype=torch.int32),
                    width=width,
                    num_rows=meta(1, dtype=torch.int32) if mapped else _BATCH * width,
                    page_size=64 if mapped else 1,
                    slot_map=meta(1 << 20, dtype=torch.int64) if mapped else None,
                    out_slots=meta(_BATCH * width, width, dtype=torch.int32),
                    out_lens=meta(_BATCH * width, dtype=torch.int32),
                )
                name = f"{arch} compact W{width} {'full_mask' if full else 'qlen_only'}{' page64 map' * mapped}"
                yield Auxiliary(name, compact_visible_slots_launch(a, arch))


def _quantizations(arch: str, kind: Format) -> Iterator[Auxiliary]:
    for dtype in (torch.bfloat16, torch.float32):
        for slots in (meta(_BATCH, dtype=torch.int64), None):
            layout = ROW_LAYOUTS[slots is None]
            cache = meta(4096, 64 * kind.row_bytes, dtype=torch.uint8)
            launch = quantize_cache_launch(meta(_BATCH, DIM, dtype=dtype), kind, 64, cache, slots, layout, MIN_AMAX)
            yield Auxiliary(
                f"{arch} quantize {kind.name} {str(dtype).removeprefix('torch.')}{' slots' * (slots is not None)}", launch
            )


def _suffixes(arch: str, dims: tuple[int, int], caches: tuple[str, ...], extras: tuple[bool, ...]) -> Iterator[Auxiliary]:
    """`extras`: whether with a soft cap, sinks, scales, a group that is no power of two and several blocks of slots."""
    for cache in caches:
        dtype = torch.float16 if cache == "fp16" else torch.bfloat16
        for extra in extras:
            heads = 40 if extra else 32
            a = SuffixArguments(
                q=meta(2048, heads, dims[0], dtype=dtype),
                k_cache=meta(1 << 16, 8, dims[0], dtype=cache_type(cache, arch)),
                v_cache=meta(1 << 16, 8, dims[1], dtype=cache_type(cache, arch)),
                suffix_slots=meta(2048, 64 if extra else 9, dtype=torch.int32),
                suffix_lens=meta(2048, dtype=torch.int32),
                prefix_out=meta(2048, heads, dims[1], dtype=dtype),
                prefix_lse=meta(2048, heads, dtype=torch.float32),
                k_scale=meta(8, dtype=torch.float32) if extra else 1.0,
                v_scale=meta(8, dtype=torch.float32) if extra else 1.0,
                sm_scale=None,
                softcap=30.0 if extra else 0.0,
                sinks=meta(heads, dtype=torch.float32) if extra else None,
            )
            name = f"{arch} gather_suffix d{'x'.join(map(str, dict.fromkeys(dims)))} {cache}{' softcap sinks scales' * extra}"
            yield Auxiliary(name, gather_suffix_merge_launch(a, arch), matrix=True)
