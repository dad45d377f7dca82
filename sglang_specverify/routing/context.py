"""How many tokens SGLang lets a request have, by a model's config.json alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Where a config says how many positions there are, in SGLang's order; the last one is GPT-2's and its like.
_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings", "n_positions")
#: To a rope of these kinds transformers adds the length before it was stretched: the config's number is the one after.
_STRETCHED = ("llama3", "longrope", "yarn")


def context_length(text: Mapping[str, Any]) -> int:
    """The first number that is there, times the factor by which a rope is going to be stretched; 0 where there is none.

    Args:
        text: the configuration of the text model.
    """
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    stretched = "original_max_position_embeddings" in rope or rope.get("rope_type", rope.get("type")) in _STRETCHED
    factor = rope.get("factor", 1)
    scale = factor if isinstance(factor, int | float) and not stretched else 1
    return int(scale * next((text[key] for key in _KEYS if isinstance(text.get(key), int) and text[key] > 0), 0))
