"""A hybrid of full-attention and linear layers, as Qwen3.5 and Qwen3-Next are: SGLang's own configuration, pools and wrapper.

Every second layer attends, so a layer's number and its place in the pool differ. Linear layers are there as far as a batch's
metadata goes; nothing runs them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("no linear layer runs here")


def _name_linear_kernels() -> None:
    """What SGLang's linear backends import, and the stand-in for `sgl_kernel` lacks."""
    module = ModuleType("sgl_kernel.mamba")
    for name in ("causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"):
        setattr(module, name, _never)
    sys.modules.setdefault("sgl_kernel.mamba", module)
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, _never)


def config_of(attention_layers: int) -> Qwen3NextConfig:
    return Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"], num_hidden_layers=2 * attention_layers, full_attention_interval=2,
        linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip


def request_pool(config: Qwen3NextConfig, rows: int, context: int, draft_tokens: int, device: str) -> HybridReqToTokenPool:
    linear = [i for i in range(config.num_hidden_layers) if i not in config.full_attention_layer_ids]
    return HybridReqToTokenPool(
        size=rows, mamba_size=rows, mamba_spec_state_size=rows, max_context_len=context, device=device, enable_memory_saver=False,
        cache_params=config.mamba2_cache_params, mamba_layer_ids=linear, enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=draft_tokens, enable_overlap_schedule=False,
    )  # fmt: skip


def key_pool(layer_ids: list[int], requests: HybridReqToTokenPool, size: int, common: dict[str, Any]) -> HybridLinearKVPool:
    return HybridLinearKVPool(
        size, full_attention_layer_ids=layer_ids, mamba_pool=requests.mamba_pool, enable_kv_cache_copy=True, **common
    )


def wrapped(runner: Any, backend: Any) -> HybridLinearAttnBackend:
    """`backend` as the target's model runner has it, by SGLang's own choice for the model."""
    _name_linear_kernels()
    whole = attn_backend_wrapper(runner, backend)
    assert type(whole) is HybridLinearAttnBackend and whole.full_attn_backend is backend
    return whole
