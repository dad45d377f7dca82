"""Two successors for every token, chosen so that no walk along them settles into few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_specverify.demo import tokenizer


@dataclass(frozen=True)
class Forks:
    """Both successors of every token, int64 [vocab]; -1 for a token that is never produced and so has none."""

    first: Tensor
    second: Tensor


def draw(seed: int) -> Forks:
    """Two successors for every live token, the circle of which is drawn by `seed`.

    All live tokens lie on one circle; the first successor is 1 ahead, the second `stride` ahead. The stride is the one with
    the latest `earliest_meeting`, so that no output settles into a few tokens and the branches of a tree stay apart.
    """
    live = torch.tensor(tokenizer.printable_ids())
    stride = max(range(2, live.numel()), key=lambda candidate: earliest_meeting(live.numel(), candidate))
    circle = live[torch.randperm(live.numel(), generator=torch.Generator().manual_seed(seed))]
    first, second = torch.full((tokenizer.VOCABULARY,), -1), torch.full((tokenizer.VOCABULARY,), -1)
    first[circle], second[circle] = circle.roll(-1), circle.roll(-stride)
    return Forks(first, second)


def earliest_meeting(size: int, stride: int) -> int:
    """The first length at which two walks of steps 1 and `stride` around a circle of `size` meet without having to.

    Two walks of equal counts of both steps always meet, in whatever order they go. No shorter walk returns to its start.
    """
    differences = [(ones - turn, strides) for strides in range(size) for ones in [-strides * stride % size] for turn in (0, size)]
    return min(max(max(ones, 0) + strides, max(-ones, 0)) for ones, strides in differences if (ones, strides) != (0, 0))
