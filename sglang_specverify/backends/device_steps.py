"""Steps whose metadata lies on the device: read from a batch without a look at a length.

Eager, each step has buffers of its own. Under CUDA graphs a backend has one set of buffers of fixed address: `bind` makes the
step of a batch size when its graph is captured, and `fill`, recorded into the graph, makes its contents anew at every replay. It
waits for nothing and allocates nothing. Layers read only what `fill` wrote, never `req_to_token`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify import kernels
from sglang_specverify.backends.plans import AFTER_PREFIX_PASS, OWN_DRAFTS, Plans, Scratch, Served, groups
from sglang_specverify.backends.steps import Pools, Step, View
from sglang_specverify.kernels.checks import FP8
from sglang_specverify.routing.facts import Mode, ServerFacts
from sglang_specverify.routing.rows import FLASH
from sglang_specverify.routing.tree import depth

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class Buffers:
    """What `fill` writes, for up to `len(row_ids)` requests."""

    row_ids: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None
    prefix: torch.Tensor
    offsets: torch.Tensor
    window_slots: torch.Tensor | None
    window_steps: torch.Tensor | None


@dataclass(frozen=True)
class Bound:
    """A step, and the batch's tensors from which `fill` makes its contents."""

    step: Step
    rows: torch.Tensor
    seq_lens: torch.Tensor
    #: Rows of each request where they are ragged, which `seq_lens` counts: draft extend.
    extended: torch.Tensor | None
    write_slots: torch.Tensor
    copies_prefix: bool
    served: tuple[Served, ...]
    #: Whether SGLang's own metadata is made beside it, for layers that are SGLang's.
    stock_too: bool = False


class DeviceSteps:
    """Makes the steps of one backend, or of all children of one multi-step draft.

    Args:
        runner: the model runner.
        pools: where its requests and tokens live.
        server: what it was started with.
        topk, num_steps: of a multi-step draft.
    """

    def __init__(self, runner: ModelRunner, pools: Pools, server: ServerFacts, *, topk: int = 1, num_steps: int = 1) -> None:
        self.pools, self.server, self.topk, self.num_steps = pools, server, topk, num_steps
        self.device = pools.req_to_token.device
        self.dtype, self.cache_dtype = runner.dtype, runner.kv_cache_dtype
        self.scratch = Scratch(self.device)
        self._room: tuple[int, int] | None = None
        self._fixed: Buffers | None = None
        self._captured: list[Bound] = []

    def reserve(self, requests: int, tokens: int) -> None:
        """Have room for up to `requests` of them and `tokens` write slots in all in the buffers that captured graphs share.

        They are made when the first step is bound, so that a backend that serves nothing holds nothing.
        """
        self._room, self._fixed = (requests, tokens), None

    def eager(self, forward_batch: ForwardBatch, mode: Mode, served: tuple[Served, ...], mask: torch.Tensor | None) -> Step:
        """The step of a batch that no graph holds, filled. `mask` is QLEN_ONLY, or None for chains and drafts."""
        bound = self._bind(forward_batch, mode, served, mask, None)
        self.fill(bound)
        return bound.step

    def bind(
        self, forward_batch: ForwardBatch, mode: Mode, served: tuple[Served, ...], mask: torch.Tensor | None, *, stock_too: bool
    ) -> Bound:
        """The step of a batch whose tensors a graph will read at their addresses. Filled once, so that nothing is left to
        allocate or to compile when it is captured."""
        if self._fixed is None:
            assert self._room is not None, "SGLang sizes the graphs before it captures one"
            self._fixed = self._buffers(*self._room, self.pools.req_to_token.shape[1])
        bound = replace(self._bind(forward_batch, mode, served, mask, self._fixed), stock_too=stock_too)
        self.fill(bound)
        # A batch size may be captured more than once, and each graph keeps the addresses that it was captured with.
        self._captured.append(bound)
        return bound

    def _buffers(self, requests: int, tokens: int, positions: int) -> Buffers:
        page, mapping = self.pools.page_size, self.pools.full_to_window

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        # Rows that begin at multiples of 16 entries are copied in wide accesses.
        width = -(-max(1, positions) // (16 * page)) * 16
        return Buffers(
            row_ids=torch.arange(requests, dtype=torch.int32, device=self.device),
            table=integers(requests, width),
            window_table=None if mapping is None else integers(requests, width),
            prefix=integers(requests),
            offsets=integers(requests + 1),
            window_slots=None if mapping is None else integers(tokens, dtype=mapping.dtype),
            window_steps=None if mapping is None or self.num_steps == 1 else integers(tokens, dtype=mapping.dtype),
        )

    def _bind(
        self, batch: ForwardBatch, mode: Mode, served: tuple[Served, ...], mask: torch.Tensor | None, fixed: Buffers | None
    ) -> Bound:
        bs, slots = len(batch.req_pool_indices), batch.out_cache_loc
        drafting, extending = mode is Mode.DRAFT_DECODE, mode is Mode.DRAFT_EXTEND
        queries = self.topk if drafting else self._queries(batch, mode)
        b = fixed if fixed is not None else self._buffers(bs, slots.numel(), self._longest(batch, 0 if drafting else queries))
        prefix_pass = any(one.kernel in AFTER_PREFIX_PASS for one in served)
        # FlashAttention takes 32-bit lengths. Without a graph the scheduler may move on before the step has run.
        copies = fixed is None or prefix_pass or extending
        window = None
        if b.window_table is not None and b.window_slots is not None:
            writes = b.window_slots[: slots.numel()]
            own = writes.view(bs, self.topk, self.num_steps) if drafting else None
            # SGLang's kernels write to slots that lie side by side.
            steps = b.window_steps[: slots.numel()].view(self.num_steps, -1) if drafting and b.window_steps is not None else None
            window = View(b.window_table[:bs], own, writes, steps)
        step = Step(
            mode=mode,
            rows=bs,
            page_size=self.pools.page_size,
            row_ids=b.row_ids[:bs],
            prefix_lens=b.prefix[:bs] if copies else batch.seq_lens[:bs],
            full=View(b.table[:bs], slots.view(bs, self.topk, self.num_steps) if drafting else None),
            window=window,
            num_draft_tokens=queries,
            q_offsets=b.offsets[: bs + 1] if extending else None,
            mask=mask,
            positions=batch.positions[: bs * queries] if mask is not None else None,
            topk=self.topk if drafting else 1,
            # SGLang's aiter backend scales an FP8 cache alone too.
            scales_fp8_only=self.server.base in (*FLASH, "aiter"),
            plans=Plans(self.server.deterministic, self._q_type(), saturates=self.server.base == "aiter"),
            flash_offsets=self._counted(bs) * queries if prefix_pass else None,
            own_offsets=self._counted(bs * queries) if any(one.kernel == "prefix_flash" for one in served) else None,
        )
        return Bound(
            step=step,
            rows=batch.req_pool_indices,
            seq_lens=batch.seq_lens[:bs],
            extended=batch.extend_seq_lens[:bs] if extending else None,
            write_slots=slots,
            copies_prefix=copies,
            served=served,
        )

    def _counted(self, sequences: int) -> torch.Tensor:
        return torch.arange(sequences + 1, dtype=torch.int32, device=self.device)

    def _q_type(self) -> torch.dtype | None:
        quantizes = self.server.base in FLASH or (self.server.base == "aiter" and self.server.unified)
        return self.cache_dtype if quantizes and self.cache_dtype in FP8 else None

    def _queries(self, batch: ForwardBatch, mode: Mode) -> int:
        """The most rows of a request: the drafts of a verify, the window of a draft extend."""
        if mode is Mode.TARGET_VERIFY:
            return int(batch.spec_info.draft_token_num)
        counts = batch.extend_seq_lens_cpu
        most: int = max(counts) if counts is not None else -(-batch.input_ids.numel() // max(1, len(batch.req_pool_indices)))
        return max(1, most)

    def _longest(self, batch: ForwardBatch, extra: int) -> int:
        """Positions that a row of the table must hold: the longest request where the host knows, else the context."""
        context: int = self.pools.req_to_token.shape[1]
        lens = batch.seq_lens_cpu
        if lens is None or lens.numel() == 0:
            return context
        longest = int(lens.max()) + extra
        return min(context, longest)

    def fill(self, bound: Bound) -> None:
        """Make the contents of a step; this is what a graph records."""
        step = bound.step
        if bound.extended is not None:
            torch.sub(bound.seq_lens, bound.extended, out=step.prefix_lens)
            # A padded row of a graph counts fewer tokens than it has rows.
            step.prefix_lens.clamp_(min=0)
            assert step.q_offsets is not None
            torch.cumsum(bound.extended, dim=0, dtype=torch.int32, out=step.q_offsets[1:])
        elif bound.copies_prefix:
            step.prefix_lens.copy_(bound.seq_lens)
        if step.window is not None and step.window.write_slots is not None:
            assert self.pools.full_to_window is not None
            torch.index_select(self.pools.full_to_window, 0, bound.write_slots, out=step.window.write_slots)
            if step.window.step_slots is not None:
                step.window.step_slots.copy_(step.window.write_slots.view(-1, self.num_steps).transpose(0, 1))
        if step.rows > 0:
            self._prepare(bound)

    def _prepare(self, bound: Bound) -> None:
        """The one launch that copies the step's slots and makes its plan; one more for layers that can share neither."""
        step, plans, size = bound.step, bound.step.plans, 0
        assert plans is not None and step.num_draft_tokens is not None
        windowed = step.window is not None
        for number, members in enumerate(groups(bound.served)):
            first = members[0]
            dims = first.dims
            layers: dict[str, Any] = {
                "num_draft_tokens": step.num_draft_tokens,
                "q_heads": dims.q_heads,
                "kv_heads": dims.kv_heads,
                "head_dim": dims.head_dim,
                "v_head_dim": dims.v_head_dim,
                "dtype": self.dtype,
                "cache_dtype": self.cache_dtype,
                "page_size": step.page_size,
                "window": first.window if first.divides else -1,
                "branches": step.mode is Mode.DRAFT_DECODE,
                "q_offsets": step.q_offsets,
                "num_rows": None if step.q_offsets is None else step.rows * step.num_draft_tokens,
                "mask": step.mask,
                "deterministic": self.server.deterministic,
                "divide": None if first.divides else False,
                "kernel": first.kernel if first.divides else "fused",
                "out": plans.buffers[number] if number < len(plans.buffers) else None,
            }
            if number == 0:
                plan = kernels.prepare_step(
                    self.pools.req_to_token,
                    bound.rows,
                    step.prefix_lens,
                    table=step.full.table,
                    slot_map=self.pools.full_to_window if windowed else None,
                    window_table=step.window.table if step.window is not None else None,
                    extra=0 if step.mode is Mode.DRAFT_DECODE else step.num_draft_tokens,
                    **layers,
                )
            else:
                longest = step.full.table.shape[1] * step.page_size
                plan = kernels.plan_verify_attention(step.prefix_lens, step.row_ids, **layers, longest=longest)
            if number == len(plans.buffers):
                plans.buffers.append(plan.buffer)
            for one in members:
                plans.by_layer[one] = plan if one.divides else plan.undivided()
            size = max(size, plan.shape.workspace_bytes(step.rows) if plan.divides else 0)
        if plans.workspace is None and size:
            plans.workspace = self.scratch.of(size)
        if step.mask is not None and any(one.kernel in OWN_DRAFTS for one in bound.served):
            self._compact(step, plans, step.mask)

    def _compact(self, step: Step, plans: Plans, mask: torch.Tensor) -> None:
        """Each row's visible draft slots."""
        drafts = step.num_draft_tokens or 0
        if plans.suffix is None:
            rows = step.rows * drafts
            new = {"dtype": torch.int32, "device": self.device}
            plans.suffix = torch.empty(rows, drafts, **new), torch.empty(rows, **new)  # type: ignore[call-overload]
        kernels.compact_visible_slots(
            mask, step.full.table, step.row_ids, step.prefix_lens, num_draft_tokens=drafts, mask_layout="qlen_only",
            page_size=step.page_size, out_slots=plans.suffix[0], out_lens=plans.suffix[1],
        )  # fmt: skip
        # A padded request's mask is anything.
        plans.suffix[1].clamp_(max=depth(self.server.algorithm, self.server.num_steps, drafts))
