"""Sparse MLA decode against its FP64 oracle: sizes, lists, lengths, layouts, parts; what is not to be read is NaN throughout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.kernels.sparse_mla.decode import deepseek_v41_decode
from sglang_specverify.kernels.sparse_mla.splits import (
    MAX_PROGRAMS,
    SparseConfig,
    deepseek_v41_decode_workspace_size,
    divide,
    workspace_bytes,
)
from tests.gpu.sparse_mla_problems import Problem, build, oracle

from .sparse_mla_calls import SMALL, guarded


def wrong(p: Problem, device: str, splits: int | None, config: SparseConfig = SMALL) -> list[str]:
    call = build(p, device)
    return rejections(*guarded(call, splits, config), oracle(call))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    queries = draw(st.integers(1, 4))
    shared = draw(st.booleans())
    return Problem(
        batch=draw(st.integers(1, 2)),
        queries=queries,
        heads=draw(st.sampled_from((8, 16, 32))),
        window=draw(st.integers(queries, 40)),
        topk=draw(st.sampled_from((0, 1, 15, 16, 33, 40))),
        shared=shared,
        starts=shared and draw(st.booleans()),
        shared_main=draw(st.booleans()),
        lens=draw(st.booleans()),
        missing=draw(st.sampled_from((0.0, 0.3, 1.0))),
        swa_format=draw(st.sampled_from(("swa_mxfp8", "swa_fp8"))),
        swa_page_rows=draw(st.sampled_from((64, 128, 256, 61))),
        main_page_rows=draw(st.sampled_from((64, 128, 256, 61))),
        swa_layout=draw(st.sampled_from(("block_split", "interleaved"))),
        main_layout=draw(st.sampled_from(("block_split", "interleaved"))),
        pad=draw(st.sampled_from((0, 48))),
        sink=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=5)
@given(p=problems(), splits=st.sampled_from((None, 1, 2, 7)), parts=st.sampled_from((1, 4)))
@example(p=Problem(1, 8, 8, 23, 17, shared=True, starts=True, seed=5), splits=2, parts=1)
@example(p=Problem(1, 1, 128, 20, 20, seed=6), splits=2, parts=2)
@example(p=Problem(1, 2, 64, 20, 0, missing=1.0, seed=7), splits=1, parts=1)
@example(p=Problem(1, 1, 16, 20, 20, seed=8), splits=33, parts=1)  # more parts than whose columns fit at once
def test_equals_the_oracle(device: str, p: Problem, splits: int | None, parts: int) -> None:
    assert wrong(p, device, splits, replace(SMALL, value_parts=parts)) == []


def test_the_interpreter_s_own_options_divide_and_serve_strided_inputs(device: str) -> None:
    p = Problem(2, 2, 8, 40, 33, shared=True, starts=True, seed=8)
    call = build(p, device)
    q = torch.full((2, 2, 12, 528), float("nan"), dtype=torch.bfloat16, device=device)
    q[:, :, :8, :512] = call["q"]
    lists = torch.full((2, 2, 50), 3, dtype=torch.int32, device=device)
    lists[:, :, :33] = call["main_indices"]
    lens = torch.full((2, 4), 99, dtype=torch.int32, device=device)
    lens[:, ::2] = call["main_lens"]
    strided = {**call, "q": q[:, :, :8, :512], "main_indices": lists[:, :, :33], "main_lens": lens[:, ::2]}
    assert rejections(*deepseek_v41_decode(**strided), oracle(call)) == []


def test_e4m3_queries_and_both_scales(device: str) -> None:
    call = build(Problem(1, 1, 16, 20, 20, seed=9), device)
    scales = {"bmm1_scale": 0.5 * 512**-0.5, "bmm2_scale": -3.0}
    call = {**call, "q": call["q"].to(torch.float8_e4m3fn), **scales}
    assert rejections(*guarded(call, 2), oracle(call)) == []


def test_lengths_of_requests_stand_for_all_rows(device: str) -> None:
    call = build(Problem(2, 2, 8, 20, 20, lens=False, seed=10), device)
    for name, values in (("swa_lens", (7, 0)), ("main_lens", (20, 5))):
        call[name] = torch.tensor(values, dtype=torch.int32, device=device)
    assert rejections(*guarded(call, 1), oracle(call)) == []


def test_no_key_at_all(device: str) -> None:
    """Rows without a key give 0 and -inf, whatever the sink, in one part and in several."""
    call = build(Problem(1, 2, 8, 20, 20, seed=11), device)
    call["swa_lens"] = torch.tensor([[0, -4]], dtype=torch.int32, device=device)
    call["main_lens"] = torch.tensor([[0, 3]], dtype=torch.int32, device=device)
    call["main_indices"][:, 1] = -1
    for splits in (1, 3):
        out, lse = guarded(call, splits)
        assert bool((out == 0).all()) and bool((lse == float("-inf")).all())


def test_no_request(device: str) -> None:
    out, lse = deepseek_v41_decode(**build(Problem(0, 1, 8, 16, 16), device))
    assert out.shape == (0, 1, 8, 512) and lse.shape == (0, 1, 8)


def test_slots_past_two_gib(device: str) -> None:
    """Bytes of the third page lie past 2^31; the memory between the pages is never touched."""
    call = build(Problem(1, 1, 8, 16, 16, missing=0.0, lens=False, seed=12, swa_page_rows=64), device)
    for name in ("swa", "main"):
        near, stride = call[f"{name}_cache"], (1 << 30) + 4096
        far = torch.empty(2 * stride + near.shape[1], dtype=torch.uint8, device=device)
        far = far.as_strided((3, near.shape[1]), (stride, 1))
        pages = min(3, len(near))
        far[:pages] = near[:pages]
        call[f"{name}_indices"] %= 64 * pages
        near_call = {**call, f"{name}_cache": near[:pages]}
        expected = deepseek_v41_decode(**near_call, splits=1, config=SMALL)
        got = deepseek_v41_decode(**{**call, f"{name}_cache": far}, splits=1, config=SMALL)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        call = near_call


@pytest.mark.parametrize(("cache", "byte"), [("swa_cache", 0x7F), ("swa_cache", None), ("main_cache", None)])
def test_a_nan_that_a_row_sees_is_not_hidden(device: str, cache: str, byte: int | None) -> None:
    """In a value, or (None) in a scale."""
    call = build(Problem(1, 1, 8, 16, 16, missing=0.0, lens=False, seed=13), device)
    slot = int(call[cache.replace("cache", "indices")][0, 0, 0])
    values, scales = (512, 16) if cache == "swa_cache" else (256, 32)
    at = slot % 64 * values + 5 if byte is not None else 64 * values + slot % 64 * scales + 2
    call[cache][slot // 64, at] = 0xFF if byte is None else byte
    out, lse = guarded(call, 1)
    assert bool(lse.isnan().all())
    # A sink of +inf takes all weight, and a NaN then has none.
    heads = [h for h in range(8) if float(call["sink"][h]) != float("inf")]
    assert bool(out[:, :, heads].isnan().all())
    assert bool(oracle(call).lse.isnan().all())


def test_the_comparison_sees_what_is_wrong(device: str) -> None:
    """Controls: the same kernel with an argument that means something else is rejected by the gates."""
    p = Problem(1, 2, 8, 24, 20, shared=True, starts=True, missing=0.0, lens=False, seed=14)
    call = build(p, device)
    reference = oracle(call)
    assert rejections(*guarded(call, 2), reference) == []
    starts, listed = call["swa_starts"], call["swa_lens"]
    for changed in (
        {"swa_starts": starts + 1, "swa_lens": listed - 1},
        {"swa_lens": listed + 1},
        {"main_lens": torch.full_like(listed, 19)},
        {"sink": None},
        {"swa_format": "swa_mxfp8", "swa_page_rows": 61},
        {"main_cache": call["main_cache"] ^ 0x11},
        {"main_cache": (call["main_cache"] << 4) | (call["main_cache"] >> 4)},
        {"bmm1_scale": 0.99 * 512**-0.5},
        {"bmm2_scale": 1.02},
    ):
        assert rejections(*guarded({**call, **changed}, 2), reference) != [], changed


def test_division_and_workspace() -> None:
    """Never more than the pure size says, which is monotone; packed rows fill tiles."""
    config = SparseConfig()
    for batch, queries, heads, topk, packed in ((1, 1, 64, 512, False), (7, 6, 16, 512, True), (300, 8, 128, 64, False),
                                                (16, 1, 8, 0, False), (3, 8, 8, 100, True)):  # fmt: skip
        division = divide(batch, queries, heads, 135, topk, config, 132, packed=packed, shared_main=False)
        size = deepseek_v41_decode_workspace_size(batch, topk, queries=queries, heads=heads, window=135)
        assert workspace_bytes(batch, division) <= size
        assert division.splits == 1 or batch * division.blocks * division.splits <= 132
        assert division.tokens * division.blocks * 64 >= queries * heads
        for larger in (
            {"batch": batch + 1},
            {"topk": topk + 64},
            {"queries": queries + 1},
            {"heads": 2 * heads},
            {"window": 400},
        ):
            given = {"batch": batch, "topk": topk, "queries": queries, "heads": heads, "window": 135, **larger}
            assert deepseek_v41_decode_workspace_size(given.pop("batch"), given.pop("topk"), **given) >= size
    assert deepseek_v41_decode_workspace_size(10**6, 512) == MAX_PROGRAMS * 64 * 513 * 4
    assert divide(4, 4, 16, 131, 512, config, 132, packed=True, shared_main=False).blocks == 1
    assert divide(1, 1, 64, 128, 512, config, 132, packed=False, shared_main=True).splits == 20
    assert divide(132, 1, 64, 128, 512, config, 132, packed=False, shared_main=True).splits == 1


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", lambda c: {"q": c["q"].float()}),
        ("q", lambda c: {"q": c["q"][:, :, :5]}),
        ("q", lambda c: {"q": c["q"][..., :448]}),
        ("q", lambda c: {"q": c["q"].repeat(1, 9, 1, 1)}),
        ("swa_cache", lambda c: {"swa_cache": c["swa_cache"].to(torch.int8)}),
        ("swa_cache", lambda c: {"swa_cache": c["swa_cache"][:, :-1]}),
        ("swa_page_rows", lambda c: {"swa_page_rows": 0}),
        ("swa_page_rows", lambda c: {"swa_page_rows": 1 << 22}),
        ("swa_indices", lambda c: {"swa_indices": c["swa_indices"].long()}),
        ("swa_indices", lambda c: {"swa_indices": c["swa_indices"].repeat(1, 3, 1)}),
        ("swa_starts", lambda c: {"swa_starts": torch.zeros(1, 2, dtype=torch.int32)}),
        ("swa_lens", lambda c: {"swa_lens": torch.zeros(2, dtype=torch.int32)}),
        ("swa_format", lambda c: {"swa_format": "main_kv_fp4"}),
        ("main_format", lambda c: {"main_format": "swa_fp8"}),
        ("main_layout", lambda c: {"main_layout": "planar"}),
        ("main_cache", lambda c: {"main_cache": None}),
        ("main_indices", lambda c: {"main_indices": None}),
        ("main_lens", lambda c: {"main_lens": c["main_lens"].float()}),
        ("sink", lambda c: {"sink": c["sink"][:3]}),
        ("bmm1_scale", lambda c: {"bmm1_scale": float("inf")}),
        ("bmm2_scale", lambda c: {"bmm2_scale": "1"}),
        ("contract", lambda c: {"contract": "fast"}),
        ("splits", lambda c: {"splits": 0}),
        ("out", lambda c: {"out": torch.empty(1, 2, 8, 512)}),
        ("out", lambda c: {"out": c["q"]}),
        ("lse", lambda c: {"lse": torch.empty(1, 2, 1).expand(1, 2, 8)}),
        ("workspace", lambda c: {"workspace": torch.empty(64, dtype=torch.uint8), "splits": 2}),
        ("config", lambda c: {"config": SparseConfig(specialized=True)}),
    ],
)
def test_a_bad_argument_is_named(argument: str, change: Any) -> None:
    call = build(Problem(1, 2, 8, 16, 16, seed=15), "cpu")
    if call["q"].is_cuda or torch.cuda.is_available():
        pytest.skip("the arguments here are on the CPU, which only the interpreter serves")
    with pytest.raises(ArgumentError) as error:
        deepseek_v41_decode(**{**call, **change(call)})
    assert error.value.argument == argument
