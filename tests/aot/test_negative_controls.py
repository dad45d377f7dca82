"""What the checks must report: launches that are wrong on purpose, each beside one that is right."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.kernels import aot
from sglang_specverify.kernels.launch import Launch
from tests.aot import workers

There = Callable[..., Any]
FITS = aot.Compiled("k", "sm_90", 168, 0, 0, 0, 65536, {"wgmma.mma_async": 4}, (), 1.0)


def only(problems: list[str], start: str) -> None:
    """There is one problem, and it starts so."""
    assert [problem.startswith(start) for problem in problems] == [True], problems


@pytest.mark.parametrize(("arch", "instruction"), [("sm_90", "wgmma.mma_async"), ("gfx942", "v_mfma"), ("gfx950", "v_mfma")])
def test_a_launch_that_fits_has_no_problem(there: There, arch: str, instruction: str) -> None:
    compiled, problems = there(workers.checked, "multiplying", arch, {})
    assert problems == []
    assert (compiled.kernel, compiled.arch, list(compiled.matrix_instructions)) == ("multiply", arch, [instruction])
    assert compiled.registers > 0
    assert compiled.seconds > 0
    assert not compiled.cached


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_spills_and_too_much_shared_memory_are_reported(there: There, arch: str) -> None:
    """One program multiplies 256 by 256 matrices, kept in shared memory: 256 KB on NVIDIA, 128 KB on AMD."""
    compiled, problems = there(workers.checked, "multiplying", arch, {"block": 256})
    assert compiled.spill_stores > 0
    assert [problem.split()[0] for problem in problems] == ["spills", str(compiled.shared_bytes)]


def test_the_accepted_spills_are_accepted_and_not_a_byte_more(there: There) -> None:
    compiled, problems = there(workers.checked, "multiplying", "gfx950", {"block": 256})
    only(problems, "spills registers: ")
    assert aot.problems(compiled, spill_bytes=compiled.spill_bytes) == []
    only(aot.problems(compiled, spill_bytes=compiled.spill_bytes - 1), "spills registers: ")


def test_too_many_waves_make_amd_spill(there: There) -> None:
    """Eight waves leave 64 registers to each of them, which holds no accumulator of 128 by 128 in four."""
    assert there(workers.checked, "multiplying", "gfx942", {"block": 128, "waves_per_eu": 1})[1] == []
    only(there(workers.checked, "multiplying", "gfx942", {"block": 128, "waves_per_eu": 8})[1], "spills registers: ")


def test_an_amd_option_in_an_nvidia_launch_is_reported(there: There) -> None:
    arguments = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    compiled, problems = there(workers.checked, "multiplying", "sm_90", arguments)
    assert compiled is None
    assert problems == ["AMD options in a launch for sm_90: matrix_instr_nonkdim, waves_per_eu"]
    assert there(workers.checked, "multiplying", "gfx950", arguments)[1] == []


def test_a_warning_of_the_compiler_is_reported(there: There) -> None:
    assert there(workers.checked, "multiplying", "gfx950", {"kpack": 1})[1] == []
    only(there(workers.checked, "multiplying", "gfx950", {"kpack": 2})[1], "the compiler warns: kpack is deprecated")


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_kernel_without_a_matrix_product_is_reported(there: There, arch: str) -> None:
    only(there(workers.checked, "adding", arch, {})[1], "no matrix instruction")
    assert there(workers.checked, "adding", arch, {}, matrix=False)[1] == []


def test_a_launch_that_does_not_compile_is_reported(there: There) -> None:
    compiled, problems = there(workers.checked, "multiplying", "sm_90", {"block": 48})
    assert compiled is None
    only(problems, "multiply does not compile for sm_90: CompilationError: ")
    with pytest.raises(KeyError, match="num_wraps"):
        there(workers.checked, "misspelt", "sm_90", {})


@pytest.mark.parametrize(
    ("instructions", "spilled", "stack"),
    [
        # Two vector registers went to accumulation registers, and scalar ones to lanes of vector registers: memory has neither.
        ("v_accvgpr_write_b32 a0, v1\n\tv_writelane_b32 v2, s3, 0", 0, 0),
        ("scratch_store_dword off, v1, off offset:4", 8, 36),
        ("scratch_load_dwordx2 v[0:1], off, off", 8, 36),
    ],
)
def test_on_amd_only_what_an_instruction_touches_is_memory(instructions: str, spilled: int, stack: int) -> None:
    metadata = {"vgpr_spill_count": 2, "private_segment_fixed_size": 36, "vgpr_count": 227, "group_segment_fixed_size": 0}
    assembly = f"\t{instructions}\n" + "".join(f"    .{name}: {number}\n" for name, number in metadata.items())
    compiled = aot._read_amdgcn(replace(FITS, arch="gfx942"), assembly)
    assert (compiled.spill_stores, compiled.spill_loads, compiled.stack_bytes) == (spilled, spilled, stack)
    assert compiled.registers == 227


def test_each_limit_is_a_limit() -> None:
    assert aot.problems(FITS) == []
    only(aot.problems(replace(FITS, registers=256)), "256 registers; sm_90 has 255")
    only(aot.problems(replace(FITS, shared_bytes=227 * 1024 + 1)), "232449 bytes of shared memory; sm_90 has 232448")
    assert aot.problems(replace(FITS, shared_bytes=227 * 1024)) == []
    assert aot.problems(replace(FITS, arch="gfx942", shared_bytes=65536)) == []
    only(aot.problems(replace(FITS, arch="gfx942", shared_bytes=65537)), "65537 bytes")
    for name in ("spill_stores", "spill_loads", "stack_bytes"):
        only(aot.problems(replace(FITS, **{name: 4})), "spills registers: ")


def test_unknown_hardware_and_the_interpreter_are_refused() -> None:
    with pytest.raises(ArgumentError, match="arch: got 'sm_89'; allowed: sm_90, "):
        aot.compile_launch(Launch(None, (1, 1, 1), {}, {}), "sm_89")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(workers.refused_under_the_interpreter).result()
    assert error.startswith("multiply is no compiled kernel\n  remedy: unset TRITON_INTERPRET")


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_PTXAS_OF", {"sm_107": ("no-such-distribution", "bin/ptxas")})
    with pytest.raises(SpecverifyError, match=r"does not know sm_107\n  remedy: .*pip install no-such-distribution"):
        aot._ptxas("sm_107")
