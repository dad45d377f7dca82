"""The arms of a comparison: this project's variants. `stock.py` has what SGLang runs today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.inputs import Inputs
from benchmarks.points import DRAFT_STEP, TREE_DEPTH
from sglang_specverify import kernels
from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments, check_draft_decode, check_verify
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.variants import DIVIDING

#: Runs one layer and returns its output [T, Hq, D]; what a step shares between layers was prepared before.
Call = Callable[[int], torch.Tensor]


class Unavailable(Exception):
    """Why an arm does not serve a point."""


@dataclass(frozen=True)
class Arm:
    """One way to compute a point.

    Attributes:
        group: "ours"; "stock", what SGLang 0.5.23 runs; "yardstick", a part of the work or what no backend runs.
        build: prepares what a step shares and returns the call. Raises where the arm cannot serve.
        kinds: the kinds of point it is for.
        prefix_only: it attends to the prefix alone.
        fp8_products: with an FP8 cache it also rounds Q and P to FP8.
    """

    name: str
    group: Literal["ours", "stock", "yardstick"]
    build: Callable[[Inputs], Call]
    kinds: tuple[str, ...] = ("tree", "chain")
    prefix_only: bool = False
    fp8_products: bool = False


def common(inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments that all operations of this project share."""
    return {
        "page_size": inputs.point.page_size,
        "window": inputs.point.window,
        "sinks": inputs.sinks,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
    }


def verify_options(inputs: Inputs) -> dict[str, Any]:
    """The mask and what goes with it: none for a chain."""
    options = common(inputs) | {"num_draft_tokens": inputs.point.width}
    if inputs.point.kind == "tree":
        options |= {"mask": inputs.mask, "positions": inputs.positions}
    return options


def variant(name: str) -> Callable[[Inputs], Call]:
    """`verify_attention` or `draft_decode_attention` by one variant; its plan and workspace made before."""

    def build(inputs: Inputs) -> Call:
        out = torch.empty_like(inputs.q)
        options: dict[str, Any] = {"variant": name, "out": out, "plan": make_plan(inputs, name)}
        if name in DIVIDING:
            plan = options["plan"]
            size = max(16, plan.shape.workspace_bytes(plan.batch))
            options["workspace"] = torch.empty(size, dtype=torch.uint8, device=out.device)
        shared: tuple[torch.Tensor, ...] = (inputs.table, inputs.row_ids, inputs.prefix_lens)
        if inputs.draft_slots is not None:
            options |= common(inputs) | {"topk": inputs.point.width, "step": DRAFT_STEP}
            shared = (*shared, inputs.draft_slots)
            return lambda layer: kernels.draft_decode_attention(inputs.q, inputs.k[layer], inputs.v[layer], *shared, **options)
        options |= verify_options(inputs)
        return lambda layer: kernels.verify_attention(inputs.q, inputs.k[layer], inputs.v[layer], *shared, **options)

    return build


def arguments_of(inputs: Inputs) -> tuple[VerifyArguments | DraftArguments, Problem]:
    """The arguments of the point's first layer, checked."""
    shared: dict[str, Any] = common(inputs) | {
        "q": inputs.q, "k_cache": inputs.k[0], "v_cache": inputs.v[0], "table": inputs.table, "row_ids": inputs.row_ids,
        "prefix_lens": inputs.prefix_lens, "slot_map": None, "softcap": 0.0, "sm_scale": None, "deterministic": False,
        "out": None, "lse": None, "return_lse": False,
    }  # fmt: skip
    if inputs.draft_slots is not None:
        draft = DraftArguments(**shared, draft_slots=inputs.draft_slots, topk=inputs.point.width, step=DRAFT_STEP)
        return draft, check_draft_decode(draft)
    masked = {"mask": None, "positions": None} | verify_options(inputs)
    verify = VerifyArguments(**shared | masked, q_offsets=None, mask_layout="qlen_only", mask_offsets=None)
    return verify, check_verify(verify)


def selected(inputs: Inputs) -> tuple[str, str]:
    """The variant that `variant="auto"` takes for the point's calls, and the reason."""
    from sglang_specverify.kernels import run

    choice = run.choose(*arguments_of(inputs), "auto")
    return choice.name, choice.reason


def make_plan(inputs: Inputs, name: str, config: LaunchConfig | None = None) -> Any:
    """The step's metadata for the point's calls by a variant: packed masks, and how prefixes are divided, if they are.

    Args:
        config: how the kernel is launched; as the tables say where None.
    """
    point = inputs.point
    masked = {"mask": inputs.mask} if point.kind == "tree" else {}
    return kernels.plan_verify_attention(
        inputs.prefix_lens, inputs.row_ids, num_draft_tokens=point.width, q_heads=point.q_heads, kv_heads=point.kv_heads,
        head_dim=point.head_dim, dtype=inputs.q.dtype, cache_dtype=inputs.k.dtype, page_size=point.page_size,
        window=point.window, branches=point.kind == "draft", divide=name in DIVIDING,
        kernel="specialized" if name == "specialized_split" else "fused", config=config, **masked,
    )  # fmt: skip


def tree_tile(inputs: Inputs) -> Call:
    """FlashAttention's prefix pass, and the drafts as one tile under the mask, merged in place."""
    from benchmarks.stock import prefix_pass

    prefix = prefix_pass(inputs)
    options = verify_options(inputs)
    if inputs.point.kind == "tree":
        options["plan"] = make_plan(inputs, "fused")
    shared = (inputs.table, inputs.row_ids, inputs.prefix_lens)

    def call(layer: int) -> torch.Tensor:
        out, lse = prefix(layer)
        kernels.tree_suffix_merge(inputs.q, inputs.k[layer], inputs.v[layer], *shared, out, lse.T, **options)
        return out

    return call


def visible_slots(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's suffix table, sliced to the depth of the trees, and its lengths."""
    if inputs.mask is None:
        raise Unavailable("a draft decode has no mask to compact")
    rows = inputs.point.batch * inputs.point.width
    slots = torch.empty(rows, inputs.point.width, dtype=torch.int32, device=inputs.q.device)
    lens = torch.empty(rows, dtype=torch.int32, device=inputs.q.device)
    kernels.compact_visible_slots(
        inputs.mask, inputs.table, inputs.row_ids, inputs.prefix_lens, num_draft_tokens=inputs.point.width,
        mask_layout="qlen_only", page_size=inputs.point.page_size, out_slots=slots, out_lens=lens,
    )  # fmt: skip
    depth = inputs.point.width if inputs.point.kind == "chain" else min(TREE_DEPTH, inputs.point.width)
    return slots[:, :depth], lens


def gather(inputs: Inputs) -> Call:
    """FlashAttention's prefix pass, and each row's visible drafts gathered, merged in place."""
    from benchmarks.stock import prefix_pass

    if inputs.point.window >= 0:
        raise Unavailable("the gathered suffix knows no window")
    prefix = prefix_pass(inputs)
    slots, lens = visible_slots(inputs)
    options = {name: common(inputs)[name] for name in ("k_scale", "v_scale", "sinks")}

    def call(layer: int) -> torch.Tensor:
        out, lse = prefix(layer)
        kernels.gather_suffix_merge(inputs.q, inputs.k[layer], inputs.v[layer], slots, lens, out, lse.T, **options)
        return out

    return call


OURS = (
    Arm("fused", "ours", variant("fused"), ("tree", "chain", "draft")),
    Arm("fused_split", "ours", variant("fused_split"), ("tree", "chain", "draft")),
    Arm("specialized", "ours", variant("specialized")),
    Arm("specialized_split", "ours", variant("specialized_split")),
    Arm("fa3+tree_suffix", "ours", tree_tile, fp8_products=True),
    Arm("fa3+gather_suffix", "ours", gather, fp8_products=True),
)
