"""Which launch configuration serves a call: the table of its architecture, or a rule where that is silent.

The tables are `configs/kernels/<arch>.json`, in the wheel as package data; `table_schema.py` says what is in one.
"""

from __future__ import annotations

import functools
import importlib.resources

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import BLOCKS, KERNELS, Entry, Table, TableFacts, parse

__all__ = ["Entry", "Table", "TableFacts", "find", "lookup", "read", "rule", "shipped"]


@functools.lru_cache(maxsize=4096)
def lookup(arch: str, kernel: str, facts: TableFacts) -> tuple[LaunchConfig, str]:
    """How `kernel` is launched on `arch`, and where that comes from. Reads a table once in a process.

    Args:
        arch: "sm_90", "gfx950", ...; "none" for Triton's interpreter.
        kernel: one of `KERNELS`.

    Raises:
        SpecverifyError: the table is damaged; names file, entry and field.
    """
    found = find(arch, kernel, facts)
    if isinstance(found, str):
        return rule(arch, kernel, facts), f"rule: {found}"
    number, entry = found
    table = read(arch)
    how = f"measured with Triton {table.triton}" if table and entry.measured else "not measured"
    return entry.launch, f"{arch}.json, {kernel} entry {number} ({how})"


def find(arch: str, kernel: str, facts: TableFacts) -> tuple[int, Entry] | str:
    """The entry that serves, with its place in the table from 0 on; or why none does."""
    if kernel not in KERNELS:
        raise ArgumentError("kernel", repr(kernel), " or ".join(KERNELS))
    table = read(arch)
    if table is None:
        return f"no table for {arch}"
    holding = ((number, entry) for number, entry in enumerate(table.kernels.get(kernel, ())) if entry.holds(facts))
    return next(holding, f"{arch}.json has no entry of {kernel} for this call")


def rule(arch: str, kernel: str, facts: TableFacts) -> LaunchConfig:
    """A launch that fits the hardware, for calls that no table knows. Not tuned."""
    if kernel == "specialized":
        # All of the shared memory, and of the registers for 512 threads.
        keys = 128 if facts.head_dim > 64 else 64
        return LaunchConfig(128, keys, 4, 2 if keys == 128 else 4, 1, max_registers=128)
    if arch == "none":
        # The interpreter: small blocks, so that small tests run through several.
        return LaunchConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    wide = max(facts.head_dim, facts.v_head_dim) > 128 or facts.cache_bits > 16 or facts.q_bits > 16
    if arch.startswith("gfx"):
        most, amd = 64 if wide else 128, (("waves_per_eu", 1), ("matrix_instr_nonkdim", 16))
        block_m = _block_for(facts.rows, most)
        return LaunchConfig(block_m, 32 if wide else 64, 8 if block_m > 64 else 4, 1, 2 if block_m <= 32 else 1, amd)
    if facts.q_bits > 16:
        # No matrix instruction of NVIDIA's multiplies FP32 exactly. Threads do, from small tiles: large
        # ones spill kilobytes. These spill nothing on SM90, and up to 16 bytes on SM100.
        return LaunchConfig(16, 16, 8, 1) if max(facts.head_dim, facts.v_head_dim) > 128 else LaunchConfig(16, 32, 4, 1)
    if not arch.startswith(("sm_9", "sm_10")):
        # 99 KB of shared memory on sm_86, sm_89 and sm_120.
        return LaunchConfig(_block_for(facts.rows, 64), 32, 4, 1 if wide else 2)
    block_m = _block_for(facts.rows, 128)
    stages = 2 if kernel == "tree_suffix" else 3
    return LaunchConfig(block_m, 32 if wide else 64, 8 if block_m > 64 else 4, stages, 2 if block_m <= 32 else 1)


def _block_for(rows: int, most: int) -> int:
    """The least block that holds `rows`, from 16 to `most`."""
    return next((block for block in BLOCKS if rows <= block < most), most)


@functools.cache
def read(arch: str) -> Table | None:
    """The shipped table of `arch`; None where there is none.

    Raises:
        SpecverifyError: it is damaged; names file, entry and field.
    """
    source = importlib.resources.files("sglang_specverify.kernels") / "configs" / f"{arch}.json"
    if arch not in shipped():
        return None
    return parse(source.read_text(encoding="utf-8"), f"{arch}.json", arch)


@functools.cache
def shipped() -> tuple[str, ...]:
    """Every architecture that has a table."""
    folder = importlib.resources.files("sglang_specverify.kernels") / "configs"
    if not folder.is_dir():
        return ()
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))
