"""The ways in which main rows become E4M3 compile where `conversions` says so, to the instructions that they are meant to use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sglang_specverify.kernels.sparse_mla.conversions import (
    PACKED_ARCHS,
    PACKED_PTXAS,
    conversion_of,
    conversions,
    parse_ptxas_version,
)
from sglang_specverify.kernels.targets import TARGETS
from tests.aot import workers

There = Callable[..., Any]
PACKED, HALVES = "mul.e4m3x4.e2m1p4x4.e4m3x4.satfinite", "cvt.rn.satfinite.e4m3x2.f16x2"


@pytest.mark.parametrize("arch", TARGETS)
def test_the_best_way_becomes_its_instruction(there: There, arch: str) -> None:
    best = conversions(arch, PACKED_PTXAS)[0]
    assembly, error = there(workers.converting, arch, best)
    assert not error
    expected = {"packed": {PACKED}, "fp16": {HALVES}, "integer": set()}[best]
    assert {name for name in (PACKED, HALVES) if name in assembly} == expected
    # 512 values of 128 threads: one instruction for four, or two for two each.
    assert assembly.count(PACKED) + assembly.count(HALVES) == {"packed": 1, "fp16": 2, "integer": 0}[best]


@pytest.mark.parametrize("arch", ["sm_107"])
def test_the_packed_multiply_is_refused_elsewhere(there: There, arch: str) -> None:
    """So its absence from the list is no oversight; a ptxas that takes it there makes this fail, and the list longer."""
    assert arch not in PACKED_ARCHS
    assembly, error = there(workers.converting, arch, "packed")
    assert not assembly and "not supported on .target 'sm_107a'" in error


def test_the_decode_kernel_takes_the_packed_multiply(there: There) -> None:
    """Its threads hold what the instruction takes, and its sums fit tensor memory, all of it."""
    assembly, columns = there(workers.decoding_packed, "sm_100")
    # Rows of the window need no conversion, P has FP32's.
    assert PACKED in assembly and HALVES not in assembly
    assert "cvt.rn.satfinite.e4m3x2.f32" in assembly
    assert set(re.findall(r"kind::\w+", assembly)) == {"kind::f8f6f4"}
    assert 0 < columns <= 512


@pytest.mark.parametrize(("release", "way"), [("13.3, V13.3.33", "fp16"), ("13.4, V13.4.1", "packed")])
def test_the_ptxas_that_triton_takes_decides(release: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    asked = []
    monkeypatch.setattr(compiler, "get_ptxas_version", lambda arch: asked.append(arch) or f"tools, release {release}\n")
    assert {conversion_of(arch) for arch in PACKED_ARCHS} == {way}
    assert asked == [100, 103]
    assert [conversion_of(arch) for arch in ("sm_107", "gfx950", "none")] == ["fp16", "integer", "integer"]
    assert len(asked) == 2


def test_a_ptxas_chosen_for_one_launch_decides_nothing_later(there: There) -> None:
    """In the process that compiled the packed multiply with a newer ptxas, the next launch goes by Triton's own."""
    behind, anew = there(workers.conversions_behind_the_packed_one, "sm_100")
    assert behind == anew


def test_which_way_an_architecture_has() -> None:
    assert conversions("sm_100", (13, 3)) == ("fp16", "integer")
    assert conversions("sm_103", (13, 4)) == ("packed", "fp16", "integer")
    assert conversions("sm_107", (14, 0)) == conversions("sm_90", (14, 0)) == ("fp16", "integer")
    for arch in ("gfx942", "gfx950", "none", "sm_80"):
        assert conversions(arch, (14, 0)) == ("integer",)
    assert parse_ptxas_version("Cuda compilation tools, release 13.5, V13.5.37") == (13, 5)
    assert parse_ptxas_version("something else") == (0, 0)
