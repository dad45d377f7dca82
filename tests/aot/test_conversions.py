"""The ways in which main rows become E4M3 compile where `conversions` says so, to the instructions that they are meant to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_specverify.kernels.sparse_mla.conversions import PACKED_ARCHS, PACKED_PTXAS, conversions, parse_ptxas_version
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


def test_which_way_an_architecture_has() -> None:
    assert conversions("sm_100", (13, 3)) == ("fp16", "integer")
    assert conversions("sm_103", (13, 4)) == ("packed", "fp16", "integer")
    assert conversions("sm_107", (14, 0)) == conversions("sm_90", (14, 0)) == ("fp16", "integer")
    for arch in ("gfx942", "gfx950", "none", "sm_80"):
        assert conversions(arch, (14, 0)) == ("integer",)
    assert parse_ptxas_version("Cuda compilation tools, release 13.5, V13.5.37") == (13, 5)
    assert parse_ptxas_version("something else") == (0, 0)
