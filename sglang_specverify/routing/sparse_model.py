"""The sparse MLA layers of a DeepSeek-V4 family model, from its config.json alone. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_specverify.errors import SpecverifyError

#: Heads to which SGLang pads a rank's own for FlashMLA, unless it has more.
PADDED_HEADS = 64


@dataclass(frozen=True)
class SparseGroup:
    """Layers of one compress ratio: positions that a selected row stands for; 0 for layers with a window alone.

    `heads` are a rank's own padded for FlashMLA, as a call of the backend has them.
    """

    ratio: int
    count: int
    heads: int


def is_v41(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type", "")).startswith("deepseek_v41")


def sparse_groups(config: Mapping[str, Any], ranks: int = 1) -> tuple[SparseGroup, ...]:
    """The layers by compress ratio; empty for a model of another family.

    Args:
        config: the parsed config.json, nested text configuration included.
        ranks: those that share the attention heads.

    Raises:
        SpecverifyError: ratios that are no list of whole numbers, or heads that do not divide.
    """
    if not str(config.get("model_type", "")).startswith("deepseek_v4"):
        return ()
    inner = config.get("text_config")
    text = {**inner, **config} if isinstance(inner, Mapping) else config
    ratios, heads = text.get("compress_ratios"), text.get("num_attention_heads")
    if not isinstance(ratios, list) or not all(isinstance(ratio, int) and ratio >= 0 for ratio in ratios):
        raise SpecverifyError(
            "the config has no list compress_ratios, one whole number for each layer", "name the config.json of a whole model"
        )
    if not isinstance(heads, int) or heads < 1 or heads % ranks:
        raise SpecverifyError(
            f"{heads} attention heads do not divide over {ranks} tensor-parallel ranks", "choose a --tp-size that divides them"
        )
    # SGLang pads to 64, and leaves more than that at what the model has.
    padded = PADDED_HEADS if heads // ranks <= PADDED_HEADS else heads
    layers = text.get("num_hidden_layers")
    counted = Counter(ratios[:layers] if isinstance(layers, int) else ratios)
    return tuple(SparseGroup(ratio, count, padded) for ratio, count in sorted(counted.items()))
