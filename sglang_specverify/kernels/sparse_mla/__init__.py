"""DeepSeek-V4.1 sparse MLA decode on plain tensors: cache formats, quantiser, kernel, oracle. This package knows no engine."""

from __future__ import annotations

from sglang_specverify.kernels.sparse_mla.decode import deepseek_v41_decode
from sglang_specverify.kernels.sparse_mla.formats import FORMATS, ROW_LAYOUTS, Format, allocate_cache, decode_rows
from sglang_specverify.kernels.sparse_mla.quantize import SGLANG_MIN_AMAX, deepseek_v41_quantize_cache
from sglang_specverify.kernels.sparse_mla.reference import Reference, reference_decode
from sglang_specverify.kernels.sparse_mla.splits import deepseek_v41_decode_workspace_size

__all__ = [
    "FORMATS",
    "ROW_LAYOUTS",
    "SGLANG_MIN_AMAX",
    "Format",
    "Reference",
    "allocate_cache",
    "decode_rows",
    "deepseek_v41_decode",
    "deepseek_v41_decode_workspace_size",
    "deepseek_v41_quantize_cache",
    "reference_decode",
]
