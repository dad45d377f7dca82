"""The tree mask of a verify batch: who makes it, in which layout, and what SGLang's own backends need."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from sglang_specverify.backends.facts import padded

if TYPE_CHECKING:
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def tree_mask(runner: ModelRunner, num_draft_tokens: int) -> VerifyMask | None:
    """A QLEN_ONLY mask buffer for every request of the pool and those that pad a batch of them; None without speculation."""
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    if not num_draft_tokens:
        return None
    requests = padded(runner.req_to_token_pool.size)
    buffer = torch.zeros(requests * num_draft_tokens**2, dtype=torch.bool, device=runner.device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)


def widened(mask: VerifyMask, requests: int) -> VerifyMask:
    """The mask itself where it holds so many requests, else a larger one. Before anything is captured over the old one."""
    if mask.fits(requests):
        return mask
    entries = mask.buffer.numel() // mask.max_bs * requests
    return type(mask)(buffer=mask.buffer.new_zeros(entries), mode=mask.mode, max_bs=requests)


def mask_layout(forward_batch: ForwardBatch, published: VerifyMask | None) -> str:
    """The layout of this batch's tree mask, told by the producer of the batch and never by a size.

    EAGLE's draft stage follows the mask that the target backend publishes, or SGLang's default for the
    device where there is none; NGRAM sends FULL_MASK except on a CPU; the others send FULL_MASK always.
    """
    from sglang.srt.speculative import ngram_worker
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
    from sglang.srt.speculative.spec_info import SpecInputType

    producer = forward_batch.spec_info.spec_input_type
    if producer == SpecInputType.EAGLE_VERIFY:
        mode = default_tree_mask_mode() if published is None else published.mode
        return "qlen_only" if mode == TreeMaskMode.QLEN_ONLY else "full_mask"
    if producer == SpecInputType.NGRAM_VERIFY:
        return "full_mask" if ngram_worker.USE_FULL_MASK and not ngram_worker._is_cpu else "qlen_only"
    return "full_mask"


def own_columns(full_mask: torch.Tensor, prefix_lens: torch.Tensor, drafts: int, out: torch.Tensor) -> None:
    """Write the QLEN_ONLY bits of a FULL_MASK, bs times [W, L + W], into `out`, flat. Waits for no length.

    Requests that the mask does not reach, as the padded ones of a graph, get bits of others.
    """
    lens = prefix_lens.to(torch.int64)
    width = lens + drafts
    starts = torch.cumsum(drafts * width, dim=0) - drafts * width
    draft = torch.arange(drafts, device=lens.device)
    # [bs, W, W]: where row i of a request has its column L + j.
    places = starts[:, None, None] + draft[:, None] * width[:, None, None] + lens[:, None, None] + draft
    bits = full_mask[places.clamp_(max=full_mask.numel() - 1)]
    out[: bits.numel()].copy_(bits.flatten())


def with_full_mask(forward_batch: ForwardBatch) -> ForwardBatch:
    """A copy of a verify batch whose QLEN_ONLY mask [bs, W, W] became FULL_MASK, bs times [W, L + W]. Reads the lengths."""
    spec = copy.copy(forward_batch.spec_info)
    lens, drafts = forward_batch.seq_lens.tolist(), spec.draft_token_num
    bits = spec.custom_mask[: len(lens) * drafts**2].view(len(lens), drafts, drafts)
    rows = (torch.cat([own.new_ones(drafts, prefix), own], dim=1) for prefix, own in zip(lens, bits, strict=True))
    spec.custom_mask = torch.cat([row.flatten() for row in rows])
    whole = copy.copy(forward_batch)
    whole.spec_info = spec
    return whole
