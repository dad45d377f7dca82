"""Who serves what over SGLang's aiter backend, and chains on gfx942."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify.flags import Flags
from sglang_specverify.hardware import from_name
from sglang_specverify.routing import CallFacts, Decision, LayerFacts, LayerKind, Mode, ServerFacts, decide, require

LAYER = LayerFacts(LayerKind.FULL, 32, 8, 128, 128)
WINDOW = replace(LAYER, kind=LayerKind.WINDOW, window=127)
TREE = ServerFacts("aiter", "EAGLE3", 4, 3, 8)
CHAIN = replace(TREE, topk=1, num_draft_tokens=4)
UNIFIED = replace(CHAIN, unified=True, unified_verify=True)
NGRAM = replace(CHAIN, algorithm="NGRAM")
VERIFY, DECODE, EXTEND = Mode.TARGET_VERIFY, Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND


def ask(mode: Mode, server: ServerFacts, layer: LayerFacts = LAYER, hardware: str = "gfx950", sinks: bool = False,
        **flags: Any) -> Decision:  # fmt: skip
    decision = decide(from_name(hardware), server, layer, mode, Flags(**flags), CallFacts(frozenset({"sinks"} if sinks else ())))
    # Whatever stays with aiter does so by design, and is no error in strict mode.
    require(decision, Flags(strict=True))
    return decision


@pytest.mark.parametrize(
    ("mode", "server", "kernel"),
    [
        (VERIFY, TREE, "fused"),
        (VERIFY, replace(TREE, page_size=16), "fused"),
        (VERIFY, NGRAM, "fused"),
        (VERIFY, replace(NGRAM, unified=True, unified_verify=True), "fused"),
        (DECODE, TREE, "fused"),
        (DECODE, replace(TREE, unified=True, unified_verify=True), "fused"),
        (EXTEND, TREE, "stock"),
        (VERIFY, UNIFIED, "stock"),
        (DECODE, UNIFIED, "stock"),
        (EXTEND, UNIFIED, "stock"),
        # SGLang's older verify is serial over the prefix, and reads the drafts' K and V before they went through the cache.
        (VERIFY, CHAIN, "fused"),
        (VERIFY, replace(UNIFIED, unified_verify=False), "fused"),
        (DECODE, CHAIN, "stock"),
        (EXTEND, CHAIN, "stock"),
    ],
)
@pytest.mark.parametrize("layer", [LAYER, WINDOW], ids=["full", "window"])
def test_who_serves(mode: Mode, server: ServerFacts, layer: LayerFacts, kernel: str) -> None:
    if (mode, server, layer) == (DECODE, CHAIN, WINDOW):
        kernel = "fused"  # aiter's paged attention has no window
    decision = ask(mode, server, layer)
    assert decision.kernel == kernel
    if kernel == "stock":
        assert "aiter" in decision.reason and "SGLANG_SPECVERIFY_CHAIN_KERNEL=fused" in decision.reason
        assert ask(mode, server, layer, chain_kernel="fused").kernel == "fused"


def test_sinks_that_paged_attention_has_no_place_for() -> None:
    assert ask(DECODE, CHAIN).kernel == "stock"
    assert ask(DECODE, CHAIN, sinks=True).kernel == ask(DECODE, CHAIN, replace(LAYER, has_sinks=True)).kernel == "fused"
    assert ask(DECODE, UNIFIED, sinks=True).kernel == "stock"


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({"aiter_verify": False}, {(VERIFY, "chain")}),
        ({"chain": False}, {(VERIFY, "chain"), (EXTEND, "chain"), (EXTEND, "tree")}),
        ({"draft_decode": False}, {(DECODE, "chain"), (DECODE, "tree")}),
        ({"tree": False}, {(VERIFY, "tree")}),
    ],
)
def test_opt_outs(flags: dict[str, bool], left: set[Any]) -> None:
    for mode in (VERIFY, DECODE, EXTEND):
        for name, server in (("chain", CHAIN), ("tree", TREE)):
            decision = ask(mode, server, chain_kernel="fused", **flags)
            assert decision.served == ((mode, name) not in left), (mode, name)
            assert decision.served or f"SGLANG_SPECVERIFY_{next(iter(flags)).upper()}=0" in decision.reason


def test_the_opt_out_of_aiter_verify_is_of_no_other_base() -> None:
    assert ask(VERIFY, replace(CHAIN, base="triton"), aiter_verify=False).served


@pytest.mark.parametrize("base", ["triton", "aiter"])
def test_chains_on_gfx942_wait_to_be_admitted(base: str) -> None:
    """The division of a chain's prefix is for gfx95x: on gfx942 a flag admits it. Trees and their steps need no admission."""
    for mode, server, gated in ((VERIFY, CHAIN, True), (EXTEND, TREE, True), (VERIFY, TREE, False), (DECODE, TREE, False)):
        server = replace(server, base=base)
        decision = ask(mode, server, hardware="gfx942", chain_kernel="fused")
        assert decision.served != gated
        assert not gated or "SGLANG_SPECVERIFY_GFX942=1 admits" in decision.reason
        assert ask(mode, server, hardware="gfx942", chain_kernel="fused", gfx942=True).kernel == "fused"
        assert ask(mode, server, chain_kernel="fused").kernel == "fused"


def test_what_no_kernel_takes_is_an_error_in_strict_mode_over_aiter_too() -> None:
    decision = decide(from_name("gfx950"), TREE, replace(LAYER, head_dim=512), VERIFY, Flags())
    assert not decision.served and decision.claimed and "head dim 512 is over its 256" in decision.reason
