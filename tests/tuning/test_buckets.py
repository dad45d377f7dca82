"""The ranges of calls that are tuned, and the launches that are tried for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.run import config_of
from sglang_specverify.kernels.table_schema import Entry, Table, TableFacts, parse, render
from sglang_specverify.tuning.buckets import Bucket, buckets, candidates, refinements
from sglang_specverify.tuning.inputs import facts_of
from sglang_specverify.tuning.run import now

ARCHES = ("sm_90", "sm_100", "gfx942", "gfx950")


def test_every_call_of_the_kernels_is_in_one_range() -> None:
    for kernel, rows, dim, bits, split in product(
        ("fused", "tree_suffix"), (1, 16, 17, 64, 65, 128, 129, 4096), (64, 80, 256), (8, 16), (0, 1)
    ):
        facts = TableFacts(rows, dim, dim, bits, 16, bool(split), 1, "qlen_only")
        holding = [b.name for b in buckets() if b.kernel == kernel and Entry(b.when, LaunchConfig(16, 16, 4, 1)).holds(facts)]
        assert len(holding) == 1, (facts, holding)


def test_the_calls_that_stand_for_a_range_are_in_it() -> None:
    names = [bucket.name for bucket in buckets()]
    assert len(set(names)) == len(names)
    for bucket in buckets():
        entry = Entry(bucket.when, LaunchConfig(16, 16, 4, 1))
        assert len(bucket.calls) >= 2
        for call in (*bucket.calls, *(call.small() for call in bucket.calls)):
            assert entry.holds(facts_of(call, "sm_90")), (bucket.name, call)


@pytest.mark.parametrize("arch", ARCHES)
def test_what_serves_each_call_now_is_tried_first(arch: str) -> None:
    """Asked as a call asks, from tensors that were made elsewhere."""
    several = set()
    for bucket in buckets():
        serving = []
        for call in bucket.calls:
            dims, cache = (call.head_dim, call.head_dim), "bf16" if call.cache_bits == 16 else "e4m3"
            case = Case(arch, call.operation, call.kind, dims, cache, call.queries * call.group, call.group, batch=call.batch)
            assert facts_of(call, arch) == case.facts()
            a, problem = case.arguments()
            types = a.k_cache.dtype, a.q.dtype
            serving.append(config_of(bucket.kernel, arch, problem, *types, split=call.operation == "fused_split"))
        assert now(bucket, arch) == tuple(serving)
        first = tuple(dict.fromkeys(serving))
        assert candidates(arch, bucket, now(bucket, arch))[: len(first)] == first
        several.add(len(first))
    # SM90's table asks how full the device is.
    assert (max(several) > 1) == (arch == "sm_90")


@pytest.mark.parametrize("arch", ARCHES)
def test_every_candidate_could_stand_in_a_table(arch: str) -> None:
    """The parser of the tables knows what a launch may be."""
    for bucket in buckets():
        tried = candidates(arch, bucket, now(bucket, arch))
        assert 4 <= len(tried) == len(set(tried)) <= 20, bucket.name
        more = refinements(arch, bucket, tried[-1])
        assert more
        assert tried[-1] not in more
        kernels = {"fused": tuple(Entry(bucket.when, config) for config in (*tried, *more)), "tree_suffix": ()}
        table = Table(arch, "3.8.0", "candidates", kernels)
        assert parse(render(table), "candidates", arch) == table


def test_few_rows_are_not_padded_to_many() -> None:
    for bucket in buckets():
        rows = max(call.queries * call.group for call in bucket.calls)
        shipped = LaunchConfig(16, 16, 1, 1)
        assert all(config.block_m <= max(16, rows) for config in candidates("sm_90", bucket, [shipped]))


@pytest.mark.parametrize(("combine", "other"), [("last", "launch"), ("launch", "last")])
def test_parts_are_combined_as_they_are_now_and_for_the_fastest_also_otherwise(combine: str, other: str) -> None:
    for arch, bucket in product(("sm_90", "gfx950"), buckets()):
        tried = candidates(arch, bucket, [LaunchConfig(16, 16, 4, 1, combine=combine)])
        assert {config.combine for config in tried} == {combine}
        combined = [config for config in refinements(arch, bucket, tried[-1]) if config.combine != combine]
        divided = bucket.calls[0].operation == "fused_split"
        # The tree tile, and calls that are not divided, have nothing to combine.
        assert combined == ([replace(tried[-1], combine=other)] if divided else [])


def test_a_divided_prefix_tries_how_full_a_multiprocessor_gets() -> None:
    divided = next(bucket for bucket in buckets() if bucket.calls[0].operation == "fused_split")
    best = candidates("sm_90", divided, [LaunchConfig(16, 16, 4, 1)])[-1]
    assert {config.ctas_per_sm for config in refinements("sm_90", divided, best)} == {1, 2}
    whole: Bucket = next(bucket for bucket in buckets() if bucket.calls[0].operation == "fused")
    assert {config.ctas_per_sm for config in refinements("sm_90", whole, replace(best, ctas_per_sm=1))} == {1}
