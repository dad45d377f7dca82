"""Where `backend_parity` runs: on a CUDA device with SGLang's own packages, or in Triton's interpreter. Import before sglang."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare() -> str:
    """Set the process up, and say the device: "cuda" or "cpu"."""
    import torch

    # What a server reads from its command line is given below, and no flag from outside may change it.
    for name in [name for name in os.environ if name.startswith("SGLANG_SPECVERIFY_")]:
        del os.environ[name]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if torch.cuda.is_available():
        return "cuda"
    os.environ |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_SPECVERIFY_KERNELS": "triton"}
    sys.path.insert(0, str(Path(__file__).parents[2] / "cpu"))
    torch.set_num_threads(1)
    import pytest

    from tests.backends import aiter_stand_in, flash_stand_in
    from tests.interpreter import repair

    repair.apply()
    for stand_in in (flash_stand_in, aiter_stand_in):
        stand_in.install(pytest.MonkeyPatch())
    return "cpu"
