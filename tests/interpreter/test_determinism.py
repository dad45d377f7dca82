"""With `deterministic=True` a request's rows have the same bits alone, with any mates and at any place in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import Config, build_draft, build_verify

from .bounds import compare
from .calls import call, launches, names, to_device
from .plans import attends, plan_for

#: Below, at and above the length from which deterministic mode divides a prefix, 1024; an empty one and a short one.
BASE = Config(
    prefix_lens=(1100, 0, 40, 1024, 1025), widths=3, q_heads=2, kv_heads=1, head_dim=16, v_head_dim=16, page_size=16,
    q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16, sinks=True,
)  # fmt: skip

BATCHES = [[0], [1], [2], [3], [4], [4, 0], [2, 1, 0], [0, 0], [3, 2, 4, 1]]


def build(kind: str, device: str) -> dict[str, Any]:
    c = BASE.but(kind=kind)
    return to_device(build_draft(c, topk=3, step=1, steps=2) if kind == "branches" else build_verify(c), device)


def some(a: dict[str, Any], requests: list[int]) -> dict[str, Any]:
    """The call with these requests alone, in this order."""
    at = torch.tensor(requests, device=a["q"].device)
    rows = (at[:, None] * 3 + torch.arange(3, device=at.device)).flatten()
    per_request = ("row_ids", "prefix_lens", "draft_slots")
    part = {name: a[name][at] for name in per_request if name in a}
    part |= {name: a[name][rows] for name in ("q", "positions") if name in a}
    if a.get("mask") is not None and a["mask_layout"] == "qlen_only":
        part["mask"] = a["mask"][at]
    elif a.get("mask") is not None:
        offsets = a["mask_offsets"].tolist()
        blocks = [a["mask"][offsets[r] : offsets[r + 1]] for r in requests]
        part["mask"] = torch.cat(blocks)
        part["mask_offsets"] = torch.tensor([0, *map(len, blocks)], device=at.device).cumsum(0)
    return {**a, **part}


def launched(a: dict[str, Any]) -> list[str]:
    """The kernels of a deterministic call without a plan."""
    return ["plan_kernel", *attends(plan_for(a | {"deterministic": True}, divide=True))]


@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask", "branches"])
def test_bits_do_not_depend_on_the_batch(device: str, kind: str) -> None:
    a = build(kind, device)
    with launches() as seen:
        out, lse = call(a, deterministic=True, variant="fused_split")
    assert names(seen) == launched(a)
    compare(a, out, lse, splits=16)
    for requests in BATCHES if kind == "qlen_only" else BATCHES[5:7]:
        got = call(some(a, requests), deterministic=True, variant="fused_split")
        rows = [3 * r + i for r in requests for i in range(3)]
        assert torch.equal(got[0], out[rows]) and torch.equal(got[1], lse[rows]), requests


def test_ragged_rows_with_the_same_most(device: str) -> None:
    """`num_draft_tokens` sets the tiles: a request with it alone has the bits that it has beside one of more rows."""
    c = BASE.but(prefix_lens=(1100, 3), widths=(2, 40))
    a = {**to_device(build_verify(c), device), "num_draft_tokens": 40, "deterministic": True, "variant": "fused_split"}
    out, lse = call(a)
    alone = {
        **a,
        "q": a["q"][:2],
        "q_offsets": a["q_offsets"][:2],
        "row_ids": a["row_ids"][:1],
        "prefix_lens": a["prefix_lens"][:1],
    }
    got = call(alone)
    assert torch.equal(got[0], out[:2]) and torch.equal(got[1], lse[:2])


def test_long_prefixes_are_divided(device: str) -> None:
    """The test above would be empty otherwise: 1100 and 1025 keys are two parts, the others one."""
    a = build("chain", device)
    with launches() as seen:
        call(a, deterministic=True, variant="fused_split")
    words = seen[0].arguments["plan"][: seen[0].arguments["capacity"] * 8].view(-1, 8)
    parts = {int(row[0]): int(row[4]) for row in words if row[0] >= 0}
    assert parts == {0: 2, 1: 1, 2: 1, 3: 1, 4: 2}


@pytest.mark.parametrize("variant", ["fused", "fused_split"])
def test_the_same_call_twice_has_the_same_bits(device: str, variant: str) -> None:
    """Without the flag too: no result depends on which program came first."""
    a = build("qlen_only", device)
    first, second = call(a, variant=variant), call(a, variant=variant)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_auto_takes_the_divided_kernel_when_asked_for_determinism(device: str) -> None:
    """Its split follows each request's own length; the choice must not follow the batch either."""
    a = build("chain", device)
    for requests in ([0], [2], [0, 1, 2, 3, 4]):
        one = some(a, requests)
        with launches() as seen:
            call(one, deterministic=True, variant="auto")
        assert names(seen) == launched(one)
        assert seen[1].constants["SPLIT"] is True
