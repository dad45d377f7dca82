"""The check that every launch passes before it is timed, on the CPU: what is right passes, what is wrong does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_specverify.tuning.buckets import Call
from sglang_specverify.tuning.inputs import Expected, compare, expect, make

CALLS = (
    Call("fused", "chain", 2, 3, 2, 16, 16, 40),
    Call("fused_split", "qlen_only", 1, 4, 1, 16, 8, 40),
    Call("tree_suffix", "qlen_only", 2, 4, 2, 16, 16, 40),
)


@pytest.fixture(scope="module", params=CALLS, ids=lambda call: call.operation)
def expected(request: pytest.FixtureRequest) -> Expected:
    return expect(make(request.param, "cpu", "sm_90"))


def test_the_right_result_passes(expected: Expected) -> None:
    assert compare(expected.out, expected.lse, expected) == ""
    # Rounded once more to BF16, as the weights are.
    noise = 1 + 2.0**-8 * torch.where(torch.arange(expected.out.shape[-1]) % 2 == 0, 1.0, -1.0)
    assert compare((expected.out.float() * noise).to(torch.bfloat16), expected.lse, expected) == ""


def test_nothing_written_is_wrong(expected: Expected) -> None:
    expected.inputs.out.fill_(torch.nan)
    assert compare(expected.inputs.out, expected.lse, expected).startswith("wrong output: inf times")
    assert compare(expected.out, torch.full_like(expected.lse, torch.nan), expected) == "wrong LSE"


def test_a_dropped_key_is_wrong(expected: Expected) -> None:
    """The result of the same call with a prefix that is one token shorter: its last key is dropped for every row."""
    a = expected.inputs.arguments
    table = a.table.clone()
    # Position 0 is read twice instead of the last one of the prefix.
    table[:, expected.inputs.call.prefix - 1] = table[:, 0]
    wrong = expect(replace(expected.inputs, arguments=replace(a, table=table)))
    assert compare(wrong.out, wrong.lse, expected) != ""


def test_the_tree_tile_starts_from_the_prefix(expected: Expected) -> None:
    inputs = expected.inputs
    inputs.reset()
    if inputs.call.operation == "tree_suffix":
        assert inputs.prefix is not None
        assert torch.equal(inputs.out, inputs.prefix[0])
        # Which alone is not the answer.
        assert compare(inputs.out, inputs.lse, expected) != ""
    else:
        assert bool(inputs.out.isnan().all())
        assert bool(inputs.lse.isnan().all())
