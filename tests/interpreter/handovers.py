"""Hand-overs between groups of warps, as small as they get: what racecheck follows, and what it reports though it is ordered.

    python -m tests.interpreter.handovers --out handovers.json

Each is what the kernels with specialised warps do: one group writes a vector to shared memory, its warps meet, one thread arrives
at an mbarrier, another group waits for that and reads. One more does not wait: a tool that has no report of it sees nothing. Two
ask what a tool would follow: a barrier of both groups in place of the mbarrier, which orders as well, and an arrival of each
writing thread. Gluon has that only as asynchronous copies make it, and PTX orders by it those copies and no stores: a question to
the tool and no form for a kernel, and its result is not held to anything.

Without racecheck on top it runs itself under it, where compute-sanitizer is installed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc, no-untyped-call"
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.sparse_mla.hopper_parts import barrier

from . import hazards, launched, sanitizers

LENGTH = 64
#: Name: whether the first group writes (four warps, which meet at barrier 0) or the second (eight, at one of their own), whether
#: the compiler writes with `stmatrix`, whether the first group meets at another barrier besides, and what the reader waits for.
CASES = {
    "first group writes": (True, False, False, "one arrival"),
    "first group writes, own barrier": (True, False, True, "one arrival"),
    "second group writes": (False, False, False, "one arrival"),
    "second group writes, stmatrix": (False, True, False, "one arrival"),
    "first group writes, barrier of both": (True, False, False, "barrier"),
    "first group writes, every thread arrives": (True, False, False, "arrivals"),
    "nobody waits": (True, False, False, ""),
}


@gluon.jit
def _write(
    out, ring, full, LENGTH: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, OWN: gl.constexpr, WAITS: gl.constexpr
):
    ring.index(0).store(gl.arange(0, LENGTH, ROWS).to(gl.float32) + 1.0)
    if OWN:
        gl.inline_asm_elementwise("bar.sync 7, 128; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        barrier()
    if WAITS == "barrier":
        gl.inline_asm_elementwise("bar.arrive 8, 384; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WAITS == "arrivals":
        async_copy.mbarrier_arrive(full.index(0), increment_count=False)
    else:
        mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def _read(out, ring, full, LENGTH: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, OWN: gl.constexpr, WAITS: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([2], [32], [8 if FIRST else 4], [0])
    if WAITS == "barrier":
        gl.inline_asm_elementwise("bar.sync 8, 384; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WAITS != "":
        mbarrier.wait(full.index(0), 0)
    gl.store(out + gl.program_id(0) * LENGTH + gl.arange(0, LENGTH, rows), ring.index(0).load(rows))


@gluon.jit
def handover_kernel(out, LENGTH: gl.constexpr, FIRST: gl.constexpr, MATRIX: gl.constexpr, OWN: gl.constexpr, WAITS: gl.constexpr):
    """FP32 [programs, LENGTH] of 1, 2, …, written by one group and stored by the other."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs: gl.constexpr = gl.SharedLinearLayout([[1], [4], [2], [8], [16], [32]])
    # As the rows of a tile that the producers decode: eight a warp, each in four threads.
    four: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [8, 1], [0, 1])
    rows: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0]) if FIRST else gl.SliceLayout(1, four)
    ring = gl.allocate_shared_memory(gl.float32, [1, LENGTH], flat if MATRIX else pairs)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=128 if WAITS == "arrivals" else 1)
    if FIRST:
        gl.warp_specialize(
            [
                (_write, (out, ring, full, LENGTH, FIRST, rows, OWN, WAITS)),
                (_read, (out, ring, full, LENGTH, FIRST, rows, OWN, WAITS)),
            ],
            [8],
        )
    else:
        gl.warp_specialize(
            [
                (_read, (out, ring, full, LENGTH, FIRST, rows, OWN, WAITS)),
                (_write, (out, ring, full, LENGTH, FIRST, rows, OWN, WAITS)),
            ],
            [8],
        )


def launch_of(name: str, out: torch.Tensor) -> Launch:
    """The launch of a case into `out`, FP32 [programs, LENGTH]."""
    constants = {"LENGTH": LENGTH, **dict(zip(("FIRST", "MATRIX", "OWN", "WAITS"), CASES[name], strict=True))}
    return Launch(handover_kernel, (len(out), 1, 1), {"out": out}, constants, {"num_warps": 4})


def run() -> int:
    """Each once, its result held to what was written where the reader waited for what orders it."""
    want = torch.arange(1, LENGTH + 1, dtype=torch.float32).expand(4, -1)
    wrong = 0
    for name, (*_, waits_for) in CASES.items():
        out = torch.zeros(4, LENGTH, device="cuda")
        with launched.noting() as noted:
            launch_of(name, out).run()
        right = torch.equal(out.cpu(), want) or waits_for not in ("one arrival", "barrier")
        wrong += not right
        print(*sorted(noted), f"{'ok   ' if right else 'WRONG'} {name}", sep="\n", flush=True)
    return wrong


def by_case(output: str) -> dict[str, list[Any]]:
    """Groups of hazards of each case, in the order in which they ran."""
    found, begin = {}, 0
    for name in CASES:
        end = next(
            (output.index(line, begin) + len(line) for line in (f"ok    {name}\n", f"WRONG {name}\n") if line in output), None
        )
        if end is not None:
            found[name], begin = hazards.read(output[begin:end])[0], end
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inside", action="store_true", help="only run them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.inside:
        return 1 if run() else 0
    from benchmarks import record

    if (tool := sanitizers.find()) is None:
        print("compute-sanitizer is not installed")
        return 1
    command = [tool, "--tool", "racecheck", *hazards.OPTIONS, sys.executable, "-m", "tests.interpreter.handovers", "--inside"]
    output, code = sanitizers.run(command, 120.0)
    found = by_case(output)
    for name in CASES:
        for one in found.get(name, ["not run"]) or ["no hazard"]:
            print(f"{name}: {one}")
    if options.out is not None:
        said = f"python -m tests.interpreter.handovers --out {options.out.name}"
        about = {"command": said, "compute_sanitizer": sanitizers.version_of(tool), "exit_code": code}
        record.write(options.out, {**about, "cases": found})
    return 0 if found.keys() == CASES.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
