"""Parts combined by a second launch: it compiles without spills, and waits for the first one where it may start early."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.aot_specialized import SpecializedCase
from tests.aot import workers

There = Callable[..., Any]
WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
#: How a part is read: past the first cache.
PART = "ld.global.cg"
#: Whose parts are written with specialised warps.
SPECIALIZED = SpecializedCase(Case("sm_90", "fused", "qlen_only", (64, 64), "bf16", 256, feature="page_64"), True, divide=True)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "gfx942", "gfx950"])
def test_the_combining_kernel(there: There, arch: str) -> None:
    assembly, problems = there(workers.combining, arch, -1)
    assert not problems
    if arch.startswith("gfx"):
        assert "griddepcontrol" not in assembly and "s_endpgm" in assembly
        return
    assert assembly.count(WAIT) == 1 and START not in assembly
    # 16 parts and their LSEs before the loop and in it, none before the wait; nor may a program leave before it.
    assert assembly.count(PART) == 64
    wait = assembly.index(WAIT)
    assert wait < assembly.index(PART)
    body = assembly[assembly.index("ld.global") : wait]
    assert "bra" not in body and "ret;" not in body


@pytest.mark.parametrize("case", [None, SPECIALIZED], ids=["fused", "specialised"])
def test_attention_in_front_of_it(there: There, case: SpecializedCase | None) -> None:
    """It counts nothing, lets the second launch start, and waits for nobody."""
    assembly, problems = there(workers.combining, "sm_90", -2, case)
    assert not problems
    assert assembly.count(START) == 1 and WAIT not in assembly
    assert not re.search(r"\b(atom|red)\.global", assembly)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "gfx942", "gfx950"])
def test_only_the_second_launch_starts_early(arch: str) -> None:
    """On NVIDIA; AMD's compiler knows no such option."""
    case = Case(arch, "fused_split", "chain", (64, 64), "bf16", 16, batch=1)
    config = case.configured()[0]
    nvidia = arch.startswith("sm_")
    attention, combining = case.launches(replace(config, combine="launch"))[-2:]
    assert [launch.options.get("launch_pdl", False) for launch in (attention, combining)] == [False, nvidia]
    assert [launch.constants["PDL"] for launch in (attention, combining)] == [nvidia, nvidia]
    alone = case.launches(replace(config, combine="last"))[-1]
    assert alone.kernel is attention.kernel and alone.constants["LAST"] and not alone.constants["PDL"]
    assert "launch_pdl" not in alone.options


def test_parts_of_the_specialised_kernel() -> None:
    """They are combined by the same kernel, in row tiles of 128, which starts early."""
    config = SPECIALIZED.configured()[0]
    attention, combining = SPECIALIZED.launches(replace(config, combine="launch"))
    fused = Case("sm_90", "fused_split", "chain", (128, 128), "bf16", 16, batch=1)
    assert combining.kernel is fused.launches(replace(fused.configured()[0], combine="launch"))[-1].kernel
    assert combining.constants["PDL"] and combining.options["launch_pdl"] and combining.constants["BLOCK_M"] == 128
    assert attention.constants["PDL"] and not attention.constants["LAST"] and "launch_pdl" not in attention.options
    (alone,) = SPECIALIZED.launches(replace(config, combine="last"))
    assert alone.kernel is attention.kernel and alone.constants["LAST"] and not alone.constants["PDL"]
