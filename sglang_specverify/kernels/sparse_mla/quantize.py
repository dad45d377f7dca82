"""Rows of a DeepSeek-V4.1 latent, rotated already, written into a cache in one of the formats of `formats.py`.

Over each group of columns that share a scale, with amax = max |x| and RN rounding to the nearest code, ties to the even one:

    main_kv_fp4   scale = E4M3_RN(max(amax, 6 * 2^-9) / 6)           code = E2M1_RN(x / scale)
    swa_mxfp8     scale = 2^ceil(log2(max(amax, min_amax) / 448))    code = E4M3_RN(x / scale)
    swa_fp8                                                          code = E4M3_RN(x)

Codes and the E4M3 scale saturate at the largest finite value; what rounds to zero keeps its sign, -0 included. A group that holds
NaN or an infinity reads back as NaN, all of it (scale NaN; E2M1 codes 0, E4M3 codes NaN), so that it is not served as a number;
in swa_fp8, which has no groups, the element alone does.

Quotients count as exact before they are rounded. Division in FP32 first gives the same codes: the midpoints between codes have
so few bits that a quotient of FP32 numbers, unless it is one of them, is further from them than half a unit in its last place.

The kernel rounds in integer arithmetic and uses no conversion instruction, so that every architecture writes the same bytes.
"""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, uses_triton
from sglang_specverify.kernels.sparse_mla.formats import (
    DIM,
    Format,
    allocate_cache,
    check_cache,
    check_layout,
    e4m3_table,
    format_of,
    row_addressing,
)
from sglang_specverify.kernels.sparse_mla.rounding import E4M3_NAN, to_e2m1, to_e4m3

#: The least amax that swa_mxfp8 scales for: FlashInfer's. SGLang's writer has 1e-4 for the scale itself, which is
#: `SGLANG_MIN_AMAX`: both clamp between the same two powers of two.
MIN_AMAX = 1e-4
SGLANG_MIN_AMAX = 448e-4

#: Bounds of `min_amax`: scales are normal numbers and x / scale vanishes for every subnormal x; no group is forced to zeros.
_LEAST_MIN_AMAX, _LARGEST_MIN_AMAX = 2.0**-100, 448.0

#: An E8M0 scale of NaN.
_E8M0_NAN = 0xFF


@torch.no_grad()
def deepseek_v41_quantize_cache(
    x: torch.Tensor,
    format: str,
    page_size: int = 64,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    layout: str = "block_split",
    min_amax: float = MIN_AMAX,
) -> torch.Tensor:
    """Write rows into a cache, bit for bit the same on every device. Does not wait for a GPU.

    Args:
        x: bf16 or fp32 [N, 512], last stride 1.
        format: "main_kv_fp4", "swa_mxfp8" or "swa_fp8".
        page_size: rows of a page.
        out: the cache, uint8 [pages, page_bytes], see `formats.py`; a new one of ceil(N / page_size) pages where None. Bytes
            of other rows, and between rows and pages, are not written.
        slots: int32 or int64 [N], any stride: row i goes to slot `slots[i]`. A slot below 0 or beyond the pool is skipped. A slot
            that occurs twice holds a mixture of its rows; on the CPU it is refused. None for 0, 1, 2, …
        layout: "block_split" or "interleaved".
        min_amax: for swa_mxfp8 only, 2^-100 to 448: groups whose largest value is smaller are scaled as if it were this.

    Returns:
        `out`.

    Raises:
        ArgumentError: an argument outside what it may be; nothing was written.
    """
    kind = _check(x, format, page_size, out, slots, layout, min_amax)
    if out is None:
        out = allocate_cache(kind, -(-len(x) // page_size), page_size, x.device)
    if uses_triton(x.device):
        quantize_cache_launch(x, kind, page_size, out, slots, layout, min_amax).run()
    else:
        _run_plain(x, kind, page_size, out, slots, layout, min_amax)
    return out


def quantize_cache_launch(
    x: torch.Tensor, kind: Format, page_size: int, out: torch.Tensor, slots: torch.Tensor | None, layout: str, min_amax: float
) -> Launch:
    """The launch that computes `deepseek_v41_quantize_cache` on checked arguments."""
    from sglang_specverify.kernels.sparse_mla.quantize_kernel import (
        quantize_e4m3_kernel,
        quantize_fp4_kernel,
        quantize_mxfp8_kernel,
    )

    value_base, value_stride, scale_base, scale_stride = row_addressing(kind, page_size, layout)
    arguments = {
        # The kernel takes numbers apart itself: it reads their bits.
        "x": x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32),
        "slots": slots, "cache": out, "capacity": out.shape[0] * page_size, "page_rows": page_size, "x_row": x.stride(0),
        "slots_stride": 0 if slots is None else slots.stride(0), "page_stride": out.stride(0), "value_base": value_base,
        "value_stride": value_stride, "scale_base": scale_base, "scale_stride": scale_stride,
    }  # fmt: skip
    kernels = {"main_kv_fp4": quantize_fp4_kernel, "swa_mxfp8": quantize_mxfp8_kernel, "swa_fp8": quantize_e4m3_kernel}
    constants = {"MIN_AMAX_BITS": _bits(min_amax)} if kind.name == "swa_mxfp8" else {}
    # 16 values a thread on NVIDIA, 8 on AMD: a group's maximum is found within few threads.
    return Launch(kernels[kind.name], (len(x), 1, 1), arguments, constants, {"num_warps": 1})


def _bits(value: float) -> int:
    """The bits of `value` in FP32."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _run_plain(
    x: torch.Tensor, kind: Format, page_size: int, out: torch.Tensor, slots: torch.Tensor | None, layout: str, min_amax: float
) -> None:
    """On a CPU without the interpreter."""
    values, scales = quantize_rows(x, kind, min_amax)
    at = torch.arange(len(x), device=x.device) if slots is None else slots.long()
    real = (at >= 0) & (at < out.shape[0] * page_size)
    page, row = at[real] // page_size, (at[real] % page_size)[:, None]
    value_base, value_stride, scale_base, scale_stride = row_addressing(kind, page_size, layout)
    out[page[:, None], value_base + row * value_stride + torch.arange(kind.value_bytes, device=x.device)] = values[real]
    out[page[:, None], scale_base + row * scale_stride + torch.arange(kind.scale_bytes, device=x.device)] = scales[real]


def quantize_rows(x: torch.Tensor, kind: Format, min_amax: float = MIN_AMAX) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of rows: values uint8 [N, value_bytes] and scales uint8 [N, scale_bytes], in plain PyTorch.

    Quotients of FP32 numbers are rounded to FP64 once before they are compared with midpoints between codes, which is as
    harmless as in FP32, see the head of this file.
    """
    rows = x.double()
    if kind.group == 0:
        # Codes of infinities would be those of the largest value.
        return to_e4m3(rows.masked_fill(rows.isinf(), torch.nan).copysign(rows)), x.new_empty((len(x), 0), dtype=torch.uint8)
    groups = rows.view(len(x), DIM // kind.group, kind.group)
    broken = ~groups.isfinite().all(dim=2)
    groups = groups.masked_fill(broken[..., None], 0.0)
    amax = groups.abs().amax(dim=2)
    if kind.name == "main_kv_fp4":
        scales = to_e4m3(amax.clamp_min(6 * 2.0**-9) / 6)
        codes = to_e2m1(groups / e4m3_table().to(x.device)[scales.long()][..., None]).flatten(1)
        scales = scales.masked_fill(broken, E4M3_NAN)
        return codes[:, 0::2] | (codes[:, 1::2] << 4), scales
    # amax / 448 = fraction * 2^exponent with a fraction of [0.5, 1): 2^exponent is the next power of two unless it is one itself.
    fraction, exponent = torch.frexp(amax.clamp_min(float(torch.tensor(min_amax, dtype=torch.float32))) / 448)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)
    codes = to_e4m3(torch.ldexp(groups, -exponent.double()[..., None])).masked_fill(broken[..., None], E4M3_NAN)
    return codes.flatten(1), (exponent + 127).masked_fill(broken, _E8M0_NAN).to(torch.uint8)


def _check(
    x: torch.Tensor,
    format: str,
    page_size: int,
    out: torch.Tensor | None,
    slots: torch.Tensor | None,
    layout: str,
    min_amax: float,
) -> Format:
    kind = format_of("format", format)
    checks.tensor("x", x, ("N", DIM), (torch.bfloat16, torch.float32), unit_last=True)
    checks.integer("page_size", page_size, 1)
    check_layout("layout", layout)
    checks.number("min_amax", min_amax, _LEAST_MIN_AMAX)
    if min_amax > _LARGEST_MIN_AMAX:
        raise ArgumentError("min_amax", repr(min_amax), f"{_LARGEST_MIN_AMAX} or less")
    if min_amax != MIN_AMAX and kind.name != "swa_mxfp8":
        raise ArgumentError("min_amax", repr(min_amax), f"{MIN_AMAX} for {kind.name}: only swa_mxfp8 has it")
    if out is not None:
        check_cache("out", out, kind, page_size, x.device)
        checks.output("out", out)
        if slots is None and len(x) > out.shape[0] * page_size:
            came = f"{out.shape[0]} pages of {page_size} rows"
            raise ArgumentError("out", came, f"room for the {len(x)} rows of x, or slots that say where they go")
        if _overlap(x, out):
            raise ArgumentError("out", "memory that x is in", "memory of its own")
    elif slots is not None:
        raise ArgumentError("out", "None with slots", "the cache that the slots are in")
    if slots is not None:
        checks.tensor("slots", slots, (len(x),), checks.INTS, x.device)
        assert out is not None
        if checks.on_cpu(slots):
            _check_slots(slots, out.shape[0] * page_size)
    return kind


def _check_slots(slots: torch.Tensor, capacity: int) -> None:
    real = slots[(slots >= 0) & (slots < capacity)]
    found, counts = torch.unique(real, return_counts=True)
    if (twice := checks.first_row(counts > 1)) is not None:
        raise ArgumentError("slots", f"slot {int(found[twice])} {int(counts[twice])} times", "each slot at most once")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of two tensors in one memory meet."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0 or a.device.type == "meta":
        return False

    def span(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (first, end), (other, other_end) = span(a), span(b)
    return first < other_end and other < end
