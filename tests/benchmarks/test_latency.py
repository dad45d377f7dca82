"""Launches that are timed beside the tables' own."""

from __future__ import annotations

import pytest

from benchmarks.latency_arms import changes_of
from sglang_specverify.errors import ArgumentError


def test_a_launch_by_its_fields() -> None:
    assert changes_of("block_n=64,num_stages=5") == {"block_n": 64, "num_stages": 5}


@pytest.mark.parametrize("text", ["", "block_n", "block_n=", "block_n=-64", "block_n=64,", "tile=64", "combine=1", "amd=1"])
def test_what_is_no_number_of_a_launch(text: str) -> None:
    with pytest.raises(ArgumentError, match="block_n"):
        changes_of(text)
