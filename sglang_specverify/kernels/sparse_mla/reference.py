"""FP64 oracle of DeepSeek-V4.1 sparse MLA decode, on what the bytes mean, and what the errors of a kernel scale with.

For query row (b, s), head h, and the keys k of its two index lists that are valid, V = {i < length, 0 <= slot < capacity}:

    z[h, k]   = bmm1 * sum_d q[h, d] K[k, d]
    lse[h]    = log sum_{k in V} exp z[h, k]                         natural logarithm, without the sink
    L[h]      = log(exp lse[h] + exp sink[h]),  w[h, k] = exp(z[h, k] - L[h])
    out[h, d] = bmm2 * sum_{k in V} w[h, k] K[k, d]
    S[h, d]   = |bmm2| * sum_{k in V} w[h, k] |K[k, d]|              sensitivity
    U[h, d]   = |bmm2| * exp(max_k z[h, k] - L[h]) * sum_{k in V} |K[k, d]|      underflow

K is the row's value, exactly (contract "exact"), or for a main row the nearest E4M3 to it, saturated at 448 ("e4m3"). A query
row without a valid key has lse -inf and out 0. A row's bytes are gathered by slot and decoded by table, and only valid slots
are read, so that the oracle shares no arithmetic with a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.sparse_mla.formats import DIM, check_cache, check_layout, decode_rows, e4m3_table, format_of
from sglang_specverify.kernels.sparse_mla.rounding import to_e4m3

CONTRACTS = ("exact", "e4m3")


@dataclass(frozen=True)
class Reference:
    """What a call gives, in FP64, and what its errors scale with; the formulas are at the head of this file.

    Attributes:
        out, sensitivity, underflow: FP64 [B, Sq, H, 512].
        lse: FP64 [B, Sq, H].
        valid: bool [B, Sq, window + top-k]: the entries of both index lists that count.
    """

    out: torch.Tensor
    lse: torch.Tensor
    sensitivity: torch.Tensor
    underflow: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True)
class _Source:
    """One of the two caches with what is read from it."""

    cache: torch.Tensor
    indices: torch.Tensor
    valid: torch.Tensor
    format: str
    page_rows: int
    layout: str
    rounded: bool

    def rows(self, b: int, s: int) -> torch.Tensor:
        """FP64 [n, 512]: the valid rows of query row (b, s), in the order of the list."""
        slots = self.indices[b, s][self.valid[b, s]]
        rows = decode_rows(self.cache, slots, self.format, self.page_rows, self.layout)
        return e4m3_table().to(rows.device)[to_e4m3(rows).long()] if self.rounded else rows


@torch.no_grad()
def reference_decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    main_cache: torch.Tensor | None,
    main_indices: torch.Tensor | None,
    sink: torch.Tensor | None = None,
    swa_lens: torch.Tensor | None = None,
    main_lens: torch.Tensor | None = None,
    *,
    swa_format: str = "swa_mxfp8",
    main_format: str = "main_kv_fp4",
    swa_page_rows: int = 64,
    main_page_rows: int = 64,
    swa_layout: str = "block_split",
    main_layout: str = "block_split",
    bmm1_scale: float = DIM**-0.5,
    bmm2_scale: float = 1.0,
    contract: str = "exact",
) -> Reference:
    """Sparse MLA decode in FP64. Runs on any device and waits for it.

    Args:
        q: [B, Sq, H, 512] bf16, fp16, fp32, fp64 or E4M3, taken as it is.
        swa_cache, main_cache: uint8 caches, see `formats.py`; main_cache may be None where main_indices is or has no columns.
        swa_indices, main_indices: int32 or int64 [B, Sq, n], or [B, 1, n] for one list that all Sq rows read. An entry counts
            if it is before the length and a slot of the pool; a slot that is listed twice counts twice.
        sink: [H] of float type, +inf and -inf included; None for none.
        swa_lens, main_lens: int32 or int64 [B] or [B, Sq]; more than the list has means all, less than 0 none; None means all.
        contract: "exact" or "e4m3".

    Raises:
        ArgumentError: an argument outside what it may be.
    """
    if contract not in CONTRACTS:
        raise ArgumentError("contract", repr(contract), " or ".join(CONTRACTS))
    batch, queries, heads, _ = checks.tensor("q", q, ("B", "Sq", "H", DIM), (*checks.FLOATS, torch.float8_e4m3fn)).shape
    swa = _source("swa", swa_cache, swa_indices, swa_lens, q, swa_format, swa_page_rows, swa_layout, False)
    sources = [swa]
    if main_indices is not None and main_indices.shape[-1] > 0:
        rounded = contract == "e4m3"
        main = _source("main", main_cache, main_indices, main_lens, q, main_format, main_page_rows, main_layout, rounded)
        sources.append(main)
    sinks = torch.full((heads,), -torch.inf, dtype=torch.float64, device=q.device)
    if sink is not None:
        sinks = checks.tensor("sink", sink, (heads,), checks.FLOATS, q.device).double()

    out, sensitivity, underflow = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(3))
    lse = torch.full((batch, queries, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        for s in range(queries):
            keys = torch.cat([source.rows(b, s) for source in sources])
            if len(keys) == 0:
                continue
            z = bmm1_scale * (q[b, s].double() @ keys.T)
            lse[b, s] = torch.logsumexp(z, dim=1)
            total = torch.logaddexp(lse[b, s], sinks)[:, None]
            weights = torch.exp(z - total)
            out[b, s] = bmm2_scale * (weights @ keys)
            sensitivity[b, s] = abs(bmm2_scale) * (weights @ keys.abs())
            peak = torch.exp(z.amax(dim=1, keepdim=True) - total)
            underflow[b, s] = abs(bmm2_scale) * peak * keys.abs().sum(dim=0)
    valid = torch.cat([source.valid for source in sources], dim=2)
    return Reference(out, lse, sensitivity, underflow, valid)


def _source(
    name: str, cache: object, indices: torch.Tensor, lens: torch.Tensor | None, q: torch.Tensor, format: str, page_rows: int,
    layout: str, rounded: bool,
) -> _Source:  # fmt: skip
    batch, queries = q.shape[:2]
    kind = format_of(f"{name}_format", format)
    checks.integer(f"{name}_page_rows", page_rows, 1)
    pool = check_cache(f"{name}_cache", cache, kind, page_rows, q.device)
    check_layout(f"{name}_layout", layout)
    checks.tensor(f"{name}_indices", indices, (batch, "Sq or 1", "n"), checks.INTS, q.device)
    if indices.shape[1] not in (1, queries):
        raise ArgumentError(f"{name}_indices", f"shape {list(indices.shape)}", f"Sq = {queries} rows a request, or 1")
    slots = indices.long().expand(batch, queries, -1)
    valid = (slots >= 0) & (slots < pool.shape[0] * page_rows)
    if lens is not None:
        shape = (batch,) if lens.dim() == 1 else (batch, queries)
        checks.tensor(f"{name}_lens", lens, shape, checks.INTS, q.device)
        limits = lens.long().view(batch, -1, 1)
        valid = valid & (torch.arange(slots.shape[2], device=q.device) < limits)
    return _Source(pool, slots, valid, kind.name, page_rows, layout, rounded)
