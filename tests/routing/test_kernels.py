"""The rows of the Triton kernels: what each takes on which hardware over which base, and each refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify.flags import Flags
from sglang_specverify.hardware import NO_GPU, Hardware, from_name
from sglang_specverify.routing import CallFacts, Decision, LayerFacts, LayerKind, Mode, ServerFacts, decide, require
from sglang_specverify.routing.tree import (
    FEW_ROWS,
    MAX_LISTED,
    SHORT_CONTEXT,
    SPECIALIZED_CONTEXT,
    TreeFacts,
    refuse_tile,
)

LAYER = LayerFacts(LayerKind.FULL, 32, 8, 128, 128)
WINDOW = replace(LAYER, kind=LayerKind.WINDOW, window=127)
TREE = ServerFacts("fa3", "EAGLE3", 16, 8, 64, context=131072)
CHAIN = replace(TREE, topk=1, num_steps=3, num_draft_tokens=4)
H200 = from_name("sm_90")
CLAIMED = (Mode.TARGET_VERIFY, Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND)


def ask(
    mode: Mode = Mode.TARGET_VERIFY, server: ServerFacts = TREE, layer: LayerFacts = LAYER, hardware: Any = H200,
    arguments: frozenset[str] = frozenset(), **flags: Any,
) -> Decision:  # fmt: skip
    return decide(hardware, server, layer, mode, Flags(**flags), CallFacts(arguments))


def refusal(decision: Decision, name: str) -> str:
    return next(row.reason for row in decision.rejected if row.name == name)


def test_a_tree_over_fa3() -> None:
    assert ask().kernel == "prefix_tile"
    assert ask(Mode.DRAFT_DECODE).kernel == "fused"
    window = ask(layer=WINDOW)
    assert window.kernel == "fused"
    assert "does not know layers of sliding window" in refusal(window, "prefix_tile")
    for decision in (ask(), window, ask(Mode.DRAFT_DECODE)):
        assert decision.claimed
        require(decision, Flags(strict=True))


@pytest.mark.parametrize("base", ["fa3", "fa4"])
def test_chains_and_draft_extend_stay_with_flash_attention(base: str) -> None:
    left = [(mode, replace(CHAIN, base=base)) for mode in CLAIMED] + [(Mode.DRAFT_EXTEND, replace(TREE, base=base))]
    for mode, server in left:
        decision = ask(mode, server)
        assert decision.kernel == "stock"
        assert "SGLANG_SPECVERIFY_CHAIN_KERNEL=fused" in decision.reason
        assert not decision.claimed
        require(decision, Flags(strict=True))
        assert ask(mode, server, chain_kernel="fused").kernel == "fused"


@pytest.mark.parametrize("base", ["fa3", "fa4"])
def test_a_chain_of_few_requests_is_verified_by_the_kernel_that_is_faster_there(base: str) -> None:
    few = replace(CHAIN, base=base, requests=8)
    assert ask(server=few).kernel == "fused" and ask(server=few).claimed
    # Its drafts stay, and so does everything that was not compared.
    for mode in (Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND):
        assert "keeps the drafts of chains" in ask(mode, few).reason
    assert ask(server=few, chain_kernel="base").reason.startswith("SGLANG_SPECVERIFY_CHAIN_KERNEL=base")
    for server, said in (
        (replace(few, requests=9), "9 requests at once"),
        (replace(few, requests=0), "no limit of requests"),
        (replace(few, deterministic=True), "deterministic"),
        (replace(few, kv_cache_dtype="fp8_e4m3"), "FP8 cache"),
        (replace(few, num_draft_tokens=5), "20 query rows"),
        (replace(few, requests=1, num_draft_tokens=9), "36 query rows"),
    ):
        decision = ask(server=server)
        assert decision.kernel == "stock" and said in decision.reason, said
    for layer in (WINDOW, replace(LAYER, kind=LayerKind.MLA), replace(LAYER, has_sinks=True), replace(LAYER, softcap=50.0)):
        assert "full attention of head dim 128 without sinks" in ask(server=few, layer=layer).reason
    # What no route takes is nobody's miss: unasked for, and no error in strict mode.
    for server in (replace(few, algorithm="DFLASH"), replace(few, dtype="float32"), replace(few, two_batch_overlap=True)):
        decision = ask(server=server)
        assert not decision.served and not decision.claimed and decision.reason.startswith("FlashAttention keeps chains: ")
        require(decision, Flags(strict=True))
    for dim in (64, 256):
        assert "head dim 128" in ask(server=few, layer=replace(LAYER, head_dim=dim, v_head_dim=dim)).reason
    assert "not with 16" in ask(server=few, layer=replace(LAYER, q_heads=64, kv_heads=16)).reason
    assert ask(server=replace(few, requests=1, num_draft_tokens=8)).kernel == "fused"
    assert "SM90 alone" in ask(server=few, hardware=from_name("sm_100")).reason


def test_an_opt_out_wins_over_a_request() -> None:
    decision = ask(server=CHAIN, chain_kernel="fused", chain=False)
    assert not decision.served
    assert decision.reason.startswith("SGLANG_SPECVERIFY_CHAIN=0")


@pytest.mark.parametrize("hardware", ["sm_90", "sm_100", "sm_103", "sm_107", "gfx942", "gfx950"])
@pytest.mark.parametrize("mode", CLAIMED)
@pytest.mark.parametrize("server", [TREE, CHAIN], ids=["tree", "chain"])
def test_everything_over_triton(server: ServerFacts, mode: Mode, hardware: str) -> None:
    server = replace(server, base="triton")
    for layer in (LAYER, WINDOW):
        decision = ask(mode, server, layer, from_name(hardware), gfx942=True)
        wide = hardware == "sm_90" and mode is Mode.TARGET_VERIFY and layer is LAYER and server.topk > 1
        assert decision.kernel == ("specialized" if wide else "fused")
        assert "triton lies underneath" in refusal(decision, "prefix_tile") or mode is not Mode.TARGET_VERIFY or layer is WINDOW


@pytest.mark.parametrize(
    ("server", "layer", "hardware", "reason"),
    [
        (replace(TREE, base="triton"), LAYER, "sm_120", "no launch table for sm_120"),
        (replace(TREE, base="triton"), LAYER, "sm_80", "no launch table for sm_80"),
        (TREE, replace(LAYER, head_dim=512, v_head_dim=512), "sm_90", "head dim 512 is over its 256"),
        (TREE, replace(LAYER, v_head_dim=320), "sm_90", "head dim 320"),
        (replace(TREE, base="triton", dtype="float32"), LAYER, "sm_90", "float32 on a GPU is not tested"),
        (replace(TREE, kv_cache_dtype="float16"), LAYER, "sm_90", "a float16 cache beside bfloat16"),
        (replace(TREE, dtype="half", kv_cache_dtype="bf16"), LAYER, "sm_90", "a bfloat16 cache beside float16"),
        (replace(TREE, base="triton", kv_cache_dtype="fp8_e4m3"), LAYER, "gfx942", "whose FP8 is another"),
        (TREE, replace(LAYER, q_heads=30), "sm_90", "whole ratio"),
        (TREE, replace(LAYER, kind=LayerKind.MLA), "sm_90", "MLA"),
        (TREE, replace(LAYER, kind=LayerKind.CROSS), "sm_90", "cross attention"),
        (TREE, replace(LAYER, unknown=frozenset({"use_irope"})), "sm_90", "use_irope"),
        (replace(TREE, unknown=frozenset({"KV cache sharding"})), LAYER, "sm_90", "KV cache sharding"),
        (replace(TREE, kv_cache_dtype="mxfp8"), LAYER, "sm_90", "mxfp8"),
        (replace(TREE, dtype="float64"), LAYER, "sm_90", "float64"),
        (replace(TREE, algorithm="FROZEN_KV_MTP"), LAYER, "sm_90", "FROZEN_KV_MTP"),
        (replace(TREE, two_batch_overlap=True), LAYER, "sm_90", "two-batch overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_what_no_kernel_takes(server: ServerFacts, layer: LayerFacts, hardware: str, reason: str) -> None:
    decision = ask(server=server, layer=layer, hardware=from_name(hardware))
    assert not decision.served
    assert reason in decision.reason
    assert decision.claimed


@pytest.mark.parametrize("argument", ["score_mod", "rel_bias", "q_rope", "k_descale", "something_new"])
def test_unknown_arguments(argument: str) -> None:
    assert ask(arguments=frozenset({"sinks"})).kernel == "prefix_tile"
    decision = ask(arguments=frozenset({"sinks", argument}))
    assert not decision.served
    assert argument in decision.reason


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2"])
def test_caches(cache: str) -> None:
    for base in ("fa3", "triton"):
        one = ask(server=replace(TREE, base=base, kv_cache_dtype=cache), tree_kernel="fused")
        assert one.kernel == ("fused" if "8" in cache else "specialized")
    tile = ask(server=replace(TREE, kv_cache_dtype=cache))
    assert tile.kernel == ("fused" if "e5m2" in cache else "prefix_tile"), "FA3 reads e4m3 alone"


def test_the_tile_over_fa4() -> None:
    """What FA4's prefix pass gives was not measured; a flag may ask for it."""
    blackwell, server = from_name("sm_100"), replace(TREE, base="fa4")
    assert ask(server=server, hardware=blackwell).kernel == "fused"
    assert ask(server=server, hardware=blackwell, tree_kernel="tile").kernel == "prefix_tile"
    fp8 = ask(server=replace(server, kv_cache_dtype="fp8_e4m3"), hardware=blackwell, tree_kernel="tile")
    assert fp8.kernel == "fused"
    assert "FA4's prefix pass over an FP8 cache" in refusal(fp8, "prefix_tile")


def test_the_flag_chooses_the_kernel_of_trees() -> None:
    one = ask(tree_kernel="fused")
    assert one.kernel == "specialized"
    assert ask(server=replace(TREE, num_draft_tokens=16), tree_kernel="fused").kernel == "fused"
    assert "SGLANG_SPECVERIFY_TREE_KERNEL=fused" in refusal(one, "prefix_tile")
    short = replace(TREE, context=512)
    assert ask(server=short).kernel == "specialized"
    assert ask(server=short, tree_kernel="tile").kernel == "prefix_tile"


@pytest.mark.parametrize(
    ("server", "layer", "kernel"),
    [
        ({}, {}, "specialized"),
        ({"context": SPECIALIZED_CONTEXT + 1}, {}, "prefix_tile"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "prefix_tile"),
        ({}, {"head_dim": 256, "v_head_dim": 256}, "prefix_tile"),
        ({}, {"head_dim": 128, "v_head_dim": 64}, "prefix_tile"),
        ({}, {"softcap": 30.0}, "prefix_tile"),
        ({"num_draft_tokens": 16}, {}, "prefix_tile"),
    ],
)
def test_specialised_warps_make_longer_contexts_short(server: dict[str, Any], layer: dict[str, Any], kernel: str) -> None:
    """Where that kernel does not take a layer, 40960 tokens are not short."""
    wide = replace(TREE, num_draft_tokens=64, context=SPECIALIZED_CONTEXT)
    full = replace(LAYER, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
    assert ask(server=replace(wide, **server), layer=replace(full, **layer)).kernel == kernel


@pytest.mark.parametrize(
    ("mode", "server", "layer", "machine", "reason"),
    [
        (Mode.TARGET_VERIFY, {"kv_cache_dtype": "fp8_e4m3"}, {}, H200, "does not read a fp8_e4m3 cache"),
        (
            Mode.TARGET_VERIFY,
            {"base": "triton"},
            {"window": 100, "kind": LayerKind.WINDOW},
            H200,
            "does not know layers of sliding window",
        ),
        (Mode.TARGET_VERIFY, {}, {"head_dim": 256, "v_head_dim": 256}, H200, "head dims 256 and 256"),
        (Mode.TARGET_VERIFY, {}, {"head_dim": 128, "v_head_dim": 64}, H200, "head dims 128 and 64"),
        (Mode.TARGET_VERIFY, {}, {"softcap": 30.0}, H200, "it does not cap scores"),
        (Mode.TARGET_VERIFY, {"num_draft_tokens": 16}, {}, H200, "64 query rows for each KV head fill no tile"),
        (Mode.TARGET_VERIFY, {"deterministic": True}, {}, H200, "deterministic inference"),
        (Mode.TARGET_VERIFY, {"base": "triton"}, {}, from_name("B200"), "written for sm_90, and this is SM100"),
        (Mode.DRAFT_DECODE, {}, {}, H200, "does not serve draft_decode"),
    ],
)
def test_what_specialised_warps_refuse(
    mode: Mode, server: dict[str, Any], layer: dict[str, Any], machine: Hardware, reason: str
) -> None:
    wide = replace(TREE, num_draft_tokens=64, context=SPECIALIZED_CONTEXT)
    full = replace(LAYER, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
    assert ask(server=wide, layer=full).kernel == "specialized"
    decision = ask(mode, replace(wide, **server), layer=replace(full, **layer), hardware=machine)
    assert decision.kernel != "specialized"
    assert reason in refusal(decision, "specialized")


def test_wide_chains_over_triton_go_to_specialised_warps() -> None:
    full = replace(LAYER, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
    chain = replace(CHAIN, base="triton", num_steps=16, num_draft_tokens=17)
    assert ask(server=chain, layer=full).kernel == "specialized"
    assert ask(server=replace(chain, num_steps=15, num_draft_tokens=16), layer=full).kernel == "fused"
    assert "SGLANG_ENABLE_SPLITKV_VERIFY=0" in refusal(
        ask(server=replace(chain, splitkv_verify=False), layer=full), "specialized"
    )


def test_what_the_specialised_kernel_takes_is_said_twice_alike() -> None:
    from sglang_specverify.kernels import specialized, variants
    from sglang_specverify.routing import tree

    said = tree.SPECIALIZED_ARCH, tree.SPECIALIZED_HEAD_DIMS, tree.SPECIALIZED_ROWS
    assert said == (specialized.ARCH, specialized.HEAD_DIMS, variants.FEW_ROWS)


def test_the_gathered_suffix() -> None:
    """Each row's own drafts after FlashAttention's prefix pass, where a flag asks and the rows are short."""
    assert ask(tree_kernel="gather").kernel == "prefix_gather"
    assert "where SGLANG_SPECVERIFY_TREE_KERNEL=gather asks" in refusal(ask(), "prefix_gather")
    for server, layer, reason in (
        (replace(TREE, num_steps=64, num_draft_tokens=65), LAYER, "a row may see 65 drafts"),
        (replace(TREE, algorithm="NGRAM", num_draft_tokens=65), LAYER, "a row may see 65 drafts"),
        (TREE, replace(LAYER, head_dim=192, v_head_dim=192), "head dim 192 is over its 128"),
        (replace(TREE, base="triton"), LAYER, "triton lies underneath"),
    ):
        decision = ask(server=server, layer=layer, tree_kernel="gather")
        assert decision.kernel == ("specialized" if server.base == "triton" else "prefix_flash")
        assert reason in refusal(decision, "prefix_gather")
        assert server.base == "triton" or reason in decision.reason
    deep = replace(TREE, num_steps=63, num_draft_tokens=128)
    assert ask(server=deep, tree_kernel="gather").kernel == "prefix_gather"
    assert ask(server=replace(TREE, algorithm="NGRAM", num_draft_tokens=64), tree_kernel="gather").kernel == "prefix_gather"


def test_the_drafts_through_flash_attention() -> None:
    """Where a flag asks, whatever the depth and head dim; by itself only where `gather` asks and does not fit."""
    assert ask(tree_kernel="flash").kernel == "prefix_flash"
    for kernel in ("auto", "fused", "tile", "gather"):
        assert "TREE_KERNEL=flash asks for it" in refusal(ask(tree_kernel=kernel), "prefix_flash")
    assert ask(layer=replace(LAYER, head_dim=256, v_head_dim=256), tree_kernel="flash").kernel == "prefix_flash"
    assert ask(server=replace(TREE, base="fa4"), hardware=from_name("sm_100"), tree_kernel="flash").kernel == "prefix_flash"
    for server, reason in (
        (replace(TREE, base="triton"), "triton lies underneath"),
        (replace(TREE, base="fa4", kv_cache_dtype="fp8_e4m3"), "FA4's prefix pass over an FP8 cache"),
        (replace(TREE, num_draft_tokens=MAX_LISTED + 1), "over the 256 that are listed"),
    ):
        assert reason in refusal(ask(server=server, tree_kernel="flash"), "prefix_flash")
    wide = ask(server=replace(TREE, num_draft_tokens=MAX_LISTED), tree_kernel="flash")
    assert wide.kernel == "prefix_flash"


def test_what_is_listed_for_each_row_is_said_twice_alike() -> None:
    from sglang_specverify.kernels.compact import MAX_DRAFTS

    assert MAX_LISTED == MAX_DRAFTS


def test_sglangs_own_switch_for_chains() -> None:
    off = replace(CHAIN, base="triton", splitkv_verify=False)
    decision = ask(server=off)
    assert not decision.served
    assert "SGLANG_ENABLE_SPLITKV_VERIFY=0" in decision.reason
    assert ask(Mode.DRAFT_DECODE, off).kernel == "fused"
    assert ask(server=replace(TREE, base="triton", splitkv_verify=False)).kernel == "specialized"


def test_ngram_of_breadth_one_is_a_tree() -> None:
    server = replace(CHAIN, algorithm="NGRAM", num_draft_tokens=12)
    assert ask(server=server).kernel == "prefix_tile"
    assert ask(server=replace(server, base="triton", splitkv_verify=False)).kernel == "fused"


def test_opting_out_of_trees_means_ngram_of_breadth_one_too() -> None:
    server = replace(CHAIN, algorithm="NGRAM", num_draft_tokens=12)
    assert ask(server=server, tree=False).reason.startswith("SGLANG_SPECVERIFY_TREE=0")
    assert ask(server=server, chain=False).kernel == "prefix_tile"
    assert ask(server=replace(CHAIN, base="triton"), tree=False).kernel == "fused"


def test_without_a_gpu() -> None:
    server = replace(TREE, base="triton", dtype="float32", cuda_graph=False)
    assert "SGLANG_SPECVERIFY_KERNELS=triton" in refusal(ask(server=server, hardware=NO_GPU), "fused")
    assert ask(server=server, hardware=NO_GPU, kernels="triton").kernel == "fused"


FACTS = TreeFacts("sm_90", 64, 4, 40960, deterministic=False)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (FACTS, None),
        (replace(FACTS, context=0), None),
        (replace(FACTS, context=SHORT_CONTEXT + 1), None),
        (replace(FACTS, width=FEW_ROWS // 4 + 1), None),
        (replace(FACTS, context=SHORT_CONTEXT), "is short"),
        (replace(FACTS, width=FEW_ROWS // 4), "are few"),
        (replace(FACTS, deterministic=True), "deterministic"),
        (replace(FACTS, arch="sm_100"), "measured on SM90 alone"),
        (replace(FACTS, specialized=True, context=SPECIALIZED_CONTEXT + 1), None),
        (replace(FACTS, specialized=True, context=SPECIALIZED_CONTEXT), "is short"),
        (replace(FACTS, specialized=True, context=0), None),
    ],
)
def test_the_rule_for_trees(facts: TreeFacts, reason: str | None) -> None:
    refused = refuse_tile(facts)
    assert refused is None if reason is None else reason in (refused or "")
