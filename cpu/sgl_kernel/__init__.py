"""Stand-in for `sglang-kernel` on a machine without a GPU: the few operations of SGLang's CPU engine, in PyTorch.

The real distribution does not import without CUDA, and SGLang's CPU engine imports these names when it starts. This
directory is never part of the wheel: it is put on the path of a development environment only (`scripts/setup`),
and it refuses to load where the real one is installed or a GPU is visible, since there it would hide real kernels.

| operation | who needs it in SGLang |
|---|---|
| `merge_state_v2` | imported by name in `layers/attention/merge_state.py`; CUDA only, never called here |
| `copy_all_layer_kv_cache_cpu` | `kernels/ops/kvcache/cache_move.py`: accepted drafts move to their final slots |
| `assign_req_to_token_pool_cpu` | `mem_cache/allocation.py`: new slots enter the request's row |
| `assign_extend_cache_locs_cpu`, `assign_draft_cache_locs_contiguous_cpu` | `kernels/ops/speculative/cache_locs.py` |
| `fill_bonus_tokens_cpu`, `fill_accept_out_cache_loc_cpu` | `kernels/ops/speculative/eagle.py`: after verify |
| `rotate_input_ids_cpu` | `kernels/ops/speculative/multi_layer_eagle.py`: input ids of draft extend |
| `build_tree_kernel_efficient_cpu`, `verify_tree_greedy_cpu` | `kernels/ops/speculative/spec_tree.py` |
| `speculative.reconstruct_indices_from_tree_mask` | `kernels/ops/speculative/reconstruct_tree.py`: NGRAM trees |
"""

from __future__ import annotations

from importlib import metadata

import torch

from ._pools import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from ._trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

#: Names under which the real package is or was distributed.
_REAL = ("sglang-kernel", "sgl-kernel", "sglang-kernel-cpu", "sgl-kernel-cpu")


def _refuse_where_real_kernels_belong() -> None:
    for name in _REAL:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        raise ImportError(
            f"the CPU stand-in for sgl_kernel is on the path before the installed distribution {name}; "
            "take the directory cpu/ of sglang-specverify off the path"
        )
    if torch.cuda.is_available() or torch.version.hip:
        raise ImportError(
            "the CPU stand-in for sgl_kernel does not serve a machine with a GPU or a ROCm build of PyTorch; "
            "take the directory cpu/ of sglang-specverify off the path and install sglang-kernel"
        )


_refuse_where_real_kernels_belong()


def merge_state_v2(*_arguments: object, **_options: object) -> None:
    """CUDA only. SGLang imports the name; calling it on a CPU is a mistake of the caller."""
    raise NotImplementedError("sgl_kernel.merge_state_v2 is a CUDA operation: this is the CPU stand-in")


__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "merge_state_v2",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
