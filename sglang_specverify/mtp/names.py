"""How the modules of a Qwen3.5 MTP layer are spelt: in files, in exclude lists, and in SGLang."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: What may stand before `mtp.` or `layers.` where a multimodal checkpoint nests its language model.
_NESTED = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
_ANY_NESTED = "(?:" + "|".join(re.escape(prefix) for prefix in _NESTED) + ")"
_MTP = re.compile(rf"{_ANY_NESTED}mtp\.(?:layers\.(?P<layer>\d+)\.)?(?P<rest>.+)")
_APPENDED = re.compile(rf"{_ANY_NESTED}layers\.(?P<layer>\d+)\.(?P<rest>.+)")

#: Fused module -> the projections that SGLang builds it from.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}

#: Architectures whose draft SGLang builds as `Qwen3_5ForCausalLMMTP` (`ModelConfig._config_draft_model`).
TARGETS = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "InternS2PreviewForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
)

#: Modules that SGLang's MTP layer builds through the quantisation; it builds all others in the model's own type.
QUANTIZABLE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "experts")


def canonical(name: str, num_hidden_layers: int) -> str | None:
    """`name` of a tensor or module as SGLang's loader expects it, `mtp.…` with layers counted from 0; None outside the MTP part.

    Args:
        num_hidden_layers: of the target; a layer's index from there on is an absolute one. 0 where it is unknown.
    """
    if found := _MTP.fullmatch(name):
        if found["layer"] is None:
            return f"mtp.{found['rest']}"
        return f"mtp.layers.{_relative(int(found['layer']), num_hidden_layers)}.{found['rest']}"
    found = _APPENDED.fullmatch(name) if num_hidden_layers else None
    if found and int(found["layer"]) >= num_hidden_layers:
        return f"mtp.layers.{_relative(int(found['layer']), num_hidden_layers)}.{found['rest']}"
    return None


def _relative(layer: int, num_hidden_layers: int) -> int:
    return layer - num_hidden_layers if 0 < num_hidden_layers <= layer else layer


def built_name(module: str) -> str:
    """The module that SGLang builds for the canonical one: projections fused, all experts of a layer in one."""
    head, dot, _ = module.partition(".mlp.experts.")
    if dot:
        return f"{head}.mlp.experts"
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_FUSED_OF.get(leaf, leaf)}"


def is_quantizable(built: str) -> bool:
    return built.startswith("mtp.layers.") and built.rpartition(".")[2] in QUANTIZABLE


def spellings(module: str, num_hidden_layers: int) -> Iterator[str]:
    """Everything that an exclude list may call the canonical `module`, itself first, then its fused form and its parents.

    Each in all nestings and, in a layer, with the relative and the absolute index.
    """
    yield module
    path: list[str] = module.split(".")
    leaf = path[-1]
    ends = [path[:length] for length in range(len(path), 0, -1)]
    if leaf in _FUSED_OF:
        ends.insert(1, [*path[:-1], _FUSED_OF[leaf]])
        if len(path) > 2 and path[-3] == "experts":
            # All experts' projections in one tensor: `experts.gate_up_proj` stands for `experts.7.gate_proj`.
            ends += [[*path[:-2], leaf], [*path[:-2], _FUSED_OF[leaf]]]
    elif len(path) > 2 and path[-3] == "experts":
        ends.append([*path[:-2], leaf])
    for end in ends:
        forms = [".".join(end)]
        if num_hidden_layers and len(end) > 2 and end[1] == "layers":
            absolute = [str(int(end[2]) + num_hidden_layers), *end[3:]]
            forms += [".".join(["mtp", "layers", *absolute]), ".".join(["layers", *absolute])]
        for form in forms:
            yield from (f"{prefix}{form}" for prefix in _NESTED)
