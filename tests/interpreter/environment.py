"""Where the Triton kernels run in this process: compiled on a GPU, or in Triton's interpreter on the CPU.

Import this before triton: the interpreter and the compiler exclude each other in one process.
"""

from __future__ import annotations

import os
import sys


def prepare() -> str:
    """Set the process up, once, and say the device: "cuda" where there is a GPU, else "cpu" with the repaired interpreter.

    A machine with a GPU runs the interpreter too if TRITON_INTERPRET=1 says so.

    Raises:
        RuntimeError: triton was imported before the interpreter could be switched on.
    """
    import torch

    torch.set_num_threads(1)  # the tensors are small, and the machine may be shared
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise RuntimeError("triton was imported before tests/interpreter could set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    from . import repair

    repair.apply()
    return "cpu"
