"""Translate one SGLang batch into the arguments of a kernel call. No mathematics here.

A `Step` is what all layers of one forward pass share: the snapshot of the request rows and the lengths,
mask and positions. Layers read the snapshot and never `req_to_token`, whose rows SGLang may hand to
another request while a step is still running.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels import snapshot_table
from sglang_specverify.routing.facts import Mode

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_specverify.backends.plans import Plans


@dataclass(frozen=True)
class Pools:
    """Where a backend's requests and tokens live.

    `full_to_window` is SGLang's map from full-pool slots to window-pool slots, None where all layers share one pool.
    """

    req_to_token: torch.Tensor
    page_size: int
    full_to_window: torch.Tensor | None


def read_pools(runner: ModelRunner) -> Pools:
    """Where the runner's requests and tokens live."""
    pool = runner.token_to_kv_pool
    return Pools(
        req_to_token=runner.req_to_token_pool.req_to_token,
        page_size=runner.page_size or 1,
        full_to_window=getattr(pool, "full_to_swa_index_mapping", None),
    )


@dataclass(frozen=True)
class View:
    """One pass as one pool sees it; a server with window layers may keep a second pool for them.

    `table` (int32 [rows, width]) is the step's own copy, by slot at page size 1 and by page above. `draft_slots` (int64
    [rows, topk, steps]) is set for draft decode only. `write_slots` (int64 [tokens]) say where the pass's own tokens go; None
    where SGLang's own batch says so.
    """

    table: torch.Tensor
    draft_slots: torch.Tensor | None = None
    write_slots: torch.Tensor | None = None
    #: Those of each step of a draft, contiguous [steps, rows * topk], where they are made on the device.
    step_slots: torch.Tensor | None = None

    def at(self, step: int) -> View:
        """The same view at another step of a draft."""
        if self.step_slots is not None:
            return replace(self, write_slots=self.step_slots[step])
        if self.write_slots is None or self.draft_slots is None:
            return self
        return replace(self, write_slots=self.draft_slots[:, :, step].reshape(-1))


@dataclass(frozen=True)
class Step:
    """One forward pass over `rows` requests.

    `prefix_lens` (int64 [rows]) never counts the tokens of this pass. `mask` is set for trees only. `window` is the view of
    a pool that holds window layers alone, None where all layers share one pool.
    """

    mode: Mode
    rows: int
    page_size: int
    row_ids: torch.Tensor
    prefix_lens: torch.Tensor
    full: View
    window: View | None = None
    num_draft_tokens: int | None = None
    q_offsets: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_layout: str = "qlen_only"
    mask_offsets: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    topk: int = 1
    step: int = 0
    #: Whether KV scales apply to an FP8 cache alone, as over FlashAttention; SGLang's Triton backend applies them to any.
    scales_fp8_only: bool = False
    #: What the Triton kernels share of this step; None where the reference serves.
    plans: Plans | None = None
    #: FlashAttention's row offsets, int32 [rows + 1], where its prefix pass serves a layer.
    flash_offsets: torch.Tensor | None = None
    #: The same where each draft token is a sequence of its own, int32 [rows * W + 1].
    own_offsets: torch.Tensor | None = None

    def at(self, step: int) -> Step:
        """The same draft-decode pass at another step of the draft."""
        window = None if self.window is None else self.window.at(step)
        return replace(self, step=step, window=window)


def mode_of(forward_batch: ForwardBatch, *, is_draft_step: bool) -> Mode | None:
    """What this pass is for; None for an idle batch. `is_draft_step` marks the children of a multi-step draft."""
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return None
    if mode.is_target_verify():
        return Mode.TARGET_VERIFY
    if mode.is_draft_extend_v2():
        return Mode.DRAFT_EXTEND
    if mode.is_decode():
        return Mode.DRAFT_DECODE if is_draft_step else Mode.DECODE
    return Mode.PREFILL


def _table(pools: Pools, rows: torch.Tensor, lens: torch.Tensor, slot_map: torch.Tensor | None) -> torch.Tensor:
    # Reads the lengths on the host: the eager, no-GPU backend may, a captured step may not.
    longest = int(lens.max()) if lens.numel() else 1
    pages = max(1, -(-longest // pools.page_size))
    table = torch.zeros((max(1, rows.numel()), pages), dtype=torch.int32, device=lens.device)
    if rows.numel():
        snapshot_table(pools.req_to_token, rows, lens, page_size=pools.page_size, slot_map=slot_map, out=table)
    return table


def _shared(
    pools: Pools, forward_batch: ForwardBatch, lens: torch.Tensor, draft_slots: torch.Tensor | None = None
) -> dict[str, Any]:
    """The fields of a `Step` that every mode fills alike; `lens` are the positions that it reads."""
    rows = forward_batch.req_pool_indices.to(torch.int64)
    window = None
    if pools.full_to_window is not None:
        translated = None if draft_slots is None else pools.full_to_window[draft_slots].to(torch.int64)
        writes = pools.full_to_window[forward_batch.out_cache_loc]
        window = View(_table(pools, rows, lens, pools.full_to_window), translated, writes)
    return {
        "full": View(_table(pools, rows, lens, None), draft_slots),
        "window": window,
        "rows": rows.numel(),
        "page_size": pools.page_size,
        "row_ids": torch.arange(rows.numel(), dtype=torch.int32, device=lens.device),
    }


def is_tree(forward_batch: ForwardBatch, topk: int) -> bool:
    """Whether a verify batch holds trees. NGRAM's are at breadth 1 too: it fills a short match up with children of the root."""
    from sglang.srt.speculative.spec_info import SpecInputType

    return topk != 1 or bool(forward_batch.spec_info.spec_input_type == SpecInputType.NGRAM_VERIFY)


def verify_step(pools: Pools, forward_batch: ForwardBatch, *, topk: int, mask_layout: str) -> Step:
    """Target verify: `seq_lens` excludes the drafts, and every request has the same number of them."""
    spec = forward_batch.spec_info
    drafts = spec.draft_token_num
    prefix = forward_batch.seq_lens.to(torch.int64)
    total = prefix + drafts
    shared = _shared(pools, forward_batch, total)
    tree: dict[str, Any] = {}
    if is_tree(forward_batch, topk):
        rows = shared["rows"]
        if spec.custom_mask is None:
            raise SpecverifyError("target verify of a tree came without its mask", "report this batch's algorithm")
        tree = {"mask": spec.custom_mask, "mask_layout": mask_layout, "positions": spec.positions[: rows * drafts]}
        if mask_layout == "full_mask":
            offsets = torch.zeros(rows + 1, dtype=torch.int64, device=prefix.device)
            torch.cumsum(drafts * total, dim=0, out=offsets[1:])
            tree["mask_offsets"] = offsets
    return Step(mode=Mode.TARGET_VERIFY, prefix_lens=prefix, num_draft_tokens=drafts, **tree, **shared)


def extend_step(pools: Pools, forward_batch: ForwardBatch, mode: Mode) -> Step:
    """Prefill and draft extend: ragged causal rows after each request's `extend_prefix_lens`."""
    new = forward_batch.extend_seq_lens.to(torch.int64)
    prefix = forward_batch.extend_prefix_lens.to(torch.int64)
    total = prefix + new
    offsets = torch.zeros(new.numel() + 1, dtype=torch.int32, device=new.device)
    offsets[1:] = torch.cumsum(new, dim=0)
    return Step(mode=mode, prefix_lens=prefix, q_offsets=offsets, **_shared(pools, forward_batch, total))


def decode_step(pools: Pools, forward_batch: ForwardBatch) -> Step:
    """Plain decode: `seq_lens` counts the token being decoded, which the kernel takes as a chain of one."""
    total = forward_batch.seq_lens.to(torch.int64)
    shared = _shared(pools, forward_batch, total)
    return Step(mode=Mode.DECODE, prefix_lens=total - 1, num_draft_tokens=1, **shared)


def draft_step(pools: Pools, forward_batch: ForwardBatch, *, topk: int, num_steps: int) -> Step:
    """All steps of a multi-step draft: `seq_lens` is the prefix, and the write slots name each branch's tokens.

    SGLang lays `out_cache_loc` out as [requests, topk, num_steps].
    """
    prefix = forward_batch.seq_lens.to(torch.int64)
    slots = forward_batch.out_cache_loc.view(prefix.numel(), topk, num_steps).to(torch.int64).clone()
    return Step(mode=Mode.DRAFT_DECODE, prefix_lens=prefix, topk=topk, **_shared(pools, forward_batch, prefix, draft_slots=slots))
