"""Models that SGLang serves with a backend of its own, by its own predicates: refused before the plugin's takes its place.

SGLang chooses those backends only while no backend is named, and the plugin's base is a name: the model would be served dense.
"""

from __future__ import annotations

from typing import Any

from sglang_specverify import flags
from sglang_specverify.door.request import FIELDS, Request, options_of
from sglang_specverify.routing.facts import DRAFT_MODELS, algorithm_name
from sglang_specverify.routing.model_rules import check_model


def sparse_kind_of(config: Any) -> str:
    """Which sparse attention of its own SGLang gives the model of this Hugging Face configuration; empty for none."""
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse
    from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

    if is_deepseek_v4(config):
        return "dsv4"
    if is_deepseek_dsa(config):
        return "dsa"
    if is_minimax_sparse(config):
        return "minimax"
    if getattr(config, "has_minicpm_sparse_attention", False):
        return "" if flags.switch("SGLANG_MINICPM_FORCE_DENSE") else "minicpm"
    try:
        return "qsa" if is_qwen_qsa(config) else ""
    except ValueError:  # keys of it that do not fit together, of which SGLang speaks when it builds the layers
        return "qsa"


def check_models(server_args: Any) -> None:
    """Refuse a target, or a draft, that SGLang serves with a backend of its own and the line gives to the plugin."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    request, view = Request.of(server_args), resolving_view(server_args)
    target = model_config_of(server_args).hf_config
    names = tuple(target.architectures or ())
    check_model(names, sparse_kind_of(target), options_of(server_args, FIELDS[:3]), prefill=request.prefill)
    if (request.draft_decode or request.draft_extend) and algorithm_name(view.speculative_algorithm) in DRAFT_MODELS:
        draft = _draft_config(view, target)
        if draft is not None:
            options = options_of(server_args, FIELDS[3:]) or options_of(server_args, FIELDS)
            check_model(tuple(draft.architectures or ()), sparse_kind_of(draft), options)


def _draft_config(view: Any, target: Any) -> Any:
    """Without a path of its own the draft is a part of the target's checkpoint. None where it cannot be read."""
    from sglang.srt.utils.hf_transformers.config import get_config

    path = view.speculative_draft_model_path
    if path in (None, view.model_path):
        return target
    try:
        return get_config(path, trust_remote_code=view.trust_remote_code, revision=view.speculative_draft_model_revision)
    except Exception:  # SGLang says itself, in its own step, that it cannot read it
        return None
