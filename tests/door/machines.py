"""Machines and models that are not here: platform facts for SGLang, and config.json files of a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NOTHING: dict[str, Any] = {
    "is_cuda": False,
    "is_hip": False,
    "is_npu": False,
    "is_xpu": False,
    "is_musa": False,
    "is_mps": False,
    "is_sm90": False,
    "is_sm100": False,
    "is_sm100_or_sm110": False,
    "is_sm110": False,
    "is_sm120": False,
    "is_blackwell": False,
    "is_hopper_with_cuda_12_3": False,
    "device_sm": 0,
    "device_capability": (None, None),
}
_HOPPER: dict[str, Any] = {"is_cuda": True, "is_sm90": True, "is_hopper_with_cuda_12_3": True}
_BLACKWELL: dict[str, Any] = {"is_cuda": True, "is_sm100": True, "is_sm100_or_sm110": True, "is_blackwell": True}

#: Name -> what SGLang's platform says there.
MACHINES: dict[str, dict[str, Any]] = {
    "SM90": {**_HOPPER, "device_sm": 90, "device_capability": (9, 0)},
    "SM100": {**_BLACKWELL, "device_sm": 100, "device_capability": (10, 0)},
    "SM103": {**_BLACKWELL, "device_sm": 103, "device_capability": (10, 3)},
    "SM107": {**_BLACKWELL, "device_sm": 107, "device_capability": (10, 7)},
    "gfx942": {"is_hip": True, "device_sm": 94, "device_capability": (9, 4)},
    "gfx950": {"is_hip": True, "device_sm": 95, "device_capability": (9, 5)},
    "none": {},
}


@contextmanager
def machine(name: str) -> Iterator[None]:
    """Let SGLang's argument resolution believe that it runs on `name`."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(**{**_NOTHING, **MACHINES[name]}):
        yield


def device_of(name: str) -> str:
    """The `--device` to name with it: SGLang's own detection asks torch, which cannot be told otherwise."""
    return "cpu" if name == "none" else "cuda"


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    **_LLAMA,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 256,
}

_WINDOWED: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 128,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA4: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 1024,
    "no_rope_layers": [1, 0],
    "intermediate_size_mlp": 2048,
}
_V4: dict[str, Any] = {
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 512,
    "compress_ratios": [0, 4],
}

#: Kind -> config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"llama-{dim}": {**_LLAMA, "head_dim": dim} for dim in (64, 80, 96, 128, 192, 256)},
    "qwen3": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "two head dims": {**_WINDOWED, "swa_head_dim": 256, "swa_v_head_dim": 256},
    "gpt-oss": {**_WINDOWED, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, **_EXPERTS},
    "llama4": {**_LLAMA, "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "head_dim": 128, **_LLAMA4},
    "exaone4": {**_WINDOWED, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window_pattern": "LG"},
    "deepseek-v3": {**_MLA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "lfm2": {**_LLAMA, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "deepseek-v4": {**_MLA, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **_V4},
}


def write_models(directory: Path) -> dict[str, Path]:
    """One directory for each of `CONFIGS`: enough of a model for argument resolution, which reads no weights."""
    paths = {}
    for kind, config in CONFIGS.items():
        paths[kind] = directory / kind
        paths[kind].mkdir()
        (paths[kind] / "config.json").write_text(json.dumps(config))
    return paths
