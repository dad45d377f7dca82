"""What a time cannot show about long chains: rows that do not depend on their batch, far offsets, empty prefixes and parts.

Each check is a row: a name, what was compared, and `ok`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import gate
from benchmarks.inputs import Inputs
from benchmarks.long_context_measure import error
from benchmarks.long_context_points import chain
from benchmarks.long_context_pool import Pool, inputs_over
from benchmarks.measure import why
from benchmarks.points import Point
from sglang_specverify import kernels

Check = Callable[[], dict[str, Any]]

VARIANTS = ("fused", "fused_split")


def run(pool: Pool, *, tiny: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Every check for which there is time.

    Args:
        tiny: sizes for Triton's interpreter.
    """
    for name, check in every(pool, tiny=tiny):
        if time.monotonic() < deadline:
            yield guarded(name, check)


def every(pool: Pool, *, tiny: bool) -> Iterator[tuple[str, Check]]:
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64} if tiny else {}
    longest, batch = (1200, 4) if tiny else (1 << 16, 16)
    mixed = chain(batch, longest, mixed=True, **shape)
    for point in (mixed, replace(mixed, cache="e4m3"), replace(mixed, width=8)):
        yield f"rows alone and in batches, {point.name}", partial(same_rows, pool, point)
    for cache in ("bf16", "e4m3"):
        point = chain(2, 300 if tiny else 1 << 12, cache=cache, **shape)
        yield f"far and near slots, {cache}", partial(far_offsets, pool, point)
    for lengths in ([200, 40], [0, 40], [1, 0, 700], [0]):
        point = chain(len(lengths), max(lengths), **shape)
        yield f"prefixes of {lengths}", partial(short_prefixes, pool, point, lengths)


def guarded(name: str, check: Check) -> dict[str, Any]:
    try:
        return {"name": name, **check()}
    except Exception as failure:
        return {"name": name, "ok": False, "why": why(failure)}


def same_rows(pool: Pool, point: Point) -> dict[str, Any]:
    """Deterministic rows of each request, `==` in the whole batch, alone, behind other mates and at other places.

    The same comparison without the flag is told beside it: where that is equal too, the check says little.
    """
    with inputs_over(pool, point, most_layers=1) as made:
        everyone = list(range(point.batch))
        subsets = [[r] for r in everyone] + [everyone[::-1], everyone[::2], everyone[1::2][::-1], [everyone[-1], *everyone[:-1]]]
        counts = {}
        for flag in (True, False):
            whole = attend(made, deterministic=flag).view(point.batch, -1)
            counts[flag] = 0
            for chosen in subsets:
                alone = attend(made, chosen, deterministic=flag).view(len(chosen), -1)
                counts[flag] += int((whole[chosen] != alone).any(1).sum())
        wanted = [(sample, gate.expected(made, sample)) for sample in gate.samples(made, 4)]
        found = error(made, attend(made, deterministic=True), wanted)
    return {
        "ok": counts[True] == 0 and found <= gate.LIMIT,
        "lengths": made.lengths,
        "batches": len(subsets) + 1,
        "requests": sum(map(len, subsets)),
        "different": counts[True],
        "different_without_the_flag": counts[False],
        "error": found,
    }


def attend(
    made: Inputs, chosen: Sequence[int] | None = None, *, deterministic: bool = False, variant: str = "auto"
) -> torch.Tensor:
    """[T, Hq, D]: the rows of some requests, in a batch of these alone, or of all."""
    point, which = made.point, list(range(made.point.batch)) if chosen is None else list(chosen)
    rows = made.q.view(point.batch, point.width, *made.q.shape[1:])[which].flatten(0, 1)
    out = torch.empty_like(rows)
    kernels.verify_attention(
        rows, made.k[0], made.v[0], made.table, made.row_ids[which], made.prefix_lens[which], num_draft_tokens=point.width,
        k_scale=made.k_scale, v_scale=made.v_scale, deterministic=deterministic, variant=variant, out=out,
    )  # fmt: skip
    return out


def far_offsets(pool: Pool, point: Point) -> dict[str, Any]:
    """A call on slots at the pool's end, `==` the same keys and values at its beginning."""
    outs: dict[str, dict[str, torch.Tensor]] = {}
    with inputs_over(pool, point, most_layers=1) as made:
        wanted = [(sample, gate.expected(made, sample)) for sample in gate.samples(made, 4)]
        used = torch.unique(made.table)
        ranks = torch.searchsorted(used, made.table).int()
        rows = [cache[0, used.long()] for cache in (made.k, made.v)]
        caches = pool.whole(point)
        slots = len(caches[0])
        for name, first in (("near", 0), ("far", slots - len(used))):
            place = slice(first, first + len(used))
            before = [cache[place].clone() for cache in caches]
            for cache, values in zip(caches, rows, strict=True):
                cache[place] = values
            far = replace(made, k=caches[0][None], v=caches[1][None], table=ranks + first)
            outs[name] = {each: attend(far, variant=each) for each in VARIANTS}
            for cache, values in zip(caches, before, strict=True):
                cache[place] = values
        found = max(error(made, out, wanted) for out in outs["far"].values())
    different = [name for name in VARIANTS if not torch.equal(outs["near"][name], outs["far"][name])]
    last = caches[0].numel() - 1
    return {
        "ok": not different and found <= gate.LIMIT,
        "last_element": last,
        "beyond_32_bits": last >= 1 << 31,
        "different": different,
        "error": found,
    }


def short_prefixes(pool: Pool, point: Point, lengths: Sequence[int]) -> dict[str, Any]:
    """Prefixes shorter than a part, and none at all, where upstream's split-KV kernel gives NaN."""
    with inputs_over(pool, point, lengths, most_layers=1) as made:
        wanted = [(sample, gate.expected(made, sample)) for sample in gate.samples(made, 8)]
        found = {}
        for name in (*VARIANTS, "deterministic"):
            flag = name == "deterministic"
            found[name] = error(made, attend(made, deterministic=flag, variant="auto" if flag else name), wanted)
    return {"ok": max(found.values()) <= gate.LIMIT, "error": max(found.values())}
