"""The tensors of the MTP part on their way into SGLang's loader: renamed where it knows another spelling, and none missing.

SGLang's loader skips a tensor whose name it does not know, and leaves a parameter without a tensor as it was allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.decide import Plan
from sglang_specverify.mtp.names import built_name, canonical
from sglang_specverify.mtp.quark import LAYER
from sglang_specverify.mtp.witness import StoredModule

#: Parameters that a tensor of the file must fill; others, as scales of the cache, have a value of their own.
_FILLED = ("weight", "weight_scale", "weight_scale_inv")
#: Half of the experts' parameters -> the projections in it.
_HALVES = {"w13": ("gate_proj", "up_proj", "gate_up_proj"), "w2": ("down_proj",)}


@dataclass(frozen=True)
class Change:
    """What a tensor becomes on its way: another name and, for scales of one a row, one dimension."""

    name: str
    flat: bool = False


def changes(plan: Plan) -> dict[str, Change]:
    """Tensor as the files spell it -> as `Qwen3_5ForCausalLMMTP.load_weights` takes it, for those that differ."""
    found = {}
    for module in plan.stored:
        if module.canonical.startswith("mtp.layers.") and not module.canonical.startswith(LAYER):
            continue
        for part, tensor in module.parts.items():
            rows = part == "weight_scale" and module.granularity == "per_channel" and ".experts." not in module.canonical
            change = Change(_expected(module, part), rows and len(tensor.shape) > 1)
            if change != Change(tensor.name):
                found[tensor.name] = change
    return found


def changed(weights: Iterable[tuple[str, Any]], table: Mapping[str, Change], num_hidden_layers: int) -> Iterator[tuple[str, Any]]:
    """`weights` with the changes of `table`.

    What belongs to no weight, as a scale of the cache, gets SGLang's spelling alone; what is not of the MTP part passes as it is.
    """
    for name, tensor in weights:
        change = table.get(name) or Change(canonical(name, num_hidden_layers) or name)
        yield change.name, tensor.reshape(-1) if change.flat else tensor


def _expected(module: StoredModule, part: str) -> str:
    name = module.canonical
    if name.partition(".mlp.experts.")[2] in ("gate_up_proj", "down_proj"):
        # All experts in one tensor: the loader replaces `experts.gate_up_proj` by `experts.w13_weight` and keeps what follows.
        return name + part.removeprefix("weight")
    if part == "weight_scale" and module.granularity == "per_block":
        return f"{name}.weight_scale_inv"
    return f"{name}.{part}"


def check(plan: Plan, parameters: Iterable[str], *, shared_expert_fused: bool = False) -> None:
    """Refuse a model whose parameters and whose tensors do not meet, before any weight is read.

    Args:
        parameters: names of the built model's parameters.
        shared_expert_fused: the shared expert is built as one more routed expert.

    Raises:
        SpecverifyError: a parameter that no tensor fills, or a tensor that fills none.
    """
    model = {name for name in parameters if _is_filled(name)}
    given: dict[str, str] = {}
    for module in plan.stored:
        if module.canonical.startswith("mtp.layers.") and not module.canonical.startswith(LAYER):
            continue
        if shared_expert_fused and ".shared_expert." in module.canonical:
            continue
        for part, tensor in module.parts.items():
            if part in _FILLED:
                given.setdefault(_parameter(module, part), tensor.name)
    remedy = "compare `specverify checkpoint` with the model that SGLang builds; SGLANG_SPECVERIFY_MTP=0 leaves it to SGLang"
    empty = sorted(model - given.keys())
    if empty:
        what = f"no tensor of {plan.directory} fills {', '.join(empty[:4])}"
        raise SpecverifyError(what + (f" and {len(empty) - 4} more parameters" if len(empty) > 4 else ""), remedy)
    lost = sorted(given[name] for name in given.keys() - model if name.startswith("model.layers.0."))
    # A pipeline stage without the layer has none of its parameters.
    if lost and any(name.startswith("model.layers.0.") for name in model):
        raise SpecverifyError(f"SGLang's MTP model has no parameter for {', '.join(lost[:4])} of {plan.directory}", remedy)


def _is_filled(parameter: str) -> bool:
    leaf = parameter.rpartition(".")[2]
    # The embedding and the head are the target's, which the draft shares.
    shared = parameter.startswith(("lm_head.", "model.embed_tokens."))
    return leaf.removeprefix("w13_").removeprefix("w2_") in _FILLED and not shared


def _parameter(module: StoredModule, part: str) -> str:
    """The parameter of SGLang's model that a tensor goes to."""
    built = built_name(module.canonical)
    if part == "weight_scale" and module.granularity == "per_block":
        part = "weight_scale_inv"
    name = built.removeprefix("mtp.").replace(".self_attn", "")
    head = "" if name.startswith(("fc", "pre_fc")) else "model."
    if built.endswith(".experts"):
        leaf = module.canonical.rpartition(".")[2]
        part = next((f"{half}_{part}" for half, leaves in _HALVES.items() if leaf in leaves), part)
    return f"{head}{name}.{part}"
