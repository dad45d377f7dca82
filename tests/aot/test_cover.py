"""Every kernel compiles for every target within its limits, without spilled registers and with matrix instructions."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from typing import Any

import pytest

from benchmarks.compile_all import Outcome
from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.aot_specialized import specialized
from sglang_specverify.kernels.sparse_mla.arguments import CONTRACTS
from sglang_specverify.kernels.targets import TARGETS, from_arch
from tests.aot import workers
from tests.aot.cover import CASES, FACTORS, cover, pairs, pairs_of

#: What a matrix product becomes, and in the e4m3 contract. 64 rows or more of a program are needed for the first of the pairs.
MATRIX = {
    "sm_90": {"wgmma.mma_async", "mma.sync"},
    "sm_100": {"tcgen05.mma", "mma.sync"},
    "sm_103": {"tcgen05.mma", "mma.sync"},
    "sm_107": {"tcgen05.mma", "mma.sync"},
    "gfx942": {"v_mfma"},
    "gfx950": {"v_mfma"},
}
MATRIX_E4M3 = {"tcgen05.mma kind::f8f6f4"}


SPECIALIZED = tuple(specialized("sm_90", short=True))
#: Queries and cache in FP32, with the widest heads and more rows than a tile holds: what a rule that does not fit shows first.
FP32 = tuple(Case(arch, "fused_split", "qlen_only", (256, 256), "fp32", 256) for arch in ("sm_90", "gfx942"))


@pytest.fixture(scope="session")
def futures(pool: ProcessPoolExecutor, pytestconfig: pytest.Config) -> dict[str, Any]:
    """Everything at once, so that all cores work; results of earlier runs come from pytest's cache folder."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("aot") / "compiled.jsonl"
    cases = {case.name: pool.submit(workers.compile_case, case, cache) for case in (*CASES, *SPECIALIZED)}
    cases |= {case.name: pool.submit(workers.compile_fp32, case, cache) for case in FP32}
    return cases | {arch: pool.submit(workers.compile_auxiliary, arch, cache) for arch in TARGETS}


def check(outcome: Outcome) -> None:
    assert outcome.problems == [], f"{outcome.name}: {outcome.text}; launch: {outcome.launch}"
    assert outcome.compiled is not None
    assert outcome.compiled.registers > 0
    expected = MATRIX_E4M3 if "sparse_mla e4m3" in outcome.name else MATRIX[outcome.arch]
    assert set(outcome.compiled.matrix_instructions) <= expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_fits_its_target(futures: dict[str, Any], case: Any) -> None:
    outcome = futures[case.name].result()
    check(outcome)
    assert outcome.compiled.kernel == "verify_attention_kernel"
    assert outcome.compiled.matrix_instructions
    # A kernel that no longer stages K and V through shared memory would still compile.
    assert outcome.compiled.shared_bytes > 0


@pytest.mark.parametrize("case", FP32, ids=lambda case: case.name)
def test_fp32_fits_its_target(futures: dict[str, Any], case: Case) -> None:
    compiled, problems = futures[case.name].result()
    assert problems == []
    assert compiled.kernel == "verify_attention_kernel"
    assert bool(compiled.matrix_instructions) == (case.arch == "gfx942")


@pytest.mark.parametrize("case", SPECIALIZED, ids=lambda case: case.name)
def test_the_specialised_kernel_fits(futures: dict[str, Any], case: Any) -> None:
    outcome = futures[case.name].result()
    check(outcome)
    assert outcome.compiled.kernel == "specialized_kernel"
    assert set(outcome.compiled.matrix_instructions) == {"wgmma.mma_async"}
    assert outcome.source.startswith("specialized entry")


def test_the_specialised_kernel_in_front_of_the_tables_second_launch(futures: dict[str, Any]) -> None:
    """Of few rows: the entry's own configuration has the parts combined by a launch, and its bytes of spills are enough."""
    (case,) = (case for case in SPECIALIZED if case.configured()[0].combine == "launch")
    assert case.divide and case.call.dims == (128, 128) and not case.combine
    config, accepted, source = case.configured()
    attention, combining = case.launches(config)
    assert not attention.constants["LAST"] and combining.kernel is not attention.kernel
    outcome = futures[case.name].result()
    check(outcome)
    assert outcome.source == source and outcome.launch["combine"] == "launch"
    assert outcome.compiled.spill_bytes <= accepted
    target = from_arch("sm_90")
    assert outcome.compiled.registers <= target.registers
    # Rings of two tiles of 128 keys and as many values, of 256 bytes each, and what two programs could not share.
    assert target.shared_bytes / 2 < outcome.compiled.shared_bytes <= target.shared_bytes


def test_only_one_architecture_has_the_specialised_kernel() -> None:
    assert [arch for arch in TARGETS if list(specialized(arch))] == ["sm_90"]
    properties = {(case.call.kind, case.call.dims, case.call.cache, case.call.feature, case.sinks) for case in SPECIALIZED}
    assert [len(set(values)) for values in zip(*properties, strict=True)] == [3, 2, 2, 3, 2]


@pytest.mark.parametrize("arch", TARGETS)
def test_everything_else_fits_its_target(futures: dict[str, Any], arch: str) -> None:
    outcomes = futures[arch].result()
    kernels = {outcome.compiled.kernel for outcome in outcomes if outcome.compiled is not None}
    assert {"plan_kernel", "snapshot_table_kernel", "merge_states_kernel", "compact_visible_slots_kernel"} < kernels
    assert {"gather_suffix_merge_kernel", "prepare_step_kernel", "page_table_kernel"} < kernels
    assert {"quantize_fp4_kernel", "quantize_mxfp8_kernel", "quantize_e4m3_kernel"} < kernels
    # The decode kernels of sparse MLA where there are such, the reducer with the first.
    sparse = {"sm_90": {"hopper_kernel", "combine_kernel"}, "sm_100": {"decode_kernel"}, "gfx950": {"decode_kernel"}}
    assert sparse.get(arch, set()) < kernels
    e4m3 = [outcome for outcome in outcomes if "sparse_mla e4m3" in outcome.name and not outcome.name.endswith("reducer")]
    assert len(e4m3) == (arch in CONTRACTS["e4m3"])
    for outcome in outcomes:
        check(outcome)


def test_every_pair_of_properties_is_compiled() -> None:
    have = set().union(*map(pairs_of, cover()))
    assert have == set(pairs())
    # All but ragged rows (two of eleven operations take part in none of its pairs twice over) can be paired.
    impossible = sum(1 for operation, kind in FACTORS["operation"] if kind not in ("chain", "full_mask"))
    assert len(have) == sum(len(FACTORS[a]) * len(FACTORS[b]) for a, b in combinations(FACTORS, 2)) - impossible


def test_the_cover_is_small_enough_for_every_run() -> None:
    assert len({case.name for case in CASES}) == len(CASES) <= 110
