"""Launches of sparse MLA decode to compile ahead of time: contracts, formats, packed rows, parts of the keys, and the reducer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_specverify.kernels.aot_cases import meta
from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.sparse_mla.arguments import CONTRACTS, E4M3_SWA_FORMATS, DecodeArguments, check_pool
from sglang_specverify.kernels.sparse_mla.decode import Buffers, decode_launches, division_of, entries_of, tiles_of_rows
from sglang_specverify.kernels.sparse_mla.formats import FORMATS
from sglang_specverify.kernels.sparse_mla.launches import config_of
from sglang_specverify.kernels.sparse_mla.splits import workspace_bytes

#: Bytes of a thread that the decode kernels may keep in memory: a tile's sums, scores and decoded bytes are more than 255
#: registers hold. Packed rows, with a range of the lists each, take most.
ACCEPTED_SPILLS = 448

#: Multiprocessors to divide keys over; code does not depend on how many there are, but on whether keys are divided.
_PROGRAMS = {"sm_90": 132, "sm_100": 148, "sm_103": 160, "sm_107": 160, "gfx950": 256}
#: Batch, query rows, heads, top-k, format of the window, whether the window's list and the main lists are shared, page layout.
Call = tuple[int, int, int, int, str, bool, bool, str]
_CALLS: tuple[Call, ...] = (
    (1, 1, 64, 512, "swa_mxfp8", False, False, "block_split"),
    (256, 1, 64, 512, "swa_mxfp8", False, False, "interleaved"),
    (256, 1, 128, 0, "swa_fp8", False, False, "block_split"),
    (256, 4, 16, 512, "swa_mxfp8", True, False, "block_split"),
    (256, 4, 64, 512, "swa_mxfp8", True, True, "block_split"),
    (2, 6, 8, 512, "swa_fp8", True, True, "interleaved"),
    (256, 1, 32, 128, "swa_fp8", False, False, "block_split"),
)


def sparse_mla(arch: str, *, short: bool = False) -> Iterator[tuple[str, Launch, bool]]:
    """(name, launch, whether it multiplies matrices) on `arch`, none where there is no such kernel.

    With `short` the reducer, and on one architecture of each kind a decode kernel of the exact contract, one of e4m3 on each that
    has it.
    """
    if arch not in CONTRACTS["exact"] or arch == "none":
        return
    window_only = [call for call in _CALLS if call[3] == 0]
    calls = _CALLS if not short else {"sm_90": _CALLS[:1], "sm_100": window_only, "gfx950": window_only}.get(arch, ())
    for call in calls:
        yield from launches_of(arch, call, "exact")
    if arch in CONTRACTS["e4m3"]:
        one = {"sm_100": _CALLS[:1], "sm_103": _CALLS[3:4], "sm_107": _CALLS[5:6]}
        for call in one[arch] if short else _CALLS:
            yield from launches_of(arch, call, "e4m3")


def launches_of(arch: str, call: Call, contract: str, conversion: str | None = None) -> Iterator[tuple[str, Launch, bool]]:
    """Decode kernel and reducer of one call; in the e4m3 contract the window's rows are of the format that it has."""
    batch, queries, heads, topk, swa_format, shared, shared_main, layout = call
    swa_format = swa_format if contract == "exact" else E4M3_SWA_FORMATS[0]
    a = _arguments((batch, queries, heads, topk, swa_format, shared, shared_main, layout), contract)
    config = config_of(arch, tiles_of_rows(a, a.packed), _PROGRAMS[arch], entries_of(a, a.packed), contract=contract)
    division = division_of(a, config, _PROGRAMS[arch], a.packed)
    needed = workspace_bytes(batch, division)
    space = meta(needed, dtype=torch.uint8) if needed else None
    buffers = Buffers(
        meta(batch, queries, heads, 512, dtype=torch.bfloat16), meta(batch, queries, heads, dtype=torch.float32), space
    )
    decode, *reducers = decode_launches(a, buffers, config, division, arch, conversion)
    kind = "" if contract == "exact" else f" {contract}"
    name = f"{arch} sparse_mla{kind} b{batch} sq{queries} h{heads} k{topk} {swa_format} {layout}{' packed' * a.packed}"
    yield name, decode, True
    for reducer in reducers:
        yield f"{name} reducer", reducer, False


def _arguments(call: Call, contract: str) -> DecodeArguments:
    batch, queries, heads, topk, swa_format, shared, shared_main, layout = call
    q = meta(batch, queries, heads, 512, dtype=torch.bfloat16 if contract == "exact" else torch.float8_e4m3fn)
    lens = meta(batch, queries, dtype=torch.int32)
    pages = 1 << 14

    def lists(one: bool, width: int) -> torch.Tensor:
        return meta(batch, 1 if one else queries, width, dtype=torch.int32)

    window = 128 + queries - 1 if shared else 128
    cache = meta(pages, 128 * FORMATS[swa_format].row_bytes, dtype=torch.uint8)
    starts = lens if shared and queries > 1 else None
    swa = check_pool("swa", q, cache, lists(shared, window), swa_format, 128, layout, lens, starts, contract)
    main = None
    if topk:
        cache = meta(pages, 256 * FORMATS["main_kv_fp4"].row_bytes, dtype=torch.uint8)
        main = check_pool("main", q, cache, lists(shared_main, topk), "main_kv_fp4", 256, layout, lens)
    return DecodeArguments(q, swa, main, meta(heads, dtype=torch.float32), 512**-0.5, 1.0, contract)
