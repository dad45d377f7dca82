"""Tiny Qwen3.5 checkpoints with an MTP layer, of every kind in `kinds`.

Values of packed modules come from the FP4 grid (E2M1) times powers of two, so that packing loses nothing and what a loader made
of them can be compared with `==`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.mtp.kinds import (
    ATTENTION,
    BLOCK,
    DENSE,
    DEPTH,
    EXPERTS,
    GRID,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    MXFP4_SPEC,
    SHARED,
    SINGLE,
    VOCABULARY,
    Kind,
)


def pack(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Grid values times 2**`exponents` of their blocks, as MXFP4: two codes a byte, the even column in the low bits."""
    units = values.double() / torch.exp2(exponents.double()).repeat_interleave(BLOCK, dim=-1)
    code = torch.bucketize(units.abs(), torch.tensor(GRID, dtype=torch.float64)).to(torch.uint8)
    assert torch.equal(torch.tensor(GRID, dtype=torch.float64)[code.long()], units.abs())
    code |= (units < 0).to(torch.uint8) << 3
    return code[..., ::2] | (code[..., 1::2] << 4)


def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of an MXFP4 tensor in FP64."""
    code = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    grid = torch.tensor([*GRID, *(-value for value in GRID)], dtype=torch.float64)
    return grid[code.long()] * torch.exp2(scale.double() - 127).repeat_interleave(BLOCK, dim=-1)


#: A draft loads the embedding, and takes the head from the target.
_SHARED = ("lm_head",)


def spread(scale: torch.Tensor) -> torch.Tensor:
    """Scales of one a tensor, a channel or a block, in FP64, so that they multiply the weight."""
    wide = scale.double()[:, None] if scale.dim() == 1 else scale.double()
    return wide.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) if wide.dim() == 2 and wide.shape[1] > 1 else wide


class Written:
    """A checkpoint on disk: its directory, the tensors of its files, and the values that each module stands for.

    `values`: module of the layer, one expert's projection or one projection, or `mtp.fc`, … -> its weight in FP64.
    """

    def __init__(self, kind: Kind, directory: Path, seed: int = 0) -> None:
        self.kind, self.directory = kind, directory
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)
        for name, shape in _shapes(kind).items():
            self._add(name, shape)
        if kind.fused:
            self._stack_experts()
        if kind.fused_rows:
            self._join_rows()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config(kind)))
        write(directory, self.tensors, kind.shards)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        stored = name if name.startswith(("mtp.", "lm_head", "model.")) else f"{self.kind.layer}{name}"
        if name.startswith(self.kind.packed) and self.kind.packed:
            exponents = torch.randint(-8, 9, (shape[0], shape[1] // BLOCK), generator=self._random)
            sign = torch.randint(0, 2, shape, generator=self._random) * 2 - 1
            magnitude = torch.tensor(GRID, dtype=torch.float64)[torch.randint(0, 8, shape, generator=self._random)]
            value = sign * magnitude * torch.exp2(exponents.double()).repeat_interleave(BLOCK, dim=-1)
            self.tensors[f"{stored}.weight"] = pack(value, exponents)
            self.tensors[f"{stored}.weight_scale"] = (exponents + 127).to(torch.uint8)
        elif name.startswith(self.kind.fp8) and self.kind.fp8:
            weight = torch.randn(shape, generator=self._random).to(torch.float8_e4m3fn)
            scales = {"tensor": (), "channel": (shape[0], 1), "block": (shape[0] // BLOCK, shape[1] // BLOCK)}
            scale = torch.rand(scales[self.kind.fp8_scales], generator=self._random)
            value = weight.double() * spread(scale)
            self.tensors[f"{stored}.weight"], self.tensors[f"{stored}.weight_scale"] = weight, scale
        else:
            weight = torch.randn(shape, generator=self._random).to(torch.bfloat16)
            value = weight.double()
            self.tensors[f"{stored}.weight"] = weight
        if not name.startswith(_SHARED):
            self.values[name] = value

    def _stack_experts(self) -> None:
        """All experts of a projection in one tensor, gate above up, and scales beside it."""
        base = f"{self.kind.layer}mlp.experts."
        bare = {"weight": "", "weight_scale": "_scale"}
        for part, ending in bare.items() if self.kind.fused == "_" else ((part, f".{part}") for part in bare):
            if f"{base}0.gate_proj.{part}" not in self.tensors:
                continue
            take = [
                {name: self.tensors.pop(f"{base}{expert}.{name}_proj.{part}") for name in ("gate", "up", "down")}
                for expert in range(EXPERTS)
            ]
            self.tensors[f"{base}gate_up_proj{ending}"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in take])
            self.tensors[f"{base}down_proj{ending}"] = torch.stack([one["down"] for one in take])

    def _join_rows(self) -> None:
        """q, k and v in one tensor: of plain modules, as scales of FP8 cannot be joined."""
        base = f"{self.kind.layer}self_attn."
        self.tensors[f"{base}qkv_proj.weight"] = torch.cat([self.tensors.pop(f"{base}{name}_proj.weight") for name in "qkv"])


def write(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write `tensors`, dealt to `shards` files, with an index where there are several."""
    if shards == 1:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = {name: tensor.clone() for number, (name, tensor) in enumerate(tensors.items()) if number % shards == shard}
        save_file(mine, directory / file)
        weight_map.update(dict.fromkeys(mine, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _shapes(kind: Kind) -> dict[str, tuple[int, ...]]:
    """Module -> shape of its weight; modules without `mtp.` lie in the layer."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head": (VOCABULARY, HIDDEN),
        "model.language_model.embed_tokens": (VOCABULARY, HIDDEN),
        "mtp.fc": (HIDDEN, 2 * HIDDEN),
        **dict.fromkeys(("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"), (HIDDEN,)),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,)),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (HEAD_DIM,)),
        # The query projection holds the output gate too.
        **dict(zip(ATTENTION, ((2 * q, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, q)), strict=True)),
    }
    mlp = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    if kind.dense:
        return shapes | dict(zip(DENSE, mlp, strict=True))
    shapes |= {"mlp.gate": (EXPERTS, HIDDEN), "mlp.shared_expert_gate": (1, HIDDEN)}
    return shapes | dict(zip(SHARED, mlp, strict=True)) | dict(zip(SINGLE, mlp * EXPERTS, strict=True))


def config(kind: Kind) -> dict[str, Any]:
    """config.json of a multimodal Qwen3.5 with a text model of these sizes."""
    text = {
        "model_type": "qwen3_5_text" if kind.dense else "qwen3_5_moe_text",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": DEPTH, "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "full_attention_interval": 4,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    if not kind.dense:
        sizes = {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER}
        text |= {**sizes, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    moe = "" if kind.dense else "Moe"
    top: dict[str, Any] = {
        "architectures": [f"Qwen3_5{moe}ForConditionalGeneration"],
        "model_type": "qwen3_5" if kind.dense else "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": HIDDEN, "intermediate_size": 32},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if kind.method == "quark":
        top["quantization_config"] = {
            "quant_method": "quark",
            "exclude": ["lm_head", "re:model\\.language_model\\.layers\\.\\d+\\.linear_attn.*", *kind.exclude],
            "global_quant_config": MXFP4_SPEC,
            "layer_quant_config": kind.layer_specs,
            "layer_type_quant_config": {},
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
        }
    elif kind.method == "fp8":
        top["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return top
