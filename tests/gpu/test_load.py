"""Requests of the mixed load do not end each other."""

from __future__ import annotations

from itertools import permutations

from tests.gpu.servers_load import Job


def test_no_request_is_aborted_with_another() -> None:
    """SGLang aborts every request whose name begins with the given one."""
    names = [Job(number, 0, "aborted", 1).rid for number in (1, 2, 10, 12, 25, 28, 120, 281)]
    assert not [pair for pair in permutations(names, 2) if pair[1].startswith(pair[0])]
