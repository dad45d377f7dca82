"""Calls captured into CUDA graphs: replays read what their buffers hold then, and eager calls may run between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.kernels import draft_decode_attention, tree_suffix_merge, verify_attention
from tests.kernels.cases import Config, build_draft, build_verify

from .bounds import compare, expect_merged
from .calls import guarded, guarded_lse, prefix_state, suffix_arguments, to_device
from .plans import plan_for

pytestmark = pytest.mark.cuda_graph

KINDS = ["chain", "qlen_only", "full_mask", "branches"]
BASE = Config(
    prefix_lens=(700, 40, 0, 129), widths=5, q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, page_size=16, sinks=True,
    q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
)  # fmt: skip

#: What a step writes into its fixed buffers before a replay.
STEP_TENSORS = ["q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens", "mask", "mask_offsets", "positions", "draft_slots"]


def build(c: Config, device: str) -> dict[str, Any]:
    """A call in buffers of the largest size, so that every step's fits: the cache of 64 pages, tables of 64, masks of 20 000."""
    a = build_draft(c, topk=5, step=1, steps=2) if c.kind == "branches" else build_verify(c)
    a["prefix_lens"] = a["prefix_lens"].int()
    sizes = {"k_cache": 2048, "v_cache": 2048}
    for name, rows in sizes.items():
        a[name] = torch.cat([a[name], torch.full((rows - len(a[name]), *a[name].shape[1:]), torch.nan, dtype=a[name].dtype)])
    a["table"] = torch.nn.functional.pad(a["table"], (0, 64 - a["table"].shape[1]), value=-1)
    if c.kind == "full_mask":
        a["mask"] = torch.nn.functional.pad(a["mask"], (0, 20_000 - len(a["mask"])), value=True)
    return to_device(a, device)


def fill(buffers: dict[str, Any], step: dict[str, Any]) -> None:
    for name in STEP_TENSORS:
        if isinstance(buffers.get(name), torch.Tensor):
            buffers[name].copy_(step[name])


def operation(a: dict[str, Any]) -> Any:
    return draft_decode_attention if "draft_slots" in a else verify_attention


LENGTHS = [(700, 40, 0, 129), (0, 0, 0, 0), (1, 650, 64, 3), (300, 300, 300, 300)]


@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("variant", ["fused", "fused_split", "planned"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_follow_their_buffers(device: str, kind: str, variant: str, window: int) -> None:
    """Lengths, tables, masks and slots change between replays, the metadata is made anew inside; two layers share it."""
    c = BASE.but(kind=kind, window=window)
    buffers = build(c, device)
    outs = [guarded(20, 8, 64, torch.bfloat16, device, strided=False) for _ in range(2)]
    lses = [guarded_lse(20, 8, device, layout="heads") for _ in range(2)]
    blank = plan_for(buffers, divide=True)
    size = blank.shape.workspace_bytes(4)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)

    def step() -> None:
        extra: dict[str, Any] = {"variant": "fused_split" if variant == "planned" else variant}
        if variant == "planned":
            plan = plan_for(buffers, divide=True, out=blank.buffer)
            extra |= {"plan": plan, "workspace": workspace}
        for out, lse in zip(outs, lses, strict=True):
            operation(buffers)(**buffers, **extra, out=out.view, lse=lse.view, return_lse=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    everything = torch.ones(20, dtype=torch.bool, device=device)
    for seed, lens in enumerate(LENGTHS):
        fill(buffers, build(c.but(seed=seed, prefix_lens=lens), device))
        for out in outs:
            out.view.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for out, lse in zip(outs, lses, strict=True):
            compare(buffers, out.view, lse.view, splits=64)
            assert out.untouched(everything) and lse.untouched(everything)
        # An eager call between replays, on the same buffers.
        step()
        torch.cuda.synchronize()
        compare(buffers, outs[0].view, lses[0].view, splits=64)


@pytest.mark.parametrize("variant", ["fused", "fused_split"])
@pytest.mark.parametrize("kind", KINDS)
def test_smaller_replays(device: str, kind: str, variant: str) -> None:
    """A graph for 4 requests of which 2 are real: those equal an eager call, the spare ones have prefix 0."""
    c = BASE.but(kind=kind)
    buffers = build(c, device)
    out, lse = guarded(20, 8, 64, torch.bfloat16, device, strided=False), guarded_lse(20, 8, device)

    def step() -> None:
        operation(buffers)(**buffers, variant=variant, out=out.view, lse=lse.view, return_lse=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    fill(buffers, build(c.but(seed=3, prefix_lens=(250, 31, 0, 0)), device))
    buffers["q"][10:] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    buffers["q"][10:] = 0
    expected_rows = out.view[:10].clone(), lse.view[:10].clone()
    whole_out, whole_lse = operation(buffers)(**buffers, variant=variant, return_lse=True)
    compare(buffers, whole_out, whole_lse, splits=64)
    assert torch.equal(expected_rows[0], whole_out[:10]) and torch.equal(expected_rows[1], whole_lse[:10])


@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
def test_tree_suffix_merge_in_a_graph(device: str, kind: str) -> None:
    """It overwrites the prefix's result: each replay starts from the state that the prefix pass left."""
    c = BASE.but(kind=kind)
    buffers = build(c, device)
    first = ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")
    out = torch.zeros(20, 8, 64, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(8, 20, device=device).T

    def step() -> None:
        rest = {name: value for name, value in buffers.items() if name not in first}
        tree_suffix_merge(*(buffers[name] for name in first), out, lse, **rest)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, lens in enumerate(LENGTHS):
        fill(buffers, build(c.but(seed=seed, prefix_lens=lens), device))
        before = prefix_state(buffers, torch.bfloat16)
        out.copy_(before[0])
        lse.copy_(before[1])
        graph.replay()
        torch.cuda.synchronize()
        compare(buffers, out, lse, expected=expect_merged(buffers, suffix_arguments(buffers), *before))


def test_a_capture_waits_for_nothing(device: str) -> None:
    """Every operation in a capture, new outputs and all: a host synchronisation would break the capture."""
    for kind in KINDS:
        a = build(BASE.but(kind=kind), device)
        operation(a)(**a, variant="fused_split")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = operation(a)(**a, variant="fused_split", return_lse=True)
        graph.replay()
        torch.cuda.synchronize()
        compare(a, out, lse, splits=64)
