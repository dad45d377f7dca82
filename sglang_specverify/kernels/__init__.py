"""Attention of speculative decoding on plain tensors: this package knows no engine."""

from __future__ import annotations

from sglang_specverify.kernels.reference import draft_decode_attention_reference, verify_attention_reference
from sglang_specverify.kernels.snapshot import snapshot_table
from sglang_specverify.kernels.variants import VARIANTS
from sglang_specverify.kernels.verify_attention import draft_decode_attention, verify_attention

__all__ = [
    "VARIANTS",
    "draft_decode_attention",
    "draft_decode_attention_reference",
    "snapshot_table",
    "verify_attention",
    "verify_attention_reference",
]
