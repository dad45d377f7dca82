"""The kernel with specialised warps over divided prefixes equals the FP64 reference, whoever combines the parts.

Programs of a launch run one after the other here, in an order that a seed draws, so any part of a prefix may be the last.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.hardware import from_name
from sglang_specverify.kernels import plan_verify_attention, run, verify_attention
from sglang_specverify.kernels.arguments import VerifyArguments, check_verify
from sglang_specverify.kernels.specialized import ARCH
from tests.kernels.cases import Config

from . import gluon_cpu
from .bounds import compare
from .gluon_cpu import Program
from .gluon_tensors import Fault
from .plans import counters, divided, plan_for
from .specialized_calls import BASE, CONFIGS, DEFAULTS, KINDS, build, check
from .strategies import HALF

pytestmark = pytest.mark.usefixtures("specialized")

LONG = BASE.but(prefix_lens=(700, 0, 130), widths=20, q_heads=8, kv_heads=2)


@st.composite
def configs(draw: Any) -> tuple[Config, tuple[int, int]]:
    bs, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    dim, dtype = draw(st.sampled_from([64, 128])), draw(st.sampled_from(HALF))
    lengths = st.sampled_from([0, 1, 255, 256, 257, 511, 513, 640, 700])
    c = Config(
        seed=draw(st.integers(0, 10**6)), prefix_lens=tuple(draw(st.lists(lengths, min_size=bs, max_size=bs))),
        widths=draw(st.sampled_from([1, 5, 17, 33, 65])), kind=draw(st.sampled_from(KINDS)), kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 4, 5])), head_dim=dim, v_head_dim=dim, q_dtype=dtype, cache_dtype=dtype,
        page_size=draw(st.sampled_from([1, 16])), sinks=draw(st.booleans()), v_scale=draw(st.sampled_from([1.0, -0.5])),
        pad_rows=draw(st.integers(0, 2)),
    )  # fmt: skip
    return c, draw(st.sampled_from(CONFIGS[dim]))


@given(drawn=configs(), programs=st.integers(1, 5), fill=st.sampled_from([4, 16, 40]), seed=st.integers(0, 9))
@settings(max_examples=12)
def test_the_planners_divisions(device: str, drawn: Any, programs: int, fill: int, seed: int) -> None:
    """`fill`: the programs that the planner has in mind."""
    c, config = drawn
    check(build(c, device), config=config, programs=programs, seed=seed, split=fill, parts=5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [[[0], [0], [0]], [[0, 640], [0], [0, 128]], [[0, 64, 128, 192, 640], [0], [0, 64]]], ids=str)
def test_divisions_by_hand(device: str, kind: str, starts: list[list[int]]) -> None:
    a = build(LONG.but(kind=kind), device)
    for seed in range(2):
        plan = divided(a, starts, kernel="specialized", combine="last")
        check(a, programs=3, seed=seed, split=plan, parts=5)
        assert not bool(counters(plan).any()), "a plan serves every layer of a step"


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_a_plan_makes_its_own(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches that the public call runs on its hardware."""
    a = build(LONG.but(kind=kind), device)
    wanted = {field.name: a.get(field.name, DEFAULTS[field.name]) for field in fields(VerifyArguments)}
    out, lse = torch.full_like(a["q"], torch.nan), a["q"].new_full(a["q"].shape[:2], torch.nan, dtype=torch.float32)
    checked = VerifyArguments(**{**wanted, "out": out, "lse": lse})
    if device == "cpu":
        monkeypatch.setattr(run, "detect", lambda: replace(from_name(ARCH), multiprocessors=3))
    plan, kernel = run.launches(checked, check_verify(checked), out, lse, ARCH, "specialized_split")
    plan.run()
    assert kernel.constants["SPLIT"]
    kernel.run() if device == "cuda" else gluon_cpu.run(kernel, seed=1)
    compare(a, out, lse, splits=8)


def test_whoever_comes_last_changes_no_bit(device: str, emulated: None) -> None:
    a = build(LONG.but(kv_heads=1, q_heads=4), device)
    plan = divided(a, [[0, 256, 512], [0], [0, 128]], kernel="specialized", combine="last")
    results = [check(a, programs=7, seed=seed, split=plan, parts=3) for seed in range(6)]
    for out, lse in results[1:]:
        assert lse is not None and results[0][1] is not None
        assert torch.equal(out[:-2], results[0][0][:-2]) and torch.equal(lse[:-2], results[0][1][:-2])


def test_a_count_that_is_off_is_seen(device: str, emulated: None) -> None:
    class Early(Program):
        """Each part believes that one more has been before it."""

        def atomic_add(self, *arguments: Any, **options: Any) -> Any:
            return super().atomic_add(*arguments, **options) + (1 if arguments[1] == 1 else 0)

    a = build(LONG.but(kv_heads=1, q_heads=4), device)
    with pytest.raises(AssertionError):
        check(a, split=divided(a, [[0, 256, 512], [0], [0, 128]], kernel="specialized", combine="last"), parts=3, program=Early)


class NoBarrier(Program):
    def barrier(self) -> None:
        self.switch()


class Relaxed(Program):
    def atomic_add(self, pointer: Any, value: Any, sem: str, scope: str) -> Any:
        return super().atomic_add(pointer, value, "relaxed", scope)


class Narrow(Program):
    def atomic_add(self, pointer: Any, value: Any, sem: str, scope: str) -> Any:
        return super().atomic_add(pointer, value, sem, "cta")


class FirstCache(Program):
    def load(self, pointer: Any, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Any:
        return super().load(pointer, mask, other)


@pytest.mark.parametrize(
    ("program", "found"),
    [(NoBarrier, "counted before"), (Relaxed, "counted before"), (Narrow, "counted before"), (FirstCache, "the first cache")],
)
def test_parts_that_another_multiprocessor_need_not_see(device: str, emulated: None, program: type[Program], found: str) -> None:
    a = build(LONG.but(kv_heads=1, q_heads=4), device)
    with pytest.raises(Fault, match=found):
        check(a, split=divided(a, [[0, 256], [0], [0]], kernel="specialized", combine="last"), parts=2, program=program)


def test_a_lost_part_is_seen(device: str, emulated: None) -> None:
    a = build(LONG, device)
    plan = divided(a, [[0, 256], [0], [0]], kernel="specialized", combine="last")
    plan.buffer[plan.items_at] -= 1
    with pytest.raises(AssertionError):
        check(a, split=plan, parts=2)


def test_a_plan_says_for_which_kernel_it_divides(device: str) -> None:
    a = build(LONG, device)
    plan = plan_for(a, divide=True, kernel="specialized")
    assert (plan.kernel, plan.shape.config.block_m) == ("specialized", 128)
    with pytest.raises(SpecverifyError, match="divides prefixes for the specialized kernel"):
        verify_attention(**a, variant="fused_split", plan=plan)
    with pytest.raises(SpecverifyError, match="divides prefixes for the fused kernel"):
        verify_attention(**a, variant="specialized_split", plan=plan_for(a, divide=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "other"}, "kernel: got 'other'; allowed: fused, specialized"),
        ({"window": 100}, "kernel: got specialized, and the layer has a window; allowed: fused for these layers"),
        ({"branches": True}, "branches of a draft decode"),
        ({"head_dim": 80}, "head dims 80 and 80"),
        ({"dtype": torch.float32}, "q is torch.float32|q is float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, "the cache is"),
        ({"deterministic": True}, "a deterministic division is the fused kernel's"),
    ],
    ids=str,
)
def test_layers_that_it_does_not_take(device: str, options: dict[str, Any], message: str) -> None:
    lens = torch.tensor([700], dtype=torch.int32, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    layers = {"num_draft_tokens": 20, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "kernel": "specialized"}
    with pytest.raises(ArgumentError, match=message):
        plan_verify_attention(lens, rows, **(layers | options))
