"""Numbers in README.md and docs/ are those of the result files."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import docs, end_to_end_tables, gpu_tables


@pytest.mark.parametrize("name", docs.PAGES)
def test_pages_say_what_their_files_say(name: str) -> None:
    text = (docs.ROOT / name).read_text()
    assert "<!-- made from" in text
    assert docs.made(text) == text, "run python -m benchmarks.docs"


def test_a_number_that_was_changed_is_seen() -> None:
    text = (docs.ROOT / "docs/trees.md").read_text()
    table = text.index("<!-- made from end-to-end")
    digit = next(i for i in range(text.index("|---", table), len(text)) if text[i].isdigit())
    changed = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
    assert docs.made(changed) == text != changed


def cell(scenario: str, theirs: float, ours: float, repetitions: int = 3, **changes: Any) -> dict[str, Any]:
    """A measured cell; speeds in tokens/s."""
    name = changes.get("stock", "fa3")
    arms = {
        arm: {"tokens_per_s": speed, "each_tokens_per_s": [speed] * repetitions, "spread": 0.02, "latency_p50_s": 1.0}
        | {"latency_p95_s": 1.5}
        for arm, speed in ((name, theirs), ("specverify", ours))
    }
    place = {"scenario": scenario, "input": 128, "concurrency": 1, "stock": "fa3", "output": 192, "under_pressure": False}
    topk = int(scenario.split("x")[1]) if "x" in scenario else 1
    collector = {name: "frozen", "specverify": "frozen"}
    return {**place, "speculation": {"topk": topk}, "arms": arms, "faults": [], "collector": collector, **changes}


def test_cells_that_do_not_count_are_in_no_table() -> None:
    failed = cell("128x8", 1.0, 1.0, error="gone")
    del failed["arms"]
    faulty = cell("128x4", 100.0, 900.0, faults=["no verify ran on a kernel of the plugin"])
    cells = [failed, faulty, cell("64x4", 100.0, 120.0), cell("128x16", 100.0, 110.0), cell("chain", 50.0, 51.0)]
    cells[2]["arms"]["specverify"]["spread"] = 0.03
    table = end_to_end_tables.trees({"cells": cells})
    assert table[2:4] == ["| 128 × 16 | 128 | 1 | 100 | 110 | 1.10 (2.0%) |", "| 64 × 4 | 128 | 1 | 100 | 120 | 1.20 (3.0%) |"]
    assert table[4:] == ["", "Medians of 3 rounds; in brackets how far rounds of one arm lie apart, the wider of both."]
    (said,) = end_to_end_tables.summary({"cells": cells})
    assert said == "1.15 times the tokens/s of stock fa3 in the median of 2 configurations, 1.10 to 1.20."
    assert end_to_end_tables.summary({"cells": [failed, faulty]}) == ["No configuration was measured."]
    assert end_to_end_tables.others({"cells": cells})[2:] == [
        "| chain of 4 | 128 | 1 | fa3 | 50 | 51 | 1.020 | 2.0% | 1.00 / 1.50 | 1.00 / 1.50 |"
    ]


def test_each_stock_arm_has_columns_and_the_best_a_sentence() -> None:
    many = {"concurrency": 32}
    cells = [
        cell("64x4", 100.0, 120.0, **many, output=48), cell("64x4", 110.0, 121.0, **many, output=192, stock="triton"),
        cell("64x4", 100.0, 120.0, input=2048),
    ]  # fmt: skip
    table = end_to_end_tables.trees({"cells": cells})
    assert table[0].count("specverify") == 2
    assert table[2:4] == [
        "| 64 × 4 | 128 | 32 | 100 | 120 | 1.20 (2.0%) | 110 | 121 | 1.10 (2.0%) \\*192 |",
        "| 64 × 4 | 2048 | 1 | 100 | 120 | 1.20 (2.0%) |  |  |  |",
    ]  # fmt: skip
    assert "lie apart, the wider of both. \\*192: answers of so many tokens, where the others at 32 requests have 48" in table[-1]
    cells[0] |= {"output": 256}
    assert "\\*192, \\*256: answers" in end_to_end_tables.trees({"cells": cells})[-1]
    said = end_to_end_tables.summary({"cells": cells})
    assert len(said) == 3
    assert said[-1].startswith("1.10 times the tokens/s of the best of them in the median of 1 configurations, where")


@pytest.mark.parametrize("collector", [{}, {"fa3": "frozen", "specverify": "collecting"}])
def test_a_collector_that_is_not_alike_is_marked(collector: dict[str, str]) -> None:
    table = end_to_end_tables.trees({"cells": [cell("64x4", 100.0, 120.0, collector=collector)]})
    assert table[2].endswith("| 1.20 (2.0%) † |") and "garbage collector" in table[-1]
    both = {"fa3": "collecting", "specverify": "collecting"}
    assert "†" not in "".join(end_to_end_tables.trees({"cells": [cell("64x4", 100.0, 120.0, collector=both)]}))


def test_clocks_are_those_of_the_largest_tree() -> None:
    read = [{"sm_mhz": clock, "watts": 690.0, "samples": 9} for clock in (1500.0, 1530.0, 1560.0)]
    largest = cell("128x16", 100.0, 120.0, concurrency=32)
    assert end_to_end_tables.clocks({"cells": [largest]}) == ["**Not read.**"]
    for arm in largest["arms"].values():
        arm["device"] = [*read, None]
    assert end_to_end_tables.clocks({"cells": [largest, cell("64x4", 1.0, 1.0)]}) == [
        "W 128, topk 16, input 128, 32 requests: stock fa3 1530 MHz at 690 W; specverify beside it 1530 MHz at 690 W."
    ]


def test_long_contexts_say_what_failed_and_what_does_not_count() -> None:
    speeds = {"fa3": 500.0, "specverify-triton": 505.0, "triton": 50.0}
    arms: dict[str, Any] = {name: {"tokens_per_s": speed, "ms_per_step": 6.0, "spread": 0.01} for name, speed in speeds.items()}
    arms["specverify-fa3"] = {"error": "gone\nits log"}
    row = {"name": "context 131072 batch 1", "length": 131072, "batch": 1, "arms": arms}
    said = "\n".join(end_to_end_tables.long_contexts({"cells": [row], "engines": {"fa3": {"faults": ["a small pool"]}}}))
    assert "| 131072 | 1 | 500 (6.0 ms) | not run | 505 (6.0 ms) | 50 (6.0 ms) |" in said
    assert "specverify-triton is 10.100 times stock triton, pass" in said
    assert "specverify-fa3: gone its log" in said and "fa3 does not count: a small pool" in said


def test_servers_under_load_that_failed_say_so() -> None:
    tokens = {"compared": 900, "wrong": 1, "undecided": 2}
    loaded = {"requests": 40, "failed": [], "tokens": tokens, "kinds": {"whole": 30, "whole, equal": 29}, "problems": ["1 wrong"]}
    said = gpu_tables.endurance({"servers": {"pages": loaded, "other": {"problems": ["gone"]}}, "problems": ["1 wrong", "gone"]})
    assert said[2:4] == ["| pages **FAILED** | 40 | 0 | 900 | 1 | 2 | whole 30 |", "| other **FAILED** | | | | | | |"]
    assert said[4:] == ["", "FAILED: 1 wrong", "", "FAILED: gone"]


def test_a_server_that_failed_is_marked() -> None:
    tokens = {"compared": 90, "wrong": 0, "undecided": 1, "runs": 9}
    accept = {"comparable": 4.1, "stock, comparable": 4.2}
    right = {"tokens": tokens, "accept length": accept, "kernels": {"target_verify": {"fused": 3}}, "problems": []}
    rows = [
        {"row": {"name": "right"}, **right},
        {"row": {"name": "wrong"}, **right, "tokens": tokens | {"wrong": 2}, "problems": ["2 of 9 runs\nhave wrong tokens"]},
        {"row": {"name": "unmeasured"}, "problems": ["ConnectionError: gone"]},
        {"row": {"name": "elsewhere"}, "error": "TimeoutError"},
        {"row": {"name": "silent"}, "problems": []},
    ]
    lines = docs.parity({"rows": rows, "not run": []})
    assert lines[2] == "| right | fused | 90 | 0 | 1 of 9 | 4.10 | 4.20 |"
    assert lines[3] == "| wrong **FAILED** | fused | 90 | 2 | 1 of 9 | 4.10 | 4.20 |"
    assert all(f"{name} **FAILED**" in line for name, line in zip(("unmeasured", "elsewhere", "silent"), lines[4:7], strict=True))
    assert {line.count("|") for line in lines[:7]} == {8}
    assert [line for line in lines[7:] if line] == [
        "FAILED: wrong: 2 of 9 runs have wrong tokens",
        "FAILED: unmeasured: ConnectionError: gone",
        "FAILED: elsewhere: TimeoutError",
        "FAILED: silent: no tokens were compared",
    ]


def test_a_soak_says_which_variants_it_ran() -> None:
    counts = {"fused": 3, "merge": 2, "planned_fused_split": 4, "planned": 1, "chain": 10, "all": 10}
    assert docs.soak({"cases": 10, "outside_their_bound": 1, "counts": counts}) == [
        "10 random cases, 1 outside their bound: fused 3, fused_split 0, specialized 0, specialized_split 0, deterministic 0, "
        "merge 2, plans shared by a step 5."
    ]


def test_points_of_the_kernel_table_are_in_order() -> None:
    assert list(docs._POINTS) == sorted(set(docs._POINTS))
