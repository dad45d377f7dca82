"""The check before a launch is timed: the kernel passes it with every candidate block, and fails it where it reads wrong keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_specverify.kernels.launch import LaunchConfig, arch_of
from sglang_specverify.tuning.buckets import Call
from sglang_specverify.tuning.inputs import Expected, expect, make

CALLS = (
    Call("fused", "chain", 2, 4, 2, 32, 16, 77),
    Call("fused", "qlen_only", 2, 5, 2, 32, 8, 77),
    Call("fused_split", "chain", 1, 4, 2, 32, 16, 520),
    Call("fused_split", "qlen_only", 1, 4, 2, 32, 16, 520),
    Call("tree_suffix", "qlen_only", 2, 6, 2, 32, 16, 50),
)


@pytest.fixture(scope="module", params=CALLS, ids=lambda call: f"{call.operation}-{call.kind}-{call.cache_bits}")
def expected(request: pytest.FixtureRequest, device: str) -> Expected:
    return expect(make(request.param, device, "sm_90"))


def test_the_kernel_passes(expected: Expected) -> None:
    arch = arch_of(expected.out.device)
    for config in (LaunchConfig(16, 32, 4, 2), LaunchConfig(32, 16, 4, 1), LaunchConfig(16, 32, 4, 2, combine="launch")):
        assert expected.problem(config, arch) == ""


def test_a_wrong_key_is_found(expected: Expected) -> None:
    """Of every request the first draft lies elsewhere than the reference was told."""
    a = expected.inputs.arguments
    table = a.table.clone()
    at = expected.inputs.call.prefix
    table[:, at] = table[:, 0]
    wrong = replace(expected, inputs=replace(expected.inputs, arguments=replace(a, table=table)))
    assert wrong.problem(LaunchConfig(16, 32, 4, 2), arch_of(expected.out.device)).startswith("wrong")
