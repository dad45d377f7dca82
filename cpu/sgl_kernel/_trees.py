"""Draft trees: their links, masks and positions, and the greedy walk along them.

A tree has n nodes, node 0 is its root (the last token of the prefix) and every parent comes before its children.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class MaskLayout(IntEnum):
    """SGLang's `TreeMaskMode`, as far as it is served here."""

    FULL_MASK = 0
    QLEN_ONLY = 1


def parents_of(selected_index: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """The parent of each node of each tree: int64 [bs, n], -1 for the root.

    Args:
        selected_index: int64 [bs, n - 1]: for nodes 1 to n - 1, which of the draft's candidates was kept. Candidates are
            numbered step by step, topk for each expanded candidate.
        parent_list: int64 [bs, any]: which candidate was expanded as number i; number 0 is the root.
        topk: candidates of one expansion.
    """
    bs = selected_index.shape[0]
    expansion = selected_index // topk
    parent = torch.zeros_like(expansion)
    inner = expansion > 0
    if bool(inner.any()):
        candidate = parent_list.reshape(bs, -1).gather(1, expansion)
        found = candidate.unsqueeze(-1) == selected_index.unsqueeze(1)
        if not bool((found.any(-1) | ~inner).all()):
            raise ValueError("selected_index holds a node whose parent was not selected")
        parent = torch.where(inner, found.long().argmax(-1) + 1, parent)
    return torch.cat([torch.full((bs, 1), -1, dtype=parent.dtype), parent], dim=1)


def visibility_of(parent: Tensor) -> Tensor:
    """bool [bs, n, n]: node i sees j when j is i or an ancestor of i."""
    bs, n = parent.shape
    visible = torch.eye(n, dtype=torch.bool).repeat(bs, 1, 1)
    at = parent
    while bool((at >= 0).any()):
        batch, node = (at >= 0).nonzero(as_tuple=True)
        visible[batch, node, at[batch, node]] = True
        at = torch.where(at >= 0, parent.gather(1, at.clamp(min=0)), at)
    return visible


def links_of(parent: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node: two int64 [bs, n], -1 for none, lower index first.

    Nodes without a parent are nobody's siblings.
    """
    n = parent.shape[1]
    order = torch.arange(n)
    none = torch.full_like(parent, n)
    child = torch.where(parent.unsqueeze(1) == order.view(1, n, 1), order, none.unsqueeze(-1)).amin(-1)
    same = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (order > order.view(n, 1)) & (parent >= 0).unsqueeze(2)
    sibling = torch.where(same, order, none.unsqueeze(-1)).amin(-1)
    return torch.where(child == n, -1, child), torch.where(sibling == n, -1, sibling)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    _depth: int,
    draft_token_num: int,
    tree_mask_mode: int = MaskLayout.FULL_MASK,
) -> None:
    """Turn the draft's selection into what verify needs. Outputs, all written in place:

    tree_mask, flat: QLEN_ONLY [bs, n, n]; FULL_MASK the concatenation of [n, seq_lens[b] + n], true over the prefix.
    positions [bs * n]: prefix length plus the node's depth. retrieve_index [bs, n]: the node's row in the batch;
    retrieve_next_token and retrieve_next_sibling [bs, n]: first child and next sibling, -1 for none.
    """
    layout = MaskLayout(int(tree_mask_mode))
    bs, n = seq_lens.numel(), draft_token_num
    parent = parents_of(selected_index.long(), parent_list.long(), topk)
    visible = visibility_of(parent)
    child, sibling = links_of(parent)
    depth = visible.sum(-1) - 1
    positions.view(bs, n).copy_(seq_lens.view(bs, 1) + depth)
    retrieve_index.view(bs, n).copy_(torch.arange(bs * n).view(bs, n))
    retrieve_next_token.view(bs, n).copy_(child)
    retrieve_next_sibling.view(bs, n).copy_(sibling)
    mask = tree_mask.view(-1)
    if layout is MaskLayout.QLEN_ONLY:
        mask[: bs * n * n] = visible.reshape(-1).to(mask.dtype)
        return
    at = 0
    for request, prefix in enumerate(seq_lens.tolist()):
        rows = mask[at : at + n * (prefix + n)].view(n, prefix + n)
        rows[:, :prefix] = True
        rows[:, prefix:] = visible[request].to(mask.dtype)
        at += n * (prefix + n)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from its root along the target's choices; the argument names are those of SGLang's call.

    Args:
        predicts: out, flat over the batch's rows: the target's token at each accepted row, the bonus token last.
        accept_index: out, [bs, longest path]: accepted rows, the root first; entries past the path stay as they are.
        accept_token_num: out, [bs]: accepted drafts, the root not counted.
        candidates: [bs, n]: draft tokens. target_predict: flat [bs * n]: the target's choice after each node.
    """
    bs, longest = accept_index.shape
    target = target_predict.reshape(-1).tolist()
    rows, children, siblings, tokens = (
        t.view(bs, -1).tolist() for t in (retrive_index, retrive_next_token, retrive_next_sibling, candidates)
    )
    for b in range(bs):
        node, path = 0, [rows[b][0]]
        while len(path) < longest:
            node = children[b][node]
            while node >= 0 and tokens[b][node] != target[path[-1]]:
                node = siblings[b][node]
            if node < 0:
                break
            path.append(rows[b][node])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts.view(-1)[path] = torch.tensor([target[row] for row in path], dtype=predicts.dtype)
