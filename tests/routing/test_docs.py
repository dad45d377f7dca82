"""docs/routes.md says what the tables in the code say."""

from __future__ import annotations

from pathlib import Path

from sglang_specverify.hardware import FAMILIES
from sglang_specverify.routing import ROUTES, Mode

PAGE = (Path(__file__).parents[2] / "docs" / "routes.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


def test_families() -> None:
    listed = {row[0].strip("`"): (row[1], row[2]) for row in ROWS if row[0].strip("`") in FAMILIES}
    assert listed == {name: (", ".join(facts.preference), ", ".join(facts.possible)) for name, facts in FAMILIES.items()}


def test_every_route_and_mode_has_a_row() -> None:
    named = {name.strip("` ") for row in ROWS for name in row[0].split(",")}
    assert {route.name for route in ROUTES} <= named
    assert {mode.value for mode in Mode} <= named
