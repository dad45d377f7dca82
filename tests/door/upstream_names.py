"""What the plugin relies on in SGLang: each function, method, class or value, as "module:name".

The hashes are in upstream_hashes.json, written by `python -m tests.door.drift --write`. A name belongs here when the
plugin overrides it, patches it, calls it, or mirrors its rule.
"""

from __future__ import annotations

_SRT = "sglang.srt."


def _in(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{_SRT}{module}:{name}" for name in names)


_BACKEND = ("__init__", "init_forward_metadata", "forward_decode", "forward_extend")
_STEPS = ("__init__", "init_forward_metadata")
#: What runs around and inside a captured graph.
_GRAPHS = ("init_cuda_graph_state", "init_forward_metadata_out_graph")
_STEP_GRAPHS = (*_GRAPHS, "init_forward_metadata_in_graph")
_HALVES = ("decode", "prefill")
_FACTORY = (
    "__init__",
    "_create_backend",
    "create_decode_backend",
    "create_draft_extend_backend",
    *(f"_create_{base}_{half}_backend" for base in ("fa3", "fa4", "triton", "aiter") for half in _HALVES),
)


def _methods(cls: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{cls}.{name}" for name in names)


NAMES: tuple[str, ...] = (
    # Loading a plugin, and the command line.
    *_in("plugins", "load_plugins", "load_plugins_by_group", "GENERAL_PLUGINS_GROUP"),
    *_in(
        "arg_groups.choices",
        "ATTENTION_BACKEND_CHOICES",
        "DRAFT_ATTENTION_BACKEND_CHOICES",
        "add_attention_backend_choices",
        "add_draft_attention_backend_choices",
    ),
    # Resolution: the steps that are hooked and their order, and how a decision is declared and read.
    *_in("arg_groups.resolution_hooks", "register_resolution_hook", "run_hook", "_bind"),
    *_in("arg_groups.pipeline", "run_resolution_pipeline"),
    *_in(
        "arg_groups.overrides",
        "declare_resolution",
        "resolving_view",
        "resolved_view",
        "model_config_of",
        "attention_backends_of",
        # Rules that the choice of a base mirrors.
        "_attention_backend_default",
        "_attention_backend_fa3_fp8_fallback",
        "_deterministic_attention_backend",
        "_fa4_page_constraint",
        "_page_size_default",
        "_hrm_text_attention_force",
        "ResolvedView",
    ),
    # Models that it does not serve with a base, or serves with a backend of its own.
    *_in("arg_groups.model_hook", "handle_model_specific_adjustments", "handle_model_capability_adjustments"),
    *_in("arg_groups.model_overrides.deepseek_v2", "_deepseek_family_overrides"),
    *_in("arg_groups.model_overrides.iquest_q1", "_iquest_q1_overrides"),
    *_in("arg_groups.model_overrides.minicpm", "_minicpm_sala_overrides"),
    *_in("arg_groups.model_overrides.minimax_m3", "_minimax_m3_overrides"),
    *_in("arg_groups.model_overrides.moss_vl", "_moss_vl_overrides"),
    *_in("configs.model_config", "is_deepseek_dsa", "is_deepseek_v4", "is_minimax_sparse"),
    *_in("configs.minicpm", "MiniCPMHybridConfig.has_minicpm_sparse_attention"),
    *_in("layers.attention.qsa.config", "is_qwen_qsa", "parse_qsa_profile"),
    *_in("models.inkling_common.attn", "InklingAttention.forward"),
    *_in("models.dots3_common.modeling", "Dots3AttentionMLA.dispatch_attn_forward_method"),
    *_in("speculative.adaptive_spec_params", "adaptive_unsupported_reason"),
    *_in("utils.hf_transformers.config", "get_config"),
    *_in(
        "arg_groups.speculative_hook",
        "_auto_choose_speculative_params",
        "_handle_eagle_family",
        "_handle_frozen_kv_mtp",
        "_handle_iquest_q1_mtp_draft",
        "_handle_ngram",
        "_handle_uno",
        "_init_adaptive_speculative_params",
        "_resolve_speculative_algorithm_alias",
    ),
    *_in("arg_groups.attention_hook", "handle_deterministic_inference"),
    # Numbers on the command line, and a model's context.
    *_in("utils.common", "human_readable_int"),
    *_in("utils.hf_transformers.common", "get_context_length", "CONTEXT_LENGTH_KEYS"),
    *_in("arg_groups.model_overrides.deepseek_v4", "_deepseek_v4_overrides"),
    *_in("server_args", "ServerArgs.resolve_once", "ServerArgs.__reduce__", "prepare_server_args"),
    *_in("configs.model_config", "AttentionArch"),
    *_in(
        "runtime_context",
        "_PLATFORM_PROBES",
        "_PLATFORM_VALUES",
        "attention_backends",
        "get_disagg",
        "get_exec",
        "get_memory",
        "get_observability",
        "get_parallel",
        "get_platform",
        "get_server_args",
        "get_spec",
    ),
    # The launcher and its schedulers.
    *_in(
        "entrypoints.engine",
        "Engine._launch_scheduler_processes",
        "Engine._launch_subprocesses",
        "SchedulerInitResult",
        "_wait_for_scheduler_ready",
    ),
    *_in("managers.data_parallel_controller", "SCHEDULER_PIDS_ARG", "run_data_parallel_controller_process"),
    *_in(
        "managers.scheduler",
        "Scheduler.get_init_info",
        "Scheduler.get_internal_state",
        "run_scheduler_process",
        "get_exception_traceback",
    ),
    # How it sizes the KV pool, and what beside the plugin's buffers depends on it.
    *_in("mem_cache.kv_cache_configurator", "KVCacheConfigurator.config_from_budget", "KVCacheConfigurator.resolve_max_num_reqs"),
    *_in("mem_cache.allocation_sizing", "get_req_to_token_extra_context_len"),
    *_in("model_executor.cuda_graph_config", "PhaseConfig", "CudaGraphConfig"),
    *_in("runtime_context", "get_schedule"),
    *_in("utils.common", "kill_process_tree"),
    # How far a batch may be padded past the request pool.
    *_in("utils.common", "get_cuda_graph_batch_size_alignment", "get_eager_max_batch_size"),
    *_in("model_executor.runner.base_cuda_graph_runner", "get_batch_sizes_to_capture"),
    # How many backends of a kind it builds, and how often it captures one of them.
    *_in("speculative.adaptive_spec_params", "resolve_candidate_steps_from_config"),
    *_in("speculative.eagle_worker_v2", *_methods("EAGLEWorkerV2", ("init_cuda_graphs", "build_adaptive_runtime_state"))),
    *_in("speculative.multi_layer_eagle_worker_v2", "MultiLayerEagleDraftWorker.init_attention_backend"),
    *_in("model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner._resolve_lora_variant"),
    *_in("runtime_context", "get_lora"),
    "sglang.utils:get_exception_traceback",
    # The factories.
    *_in(
        "layers.attention.attention_registry",
        "ATTENTION_BACKENDS",
        "create_flashattention_v3_backend",
        "create_flashattention_v4_backend",
        "create_triton_backend",
        "create_aiter_backend",
    ),
    *_in("speculative.draft_utils", *_methods("DraftBackendFactory", _FACTORY)),
    # The backends underneath.
    *_in(
        "layers.attention.base_attn_backend",
        *_methods("AttentionBackend", ("forward", "verify_mask", "update_verify_buffers_to_fill_after_draft", *_STEP_GRAPHS)),
        *_methods("AttentionBackend", ("shared_read_ends", "supports_draft_extend_metadata_staging")),
    ),
    *_in(
        "layers.attention.triton_backend",
        *_methods("TritonAttnBackend", (*_BACKEND, "verify_mask", *_GRAPHS)),
        *_methods("TritonMultiStepDraftBackend", (*_STEPS, *_STEP_GRAPHS)),
    ),
    *_in(
        "layers.attention.flashattention_backend",
        *_methods("FlashAttentionBackend", (*_BACKEND, "verify_mask", *_STEP_GRAPHS)),
        *_methods("FlashAttentionBackend", ("get_paged_mha_kv_cache", "prepare_paged_mha_query")),
        *_methods("FlashAttentionBackend", ("supports_draft_extend_metadata_staging", "stage_draft_extend_metadata")),
        "FlashAttentionMetadata",
        *_methods("FlashAttentionMultiStepBackend", (*_STEPS, *_STEP_GRAPHS)),
    ),
    *_in(
        "layers.attention.aiter_backend",
        *_methods("AiterAttnBackend", (*_BACKEND, *_GRAPHS, "_apply_cuda_graph_metadata")),
        # Its page tables and the writes of its cache, which `backends/aiter_corrected.py` corrects.
        *_methods("AiterAttnBackend", ("_build_unified_page_table_from_spec", "_build_verify_unified_metadata")),
        *_methods("AiterAttnBackend", ("_resolve_swa_kv_pool", "_use_fused_fp8_kv_write", "get_cuda_graph_seq_len_fill_value")),
        *_methods("AiterMultiStepDraftBackend", (*_STEPS, *_STEP_GRAPHS, "common_template")),
    ),
    "sglang.kernels.ops.attention.extend_attention:extend_attention_fwd",
    # What a batch, a layer and a cache pool look like.
    *_in("layers.attention.verify_mask", "VerifyMask", "maybe_create_verify_mask"),
    "sglang.kernels.ops.attention.flash_attention:flash_attn_with_kvcache",
    "sglang.kernels.ops.attention.flash_attention_v3:flash_attn_with_kvcache",
    "sglang.kernels.ops.attention.flash_attention_v4:flash_attn_with_kvcache",
    "sglang.kernels.ops.attention.flash_attention_v4:flash_attn_varlen_func",
    *_in("mem_cache.layout.paged_view", "paged_view", "paged_kv_view"),
    # The dsv4 backend, its factories, its pools and what reads them.
    *_in(
        "layers.attention.deepseek_v4_backend", *_methods("DeepseekV4AttnBackend", ("__init__", "forward", "_forward_attention"))
    ),
    *_in("layers.attention.deepseek_v4_backend", *_methods("DeepseekV4AttnBackend", ("_use_sparse_prefill",))),
    *_in("layers.attention.deepseek_v4_backend", *_methods("DeepseekV4MultiStepBackend", ("__init__", "_make_step_backend"))),
    *_in(
        "layers.attention.deepseek_v4_trtllm_backend", "create_deepseek_v4_attn_backend", "create_deepseek_v4_multistep_backend"
    ),
    *_in("layers.attention.dsv4.sparse_prefill_utils", "use_dsv4_q8kv8_sparse_prefill"),
    *_in("speculative.draft_utils", *_methods("DraftBackendFactory", tuple(f"_create_dsv4_{half}_backend" for half in _HALVES))),
    *_in("mem_cache.deepseek_v4_memory_pool", "select_dsv4_kv_layout", "resolve_compressed_kv_layout"),
    *_in("mem_cache.deepseek_v4_memory_pool", "DeepSeekV4SingleKVPool.create_buffer", "DeepSeekV4SingleKVPool.get_key_buffer"),
    *_in(
        "mem_cache.deepseek_v4_memory_pool",
        *_methods("DeepSeekV4TokenToKVPool", ("get_swa_key_layout", "get_swa_key_buffer_radix", "compressed_kv_layout")),
    ),
    *_in("mem_cache.kv_cache_configurator", "select_dsv4_kv_layout"),
    "sglang.kernels.ops.attention.dsv4.kv_layout:KVLayout",
    "sglang.kernels.ops.attention.dsv4.dequant_k_cache:get_jit_cuda_arch",
    "sglang.kernels.ops.attention.dsv4.dequant_k_cache:dequantize_k_cache_paged_v41",
    # Who captures a batch, and what is in it.
    *_in("model_executor.runner.decode_cuda_graph_runner", "build_replay_fb_view", "DecodeCudaGraphRunner.capture_one_shape"),
    *_in("speculative.eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner.capture_one_shape"),
    *_in("speculative.eagle_draft_extend_cuda_graph_runner", "EAGLEDraftExtendCudaGraphRunner.capture_one_shape"),
    *_in("layers.radix_attention", "AttentionType", "RadixAttention.__init__", "RadixAttention.forward"),
    *_in(
        "model_executor.forward_batch_info",
        *_methods("ForwardMode", ("is_idle", "is_target_verify", "is_draft_extend_v2", "is_decode")),
        "ForwardBatch.init_new",
    ),
    *_in("model_executor.model_runner", "ModelRunner._get_attention_backend"),
    *_in("model_executor.cuda_graph_config", "cuda_graph_fully_disabled"),
    *_in("mem_cache.memory_pool", "KVWriteLoc", *_methods("MHATokenToKVPool", ("set_kv_buffer", "get_key_buffer", "__init__"))),
    *_in(
        "mem_cache.memory_pool",
        *_methods("HybridLinearKVPool", ("__init__", "set_kv_buffer", "get_key_buffer", "get_value_buffer", "get_kv_buffer")),
        "HybridLinearKVPool._transfer_full_attention_id",
    ),
    # What it puts around the backend of a hybrid.
    *_in("layers.attention.attention_registry", "attn_backend_wrapper", "attn_backend_wrapper_for_draft_extend"),
    *_in(
        "layers.attention.hybrid_linear_attn_backend",
        *_methods("HybridLinearAttnBackend", (*_BACKEND, "forward", "verify_mask", *_STEP_GRAPHS)),
        "HybridLinearAttnBackend.update_verify_buffers_to_fill_after_draft",
    ),
    *_in(
        "mem_cache.swa_memory_pool",
        *_methods("SWAKVPool", ("set_kv_buffer", "get_key_buffer", "translate_loc_from_full_to_swa")),
    ),
    *_in("environ", "envs", "Envs.SGLANG_RAGGED_VERIFY_MODE"),
    # The producers of drafts and masks.
    *_in("speculative.spec_info", "SpecInputType", "SpecInput"),
    *_in("speculative.spec_utils", "resolve_draft_decode_window"),
    *_in("speculative.eagle_utils", "TreeMaskMode", "default_tree_mask_mode"),
    *_in("speculative.eagle_worker_common", "build_eagle_verify_input"),
    *_in("speculative.ngram_worker", "USE_FULL_MASK", "_is_cpu"),
    *_in("speculative.dflash_utils", "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS"),
    # An MTP part on its way from the files: which files, which architecture, which quantisation, which parameters.
    *_in("model_loader.loader", "_initialize_model", "_get_quantization_config", "DefaultModelLoader._prepare_weights"),
    *_in("model_loader.weight_utils", "filter_duplicate_safetensors_files"),
    *_in("configs.model_config", "ModelConfig._config_draft_model"),
    *_in("models.qwen3_5_mtp", "_mtp_quant_config", *_methods("Qwen3_5ForCausalLMMTP", ("__init__", "load_weights"))),
    *_in(
        "layers.quantization.quark.quark",
        *_methods("QuarkConfig", ("__init__", "get_quant_method", "_find_matched_config", "can_fuse_shared_expert")),
        *_methods("QuarkConfig", ("_get_block_fp8_config", "_is_fp8_w8a8", "_is_mx_fp4")),
    ),
    *_in("layers.quantization.quark.utils", "should_ignore_layer", "_is_equal_or_regex_match"),
)

#: Names that a module passes on from where they are defined.
PASSED_ON = {f"{_SRT}utils:kill_process_tree": f"{_SRT}utils.common:kill_process_tree"}

#: Imported as a whole; what is used of them is in `NAMES`.
MODULES = (
    f"{_SRT}arg_groups.choices",
    "sglang.kernels.ops.attention.dsv4.dequant_k_cache",
    f"{_SRT}layers.attention.deepseek_v4_trtllm_backend",
    f"{_SRT}layers.attention.flashattention_backend",
    f"{_SRT}managers.scheduler",
    f"{_SRT}mem_cache.deepseek_v4_memory_pool",
    f"{_SRT}mem_cache.kv_cache_configurator",
    f"{_SRT}model_loader.loader",
    f"{_SRT}speculative.dflash_utils",
    f"{_SRT}speculative.ngram_worker",
)

#: Server arguments that the plugin reads, by the namespace that SGLang publishes them under.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "device": ("device", "use_ray"),
    "disagg": ("enable_pdmux",),
    "exec.deterministic": ("enable_deterministic_inference",),
    "exec.dllm": ("dllm_algorithm",),
    "exec.kernel": ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    "exec.overlap": ("enable_two_batch_overlap",),
    "memory": ("enable_unified_memory",),
    "model": ("dtype", "kv_cache_dtype"),
    "parallel": ("enable_kv_cache_sharding",),
    "schedule": ("page_size",),
    "spec": (
        "speculative_algorithm",
        "speculative_attention_mode",
        "speculative_adaptive",
        "speculative_draft_attention_backend",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "speculative_ngram_max_bfs_breadth",
        "enable_multi_layer_eagle",
    ),
}
