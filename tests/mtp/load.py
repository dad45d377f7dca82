"""Loads checkpoints with SGLang's own loader on a CPU, each by SGLang alone and with the plugin's hook.

    python -m tests.mtp.load OUT DIR...

OUT gets a file of parameters for each load that succeeded and `outcomes.json`: for each directory and way of loading the error or
null, whether it was the plugin's, and how many tensors were read.

A process of its own: SGLang keeps its configuration and groups in globals. Replaced are what a CPU does not have and loading
does not need: the device's capability, which gates FP8 and FP4; vLLM's rotary kernel, which is only imported; and the step after
loading, which reorders weights for AMD's kernels and would hide what was loaded.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

#: Names of the tensors that the last load took from the files.
READ: list[str] = []
RANKS = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "attn_dcp", "moe_ep", "moe_tp", "moe_dp", "dp")


def prepare() -> None:
    """Publish the arguments of a server that asks for the plugin, and one rank of one, as a scheduler process does."""
    import socket

    import msgspec
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import get_context, get_parallel

    server_args = get_context().override_server_args(
        device="cpu", attention_backend="triton", tp_size=1, page_size=1, chunked_prefill_size=-1,
        speculative_algorithm="NEXTN", speculative_num_steps=1, speculative_eagle_topk=1, speculative_num_draft_tokens=2,
    ).install()  # fmt: skip
    # What the user gave; the above is what it was resolved to.
    msgspec.Struct.__setattr__(server_args, "attention_backend", "specverify")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo")
    initialize_model_parallel()
    get_parallel().override_permanently(**{f"{name}_rank": 0 for name in RANKS})


def replace_what_a_cpu_lacks() -> None:
    from sglang.srt.layers.quantization.quark import quark
    from sglang.srt.model_loader import loader

    vllm, custom = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    custom.rotary_embedding = vllm._custom_ops = custom  # type: ignore[attr-defined]
    sys.modules.update({"vllm": vllm, "vllm._custom_ops": custom})
    quark.get_device_capability = loader.get_device_capability = lambda *_: (9, 5)
    loader.DefaultModelLoader.postprocess_weights = staticmethod(lambda *_: None)


def load(directory: str) -> dict[str, Any]:
    """The parameters of the draft model that SGLang loads from `directory`; the tensors that it reads are in `READ`.

    Before that every parameter is filled with NaN or 77, so that one which nothing fills is seen.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader

    config = ModelConfig(model_path=directory, dtype="bfloat16", is_draft_model=True)
    build, weights = loader._initialize_model, loader.DefaultModelLoader._get_all_weights

    def poisoned(*arguments: Any) -> Any:
        model = build(*arguments)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else 77)
        return model

    def counted(self: Any, *arguments: Any) -> Any:
        for name, tensor in weights(self, *arguments):
            READ.append(name)
            yield name, tensor

    READ.clear()
    loader._initialize_model, loader.DefaultModelLoader._get_all_weights = poisoned, counted
    try:
        model = loader.DefaultModelLoader(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu"))
    finally:
        loader._initialize_model, loader.DefaultModelLoader._get_all_weights = build, weights
    return {name: parameter.data.contiguous() for name, parameter in model.named_parameters()}


def can_fuse(directory: str) -> bool | None:
    """Whether SGLang would fuse the shared expert into the routed ones, asked of the configuration that the hook hands on."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.models.qwen3_5_mtp import _mtp_quant_config

    from sglang_specverify.mtp.decide import read_plan
    from sglang_specverify.mtp.install import quantisation

    model = ModelConfig(model_path=directory, dtype="bfloat16", is_draft_model=True)
    mine = _mtp_quant_config(quantisation(loader._get_quantization_config(model, LoadConfig()), read_plan(directory)))
    return None if mine is None else bool(mine.can_fuse_shared_expert())


def main(out: Path, directories: list[str]) -> None:
    from safetensors.torch import save_file
    from sglang.srt.model_loader import loader

    from sglang_specverify.errors import SpecverifyError
    from sglang_specverify.mtp.install import install

    replace_what_a_cpu_lacks()
    prepare()
    outcomes: dict[str, dict[str, Any]] = {directory: {} for directory in directories}
    for way in ("stock", "hooked"):
        if way == "hooked":
            assert not getattr(loader._initialize_model, "_specverify", False)
            install()
        for number, directory in enumerate(directories):
            error, ours = None, False
            try:
                save_file(load(directory), out / f"{number}.{way}.safetensors")
            except Exception as caught:  # what a checkpoint does to SGLang is what is asked
                error, ours = f"{type(caught).__name__}: {caught}", isinstance(caught, SpecverifyError)
            outcomes[directory][way] = {"error": error, "ours": ours, "read": len(READ), "file": f"{number}.{way}.safetensors"}
    for directory, outcome in outcomes.items():
        quark = '"quant_method": "quark"' in (Path(directory) / "config.json").read_text()
        outcome["fuses"] = can_fuse(directory) if quark and not outcome["hooked"]["error"] else None
    (out / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
