"""The quantisation that SGLang's Quark code is given for the MTP part, so that it builds each module in the type of its tensors.

Pure: it makes the two tables that `QuarkConfig` asks, which modules are left alone and which spec the others have.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.config import CheckpointConfig, Spec, type_of_spec
from sglang_specverify.mtp.decide import Built, Plan
from sglang_specverify.mtp.names import FUSED
from sglang_specverify.mtp.witness import StoredModule

#: The layer that SGLang's MTP model builds; it has one.
LAYER = "mtp.layers.0."
#: Where `QuarkConfig.can_fuse_shared_expert` compares the shared with the routed experts, as if for the target's first layer.
_COMPARED = ("model.layers.0.", "model.language_model.layers.0.", "model.decoder.")

_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_FP8 = {"dtype": "fp8_e4m3"}


def unservable(plan: Plan) -> str:
    """Why SGLang's Quark code has no scheme for a module of the plan; "" where it has one for each."""
    other = [built for built in plan.built if not built.is_plain and built.type not in ("mxfp4", "fp8")]
    return "" if not other else f"{other[0].name} is stored as {other[0].type}, for which SGLang's Quark code has no scheme"


def excludes(plan: Plan) -> list[str]:
    """An exclude list that names exactly the plain ones among the modules that SGLang builds through the quantisation.

    As patterns, not as names: SGLang builds the whole MTP part unquantised as soon as a name in the list starts with `mtp.` and
    contains `mlp.experts`, also where attention is quantised.
    """
    return [f"re:{built.name.replace('.', chr(92) + '.')}$" for built in plan.built if built.is_plain and built.quantizable]


def layer_specs(plan: Plan) -> dict[str, Spec]:
    """Module -> spec for `layer_quant_config`: each quantised module under its fused and its single projections' names."""
    specs: dict[str, Spec] = {}
    for built in plan.built:
        if not built.quantizable or not built.name.startswith(LAYER):
            continue
        spec: Spec = {} if built.is_plain else spec_for(built, plan.config)
        tails = _names(built.name.removeprefix(LAYER))
        if not built.is_plain:
            specs.update({f"{LAYER}{tail}": spec for tail in tails})
        if ".experts" in built.name or ".shared_expert." in built.name:
            specs.update({f"{base}{tail}": spec for base in _COMPARED for tail in tails})
    return specs


def _names(tail: str) -> list[str]:
    parent, _, leaf = tail.rpartition(".")
    return [tail, *(f"{parent}.{part}" for part in FUSED.get(leaf, ()))]


def spec_for(built: Built, config: CheckpointConfig) -> Spec:
    """Quark's spec for a quantised module: the configuration's own where one fits the tensors, else made from them.

    Made specs quantise activations as Quark's exports of that weight type do: MXFP4 with dynamic MXFP4, FP8 with FP8, static
    where the files hold input scales.

    Raises:
        SpecverifyError: the type is none that SGLang's Quark code can build.
    """
    stored = built.stored[0]
    layers = (config.quant.get("layer_quant_config") or {}).values()
    for spec in (config.spec_of(stored.canonical), *layers, config.quant.get("global_quant_config") or {}):
        if isinstance(spec, Mapping) and all(_fits(spec, module) for module in built.stored):
            return spec
    if stored.type == "mxfp4":
        return _spec({**_MXFP4, "is_dynamic": False}, {**_MXFP4, "is_dynamic": True})
    if stored.type == "fp8":
        static = "input_scale" in stored.parts
        inputs = {**_FP8, "qscheme": "per_channel" if stored.granularity == "per_channel" and not static else "per_tensor"}
        weight = {**_FP8, "qscheme": stored.granularity, "is_dynamic": False}
        if stored.block is not None:
            weight["block_size"] = list(stored.block)
        return _spec(weight, {**inputs, "is_dynamic": not static})
    raise SpecverifyError(f"{built.name} is stored as {built.type}, for which SGLang's Quark code has no scheme")


def _spec(weight: Spec, inputs: Spec) -> Spec:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}


def _fits(spec: Mapping[str, Any], stored: StoredModule) -> bool:
    kind, granularity = type_of_spec(spec)
    weight, scale = stored.parts["weight"], stored.parts.get("weight_scale")
    if kind != stored.type or scale is None:
        return False
    if granularity == "per_block":
        sides = spec["weight"].get("block_size")
        if not isinstance(sides, list) or len(sides) != len(weight.shape):
            return False
        return scale.shape == tuple(ceil(size / side) for size, side in zip(weight.shape, sides, strict=True))
    if granularity == "per_tensor":
        return prod(scale.shape) == 1
    return granularity == stored.granularity
