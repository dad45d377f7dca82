"""The kinds of checkpoints: in which types the MTP layer is stored, how the files spell it, and what config.json says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HIDDEN, INNER, EXPERTS, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, DEPTH = 64, 32, 4, 64, 4, 2, 16, 4
#: The eight magnitudes of E2M1, by code; bit 3 is the sign. OCP Microscaling Formats (MX) v1.0, section 5.3.3.
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32

_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0"}
_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
MXFP4_SPEC = {
    "weight": {**_FP4, "is_dynamic": False},
    "input_tensors": {**_FP4, "is_dynamic": True},
    "output_tensors": None,
    "bias": None,
}
FP8_SPEC = {
    "weight": {**_FP8, "is_dynamic": False},
    "input_tensors": {**_FP8, "is_dynamic": True},
    "output_tensors": None,
    "bias": None,
}
_BLOCKS = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [BLOCK, BLOCK], "is_dynamic": False}
BLOCK_SPEC = {**FP8_SPEC, "weight": _BLOCKS}

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
SHARED = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
GATES = ("mlp.gate", "mlp.shared_expert_gate")
SINGLE = tuple(f"mlp.experts.{expert}.{name}_proj" for expert in range(EXPERTS) for name in ("gate", "up", "down"))
DENSE = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


def listed(*modules: str, layer: str = "mtp.layers.0.") -> list[str]:
    """An exclude list with `fc` and these modules of the MTP layer."""
    return ["mtp.fc", *(f"{layer}{module}" for module in modules)]


@dataclass(frozen=True)
class Kind:
    """One checkpoint. `packed` and `fp8` name what is stored so, by beginnings of the names in the layer; all else is bf16.

    Args:
        exclude: as it stands in config.json.
        fp8_scales: one scale a "tensor", a "channel" or a "block" of BLOCK by BLOCK.
        layer: what the files call the MTP layer.
        dense: the layer has an MLP and no experts.
        fused: the experts lie in two tensors; "_" where these are named as their modules, "." where `.weight` follows.
        fused_rows: gate and up, and q, k and v, lie in one tensor each.
        shards: number of files; more than one come with an index.
        method: quantisation method; None for a checkpoint that is not quantised.
    """

    packed: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    fp8_scales: str = "tensor"
    layer: str = "mtp.layers.0."
    dense: bool = False
    fused: str = ""
    fused_rows: bool = False
    shards: int = 1
    method: str | None = "quark"
    layer_specs: dict[str, Any] = field(default_factory=dict)


#: Every module of an MTP layer with experts, as a list names it.
_MIXED = tuple(listed(*ATTENTION, *SHARED, *GATES))
ALL = (*ATTENTION, *SHARED, *GATES, *SINGLE)
KINDS = {
    "all bf16, listed": Kind(exclude=tuple(listed(*ALL))),
    "all bf16, not listed": Kind(shards=3),
    "all bf16, by parent": Kind(exclude=("mtp.*",)),
    "all bf16, by parent without glob": Kind(exclude=("mtp",)),
    "all bf16, by pattern": Kind(exclude=("re:mtp.*",)),
    "all bf16, by two globs": Kind(exclude=tuple([*listed(*ATTENTION), "mtp.layers.0.mlp*"])),
    "mixed": Kind(("mlp.experts",), tuple(listed(*ATTENTION, *SHARED, *GATES)), shards=2),
    "mixed, listed by absolute index": Kind(
        ("mlp.experts",), tuple(listed(*ATTENTION, *SHARED, *GATES, layer=f"model.layers.{DEPTH}."))
    ),
    "mixed, experts bf16": Kind(ATTENTION, tuple(listed(*SHARED, *GATES, *SINGLE))),
    "mixed, FP8 attention": Kind(
        ("mlp.experts",), tuple(listed(*SHARED, *GATES)), ATTENTION, layer_specs={"*self_attn*": FP8_SPEC}
    ),
    "mixed, FP8 attention by channel, not said": Kind(
        ("mlp.experts",), tuple(listed(*SHARED, *GATES)), ATTENTION, fp8_scales="channel"
    ),
    "mixed, FP8 attention by block": Kind(
        ("mlp.experts",), tuple(listed(*SHARED, *GATES)), ATTENTION, "block", layer_specs={"*self_attn*": BLOCK_SPEC}
    ),
    "mixed, in all three types and one tensor a fused module": Kind(
        ("mlp.experts",), tuple(listed("self_attn.qkv_proj", *GATES)), ("mlp.shared_expert.",), fused="_", fused_rows=True
    ),
    "all packed": Kind(("mlp.experts", *ATTENTION, *SHARED), tuple(listed(*GATES))),
    "bf16 experts in two tensors": Kind(
        SHARED, tuple(listed(*ATTENTION, *GATES, "mlp.experts.gate_up_proj", "mlp.experts.down_proj")), fused="_"
    ),
    "mixed, experts in two tensors": Kind(("mlp.experts",), _MIXED, fused="_"),
    "mixed, experts in two tensors with endings": Kind(("mlp.experts",), _MIXED, fused="."),
    "stored by absolute index": Kind(("mlp.experts",), tuple(listed(*ATTENTION, *SHARED, *GATES)), layer=f"mtp.layers.{DEPTH}."),
    "stored under the language model": Kind(
        ("mlp.experts",), tuple(listed(*ATTENTION, *SHARED, *GATES)), layer="model.mtp.layers.0."
    ),
    "dense, all bf16": Kind(exclude=tuple(listed(*ATTENTION, *DENSE)), dense=True),
    "dense, all bf16, by parent": Kind(exclude=("mtp.layers.0.*", "mtp.fc"), dense=True),
    "dense, mixed": Kind(("mlp.",), tuple(listed(*ATTENTION)), dense=True),
}
#: Contradictory ones, and what the refusal must name.
BROKEN = {
    "a few experts excluded": (
        Kind(("mlp.experts",), (*_MIXED, "mtp.layers.0.mlp.experts.2.down_proj")),
        ("names 1 of its 12 weights", "mtp.layers.0.mlp.experts.2.down_proj"),
    ),
    "a few experts stored otherwise": (
        Kind(tuple(f"mlp.experts.{expert}." for expert in (0, 1, 3)), _MIXED, shards=2),
        ("3 as unquantised: mtp.layers.0.mlp.experts.2.down_proj.weight (BF16 [64, 32]", "9 as mxfp4 per_group"),
    ),
    "one projection of all experts stored otherwise": (
        Kind(tuple(f"mlp.experts.{expert}.down" for expert in range(EXPERTS)), _MIXED),
        ("stored in 2", "mtp.layers.0.mlp.experts.0.gate_proj.weight (BF16 [32, 64], model.safetensors)"),
    ),
    "q and k packed, v not": (
        Kind(("self_attn.q_proj", "self_attn.k_proj"), ("mtp.*",)),
        ("mtp.layers.0.self_attn.qkv_proj is one module", "mtp.layers.0.self_attn.v_proj.weight (BF16 [32, 64]"),
    ),
    "fc packed": (Kind(("mtp.fc",)), ("mtp.fc is stored as mxfp4", "SGLang builds it unquantised")),
}
#: Checkpoints that Quark did not make; the second is what SGLang's FP8 method reads.
OTHERS = {
    "not quantised": Kind(method=None),
    "FP8": Kind(fp8=(*ATTENTION, *SHARED, "mlp.experts"), method="fp8"),
}
