"""The public operations: verify attention (chains and trees) and draft-decode attention (branches)."""

from __future__ import annotations

import torch

from sglang_specverify.kernels.arguments import DraftArguments, Scale, VerifyArguments, check_draft_decode, check_verify
from sglang_specverify.kernels.reference import Result
from sglang_specverify.kernels.run import run


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    row_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    page_size: int = 1,
    num_draft_tokens: int | None = None,
    q_offsets: torch.Tensor | None = None,
    slot_map: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_layout: str = "qlen_only",
    mask_offsets: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sm_scale: float | None = None,
    deterministic: bool = False,
    variant: str = "auto",
    plan: object = None,
    workspace: object = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of W draft tokens a request over its prefix and over those drafts that a chain or a tree shows them.

    Draft token i of request r sees prefix positions [0, L_r) and the drafts j with visible(r, i, j), itself included
    where the mask says so; of both only keys at positions >= its own position - window. K and V of the drafts are in
    the cache already, at positions L_r to L_r + W - 1 of the request's table row.

    Args:
        q: [T, Hq, D] bf16, fp16, fp32 or fp64, any row and head stride, last stride 1. Request r has rows r*W to
            (r+1)*W - 1, or `q_offsets[r]` to `q_offsets[r+1] - 1`; rows past the last request are padding.
        k_cache, v_cache: [slots, Hkv, D] and [slots, Hkv, Dv] in a type of q or FP8, last stride 1. Hkv divides Hq.
            A slot is read only if some row sees it. NaN or Inf in it reaches the rows that see it and no other request; in
            V it may reach other rows of its request, which the fused kernels compute in the same tile, where not all of
            them see it: drafts, and the prefix at the edge of a window.
        table: int32 [rows, width]. Position p of request r is at slot `table[row_ids[r], p]`; with page_size P > 1
            the entry is a page id, `table[row_ids[r], p // P]`, and the slot is id * P + p % P. Entries that no
            position below L + W needs may be -1.
        row_ids: int32 [bs].
        prefix_lens: int32 or int64 [bs], L; drafts are not counted.
        page_size: tokens a table entry stands for.
        num_draft_tokens: W, the same for all requests; beside `q_offsets` the most that a request may have.
        q_offsets: int32 [bs + 1], row numbers of q, for requests of different W.
        slot_map: int [n]; a slot s found as above is read at cache slot `slot_map[s]`. For sliding-window pools.
        mask: None for chains (j <= i); else bool or uint8, nonzero is visible.
        mask_layout: "qlen_only": [bs, W, W], or flat with at least bs*W*W entries of which no more are read; not for
            ragged rows. "full_mask": flat; request r has W rows of L + W entries from `mask_offsets[r]` on, and the L
            entries of the prefix in each row are not read.
        mask_offsets: int64 [bs + 1], with full_mask only.
        positions: int [bs*W or more], one for each row of q: L plus depth. Read for trees with a window, which require
            it; a chain's positions are L + i whatever stands here.
        window: -1 for none.
        softcap: score -> softcap * tanh(score / softcap), before masking; 0 for none.
        sinks: FP32, BF16 or FP16 [Hq], scores after scaling, each one more term of its head's denominator.
        k_scale, v_scale: factors of K and V as stored: a number, a tensor of one element or [Hkv]. They apply whatever
            the cache's type is.
        sm_scale: factor of q . k; D**-0.5 where None.
        deterministic: demand rows that do not depend on the rest of the batch, bit for bit. The reference always
            does so. With `q_offsets` the calls compared must have the same `num_draft_tokens`, which sets the tiles.
        variant: "auto", or one of `VARIANTS`.
        plan, workspace: made for GPU kernels; the reference needs neither and ignores both.
        out: [T, Hq, Dv], last stride 1; a new one of q's dtype where None. Padding rows are not written (in a new
            tensor they are 0).
        lse: FP32 [T, Hq], any strides, written whenever given; natural logarithm over the visible keys, without the
            sink. Padding rows are not written (in a new tensor they are -inf).
        return_lse: return (out, lse).

    Returns:
        out, or (out, lse). A row that sees no key: 0 and -inf.

    Raises:
        ArgumentError: an argument that cannot be served; nothing was written, except that a slot outside the cache is
            found only when its request is reached. On a GPU values are not checked, only shapes, types and strides.
        SpecverifyError: no variant serves this device.
    """
    arguments = VerifyArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, table=table, row_ids=row_ids, prefix_lens=prefix_lens, page_size=page_size,
        num_draft_tokens=num_draft_tokens, q_offsets=q_offsets, slot_map=slot_map, mask=mask, mask_layout=mask_layout,
        mask_offsets=mask_offsets, positions=positions, window=window, softcap=softcap, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale, sm_scale=sm_scale, deterministic=deterministic, out=out, lse=lse, return_lse=return_lse,
    )  # fmt: skip
    problem = check_verify(arguments)
    return run(arguments, problem, variant, plan, workspace)


def draft_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    row_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft_slots: torch.Tensor,
    *,
    topk: int,
    step: int,
    page_size: int = 1,
    slot_map: torch.Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sm_scale: float | None = None,
    deterministic: bool = False,
    variant: str = "auto",
    plan: object = None,
    workspace: object = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of one token for each of topk draft branches over the shared prefix and over the branch's own tokens.

    Row r*topk + b of q stands at position L_r + step. It sees prefix positions [0, L_r) and its own branch's tokens
    of steps 0 to `step`, the last of which is itself: with a window only those at positions >= L_r + step - window.

    Args:
        q: [T, Hq, D] with T >= bs*topk; rows past bs*topk are padding.
        prefix_lens: int32 or int64 [bs], L: tokens before the first draft token.
        draft_slots: int [bs, topk, steps], cache slot of each branch's token at each step (a slot, also with
            page_size > 1; through `slot_map` like the table's). Entries of later steps are not read.
        topk: branches of a request.
        step: 0 to steps - 1.

    All others, the result and the errors are those of `verify_attention`; `table` serves the prefix only.
    """
    arguments = DraftArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, table=table, row_ids=row_ids, prefix_lens=prefix_lens, page_size=page_size,
        draft_slots=draft_slots, topk=topk, step=step, slot_map=slot_map, window=window, softcap=softcap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale, deterministic=deterministic, out=out, lse=lse,
        return_lse=return_lse,
    )  # fmt: skip
    problem = check_draft_decode(arguments)
    return run(arguments, problem, variant, plan, workspace)
