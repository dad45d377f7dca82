"""What `specverify explain` says of sparse MLA: which rows the pool of a DeepSeek-V4 family model has, and who reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_specverify import flags
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing.options import ServerLine
from sglang_specverify.routing.route import Decision, require
from sglang_specverify.routing.sparse_mla import (
    PoolRequest,
    SparseCall,
    decide_fp4_pool,
    decide_sparse_mla,
    pool_rows,
    stock_serves,
)
from sglang_specverify.routing.sparse_model import SparseGroup, is_v41, sparse_groups


@dataclass(frozen=True)
class SparseRow:
    """The decision for the layers of one compress ratio; `window` and `extra` are the encodings of their rows."""

    group: SparseGroup
    window: str
    extra: str | None
    decision: Decision


@dataclass(frozen=True)
class SparseExplanation:
    """`pool` is the decision on the rows, `rows` one on each kind of layer. `refused`: why a server does not start, or empty."""

    pool: Decision
    rows: tuple[SparseRow, ...]
    refused: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "pool": {"kernel": self.pool.kernel, "reason": self.pool.reason},
            "layers": [
                {
                    "ratio": row.group.ratio,
                    "layers": row.group.count,
                    "heads": row.group.heads,
                    "window": row.window,
                    "extra": row.extra,
                    "kernel": row.decision.kernel,
                    "reason": row.decision.reason,
                }
                for row in self.rows
            ],
        }

    def lines(self) -> list[str]:
        """For people: the pool, then each kind of layer."""
        found = [f"sparse MLA (SGLang's dsv4 backend); pool {self.pool.kernel}: {self.pool.reason}"]
        for row in self.rows:
            kind = f"ratio {row.group.ratio}" if row.group.ratio else "window alone"
            rows = row.window if row.extra is None else f"{row.window} + {row.extra}"
            found.append(f"  {row.group.count} × {kind}, rows {rows}: {row.decision.kernel}: {row.decision.reason}")
        return found


def explain_sparse(config: Mapping[str, Any], line: ServerLine, hardware: Hardware, current: Flags) -> SparseExplanation | None:
    """The decisions for a model and a server line, by the rules that SGLang would follow; None for another family.

    Raises:
        SpecverifyError: a config without its layers' ratios, or a pool without the kernel that reads it.
    """
    groups = sparse_groups(config, line.attention_ranks)
    if not groups:
        return None
    layout = flags.setting("SGLANG_DSV4_KV_LAYOUT")
    request = PoolRequest(
        layout=layout,
        compressed=flags.setting("SGLANG_DSV4_COMPRESSED_KV_LAYOUT") or "auto",
        backend=_backend(config, line, hardware, layout),
        q8_prefill=_q8_prefill(line),
    )
    pool = decide_fp4_pool(hardware, request, current)
    rows, refused = [], list[str]()
    for group in groups:
        window, extra = pool_rows(hardware, request, pool, group.ratio)
        call = SparseCall(window, extra, heads=group.heads, backend=request.backend)
        decision = decide_sparse_mla(hardware, call, current)
        rows.append(SparseRow(group, window, extra, decision))
        if not decision.served and not stock_serves(hardware, call):
            refused.append(decision.reason)
    refused += [text for decision in (pool, *(row.decision for row in rows)) if (text := _strictly(decision, current))]
    return SparseExplanation(pool, tuple(rows), f"sparse MLA: {refused[0]}" if refused else "")


def _strictly(decision: Decision, current: Flags) -> str:
    try:
        require(decision, current)
    except SpecverifyError as error:
        return error.what
    return ""


def _backend(config: Mapping[str, Any], line: ServerLine, hardware: Hardware, layout: str | None) -> str:
    """`--dsv4-attn-backend` as SGLang resolves it (`_default_dsv4_attention_backend`)."""
    given = line.values.get("--dsv4-attn-backend", "auto")
    if given != "auto":
        return given
    mega = (
        is_v41(config)
        and hardware.family in ("sm100", "sm103", "sm107")
        # FP8 is SGLang's own default for the family's cache.
        and line.values.get("--kv-cache-dtype", "auto") in ("auto", "fp8_e4m3")
        and line.attention_ranks == 1
        and layout in (None, "auto", "v41", "v41_new")
    )
    return "flashmla_mega" if mega else "flashmla"


def _q8_prefill(line: ServerLine) -> bool:
    if flags.setting("SGLANG_DSV4_Q8KV8_PREFILL") is not None:
        return flags.switch("SGLANG_DSV4_Q8KV8_PREFILL")
    return line.values.get("--dsv4-prefill-backend") == "flashmla_sparse_q8"
