"""Attention of speculative decoding on plain tensors: this package knows no engine."""

from __future__ import annotations

from sglang_specverify.kernels.compact import compact_visible_slots
from sglang_specverify.kernels.gather_suffix import gather_suffix_merge, gather_suffix_merge_reference
from sglang_specverify.kernels.merge import merge_states, merge_states_reference
from sglang_specverify.kernels.page_table import page_table_of_ragged, page_table_of_rows
from sglang_specverify.kernels.planning import plan_verify_attention, verify_attention_workspace_size
from sglang_specverify.kernels.reference import draft_decode_attention_reference, verify_attention_reference
from sglang_specverify.kernels.snapshot import snapshot_table
from sglang_specverify.kernels.step import prepare_step
from sglang_specverify.kernels.tree_suffix import tree_suffix_merge
from sglang_specverify.kernels.variants import VARIANTS
from sglang_specverify.kernels.verify_attention import draft_decode_attention, verify_attention

__all__ = [
    "VARIANTS",
    "compact_visible_slots",
    "draft_decode_attention",
    "draft_decode_attention_reference",
    "gather_suffix_merge",
    "gather_suffix_merge_reference",
    "merge_states",
    "merge_states_reference",
    "page_table_of_ragged",
    "page_table_of_rows",
    "plan_verify_attention",
    "prepare_step",
    "snapshot_table",
    "tree_suffix_merge",
    "verify_attention",
    "verify_attention_reference",
    "verify_attention_workspace_size",
]
