"""Prompts of whole-server runs, of tokens that the tiny models know. Pure, and the same each time."""

from __future__ import annotations

import random

from sglang_specverify.demo import tokenizer

#: At, before and behind the edges of pages of 16 and 64, and single tokens.
_LENGTHS = (1, 3, 9, 16, 33, 63, 64, 65, 70, 127, 128, 129, 200, 255, 400, 600)


def draw(lengths: list[int], seed: int) -> list[list[int]]:
    """One prompt of each length."""
    live, source = tokenizer.printable_ids(), random.Random(seed)
    return [source.choices(live, k=length) for length in lengths]


def parity_prompts(count: int, longest: int) -> list[list[int]]:
    """`count` prompts, the lengths above up to `longest` again and again."""
    fitting = [length for length in _LENGTHS if length <= longest]
    return draw([fitting[index % len(fitting)] for index in range(count)], seed=0)


def pool(count: int, longest: int, seed: int) -> list[list[int]]:
    """`count` prompts from one token to `longest`, as many short ones as long ones by order of magnitude; some begin alike."""
    source = random.Random(seed)
    lengths = sorted({1, longest} | {round(longest ** source.random()) for _ in range(count)})
    while len(lengths) < count:
        lengths.append(round(longest ** source.random()))
    prompts = draw(lengths[:count], seed)
    # Every third begins as another one does, so that the prefix cache has parts to share.
    for index in range(2, count, 3):
        other = prompts[source.randrange(count)]
        shared = min(len(other), len(prompts[index])) // 2
        prompts[index][:shared] = other[:shared]
    return prompts
