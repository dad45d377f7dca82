"""Sparse MLA decode over a DeepSeek-V4.1 cache: a sliding window of E4M3 rows and selected rows of a packed FP4 pool.

    z[h, k]   = bmm1_scale * sum_d q[h, d] K[k, d]       K: the row that entry k of a list names, both key and value
    lse[h]    = log sum_k exp z[h, k]                    natural logarithm, without the sink; -inf for no key
    out[h, d] = bmm2_scale * sum_k exp(z[h, k]) K[k, d] / (exp lse[h] + exp sink[h])       0 for no key

over the entries of both lists that lie before their lengths and name a row of the pool. Rows are read where they are, in the
bytes that `formats.py` describes. In the "exact" contract their values are exact in bf16; in "e4m3" values of main rows are
rounded to E4M3, and q, keys and weights are multiplied in it. All products accumulate in FP32.

Where there are few rows, the keys are divided over programs, and a second kernel combines the parts and applies the sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_specverify import hardware
from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton
from sglang_specverify.kernels.sparse_mla import arguments
from sglang_specverify.kernels.sparse_mla.arguments import E4M3_KEYS, DecodeArguments
from sglang_specverify.kernels.sparse_mla.conversions import conversion_of
from sglang_specverify.kernels.sparse_mla.formats import DIM
from sglang_specverify.kernels.sparse_mla.hopper import hopper_launch
from sglang_specverify.kernels.sparse_mla.launches import INTERPRETED_PROGRAMS, config_of, packs
from sglang_specverify.kernels.sparse_mla.splits import Division, SparseConfig, divide, workspace_bytes

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Buffers:
    """What a call writes; `workspace` is None where keys are not divided."""

    out: torch.Tensor
    lse: torch.Tensor
    workspace: torch.Tensor | None


def deepseek_v41_decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    main_cache: torch.Tensor | None = None,
    main_indices: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    swa_lens: torch.Tensor | None = None,
    main_lens: torch.Tensor | None = None,
    bmm1_scale: float = DIM**-0.5,
    bmm2_scale: float = 1.0,
    contract: str = "exact",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    swa_starts: torch.Tensor | None = None,
    swa_format: str = "swa_mxfp8",
    main_format: str = "main_kv_fp4",
    swa_page_rows: int = 64,
    main_page_rows: int = 64,
    swa_layout: str = "block_split",
    main_layout: str = "block_split",
    splits: int | None = None,
    config: SparseConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend; returns (out, lse). Looks at no value on the host: lengths and lists are read anew at every replay of a graph.

    Verify-aware packing: where all Sq rows of a request read one window list, swa_indices [B, 1, n], each its own range of it
    from swa_starts, and H is below 64, up to 64 / H of them may share a tile, and the rows of the window are read once for it;
    `launches.packs` says where they do. A
    chain's list is the slots of 128 + Sq - 1 consecutive positions, and row i starts at i. The main lists may be of each row's
    own: then they are read one after the other, each for its own row. A row of the pool that some rows of a tile see and
    others do not must be finite: a NaN in it reaches them all.

    Args:
        q: bf16 or E4M3 [B, Sq, H, 512], H one of 8, 16, 32, 64, 128, Sq 1 to 8; a scale of E4M3 goes into bmm1_scale.
        swa_cache, main_cache: uint8 [pages, page_bytes] of swa_format and main_format, any page stride that 16 divides.
        swa_indices, main_indices: int32 [B, Sq, n] slots, or [B, 1, n] for one list that all rows of a request read. -1 and any
            other slot that the pool does not have are left out. Without main_cache, or with n = 0, only the window is read.
        sink: [H] FP32, bf16 or fp16; -inf for a head without; None for none.
        swa_lens, main_lens: int32 [B, Sq] or [B]: entries of its list that a row reads; None for all; below 0 none.
        swa_starts: int32 [B, Sq] or [B]: the first entry of a shared window list that a row reads; None for 0.
        contract: "exact", or "e4m3", for q in E4M3 and swa_fp8 rows, on SM100, SM103 and SM107.
        out: bf16 like q; lse: FP32 [B, Sq, H]; None for new ones.
        workspace: uint8 of `deepseek_v41_decode_workspace_size` bytes or more; None for a new one where one is needed.
        splits: parts of the keys; None for the division's own.
        config: launch options; None for those of the architecture.

    Raises:
        ArgumentError: an argument outside what it may be, or a contract that the architecture does not have.
        SpecverifyError: tensors on a device that no kernel serves.
    """
    q = arguments.check_q(q)
    if not uses_triton(q.device):
        raise ArgumentError("q", "a tensor on the CPU", "a tensor on a GPU; on the CPU reference.reference_decode")
    arch = arch_of(q.device)
    contract = arguments.check_contract(contract, arch, q)
    swa = arguments.check_pool(
        "swa", q, swa_cache, swa_indices, swa_format, swa_page_rows, swa_layout, swa_lens, swa_starts, contract
    )  # fmt: skip
    if (main_cache is None) != (main_indices is None):
        name = "main_cache" if main_cache is None else "main_indices"
        raise ArgumentError(name, "None", "both main_cache and main_indices, or neither")
    main = None
    if main_cache is not None:
        main = arguments.check_pool("main", q, main_cache, main_indices, main_format, main_page_rows, main_layout, main_lens)
        main = main if main.indices.shape[2] > 0 else None
    elif main_lens is not None:
        raise ArgumentError("main_lens", "lengths", "None without main_indices")
    a = DecodeArguments(
        q, swa, main, arguments.check_sink(sink, q),
        checks.number("bmm1_scale", bmm1_scale), checks.number("bmm2_scale", bmm2_scale), contract,
    )  # fmt: skip
    if splits is not None and checks.integer("splits", splits, 1) > 65535:
        raise ArgumentError("splits", splits, "65535 or fewer")
    programs = hardware.detect().multiprocessors if q.device.type == "cuda" else INTERPRETED_PROGRAMS
    packed = _packed(a, arch, programs) if config is None else a.packed
    bf16 = q.dtype == torch.bfloat16
    config = config or config_of(arch, tiles_of_rows(a, packed), programs, entries_of(a, packed), bf16, contract)
    division = division_of(a, config, programs, packed, splits)
    reads = _reads(a)
    out, lse = arguments.check_outputs(q, out, lse, reads)
    space = arguments.check_workspace(workspace, workspace_bytes(a.batch, division), q, {**reads, "out": out, "lse": lse})
    for launch in decode_launches(a, Buffers(out, lse, space), config, division, arch):
        launch.run()
    return out, lse


def tiles_of_rows(a: DecodeArguments, packed: bool) -> int:
    """Tiles of 64 rows of all requests; `packed`: rows of several tokens share them."""
    return a.batch * -(-a.queries // _tokens(a, packed)) * -(-a.heads // 64)


def entries_of(a: DecodeArguments, packed: bool) -> int:
    """Entries of lists that a tile of rows reads: main lists of each row's own one after the other."""
    return _window(a, packed) + (1 if _shares_main(a) else _tokens(a, packed)) * a.topk


def division_of(a: DecodeArguments, config: SparseConfig, programs: int, packed: bool, splits: int | None = None) -> Division:
    return divide(
        a.batch, a.queries, a.heads, _window(a, packed), a.topk, config, programs,
        packed=packed, shared_main=_shares_main(a), splits=splits,
    )  # fmt: skip


def _packed(a: DecodeArguments, arch: str, programs: int) -> bool:
    """Whether rows of one request share tiles: they can, and it is expected to be faster."""
    return a.packed and packs(
        arch, a.batch, a.queries, a.heads, (_window(a, True), _window(a, False)), a.topk, programs,
        shared_main=_shares_main(a), bf16=a.q.dtype == torch.bfloat16, contract=a.contract,
    )  # fmt: skip


def _window(a: DecodeArguments, packed: bool) -> int:
    """Entries of the window's list that a tile of rows is expected to read: of a chain's, which is longer by a token a row."""
    width = a.swa.indices.shape[2]
    return max(width - a.queries + _tokens(a, packed), 0) if a.packed else width


def _shares_main(a: DecodeArguments) -> bool:
    return a.main is None or a.main.shared


def _tokens(a: DecodeArguments, packed: bool) -> int:
    """Rows of one request in a tile of 64."""
    return min(max(64 // a.heads, 1), a.queries) if packed else 1


def decode_launches(
    a: DecodeArguments, buffers: Buffers, config: SparseConfig, division: Division, arch: str, conversion: str | None = None
) -> tuple[Launch, ...]:
    """The decode kernel, and its reducer where keys are divided; none for no request.

    `conversion` of main rows to E4M3: one of `conversions(arch, ...)`, None for the best of them.
    """
    from sglang_specverify.kernels.sparse_mla.combine_kernel import combine_kernel
    from sglang_specverify.kernels.sparse_mla.decode_kernel import P_SCALE, decode_kernel
    from sglang_specverify.kernels.sparse_mla.rows_kernel import UNDO

    if a.batch == 0:
        return ()
    split = division.splits > 1
    partial_out, partial_lse = _partials(a.batch, buffers, division)
    pdl = config.pdl and arch.startswith("sm_")
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    e4m3 = a.contract == "e4m3"
    undo_scores, undo_values = (1.0, 1.0 / P_SCALE.value) if e4m3 else (UNDO, UNDO)
    own = {
        "sink": buffers.lse if a.sink is None else a.sink,
        "out": buffers.out,
        "lse": buffers.lse,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "queries": a.queries,
        "heads": a.heads,
        "out_scale": a.bmm2_scale * undo_values,
        **_strides("out", buffers.out, "batch", "row", "head"),
        **_strides("lse", buffers.lse, "batch", "row", "head"),
        "head_blocks": division.head_blocks,
        "splits": division.splits,
    }
    constants = {"BLOCK_M": division.block_m, "TOKENS": division.tokens, "HAS_SINK": a.sink is not None, "PDL": pdl}
    scale = a.bmm1_scale * undo_scores * _LOG2_E
    inputs = {"q": a.q, **own, **_inputs(a), "scale": scale, **_strides("q", a.q, "batch", "row", "head")}
    grid = (division.splits * config.value_parts, division.blocks, a.batch)
    shared = {**constants, **_constants(a), "SPLIT": split}
    if e4m3 and (config.specialized or config.keys < E4M3_KEYS):
        allowed = f"keys {E4M3_KEYS} or more, and not specialized, in the e4m3 contract"
        raise ArgumentError("config", str(config), allowed)
    if config.specialized:
        decode = hopper_launch(a, division, config, grid, inputs, shared, options)
    else:
        tile = {"BLOCK_N": config.keys, "VALUE_PARTS": config.value_parts, "STAGES": config.num_stages,
                "CONVERSION": (conversion or conversion_of(arch)) if e4m3 else ""}  # fmt: skip
        own_options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **options}
        decode = Launch(decode_kernel, grid, inputs, {**shared, **tile}, own_options)
    if not split:
        return (decode,)
    columns, rows = min(config.reduce_columns, DIM), min(config.reduce_rows, division.block_m)
    parts = 1 << (division.splits - 1).bit_length()
    # Up to 64 parts are read at once. Beyond 32 of them a program has half the columns: the registers of 4 warps hold no more.
    columns = columns // 2 if parts > 32 else columns
    reducer = Launch(
        combine_kernel,
        (division.block_m // rows, DIM // columns, a.batch * division.blocks),
        {**own, "blocks": division.blocks},
        {**constants, "ROWS": rows, "COLUMNS": columns, "SPLITS": parts},
        {"num_warps": config.reduce_warps, **options},
    )
    return decode, reducer


def _partials(batch: int, buffers: Buffers, division: Division) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, 512] and LSEs [rows] of all parts in FP32, in the workspace; stand-ins where there are none."""
    if buffers.workspace is None:
        return buffers.lse, buffers.lse
    rows = batch * division.blocks * division.splits * division.block_m
    space = buffers.workspace[: 4 * rows * (DIM + 1)].view(torch.float32)
    return space[: rows * DIM], space[rows * DIM :]


def _reads(a: DecodeArguments) -> dict[str, torch.Tensor]:
    """Every tensor that a call reads, by the name of its argument."""
    found = {"q": a.q, "sink": a.sink}
    for name, pool in (("swa", a.swa), ("main", a.main)):
        if pool is not None:
            found |= {f"{name}_cache": pool.cache, f"{name}_indices": pool.indices, f"{name}_lens": pool.lens}
    found["swa_starts"] = a.swa.starts
    return {name: value for name, value in found.items() if value is not None}


def _inputs(a: DecodeArguments) -> dict[str, Any]:
    """Run-time arguments of both pools; where a tensor is left out another one of its type stands in, which is not read."""
    main = a.main or a.swa
    swa_starts = a.swa.starts if a.swa.starts is not None else a.swa.indices
    found: dict[str, Any] = {"swa_starts": swa_starts, **_strides("swa_start", swa_starts, "batch", "row")}
    for name, pool in (("swa", a.swa), ("main", main)):
        lens = pool.lens if pool.lens is not None else pool.indices
        found |= {
            name: pool.cache,
            f"{name}_indices": pool.indices,
            f"{name}_lens": lens,
            f"{name}_width": pool.indices.shape[2],
            f"{name}_capacity": pool.capacity,
            f"{name}_page": pool.cache.stride(0),
            **_strides(f"{name}_index", pool.indices, "batch", "row"),
            **_strides(f"{name}_len", lens, "batch", "row"),
        }
    return found


def _constants(a: DecodeArguments) -> dict[str, Any]:
    found: dict[str, Any] = {
        "SHARED_SWA": a.swa.shared,
        "SHARED_MAIN": a.main is None or a.main.shared,
        "HAS_STARTS": a.swa.starts is not None,
        "HAS_SWA_LENS": a.swa.lens is not None,
        "HAS_MAIN_LENS": a.main is not None and a.main.lens is not None,
        "HAS_MAIN": a.main is not None,
        "SWA_GROUP": a.swa.format.group,
    }
    for name, pool in (("SWA", a.swa), ("MAIN", a.main)):
        row, base, scale_row = pool.addressing if pool is not None else (0, 0, 0)
        rows = pool.page_rows if pool is not None else 1
        found |= {f"{name}_PAGE_ROWS": rows, f"{name}_ROW": row, f"{name}_S_BASE": base, f"{name}_S_ROW": scale_row}
    return found


def _strides(name: str, value: torch.Tensor, *dims: str) -> dict[str, int]:
    return {f"{name}_{dim}": value.stride(n) for n, dim in enumerate(dims)}
