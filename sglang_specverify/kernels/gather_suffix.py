"""Attention of each query row over a short list of slots of its own, merged into an attention result over its prefix.

    s(i, k) = cap(sm_scale * k_scale * q_i . k_k),  cap(s) = softcap * tanh(s / softcap), or s where softcap is 0
    lse     = log(exp(prefix_lse) + sum over the row's slots k of exp(s(i, k)))
    out     = (exp(prefix_lse) * prefix_out + v_scale * sum over k of exp(s(i, k)) * v_k) / (exp(lse) + exp(sink))

The slots are those of `compact_visible_slots`, cut to the depth of the tree: a row reads its ancestors and nothing else.
An LSE of -inf, or of +inf as FlashAttention 2 has it, is an empty prefix, whose output may hold anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.arguments import Scale
from sglang_specverify.kernels.fused import LOG2_E, _fp8_runs, as_fp32, e5m2_by_fp16, scale_of
from sglang_specverify.kernels.launch import Launch, arch_of, uses_triton
from sglang_specverify.kernels.merge import STATES, merge_fp64

#: Columns of `suffix_slots`.
MAX_DEPTH = 256

#: Head dims that the kernel's registers hold.
MAX_HEAD_DIM = 256

#: FP64 numbers of K that the reference gathers at once: 64 MiB.
_MAX_GATHERED = 1 << 23


@dataclass(frozen=True)
class SuffixArguments:
    """Arguments of `gather_suffix_merge`, as they came."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    suffix_slots: torch.Tensor
    suffix_lens: torch.Tensor
    prefix_out: torch.Tensor
    prefix_lse: torch.Tensor
    k_scale: Scale
    v_scale: Scale
    sm_scale: float | None
    softcap: float
    sinks: torch.Tensor | None

    @property
    def scale(self) -> float:
        """`sm_scale`, or its default."""
        return float(self.q.shape[2] ** -0.5) if self.sm_scale is None else self.sm_scale


@torch.no_grad()
def gather_suffix_merge(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    suffix_slots: torch.Tensor,
    suffix_lens: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    *,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sm_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend row i of q over its first `suffix_lens[i]` slots and merge the result into `prefix_out` and `prefix_lse`.

    Args:
        q: [T, Hq, D] bf16, fp16 or fp32 (on a CPU also fp64, by the reference), any row and head stride, last stride 1.
        k_cache, v_cache: [slots, Hkv, D] and [slots, Hkv, Dv] in q's type or FP8, last stride 1. Hkv divides Hq. A slot
            is read only for the rows that list it.
        suffix_slots: int32 [N, depth], any strides, depth at most 256, N at most T. Entries from `suffix_lens[i]` on are
            not looked at; a negative one before it is no key.
        suffix_lens: int32 [N]. A row with a negative length is padding, as are the rows from N on: nothing of it is read
            or written.
        prefix_out: [T, Hq, Dv] bf16, fp16 or fp32, last stride 1: the normalised output over the prefix, without a sink,
            in units of v. Receives the merged output.
        prefix_lse: FP32 [T, Hq], any strides: natural logarithm over the prefix, without a sink; -inf or +inf where it is
            empty. Receives the merged LSE, still without the sink.
        k_scale, v_scale: factors of K and V as stored in the suffix's slots: a number, one element or [Hkv].
        sm_scale: factor of q . k; D**-0.5 where None.
        softcap: as in `verify_attention`; 0 for none.
        sinks: FP32, BF16 or FP16 [Hq], score units: counted here, once, in the denominator of the output.

    Returns:
        (prefix_out, prefix_lse). A row without any key: 0 and -inf.

    Raises:
        ArgumentError: an argument that cannot be served; nothing was written. On a GPU values are not checked.
        SpecverifyError: tensors on a device that no kernel serves.
    """
    a = SuffixArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, suffix_slots=suffix_slots, suffix_lens=suffix_lens, prefix_out=prefix_out,
        prefix_lse=prefix_lse, k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    _check(a)
    if not uses_triton(q.device):
        return _run_reference(a)
    arch = arch_of(q.device)
    if (reason := _unserved(a, arch)) is None:
        gather_suffix_merge_launch(a, arch).run()
    elif checks.on_cpu(q):
        return _run_reference(a)
    else:
        raise reason
    return prefix_out, prefix_lse


@torch.no_grad()
def gather_suffix_merge_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    suffix_slots: torch.Tensor,
    suffix_lens: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    *,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sm_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_suffix_merge` in FP64, rounded once, on any device; `prefix_out` and `prefix_lse` may be FP64 too."""
    a = SuffixArguments(
        q=q, k_cache=k_cache, v_cache=v_cache, suffix_slots=suffix_slots, suffix_lens=suffix_lens, prefix_out=prefix_out,
        prefix_lse=prefix_lse, k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    _check(a)
    return _run_reference(a)


def gather_suffix_merge_launch(a: SuffixArguments, arch: str) -> Launch:
    """The launch that computes `gather_suffix_merge` on checked arguments that the kernel serves."""
    import triton

    from sglang_specverify.kernels.gather_suffix_kernel import gather_suffix_merge_kernel

    (rows, depth), q_heads, (_, kv_heads, dim), v_dim = a.suffix_slots.shape, a.q.shape[1], a.k_cache.shape, a.v_cache.shape[2]
    group = q_heads // kv_heads
    (k_scale, k_number), (v_scale, v_number) = map(scale_of, (a.k_scale, a.v_scale))
    arguments = {
        "q": a.q, "k": a.k_cache, "v": a.v_cache, "suffix_slots": a.suffix_slots, "suffix_lens": a.suffix_lens,
        "prefix_out": a.prefix_out, "prefix_lse": a.prefix_lse, "sinks": a.sinks, "k_scale": k_scale, "v_scale": v_scale,
        "kv_heads": kv_heads, "depth": depth, "scale": a.scale * k_number, "softcap": float(a.softcap), "out_scale": v_number,
        "q_row": a.q.stride(0), "q_head": a.q.stride(1), "k_slot": a.k_cache.stride(0), "k_head": a.k_cache.stride(1),
        "v_slot": a.v_cache.stride(0), "v_head": a.v_cache.stride(1), "slots_row": a.suffix_slots.stride(0),
        "slots_column": a.suffix_slots.stride(1), "lens_stride": a.suffix_lens.stride(0),
        "out_row": a.prefix_out.stride(0), "out_head": a.prefix_out.stride(1),
        "lse_row": a.prefix_lse.stride(0), "lse_head": a.prefix_lse.stride(1),
        "sinks_stride": 0 if a.sinks is None else a.sinks.stride(0),
        "k_scale_stride": _head_stride(k_scale), "v_scale_stride": _head_stride(v_scale),
    }  # fmt: skip
    block_g = max(16, triton.next_power_of_2(group))
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (dim, v_dim))
    constants = {
        "GROUP": group, "D": dim, "DV": v_dim, "HAS_SOFTCAP": a.softcap > 0, "HAS_SINKS": a.sinks is not None,
        "HAS_K_SCALE": k_scale is not None, "HAS_V_SCALE": v_scale is not None,
        "BY_FP16": e5m2_by_fp16(arch, a.k_cache, a.v_cache),
        "BLOCK_G": block_g, "BLOCK_N": 16 if depth <= 16 or max(block_d, block_dv) > 128 else 32,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv,
    }  # fmt: skip
    # A warp holds 16 by 128 FP32 accumulators in half its registers; operands of 32 bits take the other half twice over.
    # FP8 is unpacked in registers, which takes as many again.
    warps = max(1, block_g * max(block_d, block_dv) // 2048) * (4 if a.q.element_size() == 4 else 1)
    warps *= 2 if a.k_cache.element_size() == 1 else 1
    return Launch(
        kernel=gather_suffix_merge_kernel,
        grid=(rows * kv_heads, 1, 1),
        arguments=arguments,
        constants=constants,
        # A row has one block of slots or few: there is no loop to pipeline.
        options={"num_warps": min(8, warps), "num_stages": 1},
    )


def _head_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def _check(a: SuffixArguments) -> None:
    """Raises `ArgumentError` for whatever neither the kernel nor the reference serves."""
    rows, q_heads, dim = checks.tensor("q", a.q, ("T", "Hq", "D"), checks.FLOATS, unit_last=True).shape
    cache, device = (*checks.FLOATS, *checks.FP8), a.q.device
    slots, kv_heads = checks.tensor("k_cache", a.k_cache, ("slots", "Hkv", dim), cache, device, unit_last=True).shape[:2]
    v_dim = checks.tensor("v_cache", a.v_cache, (slots, kv_heads, "Dv"), cache, device, unit_last=True).shape[2]
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ArgumentError("q", f"{q_heads} query heads for {kv_heads} KV heads", "a whole number of query heads per KV head")
    if dim == 0:
        raise ArgumentError("q", "head dim 0", "a head dim of at least 1")
    listed = len(checks.tensor("suffix_lens", a.suffix_lens, ("N",), (torch.int32,), device))
    depth = checks.tensor("suffix_slots", a.suffix_slots, (listed, "depth"), (torch.int32,), device).shape[1]
    if listed > rows:
        raise ArgumentError("suffix_lens", f"{listed} rows", f"at most the {rows} rows of q")
    if depth > MAX_DEPTH:
        raise ArgumentError("suffix_slots", f"depth {depth}", f"at most {MAX_DEPTH} columns")
    floats = (*STATES, torch.float64)
    checks.output("prefix_out", checks.tensor("prefix_out", a.prefix_out, (rows, q_heads, v_dim), floats, device, unit_last=True))
    lses = (torch.float32, torch.float64)
    checks.output("prefix_lse", checks.tensor("prefix_lse", a.prefix_lse, (rows, q_heads), lses, device))
    checks.scale("k_scale", a.k_scale, kv_heads, device)
    checks.scale("v_scale", a.v_scale, kv_heads, device)
    checks.number("softcap", a.softcap, 0.0)
    if a.sm_scale is not None:
        checks.number("sm_scale", a.sm_scale)
    if a.sinks is not None:
        checks.tensor("sinks", a.sinks, (q_heads,), checks.SINKS, device)
    if checks.on_cpu(a.q):
        if (r := checks.first_row(a.suffix_lens > depth)) is not None:
            raise ArgumentError(
                "suffix_lens", f"{int(a.suffix_lens[r])} for row {r}", f"at most the depth of suffix_slots, {depth}"
            )
        beyond = _seen(a.suffix_slots, a.suffix_lens) & (a.suffix_slots >= slots)
        if bool(beyond.any()):
            raise ArgumentError(
                "suffix_slots", f"slot {int(a.suffix_slots[beyond][0])}", f"a slot of the cache: 0 to {slots - 1}"
            )


def _unserved(a: SuffixArguments, arch: str) -> ArgumentError | None:
    """Why the kernel cannot serve checked arguments on `arch` that the reference can, or None."""
    if a.q.dtype == torch.float64:
        return ArgumentError("q", "float64", checks.names(STATES))
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        fp8 = cache.dtype in checks.FP8
        if (not fp8 and cache.dtype != a.q.dtype) or (fp8 and arch != "none" and not _fp8_runs(cache.dtype, arch)):
            allowed = f"q's type, {checks.names((a.q.dtype,))}, or an FP8 type that {arch} converts"
            return ArgumentError(name, checks.names((cache.dtype,)), allowed)
        if cache.shape[2] > MAX_HEAD_DIM:
            return ArgumentError(name, f"head dim {cache.shape[2]}", f"at most {MAX_HEAD_DIM} in this kernel")
    factors = {
        "sm_scale": a.scale * scale_of(a.k_scale)[1],
        "softcap": max(a.softcap, 2.0 * LOG2_E / a.softcap) if a.softcap > 0 else 0.0,
        "v_scale": scale_of(a.v_scale)[1],
    }
    for name, factor in factors.items():
        if not math.isfinite(as_fp32(factor)):
            return ArgumentError(name, f"a factor of {factor}", "one that is finite in FP32")
    for name, output, types in (("prefix_out", a.prefix_out, STATES), ("prefix_lse", a.prefix_lse, (torch.float32,))):
        if output.dtype not in types:
            return ArgumentError(name, checks.names((output.dtype,)), checks.names(types))
    return None


def _seen(suffix_slots: torch.Tensor, suffix_lens: torch.Tensor) -> torch.Tensor:
    """bool [N, depth]: which entries are keys."""
    column = torch.arange(suffix_slots.shape[1], device=suffix_slots.device)
    return (column < suffix_lens[:, None]) & (suffix_slots >= 0)


def _run_reference(a: SuffixArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """In FP64, in blocks of rows that bound what is gathered at once."""
    rows, depth = a.suffix_slots.shape
    kv_heads, dim = a.k_cache.shape[1:]
    block = max(1, _MAX_GATHERED // max(1, depth * kv_heads * dim))
    for start in range(0, rows, block):
        at = slice(start, min(start + block, rows))
        seen = _seen(a.suffix_slots[at], a.suffix_lens[at])
        slots = a.suffix_slots[at].long().masked_fill(~seen, 0)
        hidden = ~seen[:, :, None, None]
        # [rows, Hkv, depth, D]; an unseen slot may hold NaN, which a weight of 0 would not keep out.
        k = _gather(a.k_cache, slots).masked_fill(hidden, 0.0).transpose(1, 2)
        v = _gather(a.v_cache, slots).masked_fill(hidden, 0.0).transpose(1, 2)
        grouped = a.q[at].double().reshape(len(slots), kv_heads, -1, dim)
        scores = grouped @ k.transpose(2, 3) * (a.scale * _per_head(a.k_scale, kv_heads, a.q.device))
        if a.softcap > 0:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        suffix = (weights @ v * _per_head(a.v_scale, kv_heads, a.q.device)).flatten(1, 2)
        out, lse = merge_fp64(a.prefix_out[at], a.prefix_lse[at], suffix, lse.flatten(1, 2))
        if a.sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink))
            out = out * torch.sigmoid(lse - a.sinks.double()).masked_fill(lse == -torch.inf, 0.0)[..., None]
        real = a.suffix_lens[at] >= 0
        a.prefix_out[at] = torch.where(real[:, None, None], out.to(a.prefix_out.dtype), a.prefix_out[at])
        a.prefix_lse[at] = torch.where(real[:, None], lse.to(a.prefix_lse.dtype), a.prefix_lse[at])
    return a.prefix_out, a.prefix_lse


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """FP64 [*slots.shape, Hkv, head dim]. FP8 is gathered as bytes: not every device selects rows of an 8-bit float."""
    if len(cache) == 0:
        return torch.zeros(*slots.shape, *cache.shape[1:], dtype=torch.float64, device=cache.device)
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[slots].view(cache.dtype).double()
    return cache[slots].double()


def _per_head(scale: Scale, kv_heads: int, device: torch.device) -> torch.Tensor:
    """FP64 [Hkv, 1, 1]."""
    value = torch.as_tensor(scale, dtype=torch.float64, device=device).reshape(-1)
    return value.expand(kv_heads).view(-1, 1, 1) if len(value) == 1 else value.view(-1, 1, 1)
