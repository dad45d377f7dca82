"""FP8 codes keep what they say on their way to the products, in every kernel that reads a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.aot import workers


@pytest.mark.parametrize("operation", ["fused", "fused_split", "tree_suffix", "gather_suffix"])
def test_e5m2_becomes_bf16_by_way_of_fp16(there: Callable[..., Any], operation: str) -> None:
    """Triton's own way to BF16 makes finite numbers of infinity and NaN; `test_fault_numbers` sees it on a GPU only."""
    made, assembly = there(workers.converted, "sm_90", operation)
    assert ("f8E5M2", "f16") in made
    assert ("f8E5M2", "bf16") not in made
    assert "cvt.rn.f16x2.e5m2x2" in assembly


def test_gfx950_has_an_instruction_for_it(there: Callable[..., Any]) -> None:
    """And registers for nothing else: by way of FP16 some launches spill."""
    made, assembly = there(workers.converted, "gfx950", "fused")
    assert ("f8E5M2", "bf16") in made
    assert ("f8E5M2", "f16") not in made
    assert "v_cvt_scalef32_pk_bf16_bf8" in assembly
