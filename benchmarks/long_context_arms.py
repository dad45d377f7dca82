"""The arms for long chains: this project's kernel in its forms, and what SGLang has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.arms import OURS, Arm, Call, Unavailable, verify_options
from benchmarks.inputs import Inputs
from benchmarks.stock_triton import STOCK, split_kv
from sglang_specverify import kernels
from sglang_specverify.kernels.plan import Plan


def shape_facts(inputs: Inputs) -> dict[str, Any]:
    """What a plan of the point's calls is made from, beside lengths and tables."""
    point = inputs.point
    return {
        "num_draft_tokens": point.width, "q_heads": point.q_heads, "kv_heads": point.kv_heads, "head_dim": point.head_dim,
        "dtype": inputs.q.dtype, "cache_dtype": inputs.k.dtype,
    }  # fmt: skip


def planned(inputs: Inputs, plan: Plan, table: torch.Tensor, row_ids: torch.Tensor, **options: Any) -> Call:
    """Calls by a plan that was made, with scratch of their own."""
    out = torch.empty_like(inputs.q)
    if plan.divides:
        size = max(16, plan.shape.workspace_bytes(plan.batch))
        options["workspace"] = torch.empty(size, dtype=torch.uint8, device=out.device)
    options |= verify_options(inputs) | {"plan": plan, "out": out}
    shared = (table, row_ids, inputs.prefix_lens)

    def call(layer: int) -> torch.Tensor:
        kernels.verify_attention(inputs.q, inputs.k[layer], inputs.v[layer], *shared, **options)
        return out

    return call


def deterministic(inputs: Inputs) -> Call:
    """The division by each request's own length, whose rows do not depend on the batch."""
    plan = kernels.plan_verify_attention(inputs.prefix_lens, inputs.row_ids, deterministic=True, **shape_facts(inputs))
    return planned(inputs, plan, inputs.table, inputs.row_ids, deterministic=True)


def step(inputs: Inputs, variant: str) -> tuple[Callable[[], None], Call]:
    """A step as a backend has it: the one launch that copies the table and plans, and the calls of its layers.

    Args:
        variant: what `selected` named; it decides whether prefixes are divided.
    """
    point = inputs.point
    # Rows begin at whole sectors, as a backend allocates them.
    width = -(-(max(inputs.lengths) + point.width) // 16) * 16
    table = torch.zeros(point.batch, width, dtype=torch.int32, device=inputs.q.device)
    facts = shape_facts(inputs) | {"table": table, "extra": point.width, "divide": variant == "fused_split"}
    shared = (inputs.table, inputs.row_ids, inputs.prefix_lens)
    plan = kernels.prepare_step(*shared, **facts)

    def prepare() -> None:
        kernels.prepare_step(*shared, **facts, out=plan.buffer)

    return prepare, planned(inputs, plan, table, torch.arange(point.batch, dtype=torch.int32, device=table.device))


def upstream_splitkv(inputs: Inputs) -> Call:
    """SGLang's split-KV verify, which its backend calls on gfx95x alone."""
    from sglang.kernels.ops.attention.verify_splitkv import _MIN_BLOCK_KV, choose_n_splits

    splits = choose_n_splits(sum(inputs.lengths) / len(inputs.lengths))
    for length in inputs.lengths:
        part = -(-length // (splits * _MIN_BLOCK_KV)) * _MIN_BLOCK_KV
        if part * (splits - 1) >= length:
            raise Unavailable(f"of {splits} parts of {length} keys one is empty: its output is read and was never written")
    return split_kv(inputs)


def _named(name: str) -> Arm:
    return next(arm for arm in (*OURS, *STOCK) if arm.name == name)


ARMS = (
    _named("fused"),
    _named("fused_split"),
    Arm("deterministic", "yardstick", deterministic, ("chain",)),
    _named("fa3"),
    _named("triton"),
    Arm("upstream_splitkv", "yardstick", upstream_splitkv, ("chain",), fp8_products=True),
)
