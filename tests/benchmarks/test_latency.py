"""What is timed: launches beside the tables' own, and states of the cache."""

from __future__ import annotations

import pytest

from benchmarks.latency import states
from benchmarks.latency_arms import changes_of
from sglang_specverify.errors import ArgumentError


def test_a_launch_by_its_fields() -> None:
    assert changes_of("block_n=64,num_stages=5") == {"block_n": 64, "num_stages": 5}


@pytest.mark.parametrize("text", ["", "block_n", "block_n=", "block_n=-64", "block_n=64,", "tile=64", "combine=1", "amd=1"])
def test_what_is_no_number_of_a_launch(text: str) -> None:
    with pytest.raises(ArgumentError, match="block_n"):
        changes_of(text)


def test_a_point_is_timed_in_both_states_of_the_cache() -> None:
    assert states(4) == {"warm": 1, "cold": 4}
    assert states(1) == {"cold": 1}
