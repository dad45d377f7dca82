"""The rows of the Triton kernels: what each takes on which hardware over which base, and each refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify.flags import Flags
from sglang_specverify.hardware import NO_GPU, from_name
from sglang_specverify.routing import CallFacts, Decision, LayerFacts, LayerKind, Mode, ServerFacts, decide, require
from sglang_specverify.routing.tree import (
    BATCHED_CONTEXT,
    FEW_ROWS,
    SHORT_CONTEXT,
    SPECIALIZED_CONTEXT,
    TreeFacts,
    alone_from,
    refuse_tile,
)

LAYER = LayerFacts(LayerKind.FULL, 32, 8, 128, 128)
WINDOW = replace(LAYER, kind=LayerKind.WINDOW, window=127)
TREE = ServerFacts("fa3", "EAGLE3", 16, 8, 64, context=40960)
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
        decision = ask(mode, server, layer, from_name(hardware))
        assert decision.kernel == "fused"
        assert "triton lies underneath" in refusal(decision, "prefix_tile") or mode is not Mode.TARGET_VERIFY or layer is WINDOW


@pytest.mark.parametrize("mode", CLAIMED)
def test_aiter_has_no_kernel_yet(mode: Mode) -> None:
    decision = ask(mode, replace(CHAIN, base="aiter"), hardware=from_name("gfx950"))
    assert not decision.served
    assert "not wired to SGLang's aiter backend" in decision.reason


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
        assert ask(server=replace(TREE, base=base, kv_cache_dtype=cache), tree_kernel="fused").kernel == "fused"
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
    assert one.kernel == "fused"
    assert "SGLANG_SPECVERIFY_TREE_KERNEL=fused" in refusal(one, "prefix_tile")
    short = replace(TREE, context=512)
    assert ask(server=short).kernel == "fused"
    assert ask(server=short, tree_kernel="tile").kernel == "prefix_tile"


@pytest.mark.parametrize(
    ("server", "layer", "kernel"),
    [
        ({}, {}, "fused"),
        ({"context": SPECIALIZED_CONTEXT + 1}, {}, "prefix_tile"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "prefix_tile"),
        ({}, {"head_dim": 256, "v_head_dim": 256}, "prefix_tile"),
        ({}, {"head_dim": 128, "v_head_dim": 64}, "prefix_tile"),
        ({}, {"softcap": 30.0}, "prefix_tile"),
        ({"num_draft_tokens": 16}, {}, "prefix_tile"),
    ],
)
def test_specialised_warps_make_longer_contexts_short(server: dict[str, Any], layer: dict[str, Any], kernel: str) -> None:
    """Where that kernel does not take a layer, 8192 tokens are not short."""
    wide = replace(TREE, num_draft_tokens=64, context=SPECIALIZED_CONTEXT)
    full = replace(LAYER, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
    assert ask(server=replace(wide, **server), layer=replace(full, **layer)).kernel == kernel


WIDE = replace(TREE, num_draft_tokens=64)
SM90 = replace(H200, multiprocessors=132)


def test_large_batches_go_to_the_one_kernel() -> None:
    """W 64 with 4 query heads for each of 8 KV heads: 16 tiles a request, of which 5 requests fill more than half of 132."""
    decision = ask(server=WIDE, hardware=SM90)
    assert decision.kernel == "prefix_tile" and decision.alone_from == 5
    assert "from 5 requests on in one kernel" in decision.reason
    assert decision.at(4) is decision and decision.at(0) is decision
    large = decision.at(5)
    assert large.kernel == "fused" and large.served and large.claimed and "from 5 requests on" in large.reason
    assert large.at(9) is large


@pytest.mark.parametrize(
    ("server", "layer", "hardware", "flags"),
    [
        ({"context": BATCHED_CONTEXT + 1}, {}, {}, {}),
        ({"context": 0}, {}, {}, {}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, {}, {}),
        ({}, {"head_dim": 256, "v_head_dim": 256}, {}, {}),
        ({}, {}, {"multiprocessors": 0}, {}),
        ({}, {}, {}, {"tree_kernel": "tile"}),
    ],
)
def test_where_batches_of_any_size_keep_the_tile(
    server: dict[str, Any], layer: dict[str, Any], hardware: dict[str, Any], flags: dict[str, Any]
) -> None:
    decision = ask(server=replace(WIDE, **server), layer=replace(LAYER, **layer), hardware=replace(SM90, **hardware), **flags)
    assert decision.kernel == "prefix_tile" and decision.alone_from is None
    assert decision.at(1000) is decision


@pytest.mark.parametrize(("width", "kv_heads", "least"), [(64, 8, 5), (128, 8, 3), (64, 1, 34), (33, 8, 5), (256, 8, 2)])
def test_the_batch_whose_tiles_fill_the_device(width: int, kv_heads: int, least: int) -> None:
    facts = replace(FACTS, width=width, specialized=True)
    found = alone_from(facts, kv_heads, 132)
    assert found == least
    tiles = -(-width * facts.group // 128) * kv_heads
    assert 2 * tiles * found > 132 >= 2 * tiles * (found - 1)
    assert alone_from(replace(facts, specialized=False), kv_heads, 132) is None
    assert alone_from(replace(facts, deterministic=True), kv_heads, 132) is None


def test_what_the_specialised_kernel_takes_is_said_twice_alike() -> None:
    from sglang_specverify.kernels import specialized, variants
    from sglang_specverify.routing import tree

    said = tree.SPECIALIZED_ARCH, tree.SPECIALIZED_HEAD_DIMS, tree.SPECIALIZED_ROWS, tree.SPECIALIZED_TILE
    assert said == (specialized.ARCH, specialized.HEAD_DIMS, variants.FEW_ROWS, specialized.BLOCK_M)


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
        assert decision.kernel in ("prefix_tile", "fused")
        assert reason in refusal(decision, "prefix_gather")
    deep = replace(TREE, num_steps=63, num_draft_tokens=128)
    assert ask(server=deep, tree_kernel="gather").kernel == "prefix_gather"
    assert ask(server=replace(TREE, algorithm="NGRAM", num_draft_tokens=64), tree_kernel="gather").kernel == "prefix_gather"


def test_sglangs_own_switch_for_chains() -> None:
    off = replace(CHAIN, base="triton", splitkv_verify=False)
    decision = ask(server=off)
    assert not decision.served
    assert "SGLANG_ENABLE_SPLITKV_VERIFY=0" in decision.reason
    assert ask(Mode.DRAFT_DECODE, off).kernel == "fused"
    assert ask(server=replace(TREE, base="triton", splitkv_verify=False)).kernel == "fused"


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
        (replace(FACTS, specialized=True), None),
        (replace(FACTS, specialized=True, context=SPECIALIZED_CONTEXT + 1), None),
        (replace(FACTS, specialized=True, context=SPECIALIZED_CONTEXT), "is short"),
        (replace(FACTS, specialized=True, context=0), None),
    ],
)
def test_the_rule_for_trees(facts: TreeFacts, reason: str | None) -> None:
    refused = refuse_tile(facts)
    assert refused is None if reason is None else reason in (refused or "")
