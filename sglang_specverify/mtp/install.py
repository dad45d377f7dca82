"""The hook: SGLang builds the MTP part of a Quark checkpoint in the types that the checkpoint's files have.

Fault: SGLang 0.5.22 and 0.5.23 tell from the exclude list alone whether the MTP part is quantised, by names that start with
`mtp.` and contain `mlp.experts` (`qwen3_5_mtp._mtp_quant_config`). Other spellings, and checkpoints that leave the MTP part
unquantised without saying so, are built in the wrong type. The fix goes when SGLang asks the files.

SGLang's one point where a model class meets its checkpoint and its quantisation is `loader._initialize_model`; it is wrapped, and
for every other model it is called as it came. Nothing else is imported or patched, the model's own module included.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_specverify import flags
from sglang_specverify.errors import SpecverifyError

logger = logging.getLogger(__name__)

#: The class that the fix is for; SGLang gives a Qwen3.5 draft this architecture.
MODEL = "Qwen3_5ForCausalLMMTP"
#: Modules that hold a reference to the function, where they were imported before.
_HOLDERS = ("loader", "expert_pack_loader")

_said: set[str] = set()


def install() -> None:
    """Wrap `sglang.srt.model_loader.loader._initialize_model` in this process. Idempotent."""
    from sglang.srt.model_loader import loader

    stock = loader._initialize_model
    if getattr(stock, "_specverify", False):
        return
    wrapper = wrapped(stock)
    wrapper._specverify = True  # type: ignore[attr-defined]
    modules = [f"sglang.srt.model_loader.{name}" for name in _HOLDERS] + ["sglang.srt.weight_cache.ipc_loader"]
    for module in filter(None, map(sys.modules.get, modules)):
        if getattr(module, "_initialize_model", None) is stock:
            module._initialize_model = wrapper  # type: ignore[attr-defined]


def wrapped(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`_initialize_model` with the fix: same arguments, same result."""

    def initialize_model(model_config: Any, load_config: Any, quant_config: Any = None) -> Any:
        if not is_quark_mtp(model_config, quant_config) or not _is_asked():
            return stock(model_config, load_config, quant_config)
        from sglang_specverify.mtp import loading

        plan = _plan(model_config, load_config)
        if plan is None:
            return stock(model_config, load_config, quant_config)
        model = stock(model_config, load_config, quantisation(quant_config, plan))
        fused = any(getattr(module, "num_fused_shared_experts", 0) for module in model.modules())
        loading.check(plan, (name for name, _ in model.named_parameters()), shared_expert_fused=fused)
        changes = loading.changes(plan)
        if changes:
            # On the instance, so that no other model is touched.
            model.load_weights = _changing(model.load_weights, changes, plan.config.num_hidden_layers)
        _say(plan)
        return model

    return initialize_model


def _changing(load: Callable[..., Any], changes: Any, num_hidden_layers: int) -> Callable[..., Any]:
    from sglang_specverify.mtp import loading

    def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
        return load(loading.changed(weights, changes, num_hidden_layers), *args, **kwargs)

    return load_weights


def is_quark_mtp(model_config: Any, quant_config: Any) -> bool:
    """Whether SGLang is about to build a Qwen3.5 MTP model from a checkpoint that Quark quantised beforehand."""
    if quant_config is None or quant_config.get_name() != "quark" or not quant_config.is_prequantized:
        return False
    return bool((getattr(model_config.hf_config, "architectures", None) or [None])[0] == MODEL)


def _is_asked() -> bool:
    from sglang.srt.runtime_context import get_server_args

    from sglang_specverify.door.request import Request

    # The flags come second: a stray one must not stop a server that never asked for the plugin.
    if not Request.of(get_server_args()).any:
        return False
    set_ = flags.read()
    return set_.mtp and not set_.disable


def _plan(model_config: Any, load_config: Any) -> Any:
    """The plan of the checkpoint; None, with the reason logged, where it is left to SGLang.

    Raises:
        SpecverifyError: the checkpoint is contradictory or broken; or, in strict mode, it would be left to SGLang.
    """
    from sglang_specverify.mtp import decide, headers, quark

    if str(getattr(load_config.load_format, "value", load_config.load_format)) == "dummy":
        return None
    directory = local_directory(model_config, load_config)
    if directory is None:
        return _left(f"{model_config.model_path} is not on this machine yet")
    if not any(directory.glob("*.safetensors")):
        return _left(f"{directory} has no safetensors file")
    if not os.path.isdir(model_config.model_path):
        try:
            headers.read_index(directory)
        except SpecverifyError:
            # SGLang will fetch the rest of it.
            return _left(f"{model_config.model_path} is not whole on this machine yet")
    plan = decide.read_plan(directory)
    if not plan.built:
        return _left(f"the files of {directory} hold no MTP tensors")
    reason = quark.unservable(plan)
    return _left(reason) if reason else plan


def local_directory(model_config: Any, load_config: Any) -> Path | None:
    """Where the checkpoint lies, without fetching anything; None where it is not there."""
    if os.path.isdir(model_config.model_path):
        return Path(model_config.model_path)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model_config.model_path,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return Path(found)


def quantisation(quant_config: Any, plan: Any) -> Any:
    """`quant_config`, a `QuarkConfig`, as the MTP part needs it: a copy that names each module's type.

    The same object where nothing is quantised and SGLang knows it, so that the model is what SGLang makes by itself.
    """
    from sglang.srt.models.qwen3_5_mtp import _mtp_quant_config

    from sglang_specverify.mtp import quark

    if plan.all_plain and _mtp_quant_config(quant_config) is None:
        return quant_config
    mine = copy.copy(quant_config)
    mine.exclude_layers = quark.excludes(plan)
    mine.quant_config = {
        **quant_config.quant_config,
        "exclude": mine.exclude_layers,
        "layer_quant_config": quark.layer_specs(plan),
    }
    mine._online_quantized_layers = set()
    return mine


def _left(reason: str) -> None:
    if flags.read().strict:
        raise SpecverifyError(f"the MTP part is not loaded by the plugin: {reason}", "unset SGLANG_SPECVERIFY_STRICT")
    _once(logging.WARNING, f"specverify: MTP loading is left to SGLang: {reason}")


def _say(plan: Any) -> None:
    types: dict[str, list[str]] = {}
    for built in plan.built:
        if built.quantizable:
            types.setdefault(built.type, []).append(built.name)
    said = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in types.items())
    _once(logging.INFO, f"specverify: MTP of {plan.directory} is built as its files hold it ({plan.kind}): {said}")
    for built in plan.built:
        if built.note:
            _once(logging.WARNING, f"specverify: {built.name}: {built.note}")


def _once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.log(level, text)
