"""Which hazards of racecheck are excused: those at the compiler's dispatch bytes, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_specverify.kernels.launch import Launch

from . import hazards, sanitizers
from .launched import Compiled, compiled_of, noting, parse

#: Kernels as compiled for SM90, and addresses that a run on an H200 reported of them.
VERIFY = Compiled("specialized_kernel", 99868, 99856, 99868)
DIVIDED = Compiled("specialized_kernel", 99884, 99872, 99884)
SPARSE = Compiled("hopper_kernel", 215016, 214992, 215004)
REPORTED = {VERIFY: range(0x18A14, 0x18A1C), DIVIDED: range(0x18A24, 0x18A2C)}


def hazard(address: int, kernel: str = "specialized_kernel", at: str = "specialized_kernel.py:345", kind: str = "RAW") -> str:
    return (
        f"========= Error: Potential {kind} hazard detected at __shared__ {address:#x} in block (2,0,0) :\n"
        f"=========     Write Thread (5,0,0) at {kernel}+0x5dd0 in {at}\n"
        f"=========     Read Thread (288,0,0) at {kernel}+0x5ec0 in {at}\n"
        "=========     Current Value : 1\n=========\n"
    )


def run(*texts: str, summary: str = "1 hazard displayed (1 error, 0 warnings)") -> str:
    return "".join(texts) + f"========= RACECHECK SUMMARY: {summary}\n"


def call(*launched: Compiled) -> str:
    return "".join(f"{one}\n" for one in launched) + "ok    specialized, chain, bfloat16, plain (0.1 s)\n"


def test_what_the_tool_reported_of_the_dispatch_is_excused() -> None:
    """The reserved kilobyte is in the addresses: with it, reports of three sizes of one kernel all end where its memory ends."""
    for compiled, addresses in REPORTED.items():
        assert addresses[-1] - hazards.RESERVED == compiled.shared - 1
        text = run(
            *(hazard(address) for address in addresses), call(compiled), summary="8 hazards displayed (8 errors, 0 warnings)"
        )
        found = sanitizers.read(text)
        assert found["reports"] == {} and found["calls"] == 1
        assert [(one["count"], one["excused"], one["at"]) for one in found["hazards"]] == [(8, True, hazards.DISPATCH)]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        # The byte before the first of a further warp, and the byte behind the last.
        (hazard(99855 + 1024) + call(VERIFY), "the kernel's own shared memory"),
        (hazard(99868 + 1024) + call(VERIFY), "beyond its shared memory"),
        # Of one variant of two that the call launched it is a dispatch byte, of the other it is not.
        (hazard(99857 + 1024) + call(VERIFY, DIVIDED), "the kernel's own shared memory"),
        # Another kernel's dispatch, and a kernel that no line tells of.
        (hazard(99857 + 1024, "hopper_kernel") + call(VERIFY, SPARSE), "the kernel's own shared memory"),
        (hazard(99857 + 1024) + call(), "unknown: no such kernel was launched"),
        # What an earlier call launched says nothing of this one.
        (call(VERIFY) + hazard(99857 + 1024) + call(DIVIDED), "the kernel's own shared memory"),
        # The accesses lie in two kernels, or the tool names none.
        (hazard(99857 + 1024).replace("at specialized", "at x", 1) + call(VERIFY), "unknown: no such kernel was launched"),
        (hazard(99857 + 1024).splitlines()[0] + "\n" + call(VERIFY), "unknown: no such kernel was launched"),
        # Reported of the sparse kernel: what multiplies earlier sums, which the lead writes and the second reads.
        (hazard(0x344C0, "hopper_kernel", "hopper_consume.py:71") + call(SPARSE), "the kernel's own shared memory"),
    ],
)
def test_everything_else_counts(text: str, at: str) -> None:
    found = sanitizers.read(run(text))
    assert [(one["at"], one["excused"]) for one in found["hazards"]] == [(at, False)]
    ((name, count),) = found["reports"].items()
    assert count == 1 and name.endswith(at) and " RAW, " in name


def test_kinds_kernels_and_accesses_are_told_apart() -> None:
    alpha = [hazard(0x344C0 + byte, "hopper_kernel", "hopper_consume.py:71") for byte in range(4)]
    write = hazard(0x34400, "hopper_kernel", "hopper_consume.py:71", "WAR")
    text = run(*alpha, write, hazard(214995 + 1024, "hopper_kernel", "hopper_kernel.py:58"), call(SPARSE))
    found = sanitizers.read(text)["hazards"]
    assert [(one["kind"], one["count"], one["offsets"], one["excused"]) for one in found] == [
        ("RAW", 4, [0x340C0, 0x340C3], False), ("RAW", 1, [214995, 214995], True), ("WAR", 1, [0x34000, 0x34000], False),
    ]  # fmt: skip
    assert found[0]["accesses"] == "Write at hopper_consume.py:71 and Read at hopper_consume.py:71"


def test_what_was_not_printed_and_what_has_no_address_counts() -> None:
    text = run(hazard(99857 + 1024), call(VERIFY), summary="200 hazards displayed (11971 errors, 0 warnings)")
    assert sanitizers.read(text)["reports"] == {"hazards that the tool counted and did not print": 11771}
    race = "========= Error: Race reported between Write access at specialized_kernel+0x5dd0 in specialized_kernel.py:345\n"
    assert sum(sanitizers.read(run(race, call(VERIFY)))["reports"].values()) == 1


def test_the_tool_is_asked_for_all_of_them() -> None:
    racecheck = [one for one in sanitizers.RUNS if one[0] == "racecheck"]
    assert len(racecheck) == 3
    for checker, options, sweep, _ in racecheck:
        command = sanitizers.command_of("tool", checker, options, sweep)
        assert command.count("--print-limit") == 1 and command[command.index("--racecheck-report") + 1] == "hazard"


def binary(name: str, shared: int, warps: int, ptx: str) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(name=name, shared=shared, num_warps=warps), asm={"ptx": ptx})


def test_dispatch_bytes_of_a_compiled_kernel() -> None:
    asks = "\tld.shared.b8 \t%rs3, [%r84+214988];\n"
    found = compiled_of(binary("hopper_kernel", 215016, 16, asks), 4)
    assert found == SPARSE and parse(str(found)) == found
    # Of more parts the compiler makes a table of jumps, whose index is of 32 bits.
    assert compiled_of(binary("hopper_kernel", 215016, 16, asks.replace("%rs3", "%r139")), 4) == SPARSE
    # No further warps, two such reads, none, or one that cannot be it: nothing is the compiler's.
    for shared, warps, ptx in ((215016, 4, asks), (215016, 16, 2 * asks), (215016, 16, ""), (215000, 16, asks)):
        found = compiled_of(binary("k", shared, warps, ptx), 4)
        assert found.first == found.behind and not any(map(found.dispatches, range(shared)))
    assert parse("ok    specialized (0.1 s)") is None


def test_launches_of_a_call_are_noted() -> None:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda **arguments: made if arguments["on"] else None

    made = binary("one", 96, 4, "")
    launch = Launch(Kernel(), (1, 1, 1), {"x": torch.empty(1)}, {"on": True}, {"num_warps": 4})
    with noting() as noted:
        launch.run()
        Launch(Kernel(), (1, 1, 1), {"x": torch.empty(1)}, {"on": False}).run()
    launch.run()
    assert noted == {Compiled("one", 96)}


def test_handovers_are_told_apart() -> None:
    from .handovers import by_case

    one = Compiled("handover_kernel", 320, 312, 320)
    found = by_case(
        f"{one}\nok    first group writes\n" + hazard(1024, "handover_kernel") + f"{one}\nok    first group writes, own barrier\n"
        f"{one}\nWRONG second group writes\n" + hazard(1024 + 313, "handover_kernel") + f"{one}\nok    nobody waits\n"
    )  # fmt: skip
    assert {name: [group["excused"] for group in groups] for name, groups in found.items()} == {
        "first group writes": [], "first group writes, own barrier": [False], "second group writes": [], "nobody waits": [True],
    }  # fmt: skip
