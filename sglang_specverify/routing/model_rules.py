"""SGLang's rules for single models: bases that it does not serve them with, and backends of its own that serve them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_specverify.errors import SpecverifyError

_EXAONE = ("Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
_IQUEST_Q1 = ("IQuestQ1ForCausalLM", "IQuestQ1MTP")
_INKLING = ("InklingForConditionalGeneration", "InklingForConditionalGenerationMTP")
#: Its prompts attend in both directions, for which SGLang puts triton in the place of any other name.
_HRM_TEXT = ("HrmTextForCausalLM",)

#: Base -> models that SGLang refuses with it, at start-up or in the first forward pass, or serves with another class by its name.
_MODEL_REFUSALS: dict[str, tuple[str, ...]] = {
    "fa3": (
        "Gemma4ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        *_INKLING,
        *_HRM_TEXT,
    ),
    "fa4": (
        "Llama4ForConditionalGeneration",
        "Llama4ForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        *_EXAONE,
        *_IQUEST_Q1,
        *_HRM_TEXT,
    ),
    "aiter": ("Dots3NoteForCausalLM", *_EXAONE, *_IQUEST_Q1, *_INKLING, *_HRM_TEXT),
    "triton": ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", *_IQUEST_Q1),
}

#: Models whose prompts SGLang gives to flashinfer alone, for a mask over images that no other backend takes.
_FLASHINFER_PREFILL = ("MossVLForConditionalGeneration",)

#: Kind of sparse attention -> SGLang's backend, and what a user can do beside leaving the plugin's name out.
SPARSE_BACKENDS: dict[str, tuple[str, str]] = {
    "dsa": ("dsa", ", or name it: --attention-backend dsa"),
    "qsa": ("QSA", ""),
    "minicpm": (
        "minicpm_flashattn (minicpm_flashinfer on Blackwell)",
        ", or name it; SGLANG_MINICPM_FORCE_DENSE=1 makes the model dense",
    ),
    "minimax": ("MiniMax sparse attention", ""),
    "dsv4": ("dsv4", "; SGLANG_SPECVERIFY_SPARSE_MLA=1 asks for the plugin's kernel in it"),
}

#: SGLang's list of models with the sparse attention of DeepSeek V3.2, where their config has an `index_topk`.
_DSA = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "GlmMoeDsaForCausalLMNextN",
    "Glm5NextForConditionalGenerationNextN",
    "Glm5NextForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "LongcatFlashForCausalLMNextN",
    "Dots3NoteForCausalLM",
    "Dots3NoteForCausalLMNextN",
    "HYV4ForCausalLM",
    "HYV4ForCausalLMNextN",
)
_DSV4 = ("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark")
_MINIMAX = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
_MINICPM = ("MiniCPMForCausalLM", "MiniCPMSALAForCausalLM")
_LIGHTNING = ("lightning", "lightning_attn", "lightning-attn")


def sparse_kind(config: Mapping[str, Any], text: Mapping[str, Any], *, minicpm_dense: bool = False) -> str:
    """Which sparse attention of its own SGLang gives a model, by its config.json: a key of `SPARSE_BACKENDS`, or empty.

    Args:
        text: the nested text configuration, or `config` itself.
        minicpm_dense: SGLANG_MINICPM_FORCE_DENSE.
    """
    architecture = str((config.get("architectures") or ("",))[0])
    if architecture in _DSV4 or str(config.get("model_type", "")).startswith("deepseek_v4"):
        return "dsv4"
    if architecture in _DSA and (text.get("index_topk") is not None or config.get("index_topk") is not None):
        return "dsa"
    if architecture in _MINIMAX:
        return "minimax"
    if architecture in _MINICPM and config.get("model_type") == "minicpm_sala" and config.get("sparse_config") is not None:
        mixers = config.get("mixer_types") or ("minicpm4",)
        return "minicpm" if not minicpm_dense and any(mixer not in _LIGHTNING for mixer in mixers) else ""
    return "qsa" if text.get("indexer_n_heads") is not None else ""


def model_refusal(base: str, architectures: Sequence[str]) -> str | None:
    """Why SGLang would not serve a model of these architectures with `base`, or None."""
    barred = [name for name in architectures if name in _MODEL_REFUSALS[base]]
    return f"SGLang refuses {base} for {barred[0]}" if barred else None


def check_model(architectures: Sequence[str], sparse: str, options: Sequence[str], *, prefill: bool = False) -> None:
    """Refuse a model that no base of the plugin's serves.

    Args:
        sparse: its kind of sparse attention, or empty.
        options: those of the server line that name the plugin for this model.
        prefill: whether one of them names it for prompts.

    Raises:
        SpecverifyError: SGLang serves the model, or its prompts, with a backend of its own.
    """
    if not options:
        return
    model, named = architectures[0] if architectures else "this model", " and ".join(options)
    if sparse:
        backend, more = SPARSE_BACKENDS[sparse]
        raise SpecverifyError(
            f"{named}: SGLang serves {model} with its own sparse backend, {backend}, and the plugin has no subclass of it",
            f"leave {named} out{more}",
        )
    if prefill and model in _FLASHINFER_PREFILL:
        raise SpecverifyError(f"{named}: SGLang serves the prompts of {model} with flashinfer alone", f"leave {named} out")
