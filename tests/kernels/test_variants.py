"""Which implementation serves a call: every reason to choose or refuse one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.kernels import specialized
from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.variants import VARIANTS, VariantFacts, choose_variant, refusal_of

GPU = VariantFacts(device="cuda", programs=8, fill=132, longest=1 << 20)


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "fused_split", "8 programs for 132 at once: the prefix is divided"),
        ({"programs": 66}, "fused_split", "66 programs"),
        ({"programs": 67}, "fused", "67 programs for 132 at once: the device is filled"),
        ({"programs": 132, "uneven": True}, "fused_split", "132 programs for 132 at once: the prefix is divided"),
        ({"programs": 133, "uneven": True}, "fused", "133 programs for 132 at once: the device is filled"),
        ({"longest": 512, "uneven": True}, "fused", "512 keys at most, too few"),
        ({"longest": 512}, "fused", "512 keys at most, too few"),
        ({"longest": 513}, "fused_split", "8 programs"),
        ({"divided": True, "programs": 1000}, "fused_split", "the plan divides prefixes"),
        ({"divided": False}, "fused", "the plan divides nothing"),
        ({"deterministic": True, "programs": 1000, "longest": 1}, "fused_split", "deterministic"),
        ({"device": "cpu"}, "reference", "TRITON_INTERPRET=1"),
        ({"device": "cpu", "interpreting": True}, "fused_split", "8 programs"),
        ({"device": "cpu", "interpreting": True, "refusal": "FP64 outputs"}, "reference", "FP64 outputs"),
        ({"capturing": True}, "fused_split", "8 programs"),
        ({"programs": 67, "rows": 65, "specialized": None}, "specialized", "filled without a split; 65 rows of a KV head"),
        ({"programs": 67, "rows": 64, "specialized": None}, "fused", "64 rows of a KV head fill no specialised tile"),
        ({"programs": 67, "rows": 65, "specialized": "has a window"}, "fused", "does not take it: has a window"),
        ({"divided": False, "rows": 512, "specialized": None}, "specialized", "the plan divides nothing; 512 rows"),
        ({"divided": True, "rows": 512, "specialized": None}, "fused_split", "the plan divides prefixes"),
        ({"deterministic": True, "rows": 512, "specialized": None}, "fused_split", "deterministic"),
        ({"programs": 66, "rows": 512, "specialized": None}, "specialized_split", "66 programs"),
    ],
)
def test_auto(changes: dict[str, object], name: str, reason: str) -> None:
    choice = choose_variant("auto", replace(GPU, **changes))
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("variant", "changes", "why"),
    [
        ("reference", {"capturing": True}, "cannot be captured"),
        ("reference", {"device": "meta"}, "meta tensors hold none"),
        ("fused", {"device": "cpu"}, "TRITON_INTERPRET=1"),
        ("fused", {"device": "meta"}, "not on meta"),
        ("fused", {"refusal": "head dims 300"}, "head dims 300"),
        ("fused", {"divided": True}, "a plan came that divides"),
        ("fused_split", {"divided": False}, "a plan came that does not divide"),
        ("specialized", {"divided": True}, "a plan came that divides"),
        ("specialized", {"specialized": "has a window"}, "has a window"),
        ("specialized", {"device": "cpu"}, "TRITON_INTERPRET=1"),
        ("specialized", {}, "other hardware"),
    ],
)
def test_refusals_by_name(variant: str, changes: dict[str, object], why: str) -> None:
    facts = replace(GPU, **changes)
    assert why in (refusal_of(variant, facts) or "")
    with pytest.raises(SpecverifyError, match=f"variant {variant} cannot serve this call: .*{why}"):
        choose_variant(variant, facts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_by_name(variant: str) -> None:
    facts = replace(GPU, specialized=None)
    assert choose_variant(variant, facts).name == variant
    assert choose_variant(variant, facts).reason == "asked for by name"


def test_no_slow_reference_unasked_on_a_gpu() -> None:
    with pytest.raises(SpecverifyError, match=r"no kernel serves this call: head dims 300\n  remedy: .*variant=\"reference\""):
        choose_variant("auto", replace(GPU, refusal="head dims 300"))


def test_unknown_name() -> None:
    with pytest.raises(ArgumentError, match="variant: got 'split'; allowed: auto, reference, fused, fused_split"):
        choose_variant("split", GPU)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"k_scale": 1e-46}, "not positive in FP32"),
        ({"sm_scale": 1e-46}, "not positive in FP32"),
        ({"sm_scale": 1e-40, "k_scale": 1e-10}, "not positive in FP32"),
        ({"sm_scale": 1e-40}, None),
        ({"k_scale": -1.0}, "not positive"),
        ({"k_scale": 1e40}, "infinite in FP32"),
        ({"v_scale": -1e39}, "infinite in FP32"),
    ],
)
def test_the_specialised_kernel_takes_scales_that_fp32_holds(changes: dict[str, float], why: str | None) -> None:
    """It multiplies after it has masked with -inf, so that a factor of 0 would make NaN of what nobody sees."""
    a, problem = Case("sm_90", "fused", "chain", (128, 128), "bf16", 256).arguments()
    a = replace(a, **changes)
    problem = replace(problem, sm_scale=changes.get("sm_scale", problem.sm_scale))
    assert ((found := specialized.refusal(a, problem, "sm_90")) is None) == (why is None)
    assert why is None or why in (found or "")
