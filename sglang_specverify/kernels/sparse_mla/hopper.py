"""Builds the launch of Hopper's decode kernel with specialised warps; `hopper_kernel.py` holds the kernel."""

from __future__ import annotations

from typing import Any

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.sparse_mla.arguments import DecodeArguments
from sglang_specverify.kernels.sparse_mla.splits import Division, SparseConfig

#: The one architecture whose asynchronous matrix instructions the kernel is written in.
ARCH = "sm_90"


def hopper_launch(
    a: DecodeArguments, division: Division, config: SparseConfig, grid: tuple[int, int, int],
    inputs: dict[str, Any], constants: dict[str, Any], options: dict[str, Any],
) -> Launch:  # fmt: skip
    """The launch that serves a checked call.

    Raises:
        ArgumentError: a call or a configuration that the kernel is not written for.
    """
    from sglang_specverify.kernels.sparse_mla.hopper_kernel import hopper_kernel

    if a.q.dtype != torch.bfloat16:
        raise ArgumentError("q", f"{a.q.dtype} with a specialised configuration", "bfloat16, or another configuration")
    fits = config.keys in (32, 64) and 2 <= config.num_stages <= 128 // config.keys
    if not fits or (config.rows, config.num_warps, config.value_parts) != (64, 4, 1):
        allowed = "rows 64, num_warps 4, value_parts 1, keys 64 in 2 stages or 32 in 2 to 4 where specialized"
        raise ArgumentError("config", str(config), allowed)
    second, producers = config.registers
    own = {"SECOND_REGISTERS": second, "PRODUCER_REGISTERS": producers, "KEYS": config.keys, "STAGES": config.num_stages,
           "POSITIVE": a.bmm1_scale > 0}  # fmt: skip
    constants = {name: value for name, value in constants.items() if name != "BLOCK_M"}
    assert division.block_m == config.rows
    return Launch(hopper_kernel, grid, inputs, {**constants, **own}, {"num_warps": 4, **options})
