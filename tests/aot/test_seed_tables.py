"""Seeds for hardware that is not at hand: the candidates, their order, and which of them is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import seed_tables
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, Table, TableFacts, parse, render
from sglang_specverify.kernels.targets import TARGETS

TABLE = Table(
    "sm_100",
    "3.8.0",
    "a test",
    {"fused": (Entry((("rows", (1, 32)),), LaunchConfig(16, 16, 4, 1)),), "tree_suffix": ()},
)
EVERY = list(seed_tables.candidates("sm_100", "fused", 32, False))
DIVIDED = (("fused", 64, "bf16"), ("fused", 128, "fp16"), ("fused_split", 128, "bf16"), ("fused_split", 80, "e4m3"))
CASES = [Case("sm_100", "fused", kind, (128, 128), "bf16", 32) for kind in ("chain", "full_mask")]  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kernel", ["fused", "tree_suffix"])
def test_candidates_could_stand_in_a_table_and_get_smaller(arch: str, kernel: str) -> None:
    for rows in (16, 32, 64, 260):
        for wide in (False, True):
            tried = list(seed_tables.candidates(arch, kernel, rows, wide))
            assert len(set(tried)) == len(tried) >= 4
            entries = tuple(Entry((), config) for config in tried)
            table = Table(arch, "3.8.0", "a test", {kernel: entries, "tree_suffix" if kernel == "fused" else "fused": ()})
            assert parse(render(table), "a test", arch).kernels[kernel] == entries
            assert [config.block_m for config in tried] == sorted((config.block_m for config in tried), reverse=True)
            assert tried[0].block_m <= rows


def seed(monkeypatch: pytest.MonkeyPatch, bad: set[tuple[str, LaunchConfig]]) -> LaunchConfig:
    """The seed where these kinds and launches have a problem."""
    monkeypatch.setattr(seed_tables, "problems", lambda case, config, path: ["spills"] if (case.kind, config) in bad else [])
    with ThreadPoolExecutor(2) as pool:
        return seed_tables.seed(pool, "sm_100 fused entry 0", EVERY, CASES, Path("unused"), Console(quiet=True))


def test_the_first_launch_without_a_problem_in_any_call_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, *_ = EVERY
    assert seed(monkeypatch, set()) == first
    assert seed(monkeypatch, {("chain", first)}) == second
    assert seed(monkeypatch, {("full_mask", first), ("chain", second)}) == third


def test_no_launch_without_a_problem_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SpecverifyError, match=r"no candidate for sm_100 fused entry 0; the last one: sm_100 fused chain .*: spills"
    ):
        seed(monkeypatch, {("chain", config) for config in EVERY})


def test_a_launch_of_the_table_is_tried_first_and_then_what_is_behind_it() -> None:
    first, second, third, *_ = EVERY
    assert seed_tables.smaller(second, EVERY)[:2] == [second, third]
    assert first not in seed_tables.smaller(second, EVERY)
    foreign = replace(first, num_warps=16)
    assert seed_tables.smaller(foreign, EVERY) == [foreign, *EVERY]


def test_calls_are_divided_by_what_takes_registers() -> None:
    cases = [Case("sm_100", op, "chain", (dim, dim), cache, 32) for op, dim, cache in DIVIDED]  # type: ignore[arg-type]
    assert seed_tables.parts(cases) == {(False, 16): cases[:2], (True, 16): cases[2:3], (True, 8): cases[3:]}


ENTRY = TABLE.kernels["fused"][0]
A, B, C = EVERY[:3]
#: A launch of each part (split, cache bits), and the conditions and launches of the entries.
JOINED: list[tuple[dict[seed_tables.Key, LaunchConfig], list[tuple[dict[str, object], LaunchConfig]]]] = [
    ({(False, 16): A, (True, 8): A}, [({}, A)]),
    ({(False, 8): A, (False, 16): A, (True, 8): B, (True, 16): B}, [({"split": (True,)}, B), ({}, A)]),
    ({(False, 16): A, (False, 8): B, (True, 16): A, (True, 8): B}, [({"cache_bits": (8,)}, B), ({}, A)]),
    ({(False, 8): A, (False, 16): A, (True, 8): B, (True, 16): A}, [({"split": (True,), "cache_bits": (8,)}, B), ({}, A)]),
    (
        {(False, 8): B, (False, 16): A, (True, 8): C, (True, 16): A},
        [({"split": (False,), "cache_bits": (8,)}, B), ({"split": (True,), "cache_bits": (8,)}, C), ({}, A)],
    ),
]


@pytest.mark.parametrize(("launches", "expected"), JOINED)
def test_an_entry_is_divided_only_where_its_parts_need_other_launches(
    launches: dict[seed_tables.Key, LaunchConfig], expected: list[tuple[dict[str, object], LaunchConfig]]
) -> None:
    entries = seed_tables.joined(ENTRY, launches)
    assert [(dict(entry.when), entry.launch) for entry in entries] == [
        (dict(ENTRY.when) | narrower, config) for narrower, config in expected
    ]
    # And each part gets its own, from the first entry that holds.
    for (split, bits), config in launches.items():
        facts = TableFacts(32, 128, 128, bits, 16, split, 1, "chain")
        assert next(entry.launch for entry in entries if entry.holds(facts)) == config


def test_calls_are_taken_evenly() -> None:
    many = [Case("sm_100", "fused", "chain", (128, 128), "bf16", rows) for rows in range(10)]
    assert [case.rows for case in seed_tables.spread(many, 4)] == [0, 2, 5, 7]
    assert seed_tables.spread(many, None) == seed_tables.spread(many, 20) == many
