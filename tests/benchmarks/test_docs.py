"""Numbers in README.md and docs/ are those of the result files."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import docs


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


def cell(scenario: str, stock: float, ours: float, repetitions: int = 3, **changes: Any) -> dict[str, Any]:
    """A measured cell; speeds in tokens/s."""
    arms = {
        name: {"tokens_per_s": speed, "each_tokens_per_s": [speed] * repetitions}
        for name, speed in (("fa3", stock), ("specverify", ours))
    }
    place = {"scenario": scenario, "input": 128, "concurrency": 1, "stock": "fa3"}
    return {**place, "arms": arms, "faults": [], **changes}


def test_cells_that_do_not_count_are_in_no_table() -> None:
    failed = cell("128x8", 1.0, 1.0, error="gone")
    del failed["arms"]
    faulty = cell("128x4", 100.0, 900.0, faults=["no verify ran on a kernel of the plugin"])
    cells = [failed, faulty, cell("64x4", 100.0, 120.0, 2), cell("128x16", 100.0, 110.0)]
    table = docs.end_to_end({"cells": cells})
    assert table[2:] == [
        "| 128 × 16 | 128 | 1 | fa3 | 3 | 100 | 110 | 1.10 |",
        "| 64 × 4 | 128 | 1 | fa3 | 2 | 100 | 120 | 1.20 |",
    ]
    (said,) = docs.end_to_end_summary({"cells": cells})
    assert said == "1.15 times the tokens/s of stock fa3 in the median of 2 configurations, 1.10 to 1.20."
    assert docs.end_to_end_summary({"cells": [failed, faulty]}) == ["No configuration was measured."]


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
