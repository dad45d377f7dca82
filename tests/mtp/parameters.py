"""What a loaded draft model holds, module by module: types by the parameters' own dtypes, and values in FP64."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.mtp.checkpoints import spread, unpack
from tests.mtp.kinds import BLOCK, HEAD_DIM, HEADS, INNER, KV_HEADS

#: Rows of a fused parameter -> the projections that lie there, in order.
_ROWS = {
    "self_attn": (("q_proj", 2 * HEADS * HEAD_DIM), ("k_proj", KV_HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)),
    "mlp": (("gate_proj", INNER), ("up_proj", INNER)),
}


def value_of(module: str, parameters: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Type and FP64 value of the weight that `module`, named as in `Written.values`, has in the model."""
    if module.startswith("mlp.experts."):
        _, _, expert, leaf = module.split(".")
        half = "w2" if leaf == "down_proj" else "w13"
        rows = slice(None) if half == "w2" else slice(0, INNER) if leaf == "gate_proj" else slice(INNER, None)
        base = f"model.layers.0.mlp.experts.{half}_"
        taken = {part: parameters[f"{base}{part}"][int(expert)][rows] for part in _parts(base, parameters)}
        return _value(taken)
    if module == "model.language_model.embed_tokens":
        return _value({"weight": parameters["model.embed_tokens.weight"]})
    if module.startswith("mtp."):
        name = module.removeprefix("mtp.")
        return _value({"weight": parameters[("model." if name == "norm" else "") + name + ".weight"]})
    parent, _, leaf = module.rpartition(".")
    fused = {"q": "qkv_proj", "k": "qkv_proj", "v": "qkv_proj", "gate": "gate_up_proj", "up": "gate_up_proj"}
    where = fused.get(leaf.removesuffix("_proj"), leaf) if leaf.endswith("_proj") else leaf
    inside = "" if parent == "self_attn" else f"{parent}."
    base = f"model.layers.0.{inside if parent else ''}{where}."
    taken = {part: parameters[f"{base}{part}"] for part in _parts(base, parameters)}
    if f"{base}weight_scale_inv" in parameters:
        # One scale a block is SGLang's `weight_scale_inv`; it multiplies as any other.
        taken["weight_scale"] = parameters[f"{base}weight_scale_inv"]
    if where != leaf:
        taken = _rows(taken, leaf, _ROWS[parent.partition(".")[0]])
    return _value(taken)


def _parts(base: str, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    return [part for part in ("weight", "weight_scale") if f"{base}{part}" in parameters]


def _rows(taken: dict[str, torch.Tensor], leaf: str, order: tuple[tuple[str, int], ...]) -> dict[str, torch.Tensor]:
    """The rows of one projection; of scales that are one a projection, its own."""
    number = [name for name, _ in order].index(leaf)
    first, total = sum(rows for _, rows in order[:number]), sum(rows for _, rows in order)
    end = first + order[number][1]

    def of(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (len(order),):
            return tensor[number]
        side = 1 if tensor.shape[0] == total else BLOCK
        return tensor[first // side : end // side]

    return {part: of(tensor) for part, tensor in taken.items()}


def _value(taken: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    weight, scale = taken["weight"], taken.get("weight_scale")
    if scale is None:
        return {torch.bfloat16: "bf16"}.get(weight.dtype, str(weight.dtype)), weight.double()
    if weight.dtype == torch.uint8:
        return "mxfp4", unpack(weight, scale)
    return {torch.float8_e4m3fn: "fp8"}.get(weight.dtype, str(weight.dtype)), weight.double() * spread(scale)
