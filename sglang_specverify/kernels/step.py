"""A step's metadata by one launch: the step's own copy of the page table, the division of the prefixes, the packed masks.

It is `snapshot_table` and `plan_verify_attention` at once, with row r of the copy for request r.
"""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.plan import (
    Masks,
    Plan,
    packers,
    plan_arguments,
    plan_constants,
    plan_warps,
    programs_for_a_request,
)
from sglang_specverify.kernels.planning import Layers, plan_of
from sglang_specverify.kernels.snapshot import blocks_at_once, slots_of

#: Entries that a program copies at once.
_BLOCK = 1024

#: Copying programs of a launch, and the fewest that a request has. A program loops over what falls to it: the grid follows
#: the width of the table, and a program that finds its request short has cost its start.
_PROGRAMS = 512
_ROW_PROGRAMS = 8


@torch.no_grad()
def prepare_step(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    table: torch.Tensor,
    page_size: int = 1,
    slot_map: torch.Tensor | None = None,
    window_table: torch.Tensor | None = None,
    extra: int = 0,
    num_draft_tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    window: int = -1,
    branches: bool = False,
    q_offsets: torch.Tensor | None = None,
    num_rows: int | None = None,
    mask: torch.Tensor | None = None,
    mask_layout: str = "qlen_only",
    mask_offsets: torch.Tensor | None = None,
    deterministic: bool = False,
    divide: bool | None = None,
    programs: int | None = None,
    config: LaunchConfig | None = None,
    kernel: str = "fused",
    out: torch.Tensor | None = None,
) -> Plan:
    """Copy the slots that a step reads, and make its plan, by one launch on the device.

    The calls of the step then take `table`, row ids 0 to bs - 1 and the plan. It reads no length on the host and, where `out`
    is given, allocates nothing, so it can be captured into a graph; a replay follows what its tensors hold then.

    Args:
        req_to_token: int32 or int64 [rows, context], slot of each position; entries past a request's end may hold anything.
        req_pool_indices: int32 or int64 [bs], row of each request. A padded request has prefix 0, or 1 with row 0.
        prefix_lens: int32 or int64 [bs], L.
        table: int32 [bs or more, width], last stride 1. Row r receives the slots of request r's positions below L + `extra`,
            or the ids of their pages, as `snapshot_table` writes them. Other entries are not written. Rows that begin at
            multiples of 16 entries, and an engine's table whose rows do, are copied in wide accesses.
        page_size: tokens an entry of `table` stands for.
        slot_map, window_table: both or neither. int [n], full-pool slot to window-pool slot; and int32, of the shape that
            `table` may have and as wide, which receives the same entries through the map.
        extra: positions after the prefix that the step reads: W for target verify, 0 where draft tokens have slots of their
            own. Beside `q_offsets` each request has as many as it has rows, and this is 0 or `num_draft_tokens`.

    All others, and the errors, are those of `plan_verify_attention`. With no request nothing is launched.

    Returns:
        the plan, over `out`. `Plan.undivided` serves layers of other windows.

    Raises:
        ArgumentError: an argument that does not fit, on a CPU also a value: nothing was launched or written.
        SpecverifyError: the tensors are where no kernel runs.
    """
    plan, masks = plan_of(prefix_lens, Layers(
        num_draft_tokens=num_draft_tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        dtype=dtype, cache_dtype=cache_dtype, page_size=page_size, window=window, branches=branches, q_offsets=q_offsets,
        num_rows=num_rows, mask=mask, mask_layout=mask_layout, mask_offsets=mask_offsets, deterministic=deterministic,
        divide=divide, programs=programs, config=config, kernel=kernel, out=out,
        longest=_capacity(table, page_size),
    ))  # fmt: skip
    device, batch = prefix_lens.device, len(prefix_lens)
    checks.tensor("req_to_token", req_to_token, ("rows", "context"), checks.INTS, device)
    checks.tensor("req_pool_indices", req_pool_indices, (batch,), checks.INTS, device, unit_last=True)
    checks.integer("extra", extra, 0)
    if q_offsets is not None and extra not in (0, num_draft_tokens):
        raise ArgumentError("extra", f"{extra} with q_offsets", f"0 or num_draft_tokens, {num_draft_tokens}")
    _check_copy("table", table, batch, device)
    if (slot_map is None) != (window_table is None):
        raise ArgumentError("window_table", "one of slot_map and window_table without the other", "both or neither")
    if slot_map is not None and window_table is not None:
        checks.tensor("slot_map", slot_map, ("n",), checks.INTS, device)
        _check_copy("window_table", window_table, batch, device)
        if window_table.shape[1] != table.shape[1]:
            raise ArgumentError("window_table", f"{window_table.shape[1]} columns", f"{table.shape[1]}, as many as table has")
        if len(slot_map) == 0:
            raise ArgumentError("slot_map", "no entries", "one for each slot of the full pool")
    if batch == 0:
        return plan
    if checks.on_cpu(prefix_lens):
        ends = prefix_lens.long() + (extra if q_offsets is None else q_offsets.long().diff())
        for name, target, by in (("table", table, None), ("window_table", window_table, slot_map)):
            if target is not None:
                slots_of(req_to_token, req_pool_indices, ends, page_size, by, target.shape[1], ("prefix_lens", name))
    prepare_step_launch(
        req_to_token, req_pool_indices, prefix_lens, plan, masks, table=table, page_size=page_size, slot_map=slot_map,
        window_table=window_table, extra=extra, q_offsets=q_offsets,
    ).run()  # fmt: skip
    return plan


def _capacity(table: object, page_size: object) -> int:
    """Tokens that a row of the table can hold; 0 of what the checks are going to refuse."""
    fits = isinstance(table, torch.Tensor) and table.ndim == 2 and isinstance(page_size, int)
    return table.shape[1] * page_size if fits else 0  # type: ignore[attr-defined]


def prepare_step_launch(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    plan: Plan,
    masks: Masks | None,
    *,
    table: torch.Tensor,
    page_size: int,
    slot_map: torch.Tensor | None,
    window_table: torch.Tensor | None,
    extra: int,
    q_offsets: torch.Tensor | None,
) -> Launch:
    """The one launch that computes `prepare_step` on checked arguments."""
    from sglang_specverify.kernels.step_kernel import prepare_step_kernel

    batch, width = len(prefix_lens), min(table.shape[1], -(-req_to_token.shape[1] // page_size))
    return Launch(
        kernel=prepare_step_kernel,
        grid=(batch, programs_for_a_request(plan, masks) + copy_programs(batch, width), 1),
        arguments={
            "req_to_token": req_to_token,
            "req_pool_indices": req_pool_indices,
            "prefix_lens": prefix_lens,
            "table": table,
            "slot_map": slot_map,
            "window_table": window_table,
            "width": width,
            "extra": extra,
            "slot_count": 0 if slot_map is None else len(slot_map),
            "source_row": req_to_token.stride(0),
            "source_column": req_to_token.stride(1),
            "map_stride": 0 if slot_map is None else slot_map.stride(0),
            "table_row": table.stride(0),
            "window_row": 0 if window_table is None else window_table.stride(0),
            **plan_arguments(plan, masks),
            # Also where there is no mask: the copies read the requests' rows from it.
            "q_offsets": q_offsets,
        },
        constants={
            **plan_constants(plan, masks),
            "RAGGED": q_offsets is not None,
            "PACKERS": packers(masks),
            "PAGE_SIZE": page_size,
            "BLOCK": _BLOCK,
            "WIDE": blocks_at_once(req_to_token, page_size, slot_map),
        },
        options={"num_warps": max(4, plan_warps(plan))},
    )


def copy_programs(batch: int, width: int) -> int:
    """Programs that copy a row of `width` entries."""
    return min(-(-width // _BLOCK), max(_ROW_PROGRAMS, -(-_PROGRAMS // max(batch, 1))))


def _check_copy(name: str, value: torch.Tensor, batch: int, device: torch.device) -> None:
    checks.output(name, checks.tensor(name, value, (">= bs", "width"), (torch.int32,), device, unit_last=True))
    if len(value) < batch:
        raise ArgumentError(name, f"{len(value)} rows", f"{batch} or more, one for each request")
