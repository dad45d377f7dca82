"""Which built-in backend lies underneath: the table, each refusal, the override, and requests that go past the plugin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import BASES, Flags
from sglang_specverify.hardware import from_name
from sglang_specverify.routing import BaseDecision, ModelFacts, ServerFacts, check_request, check_server, choose_base

AITER = frozenset({"aiter"})
MODEL = ModelFacts(("Qwen3ForCausalLM",), frozenset({(128, 128)}))
SERVER = ServerFacts(base="")
TREE = replace(SERVER, algorithm="EAGLE", topk=4, num_steps=3, num_draft_tokens=8)


def choose(
    hardware: str,
    model: ModelFacts = MODEL,
    server: ServerFacts = SERVER,
    flags: Flags = Flags(),  # noqa: B008
    installed: frozenset[str] = AITER,
) -> BaseDecision:
    return choose_base(from_name(hardware), model, server, flags, installed)


@pytest.mark.parametrize(
    ("hardware", "base"),
    [
        ("sm_90", "fa3"),
        ("sm_100", "fa4"),
        ("sm_103", "fa4"),
        ("sm_107", "fa4"),
        ("gfx942", "aiter"),
        ("gfx950", "aiter"),
        ("none", "triton"),
        ("sm_80", "triton"),
        ("sm_120", "triton"),
        ("gfx90a", "triton"),
    ],
)
def test_the_table(hardware: str, base: str) -> None:
    decision = choose(hardware)
    assert decision.base == base
    assert decision.reason
    assert {rejected.name for rejected in decision.rejected} == set(BASES) - {base}
    assert all(rejected.reason for rejected in decision.rejected)
    # The choice is the same while nothing is known of the model yet.
    assert choose(hardware, ModelFacts()).base == base


def _dims(*pairs: tuple[int, int]) -> ModelFacts:
    return replace(MODEL, head_dims=frozenset(pairs))


@pytest.mark.parametrize(
    ("hardware", "preferred", "model", "server", "why"),
    [
        ("sm_100", "fa4", _dims((256, 256)), SERVER, "head dim 256"),
        ("sm_107", "fa4", _dims((128, 128), (192, 192)), SERVER, "head dim 192"),
        ("sm_103", "fa4", _dims((192, 64)), SERVER, "192 with 64 for V"),
        ("sm_100", "fa4", MODEL, replace(SERVER, kv_cache_dtype="fp8_e5m2"), "fp8_e5m2"),
        ("sm_100", "fa4", MODEL, replace(SERVER, kv_cache_dtype="nvfp4"), "nvfp4"),
        ("sm_100", "fa4", MODEL, replace(TREE, page_size=16), "page size 16"),
        ("sm_100", "fa4", MODEL, replace(SERVER, dtype="float32"), "float32"),
        ("sm_100", "fa4", replace(MODEL, architectures=("Llama4ForConditionalGeneration",)), SERVER, "Llama4"),
        ("sm_103", "fa4", MODEL, replace(TREE, algorithm="FROZEN_KV_MTP"), "frozen-KV"),
        ("sm_90", "fa3", MODEL, replace(TREE, plan_stream=True), "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
        ("sm_90", "fa3", MODEL, replace(SERVER, kv_cache_dtype="fp8_e5m2"), "fp8_e5m2"),
        ("sm_90", "fa3", MODEL, replace(SERVER, kv_cache_dtype="nvfp4"), "nvfp4"),
        ("sm_90", "fa3", MODEL, replace(SERVER, dtype="float"), "float32"),
        ("sm_90", "fa3", MODEL, replace(SERVER, kv_cache_dtype="float32"), "float32"),
        ("sm_90", "fa3", _dims((512, 512)), SERVER, "head dim 512"),
        ("sm_90", "fa3", replace(MODEL, architectures=("Gemma4ForCausalLM",)), SERVER, "Gemma4"),
        ("sm_90", "fa3", MODEL, replace(TREE, algorithm="FROZEN_KV_MTP"), "frozen-KV"),
        ("gfx950", "aiter", MODEL, replace(TREE, page_size=16), "SGLang refuses aiter for topk 4"),
        ("gfx950", "aiter", _dims((512, 512)), TREE, "would verify a tree as a chain"),
        ("gfx950", "aiter", replace(MODEL, is_mla=True), replace(TREE, algorithm="NGRAM", topk=1), "takes this one: MLA"),
        ("gfx950", "aiter", MODEL, replace(TREE, dtype="float32"), "takes this one: float32"),
        ("gfx950", "aiter", MODEL, replace(TREE, plan_stream=True), "before the draft has filled the tree's mask"),
        ("gfx942", "aiter", MODEL, replace(TREE, kv_cache_dtype="fp8_e4m3"), "fp8_e4m3 cache on gfx942"),
        ("gfx950", "aiter", MODEL, replace(TREE, algorithm="FROZEN_KV_MTP"), "frozen-KV"),
        ("gfx942", "aiter", MODEL, replace(SERVER, deterministic=True), "deterministic"),
        ("gfx950", "aiter", MODEL, replace(SERVER, kv_cache_dtype="nvfp4"), "nvfp4"),
        ("gfx950", "aiter", replace(MODEL, architectures=("Exaone4ForCausalLM",)), SERVER, "Exaone4"),
    ],
)
def test_triton_where_the_preferred_base_cannot(
    hardware: str, preferred: str, model: ModelFacts, server: ServerFacts, why: str
) -> None:
    assert choose(hardware).base == preferred
    decision = choose(hardware, model, server)
    assert decision.base == "triton"
    assert why in decision.reason
    assert why in next(rejected.reason for rejected in decision.rejected if rejected.name == preferred)


@pytest.mark.parametrize("opt_out", ["disable", "tree", "draft_decode"])
def test_a_tree_that_was_opted_out_leaves_aiter(opt_out: str) -> None:
    """SGLang's aiter backend would verify it as a chain, so it is not aiter's to serve; NGRAM has no draft steps."""
    flags = replace(Flags(), **{opt_out: opt_out == "disable"})
    decision = choose("gfx950", server=TREE, flags=flags)
    assert decision.base == "triton"
    assert f"SGLANG_SPECVERIFY_{opt_out.upper()}=" in decision.reason
    assert choose("gfx950", server=replace(TREE, topk=1), flags=flags).base == "aiter"
    ngram = choose("gfx950", server=replace(TREE, algorithm="NGRAM"), flags=flags)
    assert ngram.base == ("aiter" if opt_out == "draft_decode" else "triton")


def test_aiter_that_is_not_installed() -> None:
    decision = choose("gfx950", installed=frozenset())
    assert decision.base == "triton"
    assert "not installed" in decision.reason


@pytest.mark.parametrize(
    ("hardware", "model", "server", "base"),
    [
        # Neighbours of the refusals above that must not be refused.
        ("sm_100", _dims((128, 128), (64, 64)), SERVER, "fa4"),
        ("sm_100", _dims((192, 128)), SERVER, "fa4"),
        ("sm_100", MODEL, replace(SERVER, kv_cache_dtype="fp8_e4m3"), "fa4"),
        ("sm_100", MODEL, replace(SERVER, kv_cache_dtype="mxfp8"), "fa4"),
        ("sm_100", MODEL, TREE, "fa4"),
        ("sm_100", MODEL, replace(SERVER, page_size=128), "fa4"),
        ("sm_90", MODEL, replace(TREE, page_size=16), "fa3"),
        ("sm_90", _dims((256, 256)), SERVER, "fa3"),
        ("sm_90", MODEL, replace(SERVER, kv_cache_dtype="fp8_e4m3", deterministic=True), "fa3"),
        ("sm_90", ModelFacts(("DeepseekV3ForCausalLM",), frozenset({(576, 512)}), is_mla=True), SERVER, "fa3"),
        ("gfx950", MODEL, replace(SERVER, kv_cache_dtype="fp8_e5m2"), "aiter"),
        ("gfx950", MODEL, TREE, "aiter"),
        ("gfx942", MODEL, TREE, "aiter"),
        ("gfx950", MODEL, replace(TREE, kv_cache_dtype="fp8_e4m3"), "aiter"),
        ("gfx950", MODEL, replace(TREE, algorithm="NGRAM", topk=1, page_size=16), "aiter"),
        ("gfx950", MODEL, replace(SERVER, algorithm="EAGLE", page_size=16, plan_stream=True), "aiter"),
        ("gfx950", replace(MODEL, is_mla=True), replace(SERVER, algorithm="EAGLE"), "aiter"),
        ("none", _dims((256, 256)), replace(TREE, page_size=16, dtype="float32"), "triton"),
    ],
)
def test_no_refusal_without_its_reason(hardware: str, model: ModelFacts, server: ServerFacts, base: str) -> None:
    assert choose(hardware, model, server).base == base


@pytest.mark.parametrize(
    ("hardware", "base"), [("sm_90", "triton"), ("sm_90", "fa4"), ("sm_80", "fa3"), ("sm_100", "triton"), ("gfx950", "triton")]
)
def test_override(hardware: str, base: str) -> None:
    decision = choose(hardware, flags=Flags(base=base))
    assert decision.base == base
    assert f"SGLANG_SPECVERIFY_BASE={base}" in decision.reason


@pytest.mark.parametrize(
    ("hardware", "base", "possible"),
    [
        ("gfx950", "fa3", "triton, aiter"),
        ("sm_90", "aiter", "fa3, fa4, triton"),
        ("sm_100", "fa3", "fa4, triton"),
        ("none", "fa3", "triton"),
        ("none", "fa4", "triton"),
        ("none", "aiter", "triton"),
        ("sm_120", "fa3", "triton"),
    ],
)
def test_impossible_override_names_the_possible(hardware: str, base: str, possible: str) -> None:
    with pytest.raises(SpecverifyError) as caught:
        choose(hardware, flags=Flags(base=base))
    assert f"SGLANG_SPECVERIFY_BASE={base} cannot serve here" in caught.value.what
    assert caught.value.remedy.endswith(f": {possible}")


def test_override_with_aiter_not_installed() -> None:
    with pytest.raises(SpecverifyError, match="aiter is not installed"):
        choose("gfx950", flags=Flags(base="aiter"), installed=frozenset())


def test_override_does_not_lift_a_refusal() -> None:
    with pytest.raises(SpecverifyError, match="head dim 256"):
        choose("sm_100", _dims((256, 256)), flags=Flags(base="fa4"))
    with pytest.raises(SpecverifyError, match="SM100 and its successors alone"):
        choose("sm_90", server=replace(SERVER, kv_cache_dtype="fp8_e4m3"), flags=Flags(base="fa4"))
    with pytest.raises(SpecverifyError, match="serves MLA on SM90 alone"):
        choose("sm_80", replace(MODEL, is_mla=True), flags=Flags(base="fa3"))


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(SpecverifyError, match="only fa4 reads an mxfp8 cache"):
        choose("sm_90", server=replace(SERVER, kv_cache_dtype="mxfp8"))
    with pytest.raises(SpecverifyError, match="UNO with fa3 alone"):
        choose("sm_100", server=replace(TREE, algorithm="UNO"))
    with pytest.raises(SpecverifyError) as caught:
        choose("sm_80", server=replace(TREE, algorithm="UNO"))
    assert "fa3" in caught.value.remedy


def test_two_batch_overlap_with_a_tree_is_refused() -> None:
    check_server(replace(TREE, topk=1, two_batch_overlap=True))
    check_server(TREE)
    with pytest.raises(SpecverifyError, match="two-batch-overlap with topk 4"):
        check_server(replace(TREE, two_batch_overlap=True))
    with pytest.raises(SpecverifyError, match="two-batch-overlap"):
        choose("sm_90", server=replace(TREE, two_batch_overlap=True))


def test_ngram_trees_need_page_size_1() -> None:
    ngram = replace(TREE, algorithm="NGRAM", topk=10)
    check_server(ngram)
    check_server(replace(ngram, topk=1, page_size=16))
    with pytest.raises(SpecverifyError, match="needs page size 1; page size 16 came"):
        check_server(replace(ngram, page_size=16))


OURS = "specverify"


@pytest.mark.parametrize(
    ("names", "mode", "asked"),
    [
        ((OURS, None, None, None), "prefill", True),
        ((OURS, None, None, None), "decode", True),
        ((None, OURS, OURS, None), "prefill", True),
        ((None, OURS, None, None), "prefill", True),
        ((None, None, OURS, None), "decode", True),
        ((OURS, None, "fa3", None), "prefill", True),
        ((OURS, "fa3", None, None), "decode", True),
        (("fa3", None, None, OURS), "prefill", True),
        ((None, None, None, OURS), "prefill", True),
        (("fa3", None, None, None), "prefill", False),
        ((None, None, None, None), "prefill", False),
    ],
)
def test_requests_that_reach_the_plugin(names: tuple[str | None, ...], mode: str, asked: bool) -> None:
    attention, prefill, decode, draft = names
    assert check_request(attention, prefill, decode, draft, mode=mode, speculation=True) is asked


@pytest.mark.parametrize(
    ("names", "mode", "verifies"),
    [
        ((None, None, OURS, None), "prefill", "the one SGLang picks"),
        (("fa3", None, OURS, None), "prefill", "fa3"),
        ((OURS, "triton", None, None), "prefill", "triton"),
        ((None, OURS, None, None), "decode", "the one SGLang picks"),
        ((OURS, None, "fa3", None), "decode", "fa3"),
        ((None, None, OURS, OURS), "prefill", "the one SGLang picks"),
    ],
)
def test_requests_that_verify_would_not_reach(names: tuple[str | None, ...], mode: str, verifies: str) -> None:
    attention, prefill, decode, draft = names
    with pytest.raises(SpecverifyError) as caught:
        check_request(attention, prefill, decode, draft, mode=mode, speculation=True)
    assert "verify would not reach the plugin" in caught.value.what
    assert caught.value.what.endswith(verifies)
    assert f"--{mode}-attention-backend specverify" in caught.value.remedy
    # Without speculation there is no verify to miss.
    assert check_request(attention, prefill, decode, draft, mode=mode, speculation=False)
