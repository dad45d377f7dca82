"""The launcher's half of the door: the command-line choice, and its early resolution to a built-in base.

SGLang keys many of its rules on a backend's name. So `specverify` is declared to be a built-in base before
any of those rules runs, and again once the model is known; the user's own word stays on the raw record, where
the factories in the scheduler process find it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from sglang_specverify import __version__, flags
from sglang_specverify.door.models import check_models
from sglang_specverify.door.request import FIELDS, Request, stray_names
from sglang_specverify.errors import SpecverifyError, show_without_traceback
from sglang_specverify.hardware import Hardware, from_sglang_platform
from sglang_specverify.routing.base import PLUGIN, BaseDecision, ModelFacts, check_request, check_server, choose_base, refusal_of
from sglang_specverify.routing.facts import ServerFacts, algorithm_name
from sglang_specverify.routing.launch import check_start
from sglang_specverify.routing.model import describe

logger = logging.getLogger(__name__)

_SOURCE = "sglang_specverify"
#: Algorithms for which SGLang chooses steps, topk and draft tokens where the line gives none.
_CHOOSES_TREE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
Step = Callable[[Any], None]


def add_choice() -> None:
    """Let SGLang's parser take `specverify`. Idempotent."""
    from sglang.srt.arg_groups import choices

    if PLUGIN not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([PLUGIN])
    if PLUGIN not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([PLUGIN])


def register_hooks(problem: SpecverifyError | None = None) -> None:
    """Hook the steps of SGLang's argument resolution. With a `problem`, asking for the plugin raises it.

    The first step declares a base by hardware; the model step declares it again with the model's facts; the
    speculative step once more, when page size and topk are final; the last one checks what came of it.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    def first(server_args: Any, previous: Step) -> None:
        if any(getattr(server_args, field) == PLUGIN for field in FIELDS):
            show_without_traceback()
            if problem is not None:
                raise problem
            _check_launch(server_args)
            _declare_base(server_args, ModelFacts())
        previous(server_args)

    def with_model(server_args: Any, previous: Step) -> None:
        if Request.of(server_args).any:
            check_models(server_args)
            _declare_tree(server_args, _declare_base(server_args, _model_facts(server_args)))
        previous(server_args)

    def last(server_args: Any, previous: Step) -> None:
        previous(server_args)
        if Request.of(server_args).any:
            _check_resolved(server_args)
            _watch_launcher(server_args)

    register_resolution_hook("handle_deprecated_dp_attention")(first)
    register_resolution_hook("handle_model_specific_adjustments")(with_model)
    register_resolution_hook("handle_speculative_decoding")(with_model)
    register_resolution_hook("validate_deepep_v2_dispatch_token_budget")(last)


def _check_launch(server_args: Any) -> None:
    """Refuse what would lose the plugin on the way to the process that serves, or the handshake that shows it."""
    check_start(ray=server_args.use_ray, grpc=server_args.smg_grpc_mode or server_args.grpc_mode)
    check_plugin_filter(os.environ.get("SGLANG_PLUGINS", ""))
    check_request(
        *(getattr(server_args, field) for field in FIELDS),
        mode=server_args.speculative_attention_mode,
        speculation=server_args.speculative_algorithm is not None,
    )


def check_plugin_filter(value: str) -> None:
    """`SGLANG_PLUGINS` is SGLang's white list; child processes inherit it. One of blanks or commas alone lets nobody in."""
    if value and PLUGIN not in {name.strip() for name in value.split(",")}:
        shown = value if value.strip() else repr(value)
        raise SpecverifyError(
            f"SGLANG_PLUGINS={shown} leaves the plugin {PLUGIN} out, so no scheduler process would load it",
            f"add {PLUGIN} to SGLANG_PLUGINS, or unset it",
        )


def decide_base(server_args: Any, model: ModelFacts) -> BaseDecision:
    """The base for this server, from what resolution knows at this moment."""
    return choose_base(_hardware(server_args), model, server_facts(server_args), flags.read(), _installed())


def _hardware(server_args: Any) -> Hardware:
    from sglang.srt.runtime_context import get_platform

    return from_sglang_platform(get_platform(), server_args.device)


def _installed() -> frozenset[str]:
    return frozenset({"aiter"} if find_spec("aiter") is not None else ())


def _declare_base(server_args: Any, model: ModelFacts) -> str:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    decision = decide_base(server_args, model)
    view = resolving_view(server_args)
    # A model rule may have put another backend in our place: that is not ours to undo.
    ours = (PLUGIN, *flags.BASES)
    changed = {
        field: decision.base
        for field in FIELDS
        if getattr(server_args, field) == PLUGIN and getattr(view, field) in ours and getattr(view, field) != decision.base
    }
    if changed:
        declare_resolution(server_args, _SOURCE, **changed)
        logger.info("specverify %s: %s resolves to %s: %s", __version__, PLUGIN, decision.base, decision.reason)
    return decision.base


def server_facts(server_args: Any) -> ServerFacts:
    """What resolution knows so far of the server. `base` is left empty: it is what is being decided."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    return ServerFacts(
        base="",
        algorithm=_algorithm(view),
        topk=_topk(server_args, view),
        num_steps=view.speculative_num_steps or 0,
        num_draft_tokens=view.speculative_num_draft_tokens or 0,
        page_size=view.page_size or 1,
        dtype=view.dtype,
        kv_cache_dtype=view.kv_cache_dtype,
        # SGLang derives the one from the other after the base is chosen.
        deterministic=bool(view.enable_deterministic_inference or view.rl_on_policy_target is not None),
        two_batch_overlap=bool(view.enable_two_batch_overlap),
        plan_stream=flags.switch("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
    )


def _algorithm(view: Any) -> str | None:
    """The algorithm as SGLang's speculative step is going to resolve it: a draft may turn EAGLE into another."""
    from sglang.srt.arg_groups.speculative_hook import _resolve_speculative_algorithm_alias

    name = algorithm_name(view.speculative_algorithm)
    if name != "EAGLE" or view.speculative_draft_model_path is None:
        return name
    try:
        return str(_resolve_speculative_algorithm_alias(name, view.speculative_draft_model_path, view.trust_remote_code))
    except Exception:  # the draft is not readable yet, or not at all: SGLang says so in its own step
        return name


def _topk(server_args: Any, view: Any) -> int:
    """The breadth of the draft tree, also where SGLang will only choose it in the speculative step."""
    coming = _tree_to_come(server_args, view)
    return int(coming.get("speculative_eagle_topk") or view.speculative_eagle_topk or 1)


def _tree_to_come(server_args: Any, view: Any) -> dict[str, int]:
    """What SGLang's speculative step is going to declare of the draft tree; empty where the line says it all."""
    algorithm = algorithm_name(view.speculative_algorithm)
    if algorithm == "NGRAM":
        return {"speculative_eagle_topk": int(view.speculative_ngram_max_bfs_breadth)}
    given = view.speculative_eagle_topk is not None or view.speculative_num_steps is not None
    if algorithm not in _CHOOSES_TREE or given:
        return {}
    from sglang.srt.arg_groups.overrides import ResolvedView, model_config_of
    from sglang.srt.arg_groups.speculative_hook import _auto_choose_speculative_params
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

    # Both ask for the algorithm by the name that it will have in that step.
    named = ResolvedView(server_args, {"speculative_algorithm": algorithm})
    if view.speculative_adaptive and adaptive_unsupported_reason(named) is None:
        return {}
    try:
        architecture = model_config_of(server_args).hf_config.architectures[0]
    except Exception:  # the model is not readable yet, or not at all: SGLang says so in its own step
        return {}
    steps, topk, tokens = _auto_choose_speculative_params(named, architecture)
    return {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": tokens}


def _declare_tree(server_args: Any, base: str) -> None:
    """Declare a coming tree before SGLang's page-size rule for fa4 asks for it.

    On SM100 that rule forces pages of 128 unless it sees a topk above 1, and neither fa4 nor NGRAM serves a tree on pages.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    coming = _tree_to_come(server_args, resolving_view(server_args))
    if base == "fa4" and coming.get("speculative_eagle_topk", 1) > 1:
        declare_resolution(server_args, _SOURCE, **coming)


def _model_facts(server_args: Any) -> ModelFacts:
    """From the model's config.json, as `explain` reads it, and from what SGLang made of it."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    config = model_config_of(server_args)
    try:
        read = describe(config.hf_config.to_dict()).facts.head_dims
    except SpecverifyError as error:  # a family with keys of its own: SGLang's reading of it is left
        logger.info("specverify %s: head dims are SGLang's alone: %s", __version__, error.what)
        read = frozenset()
    return ModelFacts(
        architectures=tuple(config.hf_config.architectures or ()),
        head_dims=read | {(int(config.head_dim), int(config.v_head_dim))},
        is_mla=config.attention_arch == AttentionArch.MLA,
    )


def _check_resolved(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(server_args)
    stray = stray_names(server_args, view)
    if stray:
        named = ", ".join(f"--{field.replace('_', '-')} became {name}" for field, name in stray.items())
        raise SpecverifyError(
            f"the model's own rules replaced the plugin's base, and there is no subclass for what they chose: {named}",
            "serve this model with SGLang's own choice: leave --attention-backend out",
        )
    chosen = {field: getattr(view, field) for field in FIELDS if getattr(server_args, field) == PLUGIN}
    _check_late_facts(server_args, set(chosen.values()))
    logger.info("specverify %s: resolved %s", __version__, chosen)


def _check_late_facts(server_args: Any, bases: set[str]) -> None:
    """Ask once more with everything resolved: a page size or a tree that came late may not suit the base."""
    server, model = server_facts(server_args), _model_facts(server_args)
    check_server(server)
    for base in bases:
        refusal = refusal_of(base, _hardware(server_args), model, server, _installed(), flags.read())
        if refusal is not None:
            raise SpecverifyError(
                f"{base} was resolved before all was known, and cannot serve this: {refusal}",
                "give the option that the reason names on the command line, or set SGLANG_SPECVERIFY_BASE",
            )


def _watch_launcher(server_args: Any) -> None:
    if not flags.read().disable:
        from sglang_specverify.door.handshake import watch_launcher

        watch_launcher()
    else:
        logger.warning("specverify %s is switched off by SGLANG_SPECVERIFY_DISABLE: stock serves", __version__)
