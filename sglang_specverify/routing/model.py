"""A model's attention layers, described from its config.json alone. Pure, for any architecture.

Nothing here is a list of supported models: the config's keys say what a layer is. What they say and
nobody here knows is carried along as `LayerFacts.unknown`, so that no route can take it by mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.base import ModelFacts
from sglang_specverify.routing.context import context_length
from sglang_specverify.routing.facts import LayerFacts, LayerKind
from sglang_specverify.routing.layers import Label, labels, window_is_ignored, window_size
from sglang_specverify.routing.model_rules import sparse_kind

_NESTED = ("text_config", "llm_config", "language_config")
_ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert", "NomicBert")
_SINKS = ("GptOssForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM", "IQuestQ1ForCausalLM", "IQuestQ1MTP")


#: SGLang's models that let image tokens see each other, by a mask that they write into the built-in backend's metadata.
_IMAGE_RANGES = ("Gemma3ForConditional", "Gemma4ForConditional", "Gemma4Unified")

#: Keys of a config that say sparse attention, also where nobody here knows the family.
_SPARSE_KEYS = ("compress_ratios", "index_topk", "indexer_n_heads")


@dataclass(frozen=True)
class LayerGroup:
    """Layers that a route cannot tell apart: their facts, how many they are, and the first one's index."""

    facts: LayerFacts
    count: int
    first: int


@dataclass(frozen=True)
class Description:
    """A model as far as attention is concerned.

    `dtype` is the checkpoint's; `states` goes into `ServerFacts.unknown`; `notes` are for people; `context` is how many tokens
    SGLang lets a request have by the config, 0 where it names no number; `sparse` is the kind of sparse attention of its own that
    SGLang serves it with, a key of `SPARSE_BACKENDS`, or empty.
    """

    architectures: tuple[str, ...]
    dtype: str
    groups: tuple[LayerGroup, ...]
    facts: ModelFacts
    states: frozenset[str]
    notes: tuple[str, ...]
    context: int = 0
    sparse: str = ""


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json at `path`, or in the directory `path`.

    Raises:
        SpecverifyError: no such file, no JSON object in it, or no architecture named.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecverifyError(
            f"no config.json at {path}", "name a model's directory or its config.json; nothing is downloaded"
        ) from None
    except (OSError, ValueError) as error:
        raise SpecverifyError(f"{file} cannot be read as JSON: {error}", "name a model's config.json") from None
    if not isinstance(config, dict):
        raise SpecverifyError(f"{file} holds no JSON object", "name a model's config.json")
    return config


def describe(config: Mapping[str, Any], tensor_parallel: int = 1, *, minicpm_dense: bool = False) -> Description:
    """The layers of a model on one rank.

    Args:
        config: the parsed config.json, nested text configuration included.
        tensor_parallel: ranks that share the attention heads. KV heads are replicated where there are fewer.
        minicpm_dense: SGLANG_MINICPM_FORCE_DENSE, with which SGLang serves MiniCPM's sparse layers dense.

    Raises:
        SpecverifyError: no architecture, no layer or head count, or heads that do not divide.
    """
    architectures = tuple(str(name) for name in config.get("architectures") or ())
    if not architectures:
        raise SpecverifyError("the config names no architecture", 'add "architectures", as a saved checkpoint has it')
    text = _text_config(config)
    sparse = sparse_kind(config, text, minicpm_dense=minicpm_dense)
    reader = _Reader(text, config, architectures[0], tensor_parallel, sparse)
    found = list(reader.layers())
    groups: dict[LayerFacts, tuple[int, int]] = {}
    for index, layer in enumerate(found):
        count, first = groups.get(layer, (0, index))
        groups[layer] = (count + 1, first)
    attending = [layer for layer in groups if layer.kind is not LayerKind.LINEAR]
    facts = ModelFacts(
        architectures,
        frozenset((layer.head_dim, layer.v_head_dim) for layer in attending),
        any(layer.kind is LayerKind.MLA for layer in attending),
    )
    return Description(
        architectures,
        str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        tuple(LayerGroup(layer, count, first) for layer, (count, first) in groups.items()),
        facts,
        frozenset(reader.states()),
        tuple(reader.notes()),
        context_length(text),
        sparse,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("thinker_config")
    if isinstance(inner, Mapping):
        return _text_config(inner)
    nested = [config[key] for key in _NESTED if isinstance(config.get(key), Mapping)]
    return nested[0] if nested else config


class _Reader:
    def __init__(self, text: Mapping[str, Any], top: Mapping[str, Any], architecture: str, ranks: int, sparse: str) -> None:
        self.text, self.top, self.architecture, self.ranks, self.sparse = text, top, architecture, ranks, sparse

    def layers(self) -> Iterator[LayerFacts]:
        """Every attention layer in order; a layer with two kinds of state yields one of each."""
        text, architecture = self.text, self.architecture
        if architecture.startswith(_ENCODERS):
            for index in range(self._integer("num_hidden_layers", "n_layers")):
                yield self._layer("encoder", index)
            return
        if text.get("is_encoder_decoder") or self.top.get("is_encoder_decoder"):
            for index in range(self._integer("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers")):
                yield self._layer("encoder", index)
            for index in range(self._integer("decoder_layers", "num_decoder_layers", "num_hidden_layers", "num_layers")):
                yield self._layer("full", index)
                yield self._layer("cross", index)
            return
        count = self._integer("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        for index, label in enumerate(labels(text, architecture, count)):
            for part in label.split("+") if not label.startswith("?") else [label]:
                if part != "none":
                    yield self._layer(part, index)

    def states(self) -> Iterator[str]:
        """What is in force for the whole server with this model and that no route knows."""
        if self.text.get("attention_chunk_size"):
            yield "local (chunked) attention"
        if self.text.get("is_encoder_decoder") or self.top.get("is_encoder_decoder"):
            yield "encoder-decoder model"
        if self.architecture.startswith(_IMAGE_RANGES) and "vision_config" in self.top:
            yield "image attention ranges"

    def notes(self) -> Iterator[str]:
        if window_is_ignored(self.text, self.architecture):
            yield f"the config's sliding_window is not applied by SGLang's {self.architecture}: full attention"
        if any(key in self.top for key in ("vision_config", "audio_config")):
            yield "the vision or audio encoder has its own attention (--mm-attention-backend): not this plugin's"
        if self.text.get("num_nextn_predict_layers") or self.text.get("mtp_num_hidden_layers"):
            yield "with NEXTN the checkpoint's own MTP layer is the draft"
        if self.sparse == "dsv4":
            yield "SGLang serves this model with its dsv4 backend whatever the line names: SGLANG_SPECVERIFY_SPARSE_MLA=1 asks"
        elif self._is_sparse():
            yield "SGLang picks a sparse backend of its own for this model, and the plugin has no subclass of it"

    def _layer(self, label: Label, index: int) -> LayerFacts:
        if label == "linear":
            return LayerFacts(LayerKind.LINEAR, 0, 0, 0, 0)
        text, swa = self.text, label == "window"
        unknown = set(self._unknown())
        if label.startswith("?"):
            unknown.add(f"layer type {label[1:]}")
        if label == "chunked":
            unknown.add("use_irope")
        if swa and window_size(text) is None:
            unknown.add("sliding window of unknown size")
        q_heads, kv_heads = self._heads(label, index)
        head_dim, v_head_dim = self._head_dims(label)
        kind = {"window": LayerKind.WINDOW, "cross": LayerKind.CROSS, "encoder": LayerKind.ENCODER}.get(label, LayerKind.FULL)
        if _positive(text.get("kv_lora_rank")) and kind in (LayerKind.FULL, LayerKind.WINDOW):
            kind = LayerKind.MLA
        # SGLang counts the positions before the query's own; a config counts its own too.
        window = (window_size(text) or 0) - 1 if swa and window_size(text) else -1
        return LayerFacts(
            kind, q_heads, kv_heads, head_dim, v_head_dim, window, self._softcap(), self._sinks(swa), frozenset(unknown)
        )

    def _heads(self, label: Label, index: int) -> tuple[int, int]:
        text = self.text
        swa, full = label == "window", label == "full"
        names = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
        q_heads = self._integer(*(("swa_num_attention_heads",) if swa else ()), *names, at=index)
        kv_names = ["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"]
        if swa:
            kv_names.insert(0, "swa_num_key_value_heads")
        if full and text.get("attention_k_eq_v"):
            kv_names.insert(0, "num_global_key_value_heads")
        if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
            kv_heads = 1
        else:
            kv_heads = next((n for n in (_positive(_at(text.get(key), index)) for key in kv_names) if n), q_heads)
        if q_heads % self.ranks:
            raise SpecverifyError(
                f"{q_heads} attention heads do not divide over {self.ranks} tensor-parallel ranks",
                "choose a --tp-size that divides them",
            )
        return q_heads // self.ranks, max(1, kv_heads // self.ranks)

    def _head_dims(self, label: Label) -> tuple[int, int]:
        text = self.text
        if _positive(text.get("kv_lora_rank")):
            rope, nope = _positive(text.get("qk_rope_head_dim")), _positive(text.get("qk_nope_head_dim"))
            if rope and nope:
                return rope + nope, _positive(text.get("v_head_dim")) or nope
        head_dim = _positive(text.get("head_dim")) or _positive(text.get("attention_head_dim")) or _positive(text.get("d_kv"))
        if not head_dim:
            hidden = self._integer("hidden_size", "n_embd", "d_model")
            head_dim = hidden // self._integer("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", at=0)
        v_head_dim = _positive(text.get("v_head_dim")) or head_dim
        if label == "window":
            head_dim = _positive(text.get("swa_head_dim")) or head_dim
            v_head_dim = _positive(text.get("swa_v_head_dim")) or (v_head_dim if "swa_head_dim" not in text else head_dim)
        elif label == "full" and _positive(text.get("global_head_dim")):
            head_dim = v_head_dim = _positive(text.get("global_head_dim"))
        return head_dim, v_head_dim

    def _softcap(self) -> float:
        # Grok caps at 30 where its config is silent.
        default = 30.0 if self.architecture.startswith("Grok") else 0.0
        value = self.text.get("attn_logit_softcapping", default)
        return float(value) if isinstance(value, int | float) and value > 0 else 0.0

    def _sinks(self, swa: bool) -> bool:
        if self.architecture in _SINKS or self.text.get("learnable_sink"):
            return True
        return bool(self.text.get("add_swa_attention_sink_bias" if swa else "add_full_attention_sink_bias"))

    def _is_sparse(self) -> bool:
        return bool(self.sparse) or any(self.text.get(key) for key in _SPARSE_KEYS)

    def _unknown(self) -> Iterator[str]:
        if _positive(self.text.get("attn_temperature_len")):
            yield "xai_temperature_len"
        if self._softcap() and self.text.get("attn_logit_softcapping_method", "tanh") != "tanh":
            yield "logit_capping_method"
        if self._is_sparse():
            yield "sparse attention"
        if self.text.get("alibi") or self.text.get("position_embedding_type") == "alibi":
            yield "alibi"

    def _integer(self, *keys: str, at: int = 0) -> int:
        for key in keys:
            value = _positive(_at(self.text.get(key), at))
            if value:
                return value
        raise SpecverifyError(
            f"the config of {self.architecture} has no {keys[0]}", "name the config.json of a whole model, as a checkpoint has it"
        )


def _at(value: Any, index: int) -> Any:
    """`value`, or its entry for layer `index` where a family lists one for each layer."""
    if isinstance(value, list):
        return value[index] if index < len(value) else None
    return value


def _positive(value: Any) -> int:
    """A count from a config: the integer, or 0 where it is absent, null or no positive integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
