"""Numbers in README.md and docs/ are those of the result files."""

from __future__ import annotations

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
