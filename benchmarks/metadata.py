"""What a step prepares before its layers, in one launch and in two, beside the launches of SGLang's fa3 backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import timing
from benchmarks.points import Point
from sglang_specverify import kernels

BATCH, WIDTH = 32, 128
LENGTHS = (128, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Step:
    """One step of target verify: the engine's table and lengths, and its masks as FULL_MASK."""

    point: Point
    req_to_token: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    mask: torch.Tensor
    mask_offsets: torch.Tensor
    positions: torch.Tensor

    @property
    def bytes(self) -> int:
        """The tokens of the step's rows, read and written."""
        return 2 * 4 * self.point.batch * (self.point.length + self.point.width)


def make(point: Point, device: torch.device, seed: int = 0) -> Step:
    generator = torch.Generator(device).manual_seed(seed)
    context = point.length + point.width
    tokens = torch.randperm((point.batch + 2) * context, generator=generator, device=device).int()
    lens = torch.full((point.batch,), point.length, device=device)
    rows = torch.randperm(point.batch + 2, generator=generator, device=device)[: point.batch]
    mask = torch.ones(point.width, point.width, dtype=torch.bool, device=device).tril()
    full = torch.cat([torch.ones(point.width, point.length, dtype=torch.bool, device=device), mask], 1)
    positions = (lens[:, None] + torch.arange(point.width, device=device)).flatten()
    offsets = torch.arange(point.batch + 1, device=device) * full.numel()
    return Step(point, tokens.view(-1, context), rows, lens, full.flatten().repeat(point.batch), offsets, positions)


def ours(step: Step) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    """The one launch of `prepare_step`, and what it made of the page table."""
    out, facts = _table(step), _facts(step)
    copy: dict[str, Any] = {"table": out, "extra": step.point.width}
    plan = kernels.prepare_step(step.req_to_token, step.rows, step.lens, **copy, **facts)

    def run() -> None:
        kernels.prepare_step(step.req_to_token, step.rows, step.lens, **copy, **facts, out=plan.buffer)

    return run, lambda: out


def two_launches(step: Step) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    """The same by the two operations that it joins."""
    out, facts = _table(step), _facts(step)
    with_drafts = step.lens + step.point.width
    # The step's table is the snapshot, which has its requests in order.
    row_ids = torch.arange(step.point.batch, dtype=torch.int32, device=step.lens.device)
    plan = kernels.plan_verify_attention(step.lens, row_ids, **facts)

    def run() -> None:
        kernels.snapshot_table(step.req_to_token, step.rows, with_drafts, page_size=1, out=out)
        kernels.plan_verify_attention(step.lens, row_ids, **facts, out=plan.buffer)

    return run, lambda: out


def _table(step: Step) -> torch.Tensor:
    """The rows hold the drafts too, for one table serves prefix and drafts."""
    return torch.zeros(step.point.batch, step.req_to_token.shape[1], dtype=torch.int32, device=step.lens.device)


def _facts(step: Step) -> dict[str, Any]:
    point = step.point
    return {
        "num_draft_tokens": point.width, "q_heads": point.q_heads, "kv_heads": point.kv_heads, "head_dim": point.head_dim,
        "mask": step.mask, "mask_layout": "full_mask", "mask_offsets": step.mask_offsets, "divide": True,
        "dtype": torch.bfloat16 if step.lens.device.type == "cuda" else torch.float16,
    }  # fmt: skip


def stock(step: Step) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    """What SGLang 0.5.23's fa3 backend launches before a replay with topk > 1: page table, lengths, suffix table.

    There these launches are eager; here they are in a graph too, which is kinder to them.
    """
    from sglang.kernels.ops.attention.trtllm_mha_page_table import build_trtllm_mha_page_table

    point, device, w = step.point, step.lens.device, step.point.width
    table = torch.zeros(point.batch, step.req_to_token.shape[1], dtype=torch.int32, device=device)
    lens32 = torch.zeros(point.batch, dtype=torch.int32, device=device)
    starts = torch.zeros(point.batch + 1, dtype=torch.int32, device=device)
    suffix = torch.zeros(point.batch * w, w, dtype=torch.int32, device=device)
    suffix_lens = torch.zeros(point.batch * w, dtype=torch.int32, device=device)
    suffix_starts = torch.zeros(point.batch * w + 1, dtype=torch.int32, device=device)

    def run() -> None:
        lens32.copy_(step.lens)
        starts[1:].copy_(torch.cumsum(lens32, 0, dtype=torch.int32))
        build_trtllm_mha_page_table(
            req_to_token=step.req_to_token, req_pool_indices=step.rows, cache_seqlens=lens32, page_table=table, page_size=1
        )
        offsets = torch.arange(w, device=device).unsqueeze(0)
        columns = offsets.expand(point.batch, -1) + step.lens.unsqueeze(1)
        before = torch.nn.functional.pad(torch.cumsum((step.lens + w).repeat_interleave(w), 0), (1, 0))[:-1]
        bits = (columns.repeat_interleave(w, dim=0) + before[:, None]).view(1, -1)
        bits[:, step.positions.numel() * w :].fill_(0)
        visible = step.mask[bits].view(-1, w)
        column = offsets.expand(len(visible), w)
        order = torch.sort(torch.where(visible, column, column + w), dim=1)[1]
        slots = step.req_to_token[step.rows, :].gather(1, columns).repeat_interleave(w, dim=0)
        suffix.copy_(slots.gather(1, order))
        suffix_lens.copy_(visible.sum(dim=1))
        suffix_starts[1:].copy_(torch.cumsum(suffix_lens, 0, dtype=torch.int32))

    return run, lambda: table


ARMS: dict[str, Callable[[Step], tuple[Callable[[], Any], Callable[[], torch.Tensor]]]] = {
    "ours": ours,
    "two_launches": two_launches,
    "fa3": stock,
}


def measure(point: Point, device: torch.device) -> dict[str, Any]:
    """One row of results: each arm's time or why there is none. On a CPU nothing is timed."""
    step = make(point, device)
    rows: dict[str, dict[str, Any]] = {}
    replays: dict[str, timing.Replay] = {}
    for name, build in ARMS.items():
        try:
            run, table = build(step)
            run()
            if not torch.equal(table()[:, : point.length], step.req_to_token[step.rows, : point.length]):
                rows[name] = {"why": "wrong page table"}
                continue
            rows[name] = {}
            if device.type == "cuda":
                replays[name] = timing.capture(lambda _, run=run: run(), 1)
        except Exception as failure:
            rows[name] = {"why": f"{type(failure).__name__}: {failure}"[:300]}
    for name, times in timing.alternate(replays).items():
        rows[name]["warm"] = timing.summarise(times, replays[name].calls).as_dict()
    return {"batch": point.batch, "width": point.width, "length": point.length, "bytes": step.bytes, "arms": rows}
