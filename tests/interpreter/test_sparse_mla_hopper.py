"""The kernel of sparse MLA decode with specialised warps, in its emulator or on the hardware that it is written for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla import decode
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.kernels.sparse_mla.decode import deepseek_v41_decode
from sglang_specverify.kernels.sparse_mla.splits import SparseConfig
from tests.gpu.sparse_mla_problems import Problem, build, oracle
from tests.interpreter import sparse_mla_gluon
from tests.interpreter.gluon_tensors import Fault

SPECIALIZED = SparseConfig(keys=64, num_warps=4, specialized=True, reduce_rows=16)

pytestmark = pytest.mark.usefixtures("specialized")


@pytest.fixture(autouse=True)
def emulator(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch runs in the emulator, the reducer in Triton's interpreter."""
    if device == "cuda":
        return
    build_launches = decode.decode_launches

    def emulate(a: Any, buffers: Any, config: SparseConfig, division: Any, arch: str) -> Any:
        first, *others = build_launches(a, buffers, config, division, "sm_90")
        sparse_mla_gluon.run(first, seed=division.splits)
        return others

    monkeypatch.setattr(decode, "decode_launches", emulate)


@pytest.mark.parametrize(("splits", "keys", "stages"), [(1, 64, 2), (3, 32, 4), (2, 32, 3)])
@pytest.mark.parametrize(
    "p",
    [
        Problem(1, 1, 64, 130, 200),
        Problem(1, 1, 64, 70, 100, lens=False, swa_format="swa_fp8", sink=False, seed=1),
        Problem(1, 5, 16, 69, 70, shared=True, starts=True, seed=2),
        Problem(1, 3, 8, 66, 20, shared=True, starts=True, shared_main=True, swa_page_rows=61, main_page_rows=61,
                swa_layout="interleaved", main_layout="interleaved", pad=48, seed=3),
        Problem(1, 2, 128, 20, 0, missing=1.0, seed=4),
        Problem(2, 3, 64, 69, 40, shared=True, starts=True, shared_main=True, seed=5),
        Problem(1, 4, 128, 130, 0, shared=True, starts=True, seed=6),
    ],
    ids=lambda p: f"Sq{p.queries}-H{p.heads}-K{p.topk}",
)  # fmt: skip
def test_equals_the_oracle(device: str, p: Problem, splits: int, keys: int, stages: int) -> None:
    call = build(p, device)
    out = torch.full(call["q"].shape, float("nan"), dtype=torch.bfloat16, device=device)
    lse = torch.full(call["q"].shape[:3], float("nan"), device=device)
    config = replace(SPECIALIZED, keys=keys, num_stages=stages)
    deepseek_v41_decode(**call, out=out, lse=lse, splits=splits, config=config)
    assert rejections(out, lse, oracle(call)) == []


@pytest.mark.parametrize(("heads", "shared_main"), [(64, True), (64, False), (16, True), (16, False)])
@pytest.mark.parametrize(("splits", "keys"), [(1, 64), (4, 32), (9, 32)])
def test_windows_that_are_no_chain_s(device: str, splits: int, keys: int, heads: int, shared_main: bool) -> None:
    """Windows begin anywhere and may be longer than a chain's: no entry is read twice or not at all, however keys are divided.

    With 16 heads four rows share tiles: a later one reads further than the first.
    """
    call = build(Problem(2, 4, heads, 100, 40, shared=True, starts=True, shared_main=shared_main, seed=11), device)
    call["swa_starts"] = torch.tensor([[0, 3, 31, 1], [5, 100, 64, 1]], dtype=torch.int32, device=device)
    call["swa_lens"] = torch.tensor([[5, 97, 69, 99], [31, 7, 0, 99]], dtype=torch.int32, device=device)
    config = replace(SPECIALIZED, keys=keys, num_stages=128 // keys)
    assert rejections(*deepseek_v41_decode(**call, splits=splits, config=config), oracle(call)) == []


@pytest.mark.parametrize("heads", [64, 16])
@pytest.mark.parametrize("lens", [True, False])
@pytest.mark.parametrize(("splits", "keys"), [(1, 64), (2, 64), (4, 32), (9, 32)])
def test_windows_that_reach_beyond_their_list(device: str, splits: int, keys: int, lens: bool, heads: int) -> None:
    """Before its first entry, behind its last one, or both: the entries between are attended once, by whichever part has them."""
    call = build(Problem(2, 4, heads, 100, 40, shared=True, starts=True, shared_main=True, missing=0.0, seed=12), device)
    starts = torch.tensor([[99, -7, 37, 100], [2**31 - 1, -(2**31), 68, 1]], dtype=torch.int32, device=device)
    call["swa_lens"] = torch.tensor([[100, 104, 2**31 - 1, 9], [100, 33, -(2**31), -5]], dtype=torch.int32, device=device)
    if not lens:
        del call["swa_lens"]
    config = replace(SPECIALIZED, keys=keys, num_stages=128 // keys)
    found = deepseek_v41_decode(**call | {"swa_starts": starts}, splits=splits, config=config)
    assert rejections(*found, oracle(call | {"swa_starts": starts.clamp_min(0)})) == []


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("splits", "keys", "tiles"), [(1, 64, 3), (3, 64, 1), (1, 32, 6), (2, 32, 3), (6, 32, 1)])
def test_tiles_of_a_row_begin_where_its_window_does(splits: int, keys: int, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 keys of a shared list are two tiles of 64 wherever they begin; those and one of a main list are divided evenly."""
    handed: Counter[tuple[int, int, int]] = Counter()

    def arrive(self: Any, place: Any, **how: Any) -> None:
        handed[self.place] += place.memory.name == "k_full"
        original(self, place, **how)

    original = sparse_mla_gluon.SparseProgram.arrive
    monkeypatch.setattr(sparse_mla_gluon.SparseProgram, "arrive", arrive)
    call = build(Problem(1, 4, 64, 131, 64, shared=True, starts=True, shared_main=True, lens=False, seed=13), "cpu")
    # The last row's length is cut to what the list has.
    call["swa_lens"][0, 3] = 200
    config = replace(SPECIALIZED, keys=keys, num_stages=128 // keys)
    assert rejections(*deepseek_v41_decode(**call, splits=splits, config=config), oracle(call)) == []
    assert handed == {(part, row, 0): tiles for part in range(splits) for row in range(4)}


@pytest.mark.parametrize("scale", [-0.06, 0.0])
def test_a_scale_that_is_not_positive(device: str, scale: float) -> None:
    """The largest score before such a scale is not the largest behind it."""
    call = {**build(Problem(1, 1, 64, 70, 40, seed=7), device), "bmm1_scale": scale}
    out, lse = deepseek_v41_decode(**call, splits=1, config=SPECIALIZED)
    assert rejections(out, lse, oracle(call)) == []


def test_every_code_is_decoded_exactly(device: str) -> None:
    """One key at a time has weight 1: its row comes back, bit for bit, for every code and scale of FP4 and every E4M3 code."""
    call = build(Problem(2, 1, 64, 1, 1, missing=0.0, lens=False, sink=False, seed=5), device)
    bytes_of = torch.arange(256, dtype=torch.uint8, device=device)
    for b, scales in enumerate((0, 96)):
        slot = int(call["main_indices"][b, 0, 0])
        call["main_cache"][slot // 64, slot % 64 * 256 :][:256] = bytes_of
        # Finite scales, signed, subnormal and large.
        call["main_cache"][slot // 64, 64 * 256 + slot % 64 * 32 :][:32] = torch.arange(scales, scales + 32, device=device) % 127
        slot = int(call["swa_indices"][b, 0, 0])
        codes = torch.cat([bytes_of, bytes_of])
        call["swa_cache"][slot // 64, slot % 64 * 512 :][:512] = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    for empty in ("main_lens", "swa_lens"):
        one = {**call, empty: torch.zeros(2, dtype=torch.int32, device=device), "bmm1_scale": 0.0}
        out, _ = deepseek_v41_decode(**one, splits=1, config=SPECIALIZED)
        want = oracle(one).out
        assert torch.equal(out.double(), want), empty
        assert want.unique().numel() > 100


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("barrier", ["k_empty", "k_full", "p_full"])
@pytest.mark.parametrize(("keys", "stages"), [(64, 2), (32, 4)])
def test_the_emulator_sees_a_wait_that_is_missing(barrier: str, keys: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without one of the waits, tiles are overwritten under a product, or read before they are there.

    Not `p_empty`: but for a program's last message, `k_full` two tiles later implies it.
    """

    def wait(self: Any, place: Any, phase: Any) -> None:
        if place.memory.name != barrier:
            original(self, place, phase)

    original = sparse_mla_gluon.SparseProgram.wait
    monkeypatch.setattr(sparse_mla_gluon.SparseProgram, "wait", wait)
    call = build(Problem(1, 1, 64, 320, 0, missing=0.0, lens=False, seed=6), "cpu")
    config = replace(SPECIALIZED, keys=keys, num_stages=stages)
    run = sparse_mla_gluon.run

    def seen(seed: int) -> bool:
        monkeypatch.setattr(sparse_mla_gluon, "run", lambda launch, **_: run(launch, seed=seed))
        try:
            out, lse = deepseek_v41_decode(**call, splits=1, config=config)
        except Fault:
            return True
        return rejections(out, lse, oracle(call)) != []

    # Whether it shows depends on which partition is quick, which the seed draws.
    assert any(seen(seed) for seed in range(8))


def test_what_it_is_not_written_for_is_refused(device: str) -> None:
    call = build(Problem(1, 1, 8, 16, 16), device)
    with pytest.raises(ArgumentError, match=r"q: got torch.float8_e4m3fn"):
        deepseek_v41_decode(**{**call, "q": call["q"].to(torch.float8_e4m3fn)}, config=SPECIALIZED)
    with pytest.raises(ArgumentError, match=r"config: got .*value_parts=2"):
        deepseek_v41_decode(**call, config=SparseConfig(keys=64, num_warps=4, specialized=True, value_parts=2))
