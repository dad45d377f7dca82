"""The MTP modules of a checkpoint as its files hold them: the type of each, told by dtypes, shapes and scale tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import ceil, prod

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.headers import StoredTensor
from sglang_specverify.mtp.names import canonical

#: Unquantised storage, which SGLang loads in the type that the model is served in.
PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_E8M0 = ("U8", "F8_E8M0")
#: Values in one byte, and values that share a scale: OCP Microscaling Formats (MX) v1.0, and NVFP4.
_PACKED, _MX_BLOCK, _NV_BLOCK = 2, 32, 16
#: Endings of a scale that belongs to a tensor without `.weight`, as `experts.gate_up_proj_scale` does.
_BARE_SCALES = ("_weight_scale", "_weight_scale_inv", "_scale", "_scale_inv")


@dataclass(frozen=True)
class StoredModule:
    """One module that has a weight.

    Args:
        name: as the files spell it, without `.weight`.
        canonical: the same as SGLang's loader expects it.
        type: "bf16", "fp16", "fp32", "fp8", "mxfp4", "nvfp4", …, as stored.
        granularity: of the scales: "per_tensor", "per_channel", "per_block", "per_group", or "" without any.
        block: rows and columns that share a scale, for "per_block".
        parts: part ("weight", "weight_scale", "input_scale", …) -> tensor.
        problem: why the tensors contradict each other; "" where they do not.
    """

    name: str
    canonical: str
    type: str
    granularity: str
    block: tuple[int, int] | None
    parts: Mapping[str, StoredTensor]
    problem: str = ""

    @property
    def is_plain(self) -> bool:
        return self.type in PLAIN.values()

    @property
    def evidence(self) -> str:
        """What says so, for people: the weight's dtype, and its scale's dtype or that there is none."""
        weight, scale = self.parts["weight"], self.parts.get("weight_scale")
        said = "no scale" if scale is None else f"scale {scale.dtype} {list(scale.shape)}"
        return f"{weight.dtype} {list(weight.shape)}, {said}"


def modules_of(tensors: Mapping[str, StoredTensor], num_hidden_layers: int) -> list[StoredModule]:
    """The MTP modules among `tensors`, ordered by name.

    Raises:
        SpecverifyError: two tensors are the same one under two spellings.
    """
    parts: dict[str, dict[str, StoredTensor]] = {}
    known: dict[str, str] = {}
    for name in sorted(tensors):
        plain = canonical(name, num_hidden_layers)
        if plain is None:
            continue
        if plain in known:
            raise SpecverifyError(
                f"{known[plain]} and {name} are both {plain}: {tensors[known[plain]].what} and {tensors[name].what}",
                "remove the one that is stale from the checkpoint",
            )
        known[plain] = name
        module, part = _split(name, tensors)
        parts.setdefault(module, {})[part] = tensors[name]
    return [_module(name, found, num_hidden_layers) for name, found in parts.items() if "weight" in found]


def _split(name: str, names: Container[str]) -> tuple[str, str]:
    """A tensor's module and its part of it."""
    module, _, leaf = name.rpartition(".")
    if leaf.startswith("weight") or leaf == "bias":
        return module, "weight_scale" if leaf == "weight_scale_inv" else leaf
    for ending in _BARE_SCALES:
        if name.endswith(ending) and (name.removesuffix(ending) in names or f"{name.removesuffix(ending)}.weight" in names):
            return name.removesuffix(ending), "weight_scale"
    if leaf.endswith(("_scale", "_zero_point")):
        return module, leaf
    return name, "weight"


def _module(name: str, parts: Mapping[str, StoredTensor], num_hidden_layers: int) -> StoredModule:
    weight, scale = parts["weight"], parts.get("weight_scale")
    kind, granularity, block, problem = _classify(weight, scale)
    plain = canonical(name, num_hidden_layers)
    assert plain is not None
    return StoredModule(name, plain, kind, granularity, block, dict(parts), problem)


def _classify(weight: StoredTensor, scale: StoredTensor | None) -> tuple[str, str, tuple[int, int] | None, str]:
    if weight.dtype in PLAIN:
        problem = "" if scale is None else f"{weight.what} is not quantised, and yet has the scale {scale.what}"
        return PLAIN[weight.dtype], "", None, problem
    if scale is None:
        kind = "fp8" if weight.dtype in _FP8 else {"U8": "uint8", "I8": "int8"}.get(weight.dtype, weight.dtype.lower())
        return kind, "", None, f"{weight.what} has no scale beside it"
    if weight.dtype == "U8":
        return _four_bits(weight, scale)
    if weight.dtype in _FP8:
        return _eight_bits(weight, scale)
    return {"I8": "int8", "I32": "int4"}.get(weight.dtype, weight.dtype.lower()), "", None, ""


def _four_bits(weight: StoredTensor, scale: StoredTensor) -> tuple[str, str, tuple[int, int] | None, str]:
    """Two values of four bits in each byte, the last dimension in blocks that share a scale."""
    kind, block = ("mxfp4", _MX_BLOCK) if scale.dtype in _E8M0 else ("nvfp4", _NV_BLOCK)
    if scale.dtype not in (*_E8M0, "F8_E4M3"):
        return "uint8", "", None, f"{weight.what} is packed, and the scale {scale.what} is of no known packing"
    columns = weight.shape[-1] * _PACKED if weight.shape else 0
    expected = (*weight.shape[:-1], ceil(columns / block))
    problem = "" if scale.shape == expected else f"{weight.what} needs a scale of shape {list(expected)}, not {scale.what}"
    return kind, "per_group", None, problem


def _eight_bits(weight: StoredTensor, scale: StoredTensor) -> tuple[str, str, tuple[int, int] | None, str]:
    if scale.dtype in _E8M0:
        return "mxfp8", "per_group", None, ""
    if prod(scale.shape) == 1:
        return "fp8", "per_tensor", None, ""
    rows, columns = (weight.shape[0], weight.shape[1]) if len(weight.shape) == 2 else (0, 0)
    if rows and scale.shape in ((rows,), (rows, 1)):
        return "fp8", "per_channel", None, ""
    # Shapes alone leave the side open where a matrix is small; the configuration's word is heard first (`quark.spec_for`).
    for side in (128, 64, 32, 256):
        if rows and scale.shape == (ceil(rows / side), ceil(columns / side)):
            return "fp8", "per_block", (side, side), ""
    return "fp8", "", None, f"{weight.what} has the scale {scale.what}, which is neither one, one a row, nor one a block"
