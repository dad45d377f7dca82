"""The gather suffix merged in place: against FP64, empty suffixes and prefixes, sinks, poison, padding, far offsets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.kernels.gather_suffix import (
    SuffixArguments,
    gather_suffix_merge,
    gather_suffix_merge_launch,
    gather_suffix_merge_reference,
)
from sglang_specverify.kernels.launch import arch_of
from tests.kernels.oracle import rounding

from .calls import to_device
from .suffixes import Case, assert_close, build, check, exact, run

HALF = [torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = [1.0, 0.5, "scalar", "heads"]
BOTH = [gather_suffix_merge, gather_suffix_merge_reference]


@st.composite
def cases(draw: Any) -> Case:
    q_type = draw(st.sampled_from([*HALF, torch.float32]))
    depth = draw(st.sampled_from([0, 1, 4, 9, 16, 17, 40]))
    kv_heads, dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([16, 24, 64, 80]))
    return Case(
        seed=draw(st.integers(0, 10**6)),
        lens=tuple(draw(st.lists(st.integers(-1, depth), min_size=0, max_size=4))),
        depth=depth,
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=dim,
        v_head_dim=draw(st.sampled_from([dim, dim, 8, 40])),
        q_type=q_type,
        cache_type=draw(st.sampled_from([q_type, q_type, *FP8])),
        out_type=draw(st.sampled_from([q_type, torch.float32])),
        k_scale=draw(st.sampled_from(SCALES)),
        v_scale=draw(st.sampled_from(SCALES)),
        sm_scale=draw(st.sampled_from([None, 0.05, 1.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sinks=draw(st.booleans()),
        prefix=draw(st.sampled_from(["some", "some", "none", "inf", "mixed"])),
        holes=draw(st.booleans()),
        strided=draw(st.booleans()),
        lse_layout=draw(st.sampled_from(["rows", "heads", "column"])),
        extra_rows=draw(st.integers(0, 2)),
    )


@given(case=cases())
def test_against_fp64(device: str, case: Case) -> None:
    check(case, device)


@given(case=cases())
def test_the_reference(device: str, case: Case) -> None:
    """The FP64 reference beside the kernel against the formula written key by key: what is left is rounding once."""
    a = to_device(build(case), device)
    padding = torch.ones(len(a["q"]), dtype=torch.bool)
    padding[: len(case.lens)] = torch.tensor(case.lens, dtype=torch.int64) < 0
    before = a["prefix_out"].clone(), a["prefix_lse"].clone()
    out, lse = (t.cpu() for t in gather_suffix_merge_reference(**a))
    want = exact(build(case))
    real = ~padding
    fp64 = 1e-12 * (1 + want.out.abs())
    close = (out.double() - want.out).abs() <= rounding(want.out.abs() + fp64, out.dtype) + fp64
    assert bool(close[real].all())
    same = (lse.double() - want.lse).abs() <= rounding(want.lse.abs(), lse.dtype) + 1e-12 * (1 + want.lse.abs())
    assert bool((same | ((lse == -math.inf) & (want.lse == -math.inf)))[real].all())
    for got, old in zip((out, lse), before, strict=True):
        torch.testing.assert_close(got[padding], old.cpu()[padding], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (3, 2), (5, 1), (7, 2), (16, 2), (17, 1)])
def test_head_dims_and_ratios(device: str, dim: int, group: int, kv_heads: int) -> None:
    """Padding of a group or of a head dim never reaches the next KV head: it would be wrong by far."""
    check(Case(seed=dim + group, lens=(5,), depth=5, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim),
          device)  # fmt: skip


@pytest.mark.parametrize(("dim", "v_dim"), [(192, 128), (24, 16), (16, 40), (1, 3)])
@pytest.mark.parametrize("cache", [torch.bfloat16, *FP8])
def test_head_dims_that_differ(device: str, dim: int, v_dim: int, cache: torch.dtype) -> None:
    check(Case(seed=3, head_dim=dim, v_head_dim=v_dim, cache_type=cache, k_scale=0.5, v_scale=2.0, prefix="mixed"), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_of_16_bits(device: str, dtype: torch.dtype) -> None:
    a = build(Case(seed=4, lens=(3, 1, 2), depth=3, sinks=True))
    a["sinks"] = (a["sinks"] + 2.3).to(dtype)
    assert_close(*run(a, device), exact(a))


@pytest.mark.parametrize("depth", [32, 33, 100, 256])
def test_deep_trees(device: str, depth: int) -> None:
    check(Case(seed=4, lens=(depth, 1, depth - 1), depth=depth, holes=True, sinks=True), device)


@pytest.mark.parametrize("mark", ["none", "inf"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize("holes", [False, True])
def test_an_empty_suffix_on_an_empty_prefix(device: str, mark: str, sinks: bool, operation: Any, holes: bool) -> None:
    """Both marks of an empty prefix, undefined outputs, no key or only entries that are none: 0 and -inf, never NaN."""
    a = build(Case(lens=(0, 0, 2), depth=3, prefix=mark, sinks=sinks, extra_rows=0))
    a["suffix_slots"][2] = -1
    if holes:
        a["suffix_slots"][:] = -(1 << 31)
        a["suffix_lens"][:] = 3
    out, lse = operation(**to_device(a, device))
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize("kind", [*HALF, torch.float32])
def test_an_empty_suffix_changes_nothing(device: str, operation: Any, kind: torch.dtype) -> None:
    a = to_device(build(Case(lens=(0, 0, 0), q_type=kind, cache_type=kind, out_type=kind, extra_rows=0)), device)
    a["prefix_lse"][0] = torch.tensor([-76800.0, 1e30, 88.5, -3e38], device=device)
    before = a["prefix_out"].clone(), a["prefix_lse"].clone()
    assert all(map(torch.equal, operation(**a), before))


@pytest.mark.parametrize("operation", BOTH)
def test_a_nan_is_not_hidden(device: str, operation: Any) -> None:
    """A NaN in a listed slot reaches the rows that list it, a NaN of the prefix its own; nobody else."""
    a = build(Case(seed=6, lens=(2, 2, 2, 2), depth=2))
    a["suffix_slots"][1, 1] = a["suffix_slots"][0, 0]
    a["v_cache"][a["suffix_slots"][0, 0], 1, 3] = math.nan
    a["prefix_lse"][3, 0] = math.nan
    out, lse = operation(**to_device(a, device))
    want = torch.zeros(out.shape, dtype=torch.bool)
    want[:2, 2:, 3], want[3, 0] = True, True
    assert torch.equal(out.isnan().cpu(), want)
    assert lse.isnan().nonzero().tolist() == [[3, 0]]


@pytest.mark.parametrize("score", [-76800.0, -1e30, 76800.0, 3e4])
def test_one_key_far_out(device: str, score: float) -> None:
    """One key and no prefix: its v, and its score as the LSE, within the score's FP32 spacing. No sentinel stands for -inf."""
    a = build(Case(lens=(1,), depth=1, q_heads=1, kv_heads=1, q_type=torch.float16, cache_type=torch.float16,
                   out_type=torch.float16, sm_scale=score, prefix="none", extra_rows=0))  # fmt: skip
    a["q"].zero_(), a["k_cache"].zero_()
    a["q"][..., 0], a["k_cache"][..., 0] = 1.0, 1.0
    out, lse = run(a, device)
    assert torch.equal(out[0, 0], a["v_cache"][a["suffix_slots"][0, 0], 0])
    assert abs(lse.item() - score) <= 2.0**-23 * abs(score)


@pytest.mark.parametrize("cap", [1.5, 30.0])
def test_the_cap_comes_before_the_mask(device: str, cap: float) -> None:
    """Scores to 168 and more, k_scale inside them, entries that are no key: capped to 0 these would count."""
    c = Case(seed=8, lens=(4, 7, 9), softcap=cap, sm_scale=40.0, k_scale=2.0, holes=True, prefix="none")
    a = build(c)
    assert float(exact({**a, "softcap": 0.0}).lse.nan_to_num(0.0).max()) > 168
    check(c, device)


@pytest.mark.parametrize("cache", FP8)
def test_scales_of_an_fp8_cache(device: str, cache: torch.dtype) -> None:
    """k_scale 0.5 and v_scale 2 are those of the dequantised cache, and leaving one out is rejected."""
    a = build(Case(seed=9, cache_type=cache, k_scale=0.5, v_scale=2.0))
    got = run(a, device)
    assert_close(*got, exact(a))
    for forgotten in ("k_scale", "v_scale"):
        with pytest.raises(AssertionError, match="is off"):
            assert_close(*got, exact({**a, forgotten: 1.0}))


def test_the_bound_rejects_faults(device: str) -> None:
    """Negative controls: a dropped key, a key too many, a stale slot, the sink twice or never, a prefix that was forgotten."""
    a = build(Case(seed=10, lens=(6, 7, 8, 9), sinks=True))
    got = run(a, device)
    assert_close(*got, exact(a))
    one_more, stale = a["suffix_slots"].clone(), a["suffix_slots"].clone()
    for row, n in enumerate((6, 7, 8)):
        one_more[row, n] = a["suffix_slots"][3, 0]
    stale[:, 0] = a["suffix_slots"][:, 1]
    wrong = {
        "dropped": {"suffix_lens": a["suffix_lens"] - 1},
        "counted": {"suffix_slots": one_more, "suffix_lens": a["suffix_lens"] + torch.tensor([1, 1, 1, 0], dtype=torch.int32)},
        "stale": {"suffix_slots": stale},
        "sink twice": {"sinks": a["sinks"] + math.log(2)},
        "no sink": {"sinks": None},
        "no prefix": {"prefix_lse": torch.full_like(a["prefix_lse"], -math.inf)},
        "other prefix": {"prefix_lse": a["prefix_lse"] + 0.1},
    }
    for name, changes in wrong.items():
        with pytest.raises(AssertionError, match="is off"):
            assert_close(*got, exact({**a, **changes}))
            pytest.fail(f"{name} was not noticed")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("level", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("prefix", ["some", "none"])
def test_sinks_far_from_the_scores(device: str, level: float, prefix: str) -> None:
    a = build(Case(seed=11, sinks=True, prefix=prefix))
    a["sinks"] += level
    out, lse = run(a, device)
    assert_close(out, lse, exact(a))
    assert level < 200 or not bool(out[:4].any())


@pytest.mark.parametrize("extra", [0, 1, 4])
def test_padding_is_left_alone(device: str, extra: int) -> None:
    """232 rows of q for 228 of suffixes, and rows of negative length: neither read (their slots lead far out) nor written."""
    a = build(Case(seed=12, lens=(3, -1, 2, -5), depth=3, extra_rows=extra))
    a["suffix_slots"][1] = 1 << 30
    assert_close(*run(a, device), exact(a))


def test_lengths_beyond_the_depth_are_cut(device: str) -> None:
    """A stale length, given to the launch itself, reads no column past the depth, though good slots stand there."""
    a = build(Case(seed=16, lens=(9, 9), extra_rows=0))
    short = {**a, "suffix_slots": a["suffix_slots"][:, :4], "suffix_lens": torch.full((2,), 4, dtype=torch.int32)}
    want = run(short, device)
    moved = to_device({**short, "suffix_lens": torch.tensor([5, 1 << 30], dtype=torch.int32)}, device)
    arguments = SuffixArguments(**moved)
    gather_suffix_merge_launch(arguments, arch_of(arguments.q.device)).run()
    assert torch.equal(moved["prefix_out"].cpu(), want[0]) and torch.equal(moved["prefix_lse"].cpu(), want[1])


@pytest.mark.parametrize("lens", [(), (-1, -1)])
def test_no_rows(device: str, lens: tuple[int, ...]) -> None:
    run(build(Case(lens=lens, extra_rows=0)), device)
    run(build(Case(lens=lens, extra_rows=3)), device)


def test_each_row_as_alone(device: str) -> None:
    """A row's numbers do not depend on its mates or its place, bit for bit."""
    a = build(Case(seed=13, lens=(5, 0, 9, 1, 3), sinks=True, prefix="mixed", extra_rows=0))
    out, lse = run(a, device)
    for row in range(5):
        part = {n: a[n][row : row + 1] for n in ("q", "suffix_slots", "suffix_lens", "prefix_out", "prefix_lse")}
        alone = run({**a, **part}, device)
        assert torch.equal(alone[0][0], out[row]) and torch.equal(alone[1][0], lse[row])


@pytest.mark.parametrize("cache", FP8)
def test_cache_offsets_beyond_32_bits(device: str, cache: torch.dtype) -> None:
    """Slot times stride passes 2**31: as at low offsets. On a CPU only touched pages take memory."""
    a = build(Case(seed=14, lens=(9, 9), cache_type=cache))
    stride, slots = 1 << 27, len(a["k_cache"])
    near = run(a, device)
    far = torch.empty((slots - 1) * stride + 64, dtype=torch.uint8, device=device)
    moved = to_device(a, device)
    for name, shift in (("k_cache", 0), ("v_cache", 32)):
        view = far[shift:].as_strided((slots, 2, 16), (stride, 16, 1), shift)
        view.copy_(moved[name].view(torch.uint8))
        moved[name] = view.view(cache)
    assert int(a["suffix_slots"][:, :9].max()) * stride > 2**31
    gather_suffix_merge(**moved)
    assert torch.equal(moved["prefix_out"].cpu()[:2], near[0][:2]) and torch.equal(moved["prefix_lse"].cpu()[:2], near[1][:2])


def test_row_offsets_beyond_32_bits(device: str) -> None:
    """Row times stride passes 2**31 in q, in the output and in the slots."""
    a = build(Case(seed=15, lens=(1, 2, 3, 4, 5), depth=5, extra_rows=0))
    near = run(a, device)
    moved = to_device(a, device)
    for name, stride in (("q", (1 << 29) + 64), ("prefix_out", (1 << 29) + 128), ("suffix_slots", (1 << 29) + 32)):
        value = moved[name]
        base = torch.empty(4 * stride + 256, dtype=value.dtype, device=device)
        far = base.as_strided(value.shape, (stride, *value.stride()[1:]))
        far.copy_(value)
        moved[name] = far
    out, lse = gather_suffix_merge(**moved)
    assert torch.equal(out.cpu(), near[0]) and torch.equal(lse.cpu(), near[1])
