"""What runs in the processes that compile: they never have Triton's interpreter on, whatever the tests' own process has."""

from __future__ import annotations

import contextlib
import io
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile_all import Case, Outcome, outcome_of, run
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels import aot, aot_cases
from sglang_specverify.kernels.aot_auxiliary import auxiliary
from sglang_specverify.kernels.aot_cases import meta
from sglang_specverify.kernels.aot_sparse_mla import launches_of
from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.sparse_mla.conversions import conversion_of
from sglang_specverify.kernels.targets import from_arch


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn"), initializer=_without_interpreter)


def _without_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def compile_case(case: Case, cache: Path) -> Outcome:
    return run(case, aot.Cache(cache))


def compile_fp32(case: Case, cache: Path) -> tuple[aot.Compiled | None, list[str]]:
    """A case in FP32 with the launch that serves it. NVIDIA has no matrix instruction that multiplies FP32 exactly."""
    config, spill_bytes, source = case.configured()
    assert source == "rule"
    matrix = case.arch.startswith("gfx")
    return aot.check(case.launch(config), case.arch, aot.Cache(cache), spill_bytes=spill_bytes, matrix=matrix)


def compile_auxiliary(arch: str, cache: Path) -> list[Outcome]:
    return [outcome_of(made, arch, aot.Cache(cache)) for made in auxiliary(arch, short=True)]


def checked(builder: str, arch: str, arguments: dict[str, Any], **how: Any) -> tuple[aot.Compiled | None, list[str]]:
    """`aot.check` of a launch that `tests.aot.kernels` builds."""
    from tests.aot import kernels

    return aot.check(getattr(kernels, builder)(**arguments), arch, **how)


def refused_under_the_interpreter() -> str:
    """The error of a process in which the interpreter is on; it must not have imported triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        checked("multiplying", "sm_90", {})
    except SpecverifyError as error:
        return str(error)
    return "nothing was raised"


def compiled_through(path: Path, *launches: dict[str, Any]) -> list[aot.Compiled]:
    """The launches one after the other, the cache file read anew for each."""
    from tests.aot import kernels

    return [aot.compile_launch(kernels.multiplying(**arguments), "sm_90", aot.Cache(path)) for arguments in launches]


def specialised(arch: str, name: str, value: object) -> tuple[str, Any, list[Any]]:
    """Type, constant value (or None) and attributes that the argument `name` of a kernel gets for `value`.

    A tensor is told by its type, its number of elements and the first of them that it holds.
    """
    from triton.compiler import make_backend

    from tests.aot import kernels

    if isinstance(value, tuple):
        dtype, size, first = value
        value = meta(size, dtype=getattr(torch, dtype))[first:]
    launch = kernels.multiplying()
    launch = replace(launch, arguments={**launch.arguments, name: value})
    source, _ = aot._source(launch, make_backend(from_arch(arch).triton))
    path = (launch.kernel.arg_names.index(name),)
    return source.signature[name], source.constants.get(path), source.attrs.get(path, [])


def converting(arch: str, how: str) -> tuple[str, str]:
    """Assembly of the conversion of main rows to E4M3, and ""; or "", and why the newest ptxas does not compile it."""
    from tests.interpreter.fp4_conversion import converting

    try:
        binary = _binary(converting(*(meta(4096, dtype=torch.uint8) for _ in range(3)), how), arch, packed=how == "packed")
    except Exception as error:
        return "", str(error)
    return binary.asm["ptx" if arch[0] == "s" else "amdgcn"], ""


def decoding_packed(arch: str) -> tuple[str, int]:
    """Assembly of sparse MLA decode in the e4m3 contract with the packed multiply, and its columns of tensor memory."""
    launch = next(launches_of(arch, (256, 1, 64, 512, "swa_fp8", False, False, "block_split"), "e4m3", "packed"))[1]
    binary = _binary(launch, arch, packed=True)
    return binary.asm["ptx"], binary.metadata.tmem_size


def converted(arch: str, operation: str) -> tuple[set[tuple[str, str]], str]:
    """Types from which and to which a call with an E5M2 cache and BF16 queries converts floats, in Triton's names; assembly."""
    if operation == "gather_suffix":
        launch = next(each.launch for each in auxiliary(arch) if each.name == f"{arch} gather_suffix d128 e5m2")
    else:
        case = aot_cases.Case(arch, operation, "qlen_only", (128, 128), "e5m2", 16)  # type: ignore[arg-type]
        launch = case.launch(case.configured()[0])
    made = _binary(launch, arch, packed=False).asm
    types = set(re.findall(r"tt\.fp_to_fp .*: tensor<[\dx]*x(\w+)> -> tensor<[\dx]*x(\w+)>", made["ttir"]))
    return types, made["ptx" if arch[0] == "s" else "amdgcn"]


def hopper(batch: int) -> tuple[str, str, dict[str, str]]:
    """Assembly of sparse MLA decode with specialised warps, which of its shared memory is the compiler's own, and `handovers`."""
    from tests.interpreter.launched import compiled_of

    launch = next(launches_of("sm_90", (batch, 1, 64, 512, "swa_mxfp8", False, False, "block_split"), "exact"))[1]
    binary = _binary(launch, "sm_90", packed=False)
    return binary.asm["ptx"], str(compiled_of(binary, launch.options["num_warps"])), handovers()


def verifying() -> tuple[str, str]:
    """Assembly of verify attention with specialised warps, and which of its shared memory is the compiler's own."""
    from sglang_specverify.kernels.aot_specialized import SpecializedCase
    from tests.interpreter.launched import compiled_of

    case = SpecializedCase(aot_cases.Case("sm_90", "fused", "chain", (64, 64), "bf16", 256))
    launch = case.launch(case.configured()[0])
    binary = _binary(launch, "sm_90", packed=False)
    return binary.asm["ptx"], str(compiled_of(binary, launch.options["num_warps"]))


def handovers() -> dict[str, str]:
    """Assembly of each of `tests.interpreter.handovers`."""
    from tests.interpreter.handovers import CASES, LENGTH, launch_of

    out = meta(4, LENGTH, dtype=torch.float32)
    return {name: _binary(launch_of(name, out), "sm_90", packed=False).asm["ptx"] for name in CASES}


def combining(arch: str, number: int, case: Case | None = None) -> tuple[str, list[str]]:
    """Assembly of a divided call's attention (-2) or of the launch that combines its parts (-1), and `aot.problems` of it.

    Args:
        case: a chain of few rows, by the fused kernel, where None.
    """
    import triton
    from triton.compiler import make_backend

    if case is None:
        case = aot_cases.Case(arch, "fused_split", "chain", (64, 64), "bf16", 16, feature="head_scales", batch=1)
    config, spills, _ = case.configured()
    launch, target, log = case.launches(replace(config, combine="launch"))[number], from_arch(arch), io.StringIO()
    with aot._compiler(target), contextlib.redirect_stdout(log):
        source, options = aot._source(launch, make_backend(target.triton))
        binary = triton.compile(source, target=target.triton, options=options.__dict__)
    blank = aot.Compiled(launch.kernel.__name__, arch, 0, 0, 0, 0, binary.metadata.shared, {}, (), 0.0)
    nvidia = target.backend == "cuda"
    assembly = binary.asm["ptx" if nvidia else "amdgcn"]
    compiled = aot._read_ptxas(blank, log.getvalue()) if nvidia else aot._read_amdgcn(blank, assembly)
    return assembly, aot.problems(compiled, spill_bytes=spills if number == -2 else 0, matrix=False)


def conversions_behind_the_packed_one(arch: str) -> tuple[str, str]:
    """What `conversion_of` says when this process has just compiled the packed multiply, and when it asks Triton's ptxas anew."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version.cache_clear()
    assert not converting(arch, "packed")[1]
    behind = conversion_of(arch)
    get_ptxas_version.cache_clear()
    return behind, conversion_of(arch)


def _binary(launch: Launch, arch: str, *, packed: bool) -> Any:
    """What Triton makes of a launch; by the newest ptxas for the packed multiply."""
    import triton
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.compiler import make_backend

    target = from_arch(arch)
    if not packed:
        with aot._compiler(target):
            source, chosen = aot._source(launch, make_backend(target.triton))
            return triton.compile(source, target=target.triton, options=chosen.__dict__)
    launch = replace(launch, options={**launch.options, "ptx_version": 94})
    # Triton remembers the version of the ptxas that it met first, and this process compiles other launches too.
    get_ptxas_version.cache_clear()
    try:
        with aot._compiler(target):
            knobs.nvidia.ptxas_blackwell = str(aot._ptxas("sm_107"))
            source, chosen = aot._source(launch, make_backend(target.triton))
            return triton.compile(source, target=target.triton, options=chosen.__dict__)
    finally:
        get_ptxas_version.cache_clear()
