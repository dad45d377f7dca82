"""The e4m3 contract of sparse MLA decode: against its FP64 oracle, with faults that its gates see, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.sparse_mla import decode, decode_kernel
from sglang_specverify.kernels.sparse_mla.arguments import CONTRACTS, check_contract
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.kernels.sparse_mla.decode import deepseek_v41_decode
from sglang_specverify.kernels.sparse_mla.quantize import deepseek_v41_quantize_cache
from sglang_specverify.kernels.sparse_mla.splits import SparseConfig
from tests.gpu.sparse_mla_problems import Problem, build, oracle

from .sparse_mla_calls import guarded

#: The fewest keys that a tile of this contract may have.
SMALL = SparseConfig(rows=16, keys=32, reduce_rows=16)


@pytest.fixture(autouse=True)
def served(device: str) -> None:
    arch = arch_of(torch.device(device))
    if arch not in CONTRACTS["e4m3"]:
        pytest.skip(f"{arch} does not have the contract")


def call_of(p: Problem, device: str) -> dict[str, Any]:
    call = build(replace(p, swa_format="swa_fp8"), device)
    return {**call, "q": call["q"].to(torch.float8_e4m3fn), "contract": "e4m3"}


def gates(result: tuple[torch.Tensor, torch.Tensor], call: dict[str, Any], **how: Any) -> set[str]:
    """Which gates reject a result: "out" for its elements, "l2" for its relative error, "lse"."""
    found = rejections(*result, oracle(call), call["contract"], **how)
    return {"l2" if "relative L2" in line else line[:3] for line in found}


@pytest.mark.parametrize(
    ("p", "splits", "config"),
    [
        # The architecture's own options and parts.
        (Problem(1, 1, 16, 40, 70), None, None),
        (Problem(2, 3, 8, 42, 33, shared=True, starts=True, swa_page_rows=61, main_page_rows=61, swa_layout="interleaved",
                 main_layout="interleaved", pad=48, seed=1), 3, SMALL),
        (Problem(1, 4, 16, 35, 40, shared=True, shared_main=True, missing=0.3, seed=2), 2, replace(SMALL, value_parts=4)),
        (Problem(1, 1, 128, 40, 0, seed=3), 2, SMALL),
        (Problem(1, 2, 64, 20, 33, missing=1.0, seed=4), 1, SMALL),
        (Problem(2, 2, 32, 40, 33, lens=False, sink=False, main_page_rows=256, pad=16, seed=5), 7, SMALL),
        (Problem(1, 1, 8, 20, 33, swa_page_rows=128, main_layout="interleaved", seed=6), 1, replace(SMALL, value_parts=2)),
    ],
    ids=lambda value: f"Sq{value.queries}-H{value.heads}-K{value.topk}" if isinstance(value, Problem) else "",
)  # fmt: skip
def test_equals_the_oracle(device: str, p: Problem, splits: int | None, config: SparseConfig | None) -> None:
    call = call_of(p, device)
    assert rejections(*guarded(call, splits, config), oracle(call), "e4m3") == []
    if device == "cuda":
        # There they differ from those of the interpreter.
        assert rejections(*guarded(call, None, None), oracle(call), "e4m3") == []


def test_both_scales_and_a_row_without_a_key(device: str) -> None:
    call = call_of(Problem(1, 2, 8, 20, 20, seed=7), device)
    call |= {"bmm1_scale": 0.5 * 512**-0.5, "bmm2_scale": -3.0}
    call["swa_lens"] = torch.tensor([[0, 9]], dtype=torch.int32, device=device)
    call["main_lens"] = torch.tensor([[-2, 20]], dtype=torch.int32, device=device)
    for splits in (1, 2):
        out, lse = guarded(call, splits, SMALL)
        assert bool((out[:, 0] == 0).all()) and bool((lse[:, 0] == float("-inf")).all())
        assert rejections(out, lse, oracle(call), "e4m3") == []


def test_every_code_is_rounded_as_the_oracle_does(device: str) -> None:
    """One key at a time has weight 1: its row comes back, bit for bit, scales subnormal, negative and beyond 448 included."""
    first = (0, 96, 160)
    call = call_of(Problem(len(first), 1, 8, 1, 1, missing=0.0, lens=False, sink=False, seed=8), device)
    bytes_of = torch.arange(256, dtype=torch.uint8, device=device)

    def finite(codes: torch.Tensor) -> torch.Tensor:
        return torch.where((codes & 0x7F) == 0x7F, 0, codes)

    for b, scale in enumerate(first):
        slot = int(call["main_indices"][b, 0, 0])
        call["main_cache"][slot // 64, slot % 64 * 256 :][:256] = bytes_of
        call["main_cache"][slot // 64, 64 * 256 + slot % 64 * 32 :][:32] = finite(bytes_of[scale : scale + 32])
        slot = int(call["swa_indices"][b, 0, 0])
        call["swa_cache"][slot // 64, slot % 64 * 512 :][:512] = finite(torch.cat([bytes_of, bytes_of]))
    for empty in ("main_lens", "swa_lens"):
        one = {**call, empty: torch.zeros(len(first), dtype=torch.int32, device=device), "bmm1_scale": 0.0}
        out, _ = deepseek_v41_decode(**one, splits=1, config=SMALL)
        want = oracle(one).out
        assert torch.equal(out.double(), want), empty
        assert float(want.abs().max()) == 448 and want.unique().numel() > 100


def test_the_ways_to_round_main_rows_give_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(Problem(1, 1, 8, 20, 40, seed=9), device)
    results, asked = [], []
    for how in ("integer", "fp16"):
        monkeypatch.setattr(decode, "conversion_of", lambda arch, how=how: asked.append(how) or how)
        results.append(deepseek_v41_decode(**call, splits=1, config=SMALL))
    assert asked == ["integer", "fp16"]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def near(device: str) -> dict[str, Any]:
    """A call whose sinks weigh as much as its keys: one far below would not be missed."""
    call = call_of(Problem(1, 2, 8, 24, 20, shared=True, starts=True, missing=0.0, lens=False, seed=14), device)
    # Keys of like weight, of which each counts.
    call["bmm1_scale"] = 0.1 * 512**-0.5
    call["main_indices"][:, :, 3] = -1
    call["main_lens"] = torch.full((1, 2), 20, dtype=torch.int32, device=device)
    call["sink"] = oracle(call).lse.mean((0, 1)).float()
    return call


def changed(call: dict[str, Any], fault: str) -> dict[str, Any]:
    """The call with arguments that make a right kernel give what one with this fault gives."""
    cache, lists = call["main_cache"].clone(), call["main_indices"].clone()
    codes, scales = cache[:, : 64 * 256], cache[:, 64 * 256 : 64 * 288]
    if fault == "dropped key":
        return {**call, "main_lens": call["main_lens"] - 1}
    if fault == "counted padding key":
        # A row of zeros where the list has -1.
        unused = next(slot for slot in range(64) if slot not in lists)
        codes[0, unused * 256 :][:256] = 0
        scales[0, unused * 32 :][:32] = 0
        lists[:, :, 3] = unused
        return {**call, "main_cache": cache, "main_indices": lists}
    if fault == "stale index":
        lists[:, 0, 5] = lists[:, 1, 5]
        return {**call, "main_indices": lists}
    if fault == "double sink":
        return {**call, "sink": call["sink"] + math.log(2)}
    if fault == "swapped nibble":
        codes.copy_((codes << 4) | (codes >> 4))
    if fault == "wrong scale group":
        scales.copy_(scales.reshape(-1, 64, 32).roll(1, dims=2).flatten(1))
    return {**call, "main_cache": cache}


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("", set()),
        # One key of 42 is seen everywhere; of 640, where rounding P may do as much, in the LSE alone (test_sparse_mla_bounds.py).
        ("dropped key", {"out", "l2", "lse"}),
        ("stale index", {"out", "l2", "lse"}),
        # All values become 1 / 43 smaller, less than rounding P may do to each and to all of them.
        ("counted padding key", {"lse"}),
        # A sink has no part in the LSE.
        ("double sink", {"out", "l2"}),
        ("swapped nibble", {"out", "l2", "lse"}),
        ("wrong scale group", {"out", "l2", "lse"}),
    ],
)
def test_its_gates_see_what_is_wrong(near: dict[str, Any], fault: str, seen: set[str]) -> None:
    assert gates(guarded(changed(near, fault), 2, SMALL), near) == seen


def test_its_lse_gate_sees_a_sink_and_the_other_contract(near: dict[str, Any]) -> None:
    out, lse = guarded(near, 2, SMALL)
    assert gates((out, torch.logaddexp(lse, near["sink"])), near) == {"lse"}
    exact = {**near, "contract": "exact"}
    assert gates(guarded(exact, 2, SMALL), exact) == set()
    # Main rows that are not rounded, and rounded ones where they should not be.
    assert "lse" in gates(guarded(exact, 2, SMALL), near)
    assert "lse" in gates((out, lse), exact)


@pytest.mark.usefixtures("emulated")
def test_weights_are_scaled_into_the_range_of_e4m3(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key 7.5 ahead of 64 others: exp(-7.5) is under 2^-10, half the smallest E4M3 number, and 448 times that is not.

    The outputs of the others are in columns of their own. At 13.08 the 448 do not help, and the bound says so.
    """
    ahead, others = torch.zeros(1, 512), torch.zeros(64, 512)
    ahead[0, 256:], others[:, :256] = 1.0, 1.0
    q = torch.zeros(1, 1, 8, 512)
    q[..., 256:] = 1.0
    call = {
        "q": q.to(torch.float8_e4m3fn),
        "swa_cache": deepseek_v41_quantize_cache(ahead, "swa_fp8"),
        "swa_indices": torch.zeros(1, 1, 1, dtype=torch.int32),
        "swa_format": "swa_fp8",
        "main_cache": deepseek_v41_quantize_cache(others, "main_kv_fp4"),
        "main_indices": torch.arange(64, dtype=torch.int32).view(1, 1, 64),
        "contract": "e4m3",
    }
    near, far = ({**call, "bmm1_scale": lead / 256} for lead in (7.5, 13.08))
    assert gates(guarded(near, 1, SMALL), near) == set()
    out, lse = guarded(far, 1, SMALL)
    assert not out[..., :256].any()
    assert gates((out, lse), far, l2=False) == set()
    monkeypatch.setattr(decode_kernel, "P_SCALE", tl.constexpr(1.0))
    assert "out" in gates(guarded(near, 1, SMALL), near)


@pytest.mark.parametrize("cache", ["swa_cache", "main_cache"])
def test_a_nan_that_a_row_sees_is_not_hidden(device: str, cache: str) -> None:
    """In a value of the window, in a scale of a main row."""
    call = call_of(Problem(1, 1, 8, 16, 16, missing=0.0, lens=False, sink=False, seed=13), device)
    slot = int(call[cache.replace("cache", "indices")][0, 0, 0])
    at = slot % 64 * 512 + 5 if cache == "swa_cache" else 64 * 256 + slot % 64 * 32 + 2
    call[cache][slot // 64, at] = 0xFF
    out, lse = guarded(call, 1, SMALL)
    assert bool(lse.isnan().all()) and bool(out.isnan().all())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(1, 2, 8, 512, dtype=torch.bfloat16)},
         "q: got torch.bfloat16 in the e4m3 contract; allowed: torch.float8_e4m3fn with its scale in bmm1_scale, or contract"),
        ({"swa_format": "swa_mxfp8"},
         "swa_format: got 'swa_mxfp8' in the e4m3 contract; allowed: 'swa_fp8', or contract 'exact'"),
        ({"config": replace(SMALL, keys=16)}, "allowed: keys 32 or more, and not specialized, in the e4m3 contract"),
        ({"config": SparseConfig(keys=64, num_warps=4, specialized=True)}, "allowed: keys 32 or more, and not specialized"),
        ({"contract": "fast"}, "contract: got 'fast' on none; allowed: 'exact', 'e4m3'"),
    ],
    ids=["q", "swa_format", "keys", "specialized", "contract"],
)  # fmt: skip
@pytest.mark.usefixtures("emulated")
def test_what_it_does_not_have_is_refused(change: dict[str, Any], said: str) -> None:
    call = call_of(Problem(1, 2, 8, 16, 16, seed=15), "cpu")
    with pytest.raises(ArgumentError) as error:
        deepseek_v41_decode(**{**call, **change})
    assert said in str(error.value)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950", "gfx942"])
def test_an_architecture_without_it_says_what_it_has(device: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(Problem(1, 1, 8, 16, 16, seed=15), device)
    monkeypatch.setattr(decode, "arch_of", lambda _: arch)
    with pytest.raises(ArgumentError) as error:
        deepseek_v41_decode(**call)
    has = "none: this kernel is for sm_90, sm_100, sm_103, sm_107, gfx950" if arch == "gfx942" else "'exact'"
    assert str(error.value) == f"contract: got 'e4m3' on {arch}; allowed: {has}"
    assert check_contract("e4m3", "sm_100", call["q"]) == "e4m3"
