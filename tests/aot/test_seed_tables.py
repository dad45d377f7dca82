"""Seeds for hardware that is not at hand: the candidates, their order, and which of them is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import seed_tables
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, Table, parse, render
from sglang_specverify.kernels.targets import TARGETS

TABLE = Table(
    "sm_100",
    "3.8.0",
    "a test",
    {"fused": (Entry((("rows", (1, 32)),), LaunchConfig(16, 16, 4, 1)),), "tree_suffix": ()},
)
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


def seed(monkeypatch: pytest.MonkeyPatch, bad: set[tuple[str, LaunchConfig]]) -> Entry:
    """The seed where these kinds and launches have a problem."""
    monkeypatch.setattr(seed_tables, "problems", lambda case, config, path: ["spills"] if (case.kind, config) in bad else [])
    with ThreadPoolExecutor(2) as pool:
        return seed_tables.seed(pool, TABLE, "fused", 0, CASES, Path("unused"), Console(quiet=True))


def test_the_first_launch_without_a_problem_in_any_call_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, *_ = seed_tables.candidates("sm_100", "fused", 32, False)
    assert seed(monkeypatch, set()).launch == first
    assert seed(monkeypatch, {("chain", first)}).launch == second
    assert seed(monkeypatch, {("full_mask", first), ("chain", second)}).launch == third


def test_no_launch_without_a_problem_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {("chain", config) for config in seed_tables.candidates("sm_100", "fused", 32, False)}
    with pytest.raises(
        SpecverifyError, match=r"no candidate for sm_100 fused entry 0; the last one: sm_100 fused chain .*: spills"
    ):
        seed(monkeypatch, every)


def test_calls_are_taken_evenly() -> None:
    many = [Case("sm_100", "fused", "chain", (128, 128), "bf16", rows) for rows in range(10)]
    assert [case.rows for case in seed_tables.spread(many, 4)] == [0, 2, 5, 7]
    assert seed_tables.spread(many, None) == seed_tables.spread(many, 20) == many
