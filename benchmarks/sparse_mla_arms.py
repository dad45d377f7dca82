"""The arms of `benchmarks.sparse_mla`: this project's kernel, FlashMLA's for SM90, SGLang's in Triton, and two that gather first.

FlashMLA and SGLang are called as SGLang's DeepSeek-V4 backend calls them: every query row is a batch entry of its own with its
own window, heads padded to 64, lengths given. Padding, lists and the split schedule of FlashMLA are made before, for every arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.arms import Unavailable
from benchmarks.sparse_mla_points import DIM
from benchmarks.sparse_mla_pool import PAGE_ROWS, Inputs
from sglang_specverify.kernels.sparse_mla import FORMATS, deepseek_v41_decode, deepseek_v41_decode_workspace_size
from sglang_specverify.kernels.sparse_mla.formats import e2m1_table

SCALE = DIM**-0.5
#: Heads of the kernels in FlashMLA.
FLASH_HEADS = (64, 128)


@dataclass(frozen=True)
class Output:
    """What a call wrote: out bf16 [rows, H or more, 512], and lse FP32 [rows, H] where it is held to the oracle too."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


Call = Callable[[int], Output]


@dataclass(frozen=True)
class Arm:
    """One way to compute a point.

    Attributes:
        group: "ours"; "stock", what serves on Hopper today; "yardstick", what no backend runs.
        build: prepares what a step shares and returns the call of one layer. Raises where the arm cannot serve.
        v4_bytes: it reads the rows of 584 bytes.
    """

    name: str
    group: Literal["ours", "stock", "yardstick"]
    build: Callable[[Inputs], Call]
    v4_bytes: bool = False


def specverify(inputs: Inputs) -> Call:
    """One call for all rows of a request, which share their window."""
    point, pool = inputs.point, inputs.pool
    starts = lens = None
    if point.queries > 1:
        starts = torch.arange(point.queries, dtype=torch.int32, device=pool.device).expand(point.batch, -1).contiguous()
        lens = torch.full_like(starts, point.window)

    def lists(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.windows[layer][:, None], inputs.selected[layer]

    return _decode(inputs, inputs.q, lists, swa_starts=starts, swa_lens=lens)


def rows_apart(inputs: Inputs) -> Call:
    """The same kernel, each query row with a window of its own: what sharing saves."""
    point = inputs.point
    if point.queries == 1:
        raise Unavailable("one query row a request: the same as specverify")
    q = inputs.q.view(point.rows, 1, point.heads, DIM)
    windows, selected = _flat(inputs)
    return _decode(inputs, q, lambda layer: (windows[layer][:, None], selected[layer][:, None]))


def _decode(inputs: Inputs, q: torch.Tensor, lists: Callable[[int], tuple[torch.Tensor, torch.Tensor]], **options: Any) -> Call:
    point, pool = inputs.point, inputs.pool
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    sizes = {"queries": q.shape[1], "heads": q.shape[2], "window": inputs.windows.shape[2]}
    needed = deepseek_v41_decode_workspace_size(q.shape[0], point.topk, **sizes)
    options |= {"workspace": torch.empty(needed, dtype=torch.uint8, device=q.device), "out": out, "lse": lse}
    every = [lists(layer) for layer in range(inputs.layers)]

    def call(layer: int) -> Output:
        windows, selected = every[layer]
        main: dict[str, Any] = {"main_cache": pool.main, "main_indices": selected} if point.topk else {}
        deepseek_v41_decode(q, pool.swa, windows, sink=inputs.sink, **main, **options)
        return Output(out.view(point.rows, point.heads, DIM), lse.view(point.rows, point.heads))

    return call


def flashmla(inputs: Inputs) -> Call:
    """FlashMLA's sparse decode for SM90, from `sgl-flash-mla`."""
    interface = _flash_mla()
    shared = _serving_arguments(inputs)
    schedule = interface.get_mla_metadata()[0]

    def call(layer: int) -> Output:
        # SGLang looks at the output alone. The schedule is made in the first call and serves all that have its shape and lengths.
        return Output(interface.flash_mla_with_kvcache(tile_scheduler_metadata=schedule, **shared(layer))[0].squeeze(1))

    return call


def sglang_triton(inputs: Inputs) -> Call:
    """SGLang's sparse decode in Triton, which it runs on AMD hardware; its options are tuned in the first call."""
    from sglang.kernels.ops.attention.dsv4.triton_sparse_decode import triton_fp8_attention_fwd

    shared = _serving_arguments(inputs)
    return lambda layer: Output(triton_fp8_attention_fwd(**shared(layer))[0].squeeze(1))


def gather_flashmla(inputs: Inputs) -> Call:
    """The rows of 528 and 288 bytes gathered and converted to bf16, then FlashMLA's sparse prefill for SM90 over them."""
    from benchmarks.sparse_mla_gather import gather

    interface = _flash_mla()
    point, (q, sink) = inputs.point, _padded(inputs)
    windows, selected = _flat(inputs)
    keys = torch.empty(point.rows, point.keys, DIM, dtype=torch.bfloat16, device=q.device)
    entries = torch.arange(point.rows * point.keys, dtype=torch.int32, device=q.device).view(point.rows, 1, point.keys)

    def call(layer: int) -> Output:
        gather(inputs, windows[layer], selected[layer], keys)
        found = interface.flash_mla_sparse_fwd(q, keys.view(-1, 1, DIM), entries, SCALE, DIM, attn_sink=sink)
        return Output(found[0])

    return call


def pytorch(inputs: Inputs) -> Call:
    """PyTorch alone: gather, convert, `scaled_dot_product_attention` with the sink as a key of zeros.

    In FP32: scores that are rounded to bf16 would not be right.
    """
    point, pool = inputs.point, inputs.pool
    q = inputs.q.view(point.rows, 1, point.heads, DIM).float()
    windows, selected = _flat(inputs)
    halves = e2m1_table().to(q)[torch.tensor([[code & 15, code >> 4] for code in range(256)], device=q.device)]
    zeros = torch.zeros(point.rows, 1, DIM, device=q.device)
    bias = torch.zeros(point.heads, point.keys + 1, device=q.device)
    bias[:, -1] = inputs.sink

    def scaled(cache: torch.Tensor, slots: torch.Tensor, name: str) -> torch.Tensor:
        kind = FORMATS[name]
        page, row = slots // PAGE_ROWS, slots % PAGE_ROWS
        parts = cache.split([PAGE_ROWS * kind.value_bytes, PAGE_ROWS * kind.scale_bytes], dim=1)
        codes, scales = (part.unflatten(1, (PAGE_ROWS, -1))[page, row] for part in parts)
        if name == "main_kv_fp4":
            values, factors = halves[codes.int()].flatten(2), scales.view(torch.float8_e4m3fn).float()
        else:
            values, factors = codes.view(torch.float8_e4m3fn).float(), torch.exp2(scales.float() - 127)
        return (values.unflatten(2, (-1, kind.group)) * factors[..., None]).flatten(2)

    def call(layer: int) -> Output:
        keys = [scaled(pool.swa, windows[layer], "swa_mxfp8")]
        if point.topk:
            keys.append(scaled(pool.main, selected[layer], "main_kv_fp4"))
        k = torch.cat([*keys, zeros], dim=1)[:, None]
        # Heads stand where rows of a sequence do: all of them read the same keys.
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=bias, scale=SCALE)
        return Output(out.to(torch.bfloat16).view(point.rows, point.heads, DIM))

    return call


def _flash_mla() -> Any:
    """SGLang's own way to the wheel, whose kernels for SM90 are its default."""
    try:
        from sglang.kernels.ops.attention import flash_mla_interface
    except ImportError as failure:
        raise Unavailable(f"sgl-flash-mla: {failure}") from None
    return flash_mla_interface


def _flat(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [layers, rows, window] and [layers, rows, K]: query rows as entries of a batch."""
    point = inputs.point
    windows = torch.stack([inputs.own_windows(layer) for layer in range(inputs.layers)])
    selected = inputs.selected.expand(-1, -1, point.queries, -1).reshape(inputs.layers, point.rows, point.topk)
    return windows.view(inputs.layers, point.rows, point.window), selected


def _padded(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [rows, 64 or 128, 512], sink [64 or 128]) with heads of zeros behind the real ones."""
    point = inputs.point
    missing = min(count for count in FLASH_HEADS if count >= point.heads) - point.heads
    q = inputs.q.view(point.rows, point.heads, DIM)
    pad = torch.nn.functional.pad
    return pad(q, (0, 0, 0, missing)).contiguous(), pad(inputs.sink, (0, missing)).contiguous()


def _serving_arguments(inputs: Inputs) -> Callable[[int], dict[str, Any]]:
    """Keyword arguments that SGLang's backend passes to a decode of one layer, but for the schedule."""
    point, pool, (q, sink) = inputs.point, inputs.pool, _padded(inputs)
    windows, selected = _flat(inputs)

    def lengths(number: int) -> torch.Tensor:
        return torch.full((point.rows,), number, dtype=torch.int32, device=q.device)

    same: dict[str, Any] = {
        "q": q[:, None], "k_cache": pool.v4_swa, "head_dim_v": DIM, "block_table": None, "cache_seqlens": None,
        "softmax_scale": SCALE, "is_fp8_kvcache": True, "topk_length": lengths(point.window), "attn_sink": sink,
    }  # fmt: skip
    if point.topk:
        same |= {"extra_k_cache": pool.v4_main, "extra_topk_length": lengths(point.topk)}

    def of(layer: int) -> dict[str, Any]:
        extra = {"extra_indices_in_kvcache": selected[layer][:, None]} if point.topk else {}
        return {**same, "indices": windows[layer][:, None], **extra}

    return of


SELECTED = "specverify"
ARMS = (
    Arm(SELECTED, "ours", specverify),
    Arm("rows apart", "yardstick", rows_apart),
    Arm("flashmla", "stock", flashmla, v4_bytes=True),
    Arm("sglang triton", "stock", sglang_triton, v4_bytes=True),
    Arm("gather + flashmla", "yardstick", gather_flashmla),
    Arm("pytorch", "yardstick", pytorch),
)
