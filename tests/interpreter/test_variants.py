"""Each variant runs when it is named, "auto" runs the one it chose, and one that cannot serve says why before any launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.kernels import VARIANTS
from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.specialized import ARCH
from sglang_specverify.kernels.variants import SPECIALIZED, VariantFacts, choose_variant
from tests.kernels.cases import Config, build_draft, build_verify

from .bounds import compare
from .calls import attention, call, check, launches, names, to_device
from .plans import attends, divided, items, plan_for

BASE = Config(
    prefix_lens=(300, 40), widths=3, q_heads=2, kv_heads=1, head_dim=16, v_head_dim=16, page_size=16, q_dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
)  # fmt: skip

KINDS = ["chain", "qlen_only", "full_mask", "branches"]

#: What each variant launches for a chain, beside its outputs' numbers: that it ran is told by this, not by the result. Behind
#: a divided one stands what combines its parts, where the table says so.
LAUNCHES = {
    "reference": [],
    "fused": ["verify_attention_kernel"],
    "fused_split": ["plan_kernel", "verify_attention_kernel"],
    # On the one architecture that has it; `test_specialized.py` and `test_specialized_split.py` run it everywhere.
    "specialized": ["specialized_kernel"],
    "specialized_split": ["plan_kernel", "specialized_kernel"],
}


def build(kind: str, device: str, **changes: Any) -> dict[str, Any]:
    c = BASE.but(kind=kind, **changes)
    return to_device(build_draft(c, topk=3, step=1, steps=2) if kind == "branches" else build_verify(c), device)


def test_every_variant_is_tested_here() -> None:
    assert set(LAUNCHES) == set(VARIANTS)


@pytest.mark.parametrize("variant", [name for name in LAUNCHES if name not in SPECIALIZED])
@pytest.mark.parametrize("kind", KINDS)
def test_a_named_variant_is_the_one_that_runs(device: str, kind: str, variant: str) -> None:
    a = build(kind, device)
    with launches() as seen:
        check(a, variant=variant, splits=8)
    from sglang_specverify.kernels.fused_kernel import BRANCHES, CHAIN, TREE

    masked = kind in ("qlen_only", "full_mask") and variant != "reference"
    want = LAUNCHES[variant] if not masked else ["plan_kernel", "verify_attention_kernel"]
    if variant == "fused_split":
        want = want[:-1] + attends(plan_for(a, divide=True))
    assert names(seen) == want
    if seen:
        constants = attention(seen).constants
        assert constants["SPLIT"] is (variant == "fused_split")
        assert constants["KIND"] == {"chain": CHAIN, "branches": BRANCHES}.get(kind, TREE)
        assert constants["MERGE"] is False


@pytest.mark.parametrize("variant", SPECIALIZED)
def test_the_specialised_variant_runs_on_its_hardware_and_is_refused_elsewhere(device: str, variant: str) -> None:
    a = build("chain", device, head_dim=64, v_head_dim=64)
    arch = arch_of(torch.device(device))
    with launches() as seen:
        if arch == ARCH:
            check(a, variant=variant, splits=8)
            split = variant == "specialized_split"
            ran, plan = list(seen), plan_for(a, divide=split, kernel="specialized")
            assert names(ran) == LAUNCHES[variant][:-1] + attends(plan)
            assert attention(ran).constants["SPLIT"] is split
            return
        with pytest.raises(SpecverifyError, match=f"variant {variant} cannot serve this call: it is written for {ARCH}"):
            call(a, variant=variant)
    assert seen == []


def test_divided_runs_divide(device: str) -> None:
    """The planner divides a prefix of 700 keys, so that the variant is more than a name."""
    a = build("chain", device, prefix_lens=(700, 40), q_heads=1)
    with launches() as seen:
        check(a, variant="fused_split", splits=8)
    plan = seen[0].arguments["plan"]
    parts = {int(row[0]): int(row[4]) for row in plan[: 8 * seen[0].arguments["capacity"]].view(-1, 8)}
    assert parts[0] >= 2 and parts[1] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_auto_runs_a_kernel_and_is_right(device: str, kind: str) -> None:
    for lens in ((300, 40), (5, 0), (700,)):
        a = build(kind, device, prefix_lens=lens)
        with launches() as seen:
            check(a, variant="auto", splits=8)
        ran = [name for name in names(seen) if name != "plan_kernel"]
        assert ran == attends(plan_for(a, divide=attention(seen).constants["SPLIT"]))


def test_auto_with_a_plan_takes_the_divided_kernel(device: str) -> None:
    a = build("chain", device)
    plan = divided(a, [[0, 128], [0]])
    assert items(plan)[0, 4] == 2
    with launches() as seen:
        check(a, variant="auto", plan=plan, splits=2)
    assert names(seen) == attends(plan) and seen[0].constants["SPLIT"] is True


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp64 q": ({"q_dtype": torch.float64, "cache_dtype": torch.float64}, "q is float64"),
    "another type of cache": ({"q_dtype": torch.bfloat16, "cache_dtype": torch.float16}, "k_cache is float16"),
    "wide head": ({"head_dim": 320}, "head dims 320 and 16"),
    "wide value head": ({"v_head_dim": 512}, "head dims 16 and 512"),
}


@pytest.mark.parametrize("variant", ["fused", "fused_split"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_variant_that_cannot_serve_says_why(device: str, name: str, variant: str) -> None:
    changes, reason = REFUSED[name]
    a = build("chain", device, **changes)
    with launches() as seen, pytest.raises(SpecverifyError, match=f"variant {variant} cannot serve this call: {reason}"):
        call(a, variant=variant)
    assert not seen


@pytest.mark.parametrize("name", REFUSED)
def test_auto_falls_back_to_the_reference_on_a_cpu_only(device: str, name: str) -> None:
    a = build("chain", device, **REFUSED[name][0])
    if device == "cuda":
        with pytest.raises(SpecverifyError, match=REFUSED[name][1]):
            call(a, variant="auto")
        return
    with launches() as seen:
        out, _ = call(a, variant="auto")
    assert not seen and torch.equal(out, call(a, variant="reference")[0])


@pytest.mark.parametrize("outputs", ["out", "lse"])
def test_fp64_outputs_are_the_references(device: str, outputs: str) -> None:
    a = build("chain", device)
    rows = len(a["q"])
    where = {
        "out": torch.zeros(rows, 2, 16, dtype=torch.float64, device=device),
        "lse": torch.zeros(rows, 2, dtype=torch.float64, device=device),
    }
    with pytest.raises(SpecverifyError, match="FP64 outputs"):
        call(a, **{outputs: where[outputs]})


def test_ragged_rows_need_a_most(device: str) -> None:
    """The grid is known on the host only, so a launch needs to know the most rows of a request."""
    a = build("chain", device, widths=(3, 1))
    assert "num_draft_tokens" not in a
    with pytest.raises(SpecverifyError, match="q_offsets came without num_draft_tokens"):
        call(a)
    check({**a, "num_draft_tokens": 3})


@pytest.mark.parametrize("name", ["", "fuse", "FUSED", "triton"])
def test_unknown_variants(device: str, name: str) -> None:
    with launches() as seen, pytest.raises(ArgumentError, match="variant: got"):
        call(build("chain", device), variant=name)
    assert not seen


GPU = VariantFacts(device="cuda", programs=64, fill=264, longest=100_000)


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        (GPU, "fused_split"),
        (VariantFacts(device="cuda", programs=64, fill=264, longest=512), "fused"),
        (VariantFacts(device="cuda", programs=200, fill=264), "fused"),
        (VariantFacts(device="cuda", programs=200, fill=264, deterministic=True), "fused_split"),
        (VariantFacts(device="cuda", programs=200, fill=264, divided=True), "fused_split"),
        (VariantFacts(device="cuda", programs=1, fill=264, divided=False), "fused"),
        (VariantFacts(device="cpu"), "reference"),
        (VariantFacts(device="cpu", interpreting=True, longest=100), "fused"),
        (VariantFacts(device="cpu", interpreting=True, refusal="no"), "reference"),
    ],
)
def test_the_choice_is_a_pure_function_with_a_reason(facts: VariantFacts, want: str) -> None:
    choice = choose_variant("auto", facts)
    assert choice.name == want and choice.reason
    assert choose_variant("auto", facts) == choice


@pytest.mark.parametrize("variant", ["auto", "fused", "fused_split"])
def test_nothing_serves_other_devices(variant: str) -> None:
    with pytest.raises(SpecverifyError, match="xpu"):
        choose_variant(variant, VariantFacts(device="xpu"))


@pytest.mark.parametrize("variant", ["fused", "fused_split"])
def test_kernels_need_the_interpreter_on_a_cpu(variant: str) -> None:
    with pytest.raises(SpecverifyError, match="TRITON_INTERPRET=1"):
        choose_variant(variant, VariantFacts(device="cpu", interpreting=False))


def test_reference_is_refused_in_a_capture() -> None:
    with pytest.raises(SpecverifyError, match="cannot be captured"):
        choose_variant("reference", VariantFacts(device="cuda", capturing=True))


def test_the_comparison_does_not_depend_on_the_variant(device: str) -> None:
    """All variants of one call lie within the same bounds of the same numbers."""
    a = build("qlen_only", device)
    # The specialised one takes no head dim of 16; `test_specialized.py` holds it to the same bounds.
    results = {variant: call(a, variant=variant) for variant in VARIANTS if variant not in SPECIALIZED}
    for out, lse in results.values():
        compare(a, out, lse, splits=8)
    assert not torch.equal(results["fused"][1], results["reference"][1]), "two implementations, not one under two names"
