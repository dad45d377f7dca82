"""Plans made by hand, for splits that the planner would not choose, and the partial results that splits stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_specverify.kernels import plan_verify_attention
from sglang_specverify.kernels.plan import ITEM_WORDS, Plan

from .bounds import call_reference
from .calls import one_table


def plan_for(a: dict[str, Any], **options: Any) -> Plan:
    """A plan for the call, made as a step makes it; `options` are those of `plan_verify_attention`."""
    return plan_verify_attention(a["prefix_lens"], a["row_ids"], **(layers_of(a) | options))


def layers_of(a: dict[str, Any]) -> dict[str, Any]:
    """What `plan_verify_attention` and `prepare_step` are told of the call, beside its lengths and tables."""
    q, k, v, branches = a["q"], a["k_cache"], a["v_cache"], "draft_slots" in a
    taken = {name: a[name] for name in ("mask", "mask_layout", "mask_offsets", "q_offsets") if a.get(name) is not None}
    return {
        "num_draft_tokens": a["topk"] if branches else a["num_draft_tokens"], "q_heads": q.shape[1], "kv_heads": k.shape[1],
        "head_dim": q.shape[2], "v_head_dim": v.shape[2], "dtype": q.dtype, "cache_dtype": k.dtype, "branches": branches,
        "page_size": a.get("page_size", 1), "window": a.get("window", -1), "num_rows": len(q) if "q_offsets" in taken else None,
        "deterministic": a.get("deterministic", False), **taken,
    }  # fmt: skip


def block_n(a: dict[str, Any]) -> int:
    """Keys that a program of the divided kernel reads at once; a part may end at its multiples."""
    return plan_for(a, divide=True).shape.config.block_n


def divided(
    a: dict[str, Any],
    starts: Sequence[Sequence[int]],
    *,
    order: Sequence[int] | None = None,
    kernel: str = "fused",
    combine: str | None = None,
) -> Plan:
    """A plan in which the prefix of request r is divided at `starts[r]`, which begins with 0; the last part ends at L.

    Two equal starts make an empty part, which the specialised kernel does not know. `order`: the items' places, which is the
    order in which the interpreter runs them. `combine`: who combines the parts; as the table says where None.
    """
    lens = a["prefix_lens"].tolist()
    count = sum(len(one) for one in starts)
    shape = plan_for(a, divide=True, kernel=kernel).shape
    config = None if combine in (None, shape.config.combine) else replace(shape.config, combine=combine)
    # Room for all of them: there are bs + slots items and 2 slots partial results at the most.
    programs = max(shape.programs, (count + 1) * shape.row_tiles * shape.kv_heads)
    plan = plan_for(a, divide=True, programs=programs, kernel=kernel, config=config)
    words = items(plan)
    # What an item says of its request beside its part, from the planner's own.
    of_request = {int(word[0]): word.clone() for word in words if word[0] >= 0}
    rows = []
    partial = 0
    for r, own in enumerate(starts):
        for part, (begin, stop) in enumerate(zip(own, [*own[1:], lens[r]], strict=True)):
            row = of_request[r].clone()
            row[1:6] = torch.tensor([begin, stop, part, len(own), partial])
            rows.append(row)
        if plan.combined_by_launch:
            plan.buffer[plan.counters_at + 2 * r : plan.counters_at + 2 * r + 2] = torch.tensor([partial, len(own)])
        partial += len(own) if len(own) > 1 else 0
    assert len(rows) <= plan.capacity and partial <= plan.shape.partials(plan.batch)
    words[:, 0] = -1
    plan.buffer[plan.items_at] = count
    for place, row in zip(order or range(count), rows, strict=True):
        words[place] = row
    return plan


def items(plan: Plan) -> torch.Tensor:
    """int32 [capacity, 8], a view: request, first key, one past the last, part, parts, first partial, and more of its request."""
    return plan.buffer[: plan.capacity * ITEM_WORDS].view(-1, ITEM_WORDS)


def counters(plan: Plan) -> torch.Tensor:
    return plan.buffer[plan.counters_at : plan.counters_at + plan.shape.counters(plan.batch)]


def rested(plan: Plan) -> list[int]:
    """What `counters` are before and after every layer: 0, or where a launch combines each request's first partial and parts."""
    if plan.shape.config.combine == "last":
        return [0] * plan.shape.counters(plan.batch)
    of_request = {word[0]: [word[5], word[4]] for word in items(plan).tolist() if word[0] >= 0}
    return [number for request in range(plan.batch) for number in of_request[request]]


def attends(plan: Plan) -> list[str]:
    """The kernels of a call with the plan, as `calls.names` has them: attention, and behind it one that combines parts where
    prefixes are divided and the launch configuration leaves them to one.
    """
    kernel = {"fused": "verify_attention_kernel", "specialized": "specialized_kernel"}[plan.kernel]
    return [kernel, *["combine_parts_kernel"] * (plan.divides and plan.shape.config.combine == "launch")]


def partial_states(a: dict[str, Any], starts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 outputs [parts, T, Hq, Dv] and LSEs of a call without window and sinks, its prefixes divided at `starts`.

    A start past the end of a prefix makes an empty part; the last part has the drafts.
    """
    a = one_table(a)
    device, lens, slots = a["q"].device, a["prefix_lens"], a["table"]
    index = torch.arange(slots.shape[1], device=device)
    w, results = a["num_draft_tokens"], []
    for part, start in enumerate(starts):
        last = part == len(starts) - 1
        begin = lens.clamp(max=start)
        stop = lens if last else lens.clamp(max=starts[part + 1])
        at = (begin[:, None] + index).clamp(max=len(index) - 1)
        here = {"table": slots.gather(1, at), "prefix_lens": stop - begin}
        if not last:
            here["mask"] = torch.zeros(len(lens), w, w, dtype=torch.bool, device=device)
        results.append(call_reference(a, **here))
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


def even(length: int, parts: int, align: int) -> list[int]:
    """Starts of `parts` parts of about the same length, at multiples of `align`."""
    step = max(align, math.ceil(length / parts / align) * align)
    return [0] + [min(step * part, length // align * align) for part in range(1, parts)]
