"""What each layer of a model is, read from the keys of its config.json. Pure.

Families differ in how they say it: a list of names, a pattern string, a period, a list of indices.
Each reader below knows one way and answers None where the config does not speak it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: One layer: "full", "window", "chunked", "linear", "cross", "none" (no attention), "full+linear", or "?name" where
#: the config names a kind that nobody here knows.
Label = str

_NAMES: dict[str, Label] = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "full"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "local_attention", "swa", "sliding_window"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "gdn", "kda", "lightning"), "linear"),
    **dict.fromkeys(("chunked_attention",), "chunked"),
    **dict.fromkeys(("mlp", "moe"), "none"),
    **dict.fromkeys(("hybrid",), "full+linear"),
}
_PATTERN = {"M": "linear", "*": "full", "-": "none", "E": "none"}

#: Families whose SGLang models leave `sliding_window` out: every layer attends the whole context there.
_WINDOW_IGNORED = ("Mistral", "Mixtral", "Phi3", "Qwen2", "Qwen3")
#: Configs that say a window and no pattern, and the model that alternates all the same: period and full layer's place.
_ALTERNATING = {"Gemma2": 2, "GptOss": 2, "Gemma3": 6, "Cohere2": 4}


def window_size(config: Mapping[str, Any]) -> int | None:
    """The number of positions a windowed layer sees, its own included, or None for no window."""
    if config.get("use_sliding_window") is False:
        return None
    for key in ("sliding_window_size", "sliding_window", "window_size"):
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def window_is_ignored(config: Mapping[str, Any], architecture: str) -> bool:
    """Whether the config names a window that SGLang's model of this family does not apply."""
    return (
        architecture.startswith(_WINDOW_IGNORED)
        and "sliding_attention" not in (config.get("layer_types") or ())
        and window_size(config) is not None
    )


def labels(config: Mapping[str, Any], architecture: str, count: int) -> list[Label]:
    """One label for each of `count` decoder layers."""
    readers: tuple[Callable[[Mapping[str, Any], str, int], list[Label] | None], ...] = (
        _named,
        _pattern_string,
        _kimi,
        _interval,
        _indices,
        _cross,
        _chunked,
        _state_space,
        _windows,
    )
    for reader in readers:
        found = reader(config, architecture, count)
        if found is not None:
            return found[:count]
    return ["full"] * count


def _named(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    for key in ("layer_types", "layers_block_type", "block_types"):
        listed = config.get(key)
        if isinstance(listed, list) and listed:
            found = [_NAMES.get(str(name), f"?{name}") for name in listed]
            # Some families list one period only.
            return [found[i % len(found)] for i in range(count)]
    return None


def _pattern_string(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    pattern = config.get("hybrid_override_pattern")
    return [_PATTERN.get(letter, f"?{letter}") for letter in pattern] if isinstance(pattern, str) else None


def _kimi(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping) or not isinstance(linear.get("full_attn_layers"), list):
        return None
    # This family counts layers from 1.
    full = {int(i) - 1 for i in linear["full_attn_layers"]}
    return ["full" if i in full else "linear" for i in range(count)]


def _interval(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    interval = config.get("full_attention_interval")
    if isinstance(interval, int) and interval > 0 and any(key.startswith("linear_") for key in config):
        return ["full" if (i + 1) % interval == 0 else "linear" for i in range(count)]
    period, offset = config.get("attn_layer_period"), config.get("attn_layer_offset", 0)
    if isinstance(period, int) and period > 0:
        return ["full" if i % period == offset else "linear" for i in range(count)]
    return None


def _indices(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    kinds = config.get("attn_type_list")
    if isinstance(kinds, list):
        return ["full" if kind == 1 else "linear" for kind in kinds]
    windows = config.get("hybrid_layer_pattern")
    if isinstance(windows, list):
        return ["window" if kind == 1 else "full" for kind in windows]
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(config.get(key), list):
            return ["full" if i in config[key] else "linear" for i in range(count)]
    if isinstance(config.get("local_layer_ids"), list):
        return ["window" if i in config["local_layer_ids"] else "full" for i in range(count)]
    return None


def _cross(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    crossed = config.get("cross_attention_layers")
    return ["cross" if i in crossed else "full" for i in range(count)] if isinstance(crossed, list) and crossed else None


def _chunked(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    if not config.get("attention_chunk_size"):
        return None
    rope = config.get("no_rope_layers")
    if isinstance(rope, list) and len(rope) >= count:
        # 1 means that the layer has rotary positions, and those are the chunked ones.
        return ["chunked" if rope[i] else "full" for i in range(count)]
    return ["full" if (i + 1) % 4 == 0 else "chunked" for i in range(count)]


def _state_space(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    states = any(key.startswith(("mamba_", "ssm_")) or key == "state_size" for key in config)
    if not states:
        return None
    heads = config.get("num_attention_heads")
    return ["full+linear" if isinstance(heads, int) and heads > 0 else "linear"] * count


def _windows(config: Mapping[str, Any], architecture: str, count: int) -> list[Label] | None:
    if window_size(config) is None:
        return None
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if isinstance(pattern, str) and pattern:
        return ["window" if pattern[i % len(pattern)] == "L" else "full" for i in range(count)]
    if not isinstance(pattern, int) or pattern < 1:
        pattern = next((period for family, period in _ALTERNATING.items() if architecture.startswith(family)), None)
    if pattern is not None:
        return ["full" if (i + 1) % pattern == 0 else "window" for i in range(count)]
    return ["full" if window_is_ignored(config, architecture) else "window"] * count
