"""What memory checkers can follow in the compiled sparse MLA kernel for Hopper, and where its compiler's own bytes lie."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.aot import workers
from tests.interpreter.launched import parse
from tests.interpreter.ordered import begin_of

_LINE = re.compile(r"// (hopper_\w+)\.py:")


def writers(assembly: str) -> dict[str, set[str]]:
    """The instructions with which each source file writes shared memory, by the lines that the assembly names."""
    found: dict[str, set[str]] = {}
    source = ""
    for line in assembly.splitlines():
        if named := _LINE.search(line):
            source = named[1]
        if written := re.search(r"(?:^|\s)(stmatrix\.\S+|st\.shared\S*)", line):
            found.setdefault(source, set()).add(written[1])
    return found


@pytest.fixture(scope="module")
def made(pool: ProcessPoolExecutor) -> tuple[str, str, dict[str, str]]:
    return pool.submit(workers.hopper, 1).result()


def test_producers_write_shared_memory_with_ordinary_stores(made: tuple[str, str, dict[str, str]]) -> None:
    assembly, printed, _ = made
    found = writers(assembly)
    # Rows of 16 bytes a thread, and whether a row counts, of 4.
    assert found["hopper_produce"] == {"st.shared::cta.v4.b32", "st.shared::cta.b32"}
    # The weights, which only the tensor cores read, are written by matrices: the search would have found one.
    assert any(written.startswith("stmatrix") for written in found["hopper_consume"])
    compiled = parse(printed)
    assert compiled is not None and compiled.behind - compiled.first == 12
    # No barrier of this project's lies among the bytes by which the compiler tells twelve further warps what to run.
    barriers = [int(place) for place in re.findall(r"add\.s32 \s*%r\d+, %r\d+, (2\d{5});", assembly)]
    assert barriers and not any(map(compiled.dispatches, barriers))


def test_handovers_are_what_they_are_named(made: tuple[str, str, dict[str, str]]) -> None:
    found = made[2]
    assert {name for name, text in found.items() if "stmatrix" in text} == {"second group writes, stmatrix"}
    assert {name for name, text in found.items() if "try_wait" not in text} == {
        "nobody waits", "first group writes, barrier of both",
    }  # fmt: skip
    assert {name for name, text in found.items() if re.search(r"bar\.sync\s+7, 128", text)} == {"first group writes, own barrier"}
    assert {name for name, text in found.items() if "bar.arrive" in text} == {"first group writes, barrier of both"}
    both = found["first group writes, barrier of both"]
    # The store stands before the arrival, and the read behind the wait.
    assert both.index("st.shared::cta.b32") < re.search(r"bar\.arrive\s+8, 384", both).start()
    assert re.search(r"bar\.sync\s+8, 384", both).start() < both.index("ld.shared.v2")
    assert {name for name, text in found.items() if "cp.async.mbarrier.arrive.noinc" in text} == {
        "first group writes, every thread arrives"
    }
    for name, text in found.items():
        assert re.search(r"bar\.sync\s+" + ("0, 128" if name[0] in "fn" else "2, 256"), text), name
        assert "mbarrier.arrive" in text or name == "first group writes, barrier of both"


def test_dispatch_of_verify_attention(pool: ProcessPoolExecutor) -> None:
    """A table of jumps tells its four parts, with an index of 32 bits; where the kernel is defined, nothing else is accessed."""
    assembly, printed = pool.submit(workers.verifying).result()
    assert re.search(r"ld\.shared\.b8\s+%r\d+", assembly) and not re.search(r"ld\.shared\.b8\s+%rs\d+", assembly)
    compiled, at = parse(printed), begin_of("specialized_kernel")
    assert compiled is not None and at is not None and compiled.behind - compiled.first == 12
    named, there = "", []
    for line in assembly.splitlines():
        if found := re.search(r"// (\w+\.py:\d+):", line):
            named = found[1]
        if "shared" in line and named and at.endswith(f" {named}"):
            found = re.search(r"^\s*(st|ld)\.shared\.\S+\s.*\[(?:global_smem|%r\d+)\+(\d+)\]", line)
            assert found, line
            there.append((found[1], int(found[2])))
    # The question of a warp begins four bytes earlier: at the number of the first further warp.
    assert {what for what, _ in there} == {"ld", "st"}
    assert all(compiled.dispatches(place + 4 * (what == "ld")) for what, place in there)
    assert all(compiled.dispatches(place + byte) for what, place in there for byte in range(4) if what == "st")
    # Barriers of this project's end where they begin.
    barriers = re.findall(r"add\.s32 \s*%r\d+, %r\d+, (\d{5});", assembly)
    assert max(int(place) for place in barriers) + 8 == compiled.first
