"""Layers read from a config.json: real shapes first, then each way in which families say what a layer is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing import LayerFacts, LayerKind
from sglang_specverify.routing.model import describe, read_config
from tests.routing.configs import DEEPSEEK_V3, GEMMA_2_9B, GPT_OSS_20B, LLAMA_3_70B, NAMED, QWEN3_5, QWEN3_8B, Config

FULL, WINDOW, LINEAR = LayerKind.FULL, LayerKind.WINDOW, LayerKind.LINEAR


def groups(config: Config, ranks: int = 1) -> list[tuple[LayerFacts, int, int]]:
    return [(group.facts, group.count, group.first) for group in describe(config, ranks).groups]


def kinds(config: Config) -> list[tuple[LayerKind, int]]:
    return [(group.facts.kind, group.count) for group in describe(config).groups]


def plain(**changes: Any) -> Config:
    """A small model of an architecture that nobody has a rule for."""
    base = {
        "architectures": ["SomethingNewForCausalLM"],
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
    }
    return {key: value for key, value in {**base, **changes}.items() if value != "absent"}


def test_qwen3_8b() -> None:
    assert groups(QWEN3_8B) == [(LayerFacts(FULL, 32, 8, 128, 128), 36, 0)]
    assert groups(QWEN3_8B, 4) == [(LayerFacts(FULL, 8, 2, 128, 128), 36, 0)]


def test_llama_70b_replicates_kv_heads_over_16_ranks() -> None:
    assert groups(LLAMA_3_70B) == [(LayerFacts(FULL, 64, 8, 128, 128), 80, 0)]
    assert groups(LLAMA_3_70B, 16) == [(LayerFacts(FULL, 4, 1, 128, 128), 80, 0)]


def test_gpt_oss_20b() -> None:
    assert groups(GPT_OSS_20B, 2) == [
        (LayerFacts(WINDOW, 32, 4, 64, 64, 127, has_sinks=True), 12, 0),
        (LayerFacts(FULL, 32, 4, 64, 64, has_sinks=True), 12, 1),
    ]


def test_qwen3_5_hybrid() -> None:
    assert groups(QWEN3_5) == [(LayerFacts(LINEAR, 0, 0, 0, 0), 45, 0), (LayerFacts(FULL, 32, 2, 256, 256), 15, 3)]
    described = describe(QWEN3_5)
    # The linear layers have no head dim that a base must serve.
    assert described.facts.head_dims == {(256, 256)}
    assert any("--mm-attention-backend" in note for note in described.notes)


def test_deepseek_v3() -> None:
    assert groups(DEEPSEEK_V3, 8) == [(LayerFacts(LayerKind.MLA, 16, 16, 192, 128), 61, 0)]
    assert describe(DEEPSEEK_V3).facts.is_mla


def test_gemma_2() -> None:
    assert groups(GEMMA_2_9B) == [
        (LayerFacts(WINDOW, 16, 8, 256, 256, 4095, 50.0), 21, 0),
        (LayerFacts(FULL, 16, 8, 256, 256, softcap=50.0), 21, 1),
    ]


def test_layers_that_no_key_describes_are_full_attention() -> None:
    assert groups(plain()) == [(LayerFacts(FULL, 8, 2, 128, 128), 6, 0)]
    assert groups(plain(num_key_value_heads="absent")) == [(LayerFacts(FULL, 8, 8, 128, 128), 6, 0)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, [(LINEAR, 3), (FULL, 3)]),
        # One period, repeated.
        ({"block_types": ["recurrent", "recurrent", "attention"]}, [(LINEAR, 4), (FULL, 2)]),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]}, [(LINEAR, 2), (FULL, 1)]),
        ({"layers_block_type": ["mamba", "hybrid", "mamba"] * 2}, [(LINEAR, 6), (FULL, 2)]),
        ({"hybrid_override_pattern": "M-M*-E"}, [(LINEAR, 2), (FULL, 1)]),
        ({"linear_attn_config": {"full_attn_layers": [3, 6], "kda_layers": [1, 2, 4, 5]}}, [(LINEAR, 4), (FULL, 2)]),
        ({"full_attention_interval": 3, "linear_num_key_heads": 4}, [(LINEAR, 4), (FULL, 2)]),
        # An interval without linear layers says nothing.
        ({"full_attention_interval": 3}, [(FULL, 6)]),
        ({"attn_type_list": [0, 0, 1, 0, 0, 1]}, [(LINEAR, 4), (FULL, 2)]),
        ({"attn_layer_period": 3, "attn_layer_offset": 1}, [(LINEAR, 4), (FULL, 2)]),
        ({"attn_layer_indices": [5]}, [(LINEAR, 5), (FULL, 1)]),
        ({"full_attn_idxs": [0, 1]}, [(FULL, 2), (LINEAR, 4)]),
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "sliding_window_size": 128}, [(FULL, 2), (WINDOW, 4)]),
        ({"local_layer_ids": [0, 2], "sliding_window_size": 512}, [(WINDOW, 2), (FULL, 4)]),
        ({"cross_attention_layers": [3]}, [(FULL, 5), (LayerKind.CROSS, 1)]),
        # Attention and a state in every layer.
        ({"mamba_d_ssm": 64}, [(FULL, 6), (LINEAR, 6)]),
        ({"state_size": 16, "num_attention_heads": "absent"}, [(LINEAR, 6)]),
        ({"sliding_window": 256}, [(WINDOW, 6)]),
        ({"sliding_window": 256, "use_sliding_window": False}, [(FULL, 6)]),
        ({"sliding_window": 256, "sliding_window_pattern": 3}, [(WINDOW, 4), (FULL, 2)]),
        ({"sliding_window": 256, "sliding_window_pattern": "LLG"}, [(WINDOW, 4), (FULL, 2)]),
        ({"sliding_window": None}, [(FULL, 6)]),
        ({"sliding_window": 256, "architectures": ["Gemma3ForCausalLM"]}, [(WINDOW, 5), (FULL, 1)]),
        ({"sliding_window": 256, "architectures": ["Cohere2ForCausalLM"]}, [(WINDOW, 5), (FULL, 1)]),
        ({"sliding_window": 256, "architectures": ["MistralForCausalLM"]}, [(FULL, 6)]),
    ],
    ids=str,
)
def test_ways_to_say_what_a_layer_is(changes: Config, expected: list[tuple[LayerKind, int]]) -> None:
    assert kinds(plain(**changes)) == expected


def test_a_window_that_sglang_does_not_apply_is_noted() -> None:
    assert any("not applied" in note for note in describe(plain(sliding_window=9, architectures=["MistralForCausalLM"])).notes)
    assert not describe(plain(sliding_window=9)).notes


def test_a_kind_of_layer_that_nobody_knows_is_carried_as_unknown() -> None:
    found = describe(plain(layer_types=["full_attention", "hyper_attention"] * 3)).groups
    assert [sorted(group.facts.unknown) for group in found] == [[], ["layer type hyper_attention"]]
    found = describe(plain(hybrid_override_pattern="M*X*X*")).groups
    assert ["layer type X"] in [sorted(group.facts.unknown) for group in found]


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"attn_temperature_len": 1024}, "xai_temperature_len"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"compress_ratios": [4, 128]}, "sparse attention"),
        ({"indexer_n_heads": 8}, "sparse attention"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "sparse attention"),
        (
            {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm_sala", "sparse_config": {"topk": 64}},
            "sparse attention",
        ),
        ({"alibi": True}, "alibi"),
        ({"attn_logit_softcapping": 30.0, "attn_logit_softcapping_method": "hard"}, "logit_capping_method"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding window of unknown size"),
    ],
    ids=str,
)
def test_layer_attributes_that_no_route_knows(changes: Config, unknown: str) -> None:
    assert not describe(plain()).groups[0].facts.unknown
    assert describe(plain(**changes)).groups[0].facts.unknown == {unknown}


def test_local_chunked_attention() -> None:
    chunked = plain(attention_chunk_size=8192, num_hidden_layers=8)
    described = describe(chunked)
    assert [(sorted(g.facts.unknown), g.count) for g in described.groups] == [(["use_irope"], 6), ([], 2)]
    assert described.states == {"local (chunked) attention"}
    by_list = describe({**chunked, "no_rope_layers": [1, 0] * 4})
    assert [(sorted(g.facts.unknown), g.count) for g in by_list.groups] == [(["use_irope"], 4), ([], 4)]
    named = describe(plain(layer_types=["chunked_attention"] * 6))
    assert named.groups[0].facts.unknown == {"use_irope"}


def test_encoder_decoder() -> None:
    whisper = {
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": 512,
        "encoder_layers": 4,
        "decoder_layers": 3,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
    }
    assert kinds(whisper) == [(LayerKind.ENCODER, 4), (FULL, 3), (LayerKind.CROSS, 3)]
    assert describe(whisper).states == {"encoder-decoder model"}


def test_encoder_only() -> None:
    assert kinds(plain(architectures=["BertModel"])) == [(LayerKind.ENCODER, 6)]


def test_heads_and_dims_of_windowed_layers_of_their_own() -> None:
    config = plain(
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=128,
        head_dim=192,
        v_head_dim=128,
        swa_num_attention_heads=16,
        swa_num_key_value_heads=4,
        swa_head_dim=64,
        swa_v_head_dim=32,
        add_swa_attention_sink_bias=True,
    )
    assert groups(config) == [
        (LayerFacts(WINDOW, 16, 4, 64, 32, 127, has_sinks=True), 3, 0),
        (LayerFacts(FULL, 8, 2, 192, 128), 3, 1),
    ]
    assert describe(config).facts.head_dims == {(64, 32), (192, 128)}


def test_heads_and_dims_of_global_layers_of_their_own() -> None:
    config = plain(
        architectures=["Gemma4ForCausalLM"],
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        sliding_window=512,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )
    assert groups(config) == [(LayerFacts(WINDOW, 8, 2, 256, 256, 511), 5, 0), (LayerFacts(FULL, 8, 1, 512, 512), 1, 5)]


def test_heads_listed_for_each_layer() -> None:
    config = plain(num_attention_heads=[8, 8, 16, 16, 16, 16], num_key_value_heads=[2, 2, 4, 4, 4, 4], head_dim=64)
    assert groups(config) == [(LayerFacts(FULL, 8, 2, 64, 64), 2, 0), (LayerFacts(FULL, 16, 4, 64, 64), 4, 2)]


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"num_key_value_heads": "absent", "multi_query": True}, (8, 1)),
        ({"num_key_value_heads": "absent", "multi_query_group_num": 2}, (8, 2)),
        ({"num_key_value_heads": "absent", "num_kv_heads": 4}, (8, 4)),
        ({"num_attention_heads": "absent", "n_head": 16, "hidden_size": "absent", "n_embd": 2048}, (16, 2)),
    ],
    ids=str,
)
def test_other_names_for_heads(changes: Config, heads: tuple[int, int]) -> None:
    facts = describe(plain(**changes)).groups[0].facts
    assert (facts.q_heads, facts.kv_heads) == heads
    assert facts.head_dim == 128


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_text_configs(key: str) -> None:
    inner = {name: value for name, value in plain().items() if name != "architectures"}
    assert groups({"architectures": ["X"], key: inner}) == groups(plain())
    assert groups({"architectures": ["X"], "thinker_config": {key: inner}}) == groups(plain())


def test_soft_cap_and_sinks() -> None:
    assert describe(plain(architectures=["Grok1ForCausalLM"])).groups[0].facts.softcap == 30.0
    assert describe(plain(attn_logit_softcapping=None)).groups[0].facts.softcap == 0.0
    assert describe(plain(learnable_sink=True)).groups[0].facts.has_sinks


def test_dtype_of_the_checkpoint() -> None:
    assert describe(plain()).dtype == "bfloat16"
    assert describe(plain(torch_dtype="float16")).dtype == "float16"
    assert describe(QWEN3_5).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "ranks", "what"),
    [
        ({}, 1, "names no architecture"),
        (plain(num_hidden_layers="absent"), 1, "has no num_hidden_layers"),
        (plain(num_attention_heads="absent"), 1, "has no num_attention_heads"),
        (plain(num_hidden_layers="36"), 1, "has no num_hidden_layers"),
        (plain(hidden_size="absent"), 1, "has no hidden_size"),
        (plain(), 3, "8 attention heads do not divide over 3 tensor-parallel ranks"),
        (plain(), 16, "8 attention heads do not divide over 16"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_described(config: Config, ranks: int, what: str) -> None:
    with pytest.raises(SpecverifyError, match=what):
        describe(config, ranks)


def test_read_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    assert read_config(tmp_path) == read_config(file) == QWEN3_8B


@pytest.mark.parametrize(("content", "what"), [("{", "cannot be read as JSON"), ("[1]", "holds no JSON object")])
def test_read_config_refuses(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecverifyError, match=what):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["", "missing", "missing/config.json"])
def test_read_config_without_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecverifyError, match=r"no config\.json at"):
        read_config(tmp_path / name)


def test_every_layer_is_in_one_group() -> None:
    counts = {name: sum(group.count for group in describe(config).groups) for name, config in NAMED.items()}
    assert counts == {
        "Qwen3-8B": 36,
        "Llama-3-70B": 80,
        "gpt-oss-20b": 24,
        "Qwen3.5": 60,
        "DeepSeek-V3": 61,
        "gemma-2-9b": 42,
    }
