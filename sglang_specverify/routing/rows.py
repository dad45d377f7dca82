"""The kernels of the plugin as rows of a table: what each one knows, and why it refuses the rest. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_specverify.flags import Flags
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing.base import MAX_HEAD_DIM
from sglang_specverify.routing.facts import CallFacts, LayerFacts, LayerKind, Mode, ServerFacts
from sglang_specverify.routing.tree import (
    MAX_GATHERED,
    MAX_GATHERED_DIM,
    MAX_LISTED,
    SPECIALIZED_ARCH,
    SPECIALIZED_HEAD_DIMS,
    SPECIALIZED_ROWS,
    TreeFacts,
    depth,
    refuse_tile,
)

#: Modes that the plugin is for. The others are stock on a GPU by design; without one the reference takes all.
CLAIMED = frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND})

#: FlashAttention underneath.
FLASH = ("fa3", "fa4")

#: As `--kv-cache-dtype` spells them, and as torch does once resolved.
FP8_CACHES = frozenset({"fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2"})
_PLAIN_CACHES = frozenset({"auto", "float32", "bfloat16", "bf16", "float16", "half"})

#: Their lengths and masks are read in `backends/steps.py`. The drafts of others (frozen-KV MTP, DFLASH, DSPARK, UNO)
#: use the same modes with other lengths.
_KNOWN_ALGORITHMS = frozenset({None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"})

_LONG_NAMES = {"half": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """Everything a route may look at."""

    hardware: Hardware
    server: ServerFacts
    layer: LayerFacts
    mode: Mode
    flags: Flags
    call: CallFacts

    @property
    def is_tree(self) -> bool:
        """Whether the drafts are a tree: NGRAM's are at breadth 1 too, where a short match is filled up with siblings."""
        return self.server.topk > 1 or self.server.algorithm == "NGRAM"

    @property
    def has_sinks(self) -> bool:
        return self.layer.has_sinks or "sinks" in self.call.arguments


@dataclass(frozen=True)
class Route:
    """One kernel of the plugin: what it knows, and what it refuses beyond that.

    Attributes:
        name: the kernel's name in logs and reports.
        modes, layers: what it serves.
        dtypes: dtypes of Q.
        kv_caches: dtypes of the KV cache, under either of their names.
        algorithms: speculative algorithms whose batches it knows; None is no speculation.
        arguments: forward arguments beyond Q, K and V that it knows the meaning of.
        cuda_graphs: whether it can be recorded into one.
        refuse: the reason it does not take a case that passed all of the above, or None.
        serves: the reason it takes a case.
    """

    name: str
    modes: frozenset[Mode]
    layers: frozenset[LayerKind]
    dtypes: frozenset[str]
    kv_caches: frozenset[str]
    algorithms: frozenset[str | None]
    arguments: frozenset[str]
    cuda_graphs: bool
    refuse: Callable[[Case], str | None]
    serves: Callable[[Case], str] = lambda case: f"{case.hardware.display}: it knows everything in this call"


def _refuse_reference(case: Case) -> str | None:
    if case.hardware.has_gpu:
        return f"the FP64 reference serves without a GPU, and this is {case.hardware.display}"
    if case.flags.kernels == "triton":
        return "SGLANG_SPECVERIFY_KERNELS=triton asks for Triton kernels in its place"
    return None


def _refuse_triton(case: Case) -> str | None:
    """What no Triton kernel of the plugin serves."""
    machine, server, layer = case.hardware, case.server, case.layer
    if not machine.has_gpu and case.flags.kernels != "triton":
        return "without a GPU Triton kernels run in the interpreter alone: SGLANG_SPECVERIFY_KERNELS=triton asks for that"
    if machine.family == "other":
        return f"it has no launch table for {machine.display}"
    if max(layer.head_dim, layer.v_head_dim) > MAX_HEAD_DIM:
        return f"head dim {max(layer.head_dim, layer.v_head_dim)} is over its {MAX_HEAD_DIM}"
    if server.dtype == "float32" and machine.has_gpu:
        return "float32 on a GPU is not tested"
    cache = _LONG_NAMES.get(server.kv_cache_dtype, server.kv_cache_dtype)
    dtype = _LONG_NAMES.get(server.dtype, server.dtype)
    if cache in FP8_CACHES:
        if machine.family == "gfx942":
            return f"a {cache} cache on gfx942, whose FP8 is another, is not tested"
    elif "auto" not in (cache, dtype) and cache != dtype:
        return f"a {cache} cache beside {dtype}: it reads Q's type or FP8"
    return None


def _refuse_fused(case: Case) -> str | None:
    if reason := _refuse_triton(case):
        return reason
    chain_verify = case.mode is Mode.TARGET_VERIFY and not case.is_tree
    if case.server.base == "triton" and chain_verify and not case.server.splitkv_verify:
        return "SGLANG_ENABLE_SPLITKV_VERIFY=0 asks for chains that are verified without a division of the prefix"
    return None


def _refuse_prefix_pass(case: Case) -> str | None:
    """What neither of the kernels that follow FlashAttention's prefix pass serves."""
    server = case.server
    if server.base not in FLASH:
        return f"its prefix pass is FlashAttention's, and {server.base} lies underneath"
    if not case.is_tree:
        return "it is for trees, and this is a chain"
    if reason := _refuse_triton(case):
        return reason
    if server.base == "fa4" and server.kv_cache_dtype in FP8_CACHES:
        return "FA4's prefix pass over an FP8 cache is not tested"
    return None


def _refuse_own_drafts(case: Case) -> str | None:
    """What neither of the kernels that attend each row's own drafts serves."""
    width = case.server.num_draft_tokens
    if reason := _refuse_prefix_pass(case):
        return reason
    return f"{width} drafts of a request are over the {MAX_LISTED} that are listed for it" if width > MAX_LISTED else None


def _refuse_gather(case: Case) -> str | None:
    server, layer = case.server, case.layer
    if reason := _refuse_own_drafts(case):
        return reason
    if case.flags.tree_kernel != "gather":
        return "it serves where SGLANG_SPECVERIFY_TREE_KERNEL=gather asks for it"
    seen = depth(server.algorithm, server.num_steps, server.num_draft_tokens)
    if seen > MAX_GATHERED:
        return f"a row may see {seen} drafts, and it gathers {MAX_GATHERED} at most"
    if max(layer.head_dim, layer.v_head_dim) > MAX_GATHERED_DIM:
        return f"head dim {max(layer.head_dim, layer.v_head_dim)} is over its {MAX_GATHERED_DIM}"
    return None


def _refuse_flash(case: Case) -> str | None:
    if reason := _refuse_own_drafts(case):
        return reason
    if case.flags.tree_kernel == "flash" or (case.flags.tree_kernel == "gather" and _refuse_gather(case)):
        return None
    return "it serves where SGLANG_SPECVERIFY_TREE_KERNEL=flash asks for it, or gather does and prefix_gather does not fit"


def _refuse_tile(case: Case) -> str | None:
    asked = case.flags.tree_kernel
    if reason := _refuse_prefix_pass(case):
        return reason
    if asked == "fused":
        return "SGLANG_SPECVERIFY_TREE_KERNEL=fused asks for the one kernel"
    if asked == "tile":
        return None
    return refuse_tile(_tree_facts(case))


def _tree_facts(case: Case) -> TreeFacts:
    server, layer = case.server, case.layer
    width, specialized = server.num_draft_tokens, _refuse_specialized(case) is None
    return TreeFacts(case.hardware.arch, width, layer.group, server.context, server.deterministic, specialized=specialized)


def _refuse_specialized(case: Case) -> str | None:
    """Why the kernel with specialised warps does not verify a layer. Its own check, at each call, knows strides too."""
    server, layer = case.server, case.layer
    if reason := _refuse_fused(case):
        return reason
    if case.hardware.arch != SPECIALIZED_ARCH:
        return f"it is written for {SPECIALIZED_ARCH}, and this is {case.hardware.display}"
    if layer.head_dim != layer.v_head_dim or layer.head_dim not in SPECIALIZED_HEAD_DIMS:
        return f"head dims {layer.head_dim} and {layer.v_head_dim}, and it takes 64 or 128 for both"
    if server.kv_cache_dtype in FP8_CACHES:
        return "it reads no FP8 cache"
    if layer.softcap:
        return "it does not cap scores"
    if server.deterministic:
        return "deterministic inference: fused divides a prefix by its own length only"
    rows = server.num_draft_tokens * layer.q_heads // max(1, layer.kv_heads)
    if rows <= SPECIALIZED_ROWS:
        return f"{rows} query rows for each KV head fill no tile of it: fused is as fast"
    return None


def _gather_serves(case: Case) -> str:
    return "SGLANG_SPECVERIFY_TREE_KERNEL=gather"


def _flash_serves(case: Case) -> str:
    if case.flags.tree_kernel == "flash":
        return "SGLANG_SPECVERIFY_TREE_KERNEL=flash"
    return f"SGLANG_SPECVERIFY_TREE_KERNEL=gather, and for prefix_gather {_refuse_gather(case)}"


def _tile_serves(case: Case) -> str:
    if case.flags.tree_kernel == "tile":
        return "SGLANG_SPECVERIFY_TREE_KERNEL=tile"
    return "a tree on a long context: FlashAttention's prefix pass, and the drafts as one tile under the mask"


def _fused_serves(case: Case) -> str:
    if case.mode is Mode.DRAFT_DECODE:
        return "the branches of a draft step over one reading of the prefix"
    return _one_kernel(case)


def _one_kernel(case: Case) -> str:
    drafts = "a tree" if case.is_tree and case.mode is Mode.TARGET_VERIFY else "a chain"
    return f"{drafts} and its prefix in one kernel"


def _after_prefix_pass(
    name: str,
    refuse: Callable[[Case], str | None],
    serves: Callable[[Case], str],
) -> Route:
    return Route(
        name=name,
        modes=frozenset({Mode.TARGET_VERIFY}),
        # A window starts at another key for each row of a tree, which FlashAttention has no argument for.
        layers=frozenset({LayerKind.FULL}),
        dtypes=frozenset({"bfloat16", "float16", "half", "auto", "float32"}),
        kv_caches=_PLAIN_CACHES | {"fp8_e4m3", "float8_e4m3fn"},
        algorithms=_KNOWN_ALGORITHMS,
        arguments=frozenset({"sinks"}),
        cuda_graphs=True,
        refuse=refuse,
        serves=serves,
    )


ROUTES: tuple[Route, ...] = (
    _after_prefix_pass("prefix_gather", _refuse_gather, _gather_serves),
    _after_prefix_pass("prefix_flash", _refuse_flash, _flash_serves),
    _after_prefix_pass("prefix_tile", _refuse_tile, _tile_serves),
    Route(
        name="specialized",
        modes=frozenset({Mode.TARGET_VERIFY}),
        layers=frozenset({LayerKind.FULL}),
        dtypes=frozenset({"bfloat16", "float16", "half", "auto"}),
        kv_caches=_PLAIN_CACHES,
        algorithms=_KNOWN_ALGORITHMS,
        arguments=frozenset({"sinks"}),
        cuda_graphs=True,
        refuse=_refuse_specialized,
        serves=lambda case: f"{_one_kernel(case)}, on warps that copy and warps that compute",
    ),
    Route(
        name="fused",
        modes=CLAIMED,
        layers=frozenset({LayerKind.FULL, LayerKind.WINDOW}),
        dtypes=frozenset({"bfloat16", "float16", "half", "auto", "float32"}),
        kv_caches=_PLAIN_CACHES | FP8_CACHES,
        algorithms=_KNOWN_ALGORITHMS,
        arguments=frozenset({"sinks"}),
        cuda_graphs=True,
        refuse=_refuse_fused,
        serves=_fused_serves,
    ),
    Route(
        name="reference",
        modes=frozenset(Mode),
        layers=frozenset({LayerKind.FULL, LayerKind.WINDOW}),
        dtypes=frozenset({"float32", "bfloat16", "float16", "half", "auto"}),
        kv_caches=_PLAIN_CACHES | FP8_CACHES,
        algorithms=_KNOWN_ALGORITHMS,
        arguments=frozenset({"sinks"}),
        cuda_graphs=False,
        refuse=_refuse_reference,
        serves=lambda case: f"{case.hardware.display}: reference knows everything in this call",
    ),
)
