"""Sparse MLA in SGLang's dsv4 backend: who takes a call, which rows a pool gets, and one refusal after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify import flags, upstream
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import NO_GPU, from_name
from sglang_specverify.kernels.sparse_mla.arguments import CONTRACTS, HEADS
from sglang_specverify.kernels.sparse_mla.formats import FORMATS
from sglang_specverify.routing import sparse_mla as rules
from sglang_specverify.routing.route import Decision, require
from sglang_specverify.routing.sparse_mla import (
    PoolRequest,
    SparseCall,
    decide_fp4_pool,
    decide_sparse_mla,
    pool_rows,
    stock_serves,
)
from sglang_specverify.routing.sparse_model import SparseGroup, sparse_groups
from tests.routing.configs import MODELS, _read

CALL = SparseCall("v41", "v41_fp4")
ON = Flags(sparse_mla=True)
BOTH = Flags(sparse_mla=True, fp4_pool=True)
GPUS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_107", "sm_120", "gfx942", "gfx950")


def ask(call: SparseCall = CALL, hardware: str = "sm_90", flags: Flags = ON) -> Decision:
    return decide_sparse_mla(from_name(hardware), call, flags)


def test_what_the_rules_mirror_of_the_kernel() -> None:
    assert rules.HEADS == HEADS
    assert set(rules.ARCHS) == {arch for arch in CONTRACTS["exact"] if arch.startswith("sm_")}
    assert (
        rules.ROW_BYTES["v41"] == FORMATS["swa_mxfp8"].row_bytes
        and rules.ROW_BYTES["v41_fp4"] == FORMATS["main_kv_fp4"].row_bytes
    )


@pytest.mark.parametrize("hardware", GPUS)
def test_where_it_serves(hardware: str) -> None:
    decision = ask(hardware=hardware)
    assert decision.served == (hardware in ("sm_90", "sm_100", "sm_103", "sm_107"))
    assert decision.claimed
    assert ask(SparseCall("v41"), hardware).served == decision.served
    if hardware.startswith("gfx"):
        assert "AMD" in decision.reason


def test_it_is_off_unless_asked() -> None:
    for left, says in ((Flags(), "off by default"), (Flags(sparse_mla=True, disable=True), "DISABLE=1")):
        decision = ask(flags=left)
        assert not decision.served and not decision.claimed and says in decision.reason
        require(decision, replace(left, strict=True))


def test_without_a_gpu_only_in_the_interpreter() -> None:
    assert not decide_sparse_mla(NO_GPU, CALL, ON).served
    assert decide_sparse_mla(NO_GPU, CALL, replace(ON, kernels="triton")).served


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": "v4", "extra": "v4"}, r"rows of 584 bytes \(v4\) in the window's cache \(SGLANG_SPECVERIFY_FP4_POOL=1"),
        ({"window": "uniform_fp8"}, "rows of 512 bytes"),
        ({"window": "v41_fp4"}, "rows of 288 bytes"),
        ({"window": "600 bytes"}, "a kind that nobody here knows"),
        ({"extra": "v41"}, "rows of 528 bytes .* among the selected"),
        ({"backend": "flashmla_mega"}, "--dsv4-attn-backend flashmla_mega has a path of its own"),
        ({"backend": "trtllm"}, "--dsv4-attn-backend trtllm has a path of its own"),
        ({"seam": False}, "no seam"),
        ({"unknown": frozenset({"descale_q"})}, "does not know what the call passes: descale_q"),
        ({"head_dim": 576}, "head dim 576"),
        ({"queries": 2}, "2 rows a request"),
        ({"heads": 24}, "24 heads"),
        ({"dtype": "float8_e4m3fn"}, "Q in float8_e4m3fn"),
    ],
)
def test_one_refusal_after_the_other(change: dict[str, Any], reason: str) -> None:
    decision = ask(replace(CALL, **change))
    assert not decision.served and decision.claimed
    with pytest.raises(SpecverifyError, match=reason):
        require(decision, replace(ON, strict=True))
    require(decision, ON)


def test_who_else_reads_the_rows() -> None:
    """On Hopper SGLang's FlashMLA reads those of V4 alone, so that those of V4.1 must not be left to it."""
    assert not stock_serves(from_name("H200"), CALL)
    assert "no kernel of SGLang's serves this" in ask(replace(CALL, heads=24)).reason
    assert not stock_serves(from_name("H200"), replace(CALL, unknown=frozenset({"causal"})))
    assert stock_serves(from_name("H200"), SparseCall("600 bytes"))
    assert stock_serves(from_name("H200"), SparseCall("v4", "v4")) and stock_serves(from_name("B200"), CALL)
    assert "SGLang's own kernel serves" in ask(replace(CALL, heads=24), "B200").reason


def pool(hardware: str = "H200", flags: Flags = BOTH, **request: Any) -> Decision:
    return decide_fp4_pool(from_name(hardware), PoolRequest(**request), flags)


@pytest.mark.parametrize("layout", [None, "auto", "v41", "v41_new"])
def test_the_pool_on_hopper(layout: str | None) -> None:
    decision = pool(layout=layout)
    assert decision.served
    request = PoolRequest(layout=layout)
    found = [pool_rows(from_name("H200"), request, decision, ratio) for ratio in (0, 1, 2, 4, 128)]
    assert found == [("v41", None), ("v41", "v41_fp4"), ("v41", "v41_fp4"), ("v41", "v41"), ("v41", "v41")]
    assert [ask(SparseCall(*rows)).served for rows in found] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("hardware", "request_", "reason"),
    [
        ("B200", {}, "SGLang makes these rows itself on SM100"),
        ("sm_120", {}, "for SM90, not for sm_120"),
        ("gfx950", {}, "for SM90"),
        ("H200", {"backend": "trtllm"}, "pools of its own"),
        ("H200", {"seam": False}, "no seam"),
        ("H200", {"layout": "v4"}, "asks for other rows"),
        ("H200", {"compressed": "fp8"}, "reads FP4 alone"),
        ("H200", {"q8_prefill": True}, "FP8 sparse prefill"),
    ],
)
def test_a_pool_that_stays_sglangs(hardware: str, request_: dict[str, Any], reason: str) -> None:
    decision = pool(hardware, **request_)
    assert not decision.served and decision.claimed and reason in decision.reason


def test_a_pool_needs_both_flags() -> None:
    with pytest.raises(SpecverifyError, match="nothing would read the pool"):
        pool(flags=Flags(fp4_pool=True))
    for left in (ON, replace(BOTH, disable=True)):
        assert not pool(flags=left).served and not pool(flags=left).claimed


def test_pools_that_sglang_makes() -> None:
    none = pool(flags=Flags())

    def rows(hardware: str, **request: Any) -> tuple[str, str | None]:
        return pool_rows(from_name(hardware), PoolRequest(**request), none, 1)

    assert rows("H200") == rows("H200", layout="auto") == rows("B200") == ("v4", "v4")
    assert rows("B200", layout="v41") == rows("B200", backend="flashmla_mega") == ("v41", "v41_fp4")
    assert rows("B200", layout="v41", compressed="fp8") == ("v41", "v41")
    assert rows("B200", backend="trtllm") == ("uniform_fp8", "uniform_fp8")


def test_the_layers_of_a_model() -> None:
    v41 = _read("DeepSeek-V4.1-Flash")
    assert (MODELS / "deepseek-v4.1-flash.json").is_file()
    assert sparse_groups(v41, 4) == (SparseGroup(0, 2, 64), SparseGroup(1, 20, 64), SparseGroup(2, 18, 64))
    v4 = {"model_type": "deepseek_v4", "num_attention_heads": 128, "compress_ratios": [0, 4, 128, 4], "num_hidden_layers": 3}
    assert sparse_groups(v4) == (SparseGroup(0, 1, 128), SparseGroup(4, 1, 128), SparseGroup(128, 1, 128))
    assert sparse_groups({"model_type": "deepseek_v4", "text_config": v4})[0] == SparseGroup(0, 1, 128)
    assert sparse_groups(_read("DeepSeek-V3")) == ()
    for wrong in ({"compress_ratios": None}, {"compress_ratios": [0, "4"]}, {"num_attention_heads": 126}):
        with pytest.raises(SpecverifyError):
            sparse_groups({**v4, **wrong}, 4)


def test_what_the_environment_asks_for() -> None:
    name = "SGLANG_SPECVERIFY_SPARSE_MLA"
    assert [flags.asked("sparse_mla", {name: value}) for value in ("1", "on", "0", "off", "ja")] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert not flags.asked("sparse_mla", {}) and not flags.asked("sparse_mla", {name: "ja"}, malformed=False)
    assert flags.read({name: "1"}).sparse_mla and not flags.read({}).sparse_mla and not flags.read({}).fp4_pool
    assert flags.setting("SGLANG_DSV4_KV_LAYOUT", {"SGLANG_DSV4_KV_LAYOUT": " V41 "}) == "v41"
    assert flags.setting("SGLANG_DSV4_KV_LAYOUT", {}) is None


def test_which_sglang_has_the_seam() -> None:
    assert [upstream.has_dsv4_seam(version) for version in ("0.5.22", "0.5.22+cu130", "0.5.23", None)] == [
        False,
        False,
        True,
        False,
    ]
