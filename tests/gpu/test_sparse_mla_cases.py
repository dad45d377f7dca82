"""The parts of `sparse_mla_cases` that need no device: what is drawn, what is missing, what guards see."""

from __future__ import annotations

import pytest
import torch

from sglang_specverify.kernels.sparse_mla.arguments import HEADS, MAX_QUERIES
from tests.gpu import sparse_mla_cases as cases
from tests.gpu import sparse_mla_soak as soak
from tests.gpu.sparse_mla_calls import Guarded
from tests.gpu.sparse_mla_problems import moved
from tests.gpu.sparse_mla_rows import ROWS, eager_of


def test_every_row_has_a_process() -> None:
    for processes in (1, 3, len(ROWS), 99):
        assert sorted(name for share in cases.shares(list(ROWS), processes) for name in share) == sorted(ROWS)


def test_random_calls_are_the_same_everywhere_and_legal() -> None:
    drawn = [soak.problem(number, 0) for number in range(soak.CHUNK * len(soak.FAMILIES) * 2)]
    assert drawn == [soak.problem(number, 0) for number in range(len(drawn))]
    assert drawn != [soak.problem(number, 1) for number in range(len(drawn))]
    for p in drawn:
        assert p.heads in HEADS and 1 <= p.queries <= MAX_QUERIES and p.window >= p.queries and p.batch >= 1
        assert not p.starts or p.shared
    assert {p.topk == 0 for p in drawn} == {True, False} and max(p.batch for p in drawn) > 100
    # Two processes share the numbers out.
    own = [set(soak._numbers(first, 2, 5 * soak.CHUNK)) for first in (0, 1)]
    assert own[0] | own[1] == set(range(10 * soak.CHUNK)) and not own[0] & own[1]


@pytest.mark.parametrize("padded", [None, (2, 4, 9)])
def test_a_write_beside_a_buffer_is_seen(padded: tuple[int, ...] | None) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        one = Guarded((2, 3, 8), dtype, "cpu", padded)
        one.view.fill_(1)
        assert one.view.shape == (2, 3, 8) and one.touched() == 0
        flat = one.view.as_strided((2,), (1,), one.view.storage_offset() - 1)
        flat[0] = 1
        assert one.touched() == 1
        one.poison()
        assert one.touched() == 0 and (dtype == torch.uint8 or bool(one.view.isnan().all()))


def test_pages_stay_apart_on_another_device() -> None:
    """Here the meta device, whose tensors are copied as a GPU's are."""
    there = moved(torch.zeros(3, 100)[:, :64], "meta")
    assert there.shape == (3, 64) and there.stride() == (100, 1)
    here = torch.arange(300).view(3, 100)[1:, :64]
    assert torch.equal(moved(here, "cpu"), here) and moved(here, "cpu").stride() == (100, 1)


def test_a_graph_of_all_calls_is_compared_with_each() -> None:
    assert [eager_of(run, call, 3) for run, call in ((0, 0), (2, 0), (3, 0), (5, 0), (6, 0), (6, 2))] == [0, 2, 0, 2, 0, 2]


def test_what_is_wrong_or_missing_is_said() -> None:
    row = {"row": "K 0", "query": "bf16", "checks": 3, "kernels": {}, "problems": [], "seconds": 1.0}
    soaked = {"cases": 2, "checks": 3, "failures": 1, "problems": ["case 1: off"], "kernels": {"decode_kernel": 3}}
    found = cases.summary([row, {**row, "row": "controls", "problems": ["a length: was not seen"]}],
                          {("bf16", 0): soaked, ("bf16", 1): {**soaked, "problems": []}})  # fmt: skip
    assert found["random"]["bf16"]["cases"] == 4 and found["random"]["bf16"]["kernels"]["decode_kernel"] == 6
    result = {**found, "not run": ["e4m3, K 0"], "processes that failed": ["e4m3, K 0: exit code -9"]}
    assert cases.problems_of(result) == [
        "bf16, controls: a length: was not seen",
        "bf16, random calls: case 1: off",
        "not run: e4m3, K 0",
        "e4m3, K 0: exit code -9",
    ]
    assert cases.problems_of({"rows": [row], "random": {}, "not run": [], "processes that failed": []}) == []
