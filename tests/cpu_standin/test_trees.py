"""Trees against plain recursion over parents."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

SEEDS = range(12)


def draw_selection(rng: random.Random, topk: int, steps: int, n: int) -> tuple[list[int], list[int], list[int]]:
    """What a draft hands over: parent_list, selected_index, and the parents that they mean, by SGLang's numbering.

    Expansion 0 is the root's. Candidate c belongs to expansion c // topk, and parent_list[e] is the candidate that
    expansion e expanded, so expansions after the first step number topk for each step.
    """
    parent_list, candidates = [-1], list(range(topk))
    previous = candidates
    for _ in range(steps - 1):
        expanded = sorted(rng.sample(previous, min(topk, len(previous))))
        first = len(parent_list)
        parent_list += expanded
        previous = [e * topk + i for e in range(first, first + len(expanded)) for i in range(topk)]
        candidates += previous
    above = {c: None if c < topk else parent_list[c // topk] for c in candidates}
    selected: set[int] = set()
    while len(selected) < n - 1:
        selected.add(rng.choice([c for c in candidates if c not in selected and (above[c] is None or above[c] in selected)]))
    order = sorted(selected)
    parents = [-1] + [0 if above[c] is None else 1 + order.index(above[c]) for c in order]  # type: ignore[arg-type]
    return parent_list, order, parents


def path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


def children(parents: list[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents) if parent == node]


def links(parents: list[int], node: int) -> tuple[int, int]:
    own = children(parents, node)
    siblings = children(parents, parents[node]) if parents[node] >= 0 else []
    later = [i for i in siblings if i > node]
    return (own[0] if own else -1), (later[0] if later else -1)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_build_tree(kernels: ModuleType, seed: int, layout: int) -> None:
    rng = random.Random(seed)
    topk, steps = rng.choice([(1, 3), (2, 3), (4, 3), (3, 4)])
    n = steps + 1 if topk == 1 else rng.randint(2, topk + 4)
    drawn = [draw_selection(rng, topk, steps, n) for _ in range(3)]
    prefix = [rng.randint(0, 9) for _ in drawn]
    size = n * (sum(prefix) + n * 3) if layout == 0 else n * n * 3
    mask = torch.zeros(size + 5, dtype=torch.bool)
    outputs = [torch.full((3, n), -9) for _ in range(3)]
    positions = torch.full((3 * n,), -9)
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([d[0] for d in drawn]),
        torch.tensor([d[1] for d in drawn]),
        torch.tensor(prefix),
        mask,
        positions,
        *outputs,
        topk,
        steps,
        n,
        layout,
    )
    wanted_mask: list[bool] = []
    for b, (_, _, parents) in enumerate(drawn):
        for i in range(n):
            seen = path(parents, i)
            wanted_mask += ([True] * prefix[b] if layout == 0 else []) + [j in seen for j in range(n)]
            assert positions[b * n + i] == prefix[b] + len(seen) - 1
            assert outputs[0][b, i] == b * n + i
            assert (int(outputs[1][b, i]), int(outputs[2][b, i])) == links(parents, i)
    assert mask.tolist() == [*wanted_mask, *[False] * 5]  # nothing is written past the end


def test_build_tree_refuses_an_orphan(kernels: ModuleType) -> None:
    n, out = 3, [torch.zeros(1, 3, dtype=torch.long) for _ in range(3)]
    # Candidate 4 hangs below candidate 1, which was not kept.
    arguments = (torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="parent was not selected"):
        kernels.build_tree_kernel_efficient_cpu(*arguments, torch.zeros(9, dtype=torch.bool), torch.zeros(3), *out, 2, 2, n, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_walk(kernels: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    n, longest = 9, 4
    trees = [draw_selection(rng, 3, 3, n)[2] for _ in range(2)]
    # Few distinct tokens, so that walks get deep; siblings differ, as a draft's do.
    tokens = [[0] * n for _ in trees]
    for b, parents in enumerate(trees):
        for node in range(n):
            for child, token in zip(children(parents, node), rng.sample(range(4), 4), strict=False):
                tokens[b][child] = token
    target = [[rng.randrange(4) for _ in range(n)] for _ in trees]
    linked = torch.tensor([[links(parents, i) for i in range(n)] for parents in trees])
    predicts = torch.full((2 * n,), -5, dtype=torch.int32)
    accepted = torch.full((2, longest), -1, dtype=torch.int32)
    count = torch.empty(2, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor(tokens),
        retrive_index=torch.arange(2 * n).view(2, n),
        retrive_next_token=linked[..., 0],
        retrive_next_sibling=linked[..., 1],
        target_predict=torch.tensor(target),
    )
    for b, parents in enumerate(trees):
        walk = [0]
        while len(walk) < longest:
            step = [c for c in children(parents, walk[-1]) if tokens[b][c] == target[b][walk[-1]]]
            if not step:
                break
            walk.append(step[0])
        assert accepted[b].tolist() == [b * n + node for node in walk] + [-1] * (longest - len(walk))
        assert int(count[b]) == len(walk) - 1
        rows = predicts.view(2, n)[b].tolist()
        assert rows == [target[b][i] if i in walk else -5 for i in range(n)]


@pytest.mark.parametrize("seed", SEEDS)
def test_links_from_a_mask(kernels: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    # A forest: a padding node that sees only itself has no parent.
    trees = [[-1] + [rng.randint(-1, i - 1) for i in range(1, n)] for _ in range(3)]
    prefix = [rng.randint(0, 9) for _ in trees]
    mask = torch.tensor([[[j in path(parents, i) for j in range(n)] for i in range(n)] for parents in trees])
    positions, index, child, sibling = (torch.full((3 * n,), -9) for _ in range(4))
    kernels.speculative.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor(prefix), positions, index, child, sibling, 3, n
    )
    assert index.tolist() == list(range(3 * n))
    for b, parents in enumerate(trees):
        for i in range(n):
            assert positions[b * n + i] == prefix[b] + len(path(parents, i)) - 1
            assert (int(child[b * n + i]), int(sibling[b * n + i])) == links(parents, i)
