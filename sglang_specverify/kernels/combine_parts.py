"""The launch that combines the parts of divided prefixes, where a plan leaves that to one."""

from __future__ import annotations

import torch

from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments
from sglang_specverify.kernels.fused import Split, scale_mode, scale_of, strides_of
from sglang_specverify.kernels.launch import Launch, has_dependent_launch
from sglang_specverify.kernels.plan import padded

#: Columns of a program, which has one warp: of 32 lanes, so that each reads 16 bytes of a part.
_COLUMNS = 128


def combinations(
    a: VerifyArguments | DraftArguments,
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arch: str,
    split: Split | None,
) -> list[Launch]:
    """What goes directly behind the attention launch of a checked call: nothing, or the launch that combines the parts.

    Whether there is one depends on the plan's configuration and on no length, so that a captured graph has it always. It is
    the same for both kernels, whose parts lie alike.

    On NVIDIA from SM90 on it may start while the first launch runs, and waits for its end before it reads a part. Only this
    launch has that attribute: the first one reads Q, K and V that other kernels of the step write, and starts when they have
    ended.
    """
    if split is None or not split.plan.combined_by_launch:
        return []
    from sglang_specverify.kernels.combine_parts_kernel import combine_parts_kernel

    shape, early = split.plan.shape, has_dependent_launch(arch)
    block_m, block_dv = shape.config.block_m, padded(problem.v_head_dim)
    columns = min(block_dv, _COLUMNS)
    q_offsets = a.q_offsets if isinstance(a, VerifyArguments) else None
    v_scale, v_factor = scale_of(a.v_scale)
    strides = strides_of(a, out, lse)
    launch = Launch(
        kernel=combine_parts_kernel,
        grid=(shape.rows * (block_dv // columns), problem.kv_heads, problem.batch),
        arguments={
            "plan": split.plan.buffer,
            "partial_out": split.partial_out,
            "partial_lse": split.partial_lse,
            "q_offsets": q_offsets,
            "sinks": a.sinks,
            "v_scale": v_scale,
            "out": out,
            "lse": lse,
            "queries": problem.queries or 1,
            "tiles": shape.row_tiles,
            "out_scale": v_factor,
            **{name: strides[name] for name in ("out_row", "out_head", "lse_row", "lse_head")},
            "parts_at": split.plan.counters_at,
        },
        constants={
            "RAGGED": q_offsets is not None,
            "GROUP": problem.group,
            "DV": problem.v_head_dim,
            "HAS_SINKS": a.sinks is not None,
            "HAS_LSE": lse is not None,
            "V_SCALE": scale_mode(v_scale),
            "PDL": early,
            "BLOCK_M": block_m,
            "BLOCK_DV": block_dv,
            "COLUMNS": columns,
        },
        options={"num_warps": 1, "num_stages": 1} | ({"launch_pdl": True} if early else {}),
    )
    return [launch]
