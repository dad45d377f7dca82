"""NGRAM speculation: links and positions from a tree's mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ._trees import links_of


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write positions, rows, first children and next siblings of the trees in `tree_mask`, flat bool [bs, n, n].

    A node's ancestors are the earlier nodes that it sees, its parent is the last of them, its depth their number.
    A node that sees no earlier node has no parent and no sibling. A node's first child is the
    first later node that sees it. All outputs are [bs * n] or [bs, n].
    """
    bs, n = batch_size, draft_token_num
    ancestors = tree_mask.view(-1)[: bs * n * n].view(bs, n, n).bool().tril(-1)
    order = torch.arange(n)
    parent = torch.where(ancestors, order, torch.full_like(order, -1)).amax(-1)
    _, sibling = links_of(parent)
    first = torch.where(ancestors, order.view(n, 1), torch.full_like(order, n).view(n, 1)).amin(1)
    positions.view(bs, n).copy_(verified_seq_len.view(bs, 1) + ancestors.sum(-1))
    retrive_index.view(bs, n).copy_(torch.arange(bs * n).view(bs, n))
    retrive_next_token.view(bs, n).copy_(torch.where(first == n, -1, first))
    retrive_next_sibling.view(bs, n).copy_(sibling)
