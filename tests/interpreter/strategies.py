"""Random calls for the property-based tests, in the types that the kernels serve, and small enough for the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from tests.kernels.cases import Config, build_draft, build_verify, generator

HALF = [torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LSE_LAYOUTS = ["rows", "heads", "column"]

#: Prefix lengths around the blocks of keys and pages that the kernels read, 0 first because shrinking goes there.
LENGTHS = [0, 1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 130]

#: Caches of an FP8 type hold numbers of about 1, so their scales stay near 1.
SCALES = [1.0, 0.5, "scalar", "heads"]


@st.composite
def configs(draw: Any, kinds: tuple[str, ...] = ("chain", "qlen_only", "full_mask"), least_prefix: int = 0) -> Config:
    kind = draw(st.sampled_from(kinds))
    bs = draw(st.integers(1, 3))
    widths: Any = draw(st.sampled_from([1, 2, 4, 5, 8, 17]))
    if kind in ("chain", "full_mask") and draw(st.booleans()):
        widths = tuple(draw(st.lists(st.integers(0, 9), min_size=bs, max_size=bs)))
    q_dtype = draw(st.sampled_from(HALF))
    kv_heads = draw(st.sampled_from([1, 2]))
    head_dim = draw(st.sampled_from([16, 24, 64, 80]))
    lengths = st.sampled_from(LENGTHS).map(lambda n: n + least_prefix)
    return Config(
        seed=draw(st.integers(0, 10**6)),
        prefix_lens=tuple(draw(st.lists(lengths, min_size=bs, max_size=bs))),
        widths=widths,
        kind=kind,
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([head_dim, head_dim, 16, 40])),
        page_size=draw(st.sampled_from([1, 1, 4, 16, 64, 128])),
        window=draw(st.sampled_from([-1, -1, 0, 1, 5, 16, 40, 1000])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sinks=draw(st.booleans()),
        q_dtype=q_dtype,
        cache_dtype=draw(st.sampled_from([q_dtype, q_dtype, *FP8])),
        k_scale=draw(st.sampled_from(SCALES)),
        v_scale=draw(st.sampled_from(SCALES)),
        sm_scale=draw(st.sampled_from([None, 0.05, 1.0])),
        strided=draw(st.booleans()),
        slot_map=draw(st.booleans()),
        mask_dtype=draw(st.sampled_from([torch.bool, torch.uint8])),
        flat_mask=draw(st.booleans()),
        pad_rows=draw(st.integers(0, 3)),
    )


@st.composite
def outputs(draw: Any) -> dict[str, Any]:
    """Where a call writes: options of `calls.check`."""
    return {
        "out_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
        "strided": draw(st.booleans()),
        "lse_layout": draw(st.sampled_from(LSE_LAYOUTS)),
    }


def verify_call(c: Config) -> dict[str, Any]:
    """Arguments of `verify_attention` for `c`. Ragged ones also say the most rows of a request, as a GPU launch needs it."""
    a = build_verify(c)
    if c.ragged:
        a["num_draft_tokens"] = max([1, *c.row_counts]) + c.seed % 2
    if c.seed % 3 == 0:
        # More bits set than a tree has, the diagonal aside: a mask is taken as it is.
        a |= _any_mask(c, a)
    return a


def _any_mask(c: Config, a: dict[str, Any]) -> dict[str, Any]:
    if c.kind != "qlen_only":
        return {}
    bits = torch.rand(a["mask"].shape, generator=generator(c.seed)) < 0.4
    return {"mask": bits if c.mask_dtype == torch.bool else bits.to(torch.uint8) * 0x80}


def draft_call(c: Config, topk: int, step: int, steps: int) -> dict[str, Any]:
    """Arguments of `draft_decode_attention`; odd seeds have int32 slots in a view with a stride in its last dimension."""
    a = build_draft(replace(c, kind="chain"), topk=topk, step=step, steps=steps)
    if c.seed % 2:
        wide = torch.full((*a["draft_slots"].shape[:2], 2 * steps), 1 << 30, dtype=torch.int32)
        wide[:, :, ::2] = a["draft_slots"].int()
        a["draft_slots"] = wide[:, :, ::2]
    return a
