"""The engine of each combination that runs in one process; `tests/parity/cover.py` lists them."""

from __future__ import annotations

import torch

from tests.backends.engine import Setup
from tests.parity.cover import IN_PROCESS as COMBINATIONS

__all__ = ["COMBINATIONS", "setup_of"]

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def setup_of(algorithm: str, shape: str, page_size: int, dtype: str) -> Setup:
    """The engine of one combination; FP8 caches have scales other than 1."""
    topk, tokens = (1, 4) if shape == "chain" else (4, 8)
    setup = Setup(algorithm=algorithm, topk=topk, draft_tokens=tokens, page_size=page_size, slots=2560, context=640)
    if dtype in _FP8:
        return setup.but(dtype=torch.bfloat16, cache_dtype=_FP8[dtype], scales=(0.5, 2.0))
    return setup.but(dtype=getattr(torch, dtype))
