"""Multi-token prediction (MTP) modules of Qwen3.5 checkpoints quantised by AMD Quark: the type of each, and loading it so."""

from __future__ import annotations

import os

__all__ = ["mtp_module_types"]


def mtp_module_types(checkpoint_dir: str | os.PathLike[str]) -> dict[str, str]:
    """The type of each MTP module that has a weight, as the checkpoint's safetensors files hold it.

    Reads config.json and the files' headers; needs no GPU, no SGLang and no PyTorch.

    Args:
        checkpoint_dir: a directory with config.json and safetensors files, with or without an index.

    Returns:
        Module as the files spell it, without `.weight`, -> "bf16", "fp16", "fp32", "fp8", "mxfp4", "nvfp4", "mxfp8", "int8", …;
        a tensor that holds all experts counts as one module. Empty for a model without MTP.

    Raises:
        SpecverifyError: the checkpoint cannot be read, or it is Quark's and its MTP part is contradictory.
    """
    from sglang_specverify.mtp.decide import read_plan

    return {module.name: module.type for module in read_plan(os.fspath(checkpoint_dir)).stored}
