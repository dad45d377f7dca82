"""Spellings of one module, in files and in exclude lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.config import CheckpointConfig, Excludes, read_config, type_of_spec
from sglang_specverify.mtp.names import built_name, canonical, is_quantizable
from tests.mtp.kinds import BLOCK_SPEC, FP8_SPEC, MXFP4_SPEC


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj"),
        ("mtp.layers.1.mlp.gate", "mtp.layers.1.mlp.gate"),
        ("mtp.layers.60.mlp.gate", "mtp.layers.0.mlp.gate"),
        ("mtp.layers.61.mlp.gate", "mtp.layers.1.mlp.gate"),
        ("model.mtp.norm", "mtp.norm"),
        ("model.language_model.mtp.layers.60.mlp.gate", "mtp.layers.0.mlp.gate"),
        ("model.layers.60.mlp.gate", "mtp.layers.0.mlp.gate"),
        ("model.language_model.layers.60.mlp.gate", "mtp.layers.0.mlp.gate"),
        ("model.layers.59.mlp.gate", None),
        ("model.language_model.layers.0.mlp.gate", None),
        ("model.visual.blocks.60.mlp.gate", None),
        ("visual.layers.60.mlp.gate", None),
        ("lm_head.weight", None),
        ("model.smtp.fc", None),
    ],
)
def test_canonical(name: str, expected: str | None) -> None:
    assert canonical(name, 60) == expected


def test_without_a_depth_no_index_is_absolute() -> None:
    assert canonical("mtp.layers.60.mlp.gate", 0) == "mtp.layers.60.mlp.gate"
    assert canonical("model.layers.60.mlp.gate", 0) is None


@pytest.mark.parametrize(
    ("module", "built", "quantizable"),
    [
        ("mtp.layers.0.self_attn.k_proj", "mtp.layers.0.self_attn.qkv_proj", True),
        ("mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.self_attn.qkv_proj", True),
        ("mtp.layers.0.self_attn.o_proj", "mtp.layers.0.self_attn.o_proj", True),
        ("mtp.layers.0.mlp.shared_expert.up_proj", "mtp.layers.0.mlp.shared_expert.gate_up_proj", True),
        ("mtp.layers.0.mlp.experts.511.up_proj", "mtp.layers.0.mlp.experts", True),
        ("mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts", True),
        ("mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.gate", False),
        ("mtp.layers.0.mlp.shared_expert_gate", "mtp.layers.0.mlp.shared_expert_gate", False),
        ("mtp.fc", "mtp.fc", False),
    ],
)
def test_built(module: str, built: str, quantizable: bool) -> None:
    assert built_name(module) == built
    assert is_quantizable(built) == quantizable


EXPERT = "mtp.layers.0.mlp.experts.7.up_proj"


@pytest.mark.parametrize(
    "entry",
    [
        EXPERT,
        "mtp.layers.0.mlp.experts.7.gate_up_proj",
        "mtp.layers.0.mlp.experts.7",
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.up_proj",
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0",
        "mtp",
        "mtp.*",
        "*mtp*",
        "mtp.layers.0.mlp*",
        "mtp.layers.[0-9].mlp.experts.*.up_proj",
        "re:mtp",
        "re:mtp.*",
        "re:^mtp\\.layers\\.0\\.mlp$",
        "re:.*experts\\.\\d+\\.up_proj$",
        "model.layers.60.mlp.experts.7.up_proj",
        "model.language_model.layers.60.*",
        "mtp.layers.60.mlp.experts",
        "language_model.mtp.layers.0.mlp.experts.7.up_proj",
        "re:model\\.layers\\.60\\..*",
    ],
)
def test_an_entry_that_names_an_expert(entry: str) -> None:
    assert Excludes(["lm_head", entry]).find(EXPERT, 60) == entry


@pytest.mark.parametrize(
    "entry",
    [
        "mtp.layers.0.mlp.experts.70.up_proj",
        "mtp.layers.0.mlp.experts.7.down_proj",
        "mtp.layers.0.mlp.experts.8",
        "mtp.layers.1",
        "mtp.layers.0.self_attn*",
        "mtp.layers.0.mlp.expert",
        "model.layers.6",
        "model.layers.0.mlp.experts.7.up_proj",
        "model.layers",
        "re:experts",
        "re:^mtp$x",
        "MTP.*",
        "experts.7.up_proj",
        "",
    ],
)
def test_an_entry_that_does_not(entry: str) -> None:
    assert Excludes([entry]).find(EXPERT, 60) is None


def test_a_broken_pattern_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "quark", "exclude": ["re:mtp(["]}}))
    with pytest.raises(SpecverifyError, match=r"holds 're:mtp\(\[', which is no regular expression"):
        read_config(tmp_path)


def test_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(SpecverifyError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path)
    for wrong, says in (("{", "is no JSON"), ("[]", "holds no object"), ("\x00", "is no JSON")):
        path.write_text(wrong)
        with pytest.raises(SpecverifyError, match=says):
            read_config(tmp_path)
    path.write_text("{}")
    empty = read_config(tmp_path)
    assert (empty.method, empty.is_quark, empty.num_hidden_layers, empty.num_experts) == ("none", False, 0, 0)
    quant = {"quant_method": "quark", "exclude": None, "layer_quant_config": None}
    text = {"num_hidden_layers": 60, "num_experts": 512, "quantization_config": quant}
    path.write_text(json.dumps({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}))
    found = read_config(tmp_path)
    assert (found.is_quark, found.num_hidden_layers, found.num_experts, found.excludes.entries) == (True, 60, 512, ())
    assert found.spec_of(EXPERT) == {}


def test_specs() -> None:
    quant = {
        "quant_method": "quark",
        "global_quant_config": MXFP4_SPEC,
        "layer_quant_config": {"*self_attn*": FP8_SPEC, "model.layers.60.mlp.gate": BLOCK_SPEC},
    }
    config = CheckpointConfig(num_hidden_layers=60, quant=quant)
    assert config.spec_of("mtp.layers.0.self_attn.q_proj") is FP8_SPEC
    assert config.spec_of("mtp.layers.0.mlp.gate") is BLOCK_SPEC
    assert config.spec_of(EXPERT) is MXFP4_SPEC
    assert type_of_spec(MXFP4_SPEC) == ("mxfp4", "per_group")
    assert type_of_spec(FP8_SPEC) == ("fp8", "per_tensor")
    assert type_of_spec(BLOCK_SPEC) == ("fp8", "per_block")
    assert type_of_spec({"weight": {**MXFP4_SPEC["weight"], "group_size": 16}}) == ("nvfp4", "per_group")
    assert type_of_spec({"weight": None}) == type_of_spec({"weight": {"dtype": None}}) == type_of_spec({}) == ("", "")
