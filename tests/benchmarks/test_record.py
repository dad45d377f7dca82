"""The text of result files."""

from __future__ import annotations

import json

from benchmarks import record


def test_each_row_of_a_list_is_a_line() -> None:
    found = {"date": "now", "versions": {"a": 1, "b": []}, "none": [], "points": [{"name": "µ\n", "arms": {"x": [1, 2]}}, 3]}
    text = record.text_of(found)
    assert json.loads(text) == found
    lines = text.splitlines()
    assert [line for line in lines if "µ" in line] == ['    {"name": "µ\\n", "arms": {"x": [1, 2]}},']
    assert lines[-3:] == ["    3", "  ]", "}"]
