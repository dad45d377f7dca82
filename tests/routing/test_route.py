"""Default deny: a served case for each mode, and one refusal after the other that takes it away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import NO_GPU, from_name
from sglang_specverify.routing import (
    CLAIMED,
    ROUTES,
    CallFacts,
    Decision,
    LayerFacts,
    LayerKind,
    Mode,
    ServerFacts,
    decide,
    require,
    route,
)

LAYER = LayerFacts(LayerKind.FULL, 8, 2, 128, 128)
WINDOW = replace(LAYER, kind=LayerKind.WINDOW, window=127)
SERVER = ServerFacts("triton", "EAGLE", 4, 3, 8, dtype="float32", cuda_graph=False)
CHAIN = replace(SERVER, topk=1, num_draft_tokens=4)
GPUS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_107", "sm_120", "gfx942", "gfx950")


def ask(
    mode: Mode = Mode.TARGET_VERIFY,
    layer: LayerFacts = LAYER,
    server: ServerFacts = SERVER,
    hardware: Any = NO_GPU,
    arguments: frozenset[str] = frozenset(),
    **flags: Any,
) -> Decision:
    return decide(hardware, server, layer, mode, Flags(**flags), CallFacts(arguments))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("layer", [LAYER, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("server", [SERVER, CHAIN], ids=["tree", "chain"])
def test_the_reference_serves_without_a_gpu(mode: Mode, layer: LayerFacts, server: ServerFacts) -> None:
    decision = ask(mode, layer, server)
    assert decision.served
    assert decision.kernel == "reference"
    assert decision.claimed
    assert [rejected.name for rejected in decision.rejected] == [
        "prefix_gather", "prefix_flash", "prefix_tile", "specialized", "fused", "stock",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "server",
    [replace(SERVER, kv_cache_dtype=name) for name in ("auto", "bfloat16", "bf16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")]
    # The same as torch calls them once resolved.
    + [replace(SERVER, kv_cache_dtype=name) for name in ("float8_e4m3fn", "float8_e5m2")]
    + [replace(SERVER, dtype=name) for name in ("bfloat16", "float16")]
    + [replace(SERVER, page_size=64), replace(SERVER, deterministic=True), replace(SERVER, algorithm="NGRAM")],
    ids=str,
)
def test_what_the_reference_knows_of_a_server(server: ServerFacts) -> None:
    assert ask(server=server).served


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, head_dim=256, v_head_dim=256),
        replace(LAYER, head_dim=192, v_head_dim=128),
        replace(LAYER, head_dim=72, v_head_dim=72),
        replace(LAYER, softcap=50.0),
        replace(WINDOW, has_sinks=True),
        replace(LAYER, q_heads=12, kv_heads=4),
    ],
    ids=str,
)
def test_what_the_reference_knows_of_a_layer(layer: LayerFacts) -> None:
    assert ask(layer=layer).served


def test_the_reference_knows_sinks() -> None:
    assert ask(arguments=frozenset({"sinks"})).served


def _refused(decision: Decision, why: str) -> None:
    assert not decision.served
    assert decision.kernel == "stock"
    assert why in next(row.reason for row in decision.rejected if row.name == "reference")
    assert why in decision.reason
    assert decision.reason.endswith("SGLang's triton serves")


@pytest.mark.parametrize("kind", [LayerKind.MLA, LayerKind.CROSS, LayerKind.ENCODER])
def test_refuses_other_layers(kind: LayerKind) -> None:
    _refused(ask(layer=replace(LAYER, kind=kind)), kind.value)


def test_linear_layers_are_not_attention() -> None:
    decision = ask(layer=LayerFacts(LayerKind.LINEAR, 0, 0, 0, 0))
    assert not decision.served
    assert not decision.claimed
    assert "linear attention" in decision.reason


@pytest.mark.parametrize("attribute", ["xai_temperature_len", "use_irope", "pos_encoding_mode", "logit_capping_method"])
def test_refuses_unknown_layer_attributes(attribute: str) -> None:
    _refused(ask(layer=replace(LAYER, unknown=frozenset({attribute}))), attribute)


@pytest.mark.parametrize(
    "state",
    [
        "local (chunked) attention",
        "image ranges",
        "prefill-aware windows",
        "decode context parallelism",
        "prefill context parallelism",
        "KV cache sharding",
        "unified memory pool",
        "ragged verify",
        "prefill-decode multiplexing",
        "diffusion language model",
    ],
)
def test_refuses_unknown_states(state: str) -> None:
    _refused(ask(server=replace(SERVER, unknown=frozenset({state}))), state)


@pytest.mark.parametrize(
    "argument",
    [
        "q_rope",
        "k_rope",
        "score_mod",
        "aux_tensors",
        "rel_bias",
        "q_descale",
        "k_descale",
        "v_descale",
        "return_lse",
        "idx_q",
        "something_new",
    ],
)
def test_refuses_unknown_call_arguments(argument: str) -> None:
    _refused(ask(arguments=frozenset({"sinks", argument})), argument)


def test_every_unknown_is_named() -> None:
    reason = ask(arguments=frozenset({"score_mod", "aux_tensors"})).reason
    assert "aux_tensors, score_mod" in reason


@pytest.mark.parametrize("cache", ["mxfp8", "nvfp4", "fp4_mx_block16", "fp8_e4m3fnuz", "int8"])
def test_refuses_other_caches(cache: str) -> None:
    _refused(ask(server=replace(SERVER, kv_cache_dtype=cache)), cache)


def test_refuses_other_dtypes() -> None:
    _refused(ask(server=replace(SERVER, dtype="float64")), "float64")


def test_refuses_cuda_graphs() -> None:
    _refused(ask(server=replace(SERVER, cuda_graph=True)), "--disable-cuda-graph")


def test_refuses_two_batch_overlap() -> None:
    _refused(ask(server=replace(CHAIN, two_batch_overlap=True)), "two-batch overlap")


@pytest.mark.parametrize("algorithm", ["FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO", "SOMETHING_NEW"])
def test_refuses_other_algorithms(algorithm: str) -> None:
    _refused(ask(server=replace(SERVER, algorithm=algorithm)), algorithm)


@pytest.mark.parametrize("heads", [(7, 2), (8, 0)])
def test_refuses_uneven_heads(heads: tuple[int, int]) -> None:
    _refused(ask(layer=replace(LAYER, q_heads=heads[0], kv_heads=heads[1])), "whole ratio")


@pytest.mark.parametrize("mode", list(Mode))
def test_triton_kernels_in_the_interpreter(mode: Mode) -> None:
    assert ask(mode, kernels="reference").kernel == "reference"
    decision = ask(mode, kernels="triton")
    assert decision.kernel == ("fused" if mode in CLAIMED else "stock")
    refused = next(row.reason for row in decision.rejected if row.name == "reference")
    assert mode not in CLAIMED or "SGLANG_SPECVERIFY_KERNELS=triton" in refused
    require(decision, Flags(strict=True))


TREE_VERIFY, CHAIN_VERIFY = (Mode.TARGET_VERIFY, SERVER), (Mode.TARGET_VERIFY, CHAIN)
EVERY_CASE = [(mode, server) for mode in Mode for server in (SERVER, CHAIN)]


@pytest.mark.parametrize(
    ("flags", "variable", "taken"),
    [
        ({"tree": False}, "SGLANG_SPECVERIFY_TREE=0", [TREE_VERIFY]),
        (
            {"chain": False},
            "SGLANG_SPECVERIFY_CHAIN=0",
            [CHAIN_VERIFY, (Mode.DRAFT_EXTEND, SERVER), (Mode.DRAFT_EXTEND, CHAIN)],
        ),
        (
            {"draft_decode": False},
            "SGLANG_SPECVERIFY_DRAFT_DECODE=0",
            [(Mode.DRAFT_DECODE, SERVER), (Mode.DRAFT_DECODE, CHAIN)],
        ),
        ({"disable": True}, "SGLANG_SPECVERIFY_DISABLE=1", EVERY_CASE),
    ],
    ids=["tree", "chain", "draft decode", "all"],
)
def test_an_opt_out_takes_its_own_cases_and_no_others(flags: dict[str, bool], variable: str, taken: list[Any]) -> None:
    for mode, server in EVERY_CASE:
        decision = ask(mode, server=server, **flags)
        assert decision.served == ((mode, server) not in taken), (mode, server)
        if not decision.served:
            assert variable in decision.reason
            # What the user asked for is never an error.
            assert not decision.claimed
            require(decision, Flags(strict=True, **flags))


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.PREFILL])
@pytest.mark.parametrize("hardware", GPUS)
def test_decode_and_prefill_are_stock_on_a_gpu(hardware: str, mode: Mode) -> None:
    machine = from_name(hardware)
    decision = ask(mode, server=replace(SERVER, base=machine.facts.preference[0]), hardware=machine)
    assert not decision.served
    assert decision.reason.startswith(f"{mode.value} is SGLang's own on a GPU")
    require(decision, Flags(strict=True))


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.PREFILL, Mode.TARGET_VERIFY])
def test_strict_on_a_gpu(mode: Mode) -> None:
    """Architectures without a launch table are the ones that stock serves unasked."""
    on_gpu = ask(mode, hardware=from_name("sm_120"), server=replace(SERVER, dtype="bfloat16"))
    require(on_gpu, Flags())
    if mode is not Mode.TARGET_VERIFY:
        require(on_gpu, Flags(strict=True))
        return
    with pytest.raises(SpecverifyError, match="SGLANG_SPECVERIFY_STRICT=1 and not served by the plugin: it has no launch table"):
        require(on_gpu, Flags(strict=True))


@pytest.mark.parametrize("mode", list(Mode))
def test_strict_without_a_gpu_refuses_every_fallback(mode: Mode) -> None:
    require(ask(mode), Flags(strict=True))
    with pytest.raises(SpecverifyError, match="score_mod"):
        require(ask(mode, arguments=frozenset({"score_mod"})), Flags(strict=True))


def test_strict_accepts_linear_layers_of_a_hybrid() -> None:
    require(ask(layer=LayerFacts(LayerKind.LINEAR, 0, 0, 0, 0)), Flags(strict=True))


def test_a_new_row_serves_before_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    row = route.Route(
        name="fused_tree",
        modes=frozenset({Mode.TARGET_VERIFY}),
        layers=frozenset({LayerKind.FULL}),
        dtypes=frozenset({"bfloat16"}),
        kv_caches=frozenset({"auto"}),
        algorithms=frozenset({"EAGLE"}),
        arguments=frozenset(),
        cuda_graphs=True,
        refuse=lambda case: None if case.server.topk > 1 else "trees only",
        serves=lambda case: "a tree",
    )
    monkeypatch.setattr(route, "ROUTES", (row, *ROUTES))
    gpu = from_name("sm_90")
    server = replace(SERVER, base="fa3", dtype="bfloat16", cuda_graph=True)
    served = ask(server=server, hardware=gpu)
    assert served.kernel == "fused_tree"
    assert [rejected.name for rejected in served.rejected] == [*(row.name for row in ROUTES), "stock"]
    # What the row does not know falls through it, to the next row or to stock, each with its reason.
    chain = ask(server=replace(server, topk=1, base="triton"), hardware=gpu)
    assert chain.kernel != "fused_tree"
    assert (chain.rejected[0].name, chain.rejected[0].reason) == ("fused_tree", "trees only")
    for other in (
        ask(layer=WINDOW, server=server, hardware=gpu),
        ask(server=server, hardware=gpu, arguments=frozenset({"sinks"})),
        ask(Mode.DRAFT_DECODE, server=server, hardware=gpu),
    ):
        assert other.kernel != "fused_tree"
    on_cpu = ask(server=replace(server, dtype="float32", cuda_graph=False))
    assert on_cpu.kernel == "reference"
    assert on_cpu.rejected[0].name == "fused_tree"
