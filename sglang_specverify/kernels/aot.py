"""Compile launches for hardware that is not here, and say what they take of it. Needs Triton's compiler and no GPU.

Types and alignments are derived by the code that Triton's JIT derives them with, from tensors on the "meta" device, so
that what is compiled is what a GPU would run. Triton's interpreter (TRITON_INTERPRET) must be off in the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.launch import AMD_OPTIONS, Launch
from sglang_specverify.kernels.targets import Target, from_arch

#: Raised whenever `Compiled` or its reading changes, for all or for one vendor: results of an older version are not reused.
_VERSION = {"cuda": 2, "hip": 3}

#: Matrix instructions by what they are called in PTX or in AMD's assembly, and on NVIDIA what tells 8-bit operands.
_MATRIX = {
    "cuda": r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b(?:[\w.:]*?\.(kind::f8f6f4|e4m3\.e4m3))?",
    "hip": r"\b(v_mfma|v_smfmac)_",
}

#: The ptxas that Triton brings does not know these; the one of this distribution does.
_PTXAS_OF = {"sm_107": ("nvidia-cuda-nvcc", "nvidia/cu13/bin/ptxas")}


class LaunchError(SpecverifyError):
    """This launch cannot be compiled; another could be."""


@dataclass(frozen=True)
class Compiled:
    """What one compiled launch takes of its target.

    Attributes:
        kernel: name of the function.
        registers: of a thread; on AMD vector and accumulation registers together.
        spill_stores, spill_loads: bytes of a thread that go to memory for want of registers. AMD's compiler counts
            spilled registers, not accesses: both are four bytes for each.
        stack_bytes: memory of a thread, spills included; on AMD 0 where no instruction touches what was set aside.
        shared_bytes: shared memory or LDS of a program.
        matrix_instructions: instruction, with what tells 8-bit operands behind it, and how often it stands in the code.
        warnings: what the compiler warned of.
        seconds: the compilation took.
        cached: whether it is from the cache, and `seconds` from then.
    """

    kernel: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    matrix_instructions: dict[str, int]
    warnings: tuple[str, ...]
    seconds: float
    cached: bool = False

    @property
    def spill_bytes(self) -> int:
        return max(self.spill_stores, self.spill_loads, self.stack_bytes)


@dataclass
class Cache:
    """Results of earlier compilations, one JSON object a line; several processes may add to one file.

    Keyed by kernel source with all it calls, types, alignments, constants, options, Triton, ptxas and target, so that a
    result in it is never wrong, only superfluous.
    """

    path: Path
    _known: dict[str, Compiled] | None = field(default=None, repr=False)

    @classmethod
    def default(cls) -> Cache:
        """In the user's cache folder."""
        return cls(Path.home() / ".cache" / "sglang-specverify" / "compiled.jsonl")

    def get(self, key: str) -> Compiled | None:
        if self._known is None:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
            self._known = dict(filter(None, map(_read_line, lines)))
        found = self._known.get(key)
        return None if found is None else replace(found, cached=True)

    def put(self, key: str, compiled: Compiled) -> None:
        if self._known is not None:
            self._known[key] = compiled
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write of one line to a file opened for appending: lines of several processes do not mix.
        line = json.dumps({"key": key, **asdict(compiled)}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def _read_line(line: str) -> tuple[str, Compiled] | None:
    """Key and result; None for a line that a killed process left unfinished."""
    try:
        entry = json.loads(line)
        return entry.pop("key"), Compiled(**{**entry, "warnings": tuple(entry["warnings"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def compile_launch(launch: Launch, arch: str, cache: Cache | None = None) -> Compiled:
    """Compile `launch` for `arch`, or find it in `cache`.

    Raises:
        ArgumentError: an architecture that is not in `targets.TARGETS`.
        LaunchError: AMD's options for NVIDIA, or the compiler refuses it.
        SpecverifyError: the interpreter is on, or the compiler for this architecture is missing.
    """
    target = from_arch(arch)
    if target.backend != "hip" and (foreign := sorted(set(launch.options) & set(AMD_OPTIONS))):
        raise LaunchError(f"AMD options in a launch for {arch}: {', '.join(foreign)}", "take them out of the configuration")
    if not hasattr(launch.kernel, "cache_key"):
        name = getattr(launch.kernel, "__name__", type(launch.kernel).__name__)
        raise SpecverifyError(
            f"{name} is no compiled kernel", "unset TRITON_INTERPRET: interpreter and compiler exclude each other"
        )
    with _compiler(target), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import triton
        from triton.compiler import make_backend

        backend = make_backend(target.triton)
        source, options = _source(launch, backend)
        parts = (_VERSION[target.backend], triton.__version__, source.hash(), backend.hash(), options.hash(), launch.options)
        key = hashlib.sha256("-".join(map(str, parts)).encode()).hexdigest()
        if cache is not None and (found := cache.get(key)) is not None:
            return found
        compiled = _compile(launch, source, options, target)
    compiled = replace(compiled, warnings=tuple(dict.fromkeys(str(warning.message) for warning in caught)))
    if cache is not None:
        cache.put(key, compiled)
    return compiled


def check(
    launch: Launch, arch: str, cache: Cache | None = None, *, spill_bytes: int = 0, matrix: bool = True
) -> tuple[Compiled | None, list[str]]:
    """What `launch` takes of `arch`, None where it does not compile, and its `problems`, that among them.

    Raises:
        SpecverifyError: nothing can be compiled for `arch` here.
    """
    try:
        compiled = compile_launch(launch, arch, cache)
    except LaunchError as error:
        return None, [error.what]
    return compiled, problems(compiled, spill_bytes=spill_bytes, matrix=matrix)


def problems(compiled: Compiled, *, spill_bytes: int = 0, matrix: bool = True) -> list[str]:
    """What is wrong with a launch, one sentence each; none where nothing is.

    Args:
        spill_bytes: what the configuration accepts, see `table_schema.Entry`.
        matrix: whether the kernel multiplies matrices.
    """
    target = from_arch(compiled.arch)
    found = []
    if compiled.spill_bytes > spill_bytes:
        spills = f"{compiled.spill_stores} bytes stored, {compiled.spill_loads} loaded, {compiled.stack_bytes} of stack"
        found.append(f"spills registers: {spills}; accepted: {spill_bytes}")
    if compiled.registers > target.registers:
        found.append(f"{compiled.registers} registers; {target.arch} has {target.registers}")
    if compiled.shared_bytes > target.shared_bytes:
        found.append(f"{compiled.shared_bytes} bytes of shared memory; {target.arch} has {target.shared_bytes}")
    if matrix and not compiled.matrix_instructions:
        found.append("no matrix instruction in the assembly")
    return found + [f"the compiler warns: {warning}" for warning in compiled.warnings]


def _source(launch: Launch, backend: Any) -> tuple[Any, Any]:
    """The source with types, constants and alignments, and the options, as the JIT makes them for these arguments."""
    from triton.compiler import ASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(**launch.arguments, **launch.constants, **launch.options)
    # Arguments that the kernel does not have are a mistake of its builder and stay a TypeError or a KeyError.
    options, signature, constants, attributes = kernel._pack_args(backend, dict(given), bound, specialization, given)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes), options
    return ASTSource(kernel, signature, constants, attributes), options


def _compile(launch: Launch, source: Any, options: Any, target: Target) -> Compiled:
    import triton

    log = io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(log):
        try:
            binary = triton.compile(source, target=target.triton, options=options.__dict__)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            what = f"{launch.kernel.__name__} does not compile for {target.arch}: {type(error).__name__}: {' / '.join(lines[:4])}"
            raise LaunchError(what, "see the compiler's message; try smaller blocks") from error
    assembly = binary.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    matrix = dict(Counter(" ".join(filter(None, found.groups())) for found in re.finditer(_MATRIX[target.backend], assembly)))
    blank = Compiled(
        kernel=launch.kernel.__name__,
        arch=target.arch,
        registers=0,
        spill_stores=0,
        spill_loads=0,
        stack_bytes=0,
        shared_bytes=int(binary.metadata.shared),
        matrix_instructions=matrix,
        warnings=(),
        seconds=round(time.perf_counter() - start, 3),
    )
    return _read_ptxas(blank, log.getvalue()) if target.backend == "cuda" else _read_amdgcn(blank, assembly)


def _read_ptxas(blank: Compiled, log: str) -> Compiled:
    """With what `ptxas -v` says of the kernel; a function that it calls would be listed apart."""
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if not spills or not registers:
        raise SpecverifyError(f"ptxas says nothing of the registers of {blank.kernel}", f"its output: {log[-500:]!r}")
    stack, stores, loads = (max(int(row[n]) for row in spills) for n in range(3))
    return replace(blank, registers=max(map(int, registers)), spill_stores=stores, spill_loads=loads, stack_bytes=stack)


def _read_amdgcn(blank: Compiled, assembly: str) -> Compiled:
    """With what the metadata in the assembly says, which counts more than goes to memory.

    Scalar registers spill to lanes of vector registers, and the frame that was set aside for them stays; vector registers
    spill to accumulation registers while there are some. Memory is in it only where an instruction stores to it or loads from it.
    """

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise SpecverifyError(f"no .{name} in the assembly of {blank.kernel}", "this Triton writes other metadata")
        return int(found[1])

    touched = re.search(r"\bscratch_(?:store|load)_", assembly) is not None
    spilled = 4 * number("vgpr_spill_count") if touched else 0
    return replace(
        blank,
        registers=number("vgpr_count"),
        spill_stores=spilled,
        spill_loads=spilled,
        stack_bytes=number("private_segment_fixed_size") if touched else 0,
        shared_bytes=max(blank.shared_bytes, number("group_segment_fixed_size")),
    )


@contextlib.contextmanager
def _compiler(target: Target) -> Iterator[None]:
    """Triton set to compile afresh, to hand out ptxas' log, and to leave nothing in the user's own cache."""
    from triton import knobs

    with (
        tempfile.TemporaryDirectory(prefix="specverify-aot-") as folder,
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        if target.arch in _PTXAS_OF:
            knobs.nvidia.ptxas_blackwell = str(_ptxas(target.arch))
        yield


def _ptxas(arch: str) -> Path:
    name, inside = _PTXAS_OF[arch]
    remedy = f"install the one that requirements/dev.txt names: pip install {name}"
    try:
        path = Path(str(importlib.metadata.distribution(name).locate_file(inside)))
    except importlib.metadata.PackageNotFoundError:
        raise SpecverifyError(f"the ptxas that Triton brings does not know {arch}", remedy) from None
    if not path.is_file():
        raise SpecverifyError(f"{name} is installed without {inside}", remedy)
    return path
