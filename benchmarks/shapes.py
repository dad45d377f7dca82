"""Model directories of real shapes and no weights: a config.json each, for engines that make their weights up.

Speed depends on shapes and not on values, so `--load-format dummy` measures what a checkpoint would. Every shape comes with a
one-layer EAGLE3 draft of its hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.errors import ArgumentError

#: Tokens that a draft can propose; prompts are drawn from them.
DRAFT_VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    """A target and its draft.

    Attributes:
        target, draft: what config.json holds.
        layers: of the target, full-attention layers and sliding ones.
        kv_bytes: of one token in all layers of the target, 16-bit cache.
    """

    name: str
    target: Mapping[str, Any]
    draft: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return int(self.target["num_hidden_layers"])

    @property
    def kv_bytes(self) -> int:
        return self.layers * 2 * 2 * int(self.target["num_key_value_heads"]) * int(self.target["head_dim"])

    @property
    def prompt_vocabulary(self) -> int:
        return int(self.draft["draft_vocab_size"])

    def write(self, root: Path) -> tuple[Path, Path]:
        """Write both directories under `root`; the target's and the draft's."""
        places = root / self.name, root / f"{self.name}-eagle3"
        for place, config in zip(places, (self.target, self.draft), strict=True):
            place.mkdir(parents=True, exist_ok=True)
            (place / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        return places


def _draft(
    target: Mapping[str, Any], *, draft_vocabulary: int = DRAFT_VOCABULARY, head_dim: int | None = None, mlp: int | None = None
) -> dict[str, Any]:
    """One Llama layer with the target's heads, as published EAGLE3 heads have.

    Args:
        mlp: its intermediate size, three times the hidden one if None.
    """
    hidden = int(target["hidden_size"])
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": draft_vocabulary,
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": mlp or max(3 * hidden, int(target["intermediate_size"])),
        "num_hidden_layers": 1,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": head_dim or target["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": target["torch_dtype"],
    }


def _qwen3(**changes: Any) -> dict[str, Any]:
    """Qwen3-8B, or what `changes` make of it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
        **changes,
    }


def _gpt_oss_20b() -> dict[str, Any]:
    """gpt-oss-20b with experts in bfloat16: head dim 64, sinks, every other layer with a window of 128 tokens."""
    layers = 24
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "torch_dtype": "bfloat16",
    }


def _llama3_70b_slice() -> dict[str, Any]:
    """What one of eight devices holds of Llama 3 70B under tensor parallelism: an eighth of the heads, of the MLP and of the
    vocabulary. What the devices tell each other is not in it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256 // 8,
        "hidden_size": 8192,
        "intermediate_size": 28672 // 8,
        "num_hidden_layers": 80,
        "num_attention_heads": 64 // 8,
        "num_key_value_heads": 8 // 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _shapes() -> dict[str, Shape]:
    qwen = _qwen3()
    # Qwen3.5's full-attention heads in Qwen3-8B's body: nothing but the attention differs from the shape above.
    wide = _qwen3(num_attention_heads=16, num_key_value_heads=2, head_dim=256)
    tiny = _qwen3(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        # An EAGLE3 target hands on what three layers see: the third, the middle one and the third from the end, all different.
        num_hidden_layers=7,
        max_window_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float32",
    )
    found = (
        Shape("qwen3-8b", qwen, _draft(qwen)),
        Shape("qwen3-d256", wide, _draft(wide)),
        Shape("gpt-oss-20b", gpt := _gpt_oss_20b(), _draft(gpt)),
        Shape(
            "llama3-70b-tp8",
            llama := _llama3_70b_slice(),
            _draft(llama, draft_vocabulary=llama["vocab_size"], mlp=llama["intermediate_size"]),
        ),
        Shape("tiny", tiny, _draft(tiny, draft_vocabulary=256)),
    )
    return {shape.name: shape for shape in found}


SHAPES = _shapes()


def get(name: str) -> Shape:
    """The shape of this name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in SHAPES:
        raise ArgumentError("shape", repr(name), ", ".join(SHAPES))
    return SHAPES[name]
