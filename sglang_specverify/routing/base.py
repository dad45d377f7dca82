"""Which of SGLang's built-in backends lies underneath, and why not another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import BASES, Flags
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing.facts import ServerFacts
from sglang_specverify.routing.model_rules import model_refusal

#: The name a user gives to `--attention-backend` and its siblings.
PLUGIN = "specverify"

#: The largest head dim of the plugin's Triton kernels.
MAX_HEAD_DIM = 256

_FP8 = ("fp8_e4m3", "fp8_e5m2")
_PLAIN_CACHES = ("auto", "bfloat16", "bf16", "float16", "half", "float32")


@dataclass(frozen=True)
class Rejected:
    """An alternative that was not taken, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ModelFacts:
    """What the choice of a base may know of a model.

    `head_dims` holds each pair (head dim of Q and K, head dim of V) that occurs among its attention
    layers; empty while it is not known, and then no base is refused for it.
    """

    architectures: tuple[str, ...] = ()
    head_dims: frozenset[tuple[int, int]] = frozenset()
    is_mla: bool = False

    @property
    def max_head_dim(self) -> int:
        return max((max(pair) for pair in self.head_dims), default=0)


@dataclass(frozen=True)
class BaseDecision:
    """The base that serves underneath, why, and why none of the others."""

    base: str
    reason: str
    rejected: tuple[Rejected, ...]


def choose_base(
    hardware: Hardware,
    model: ModelFacts,
    server: ServerFacts,
    flags: Flags,
    installed: frozenset[str] = frozenset(),
) -> BaseDecision:
    """The built-in backend that `specverify` resolves to.

    Args:
        hardware: where the server runs.
        model: what is known of the model; `ModelFacts()` in the first resolution step.
        server: what is known of the server; `server.base` is not read.
        flags: `flags.base` overrides the choice, not the refusals; opt-outs that leave a tree to a base that cannot serve it.
        installed: of the optional kernel packages, the importable ones: "aiter".

    Raises:
        SpecverifyError: an override that cannot serve here, or no base that can; both name the possible ones.
    """
    check_server(server)
    refusals = {base: refusal_of(base, hardware, model, server, installed, flags) for base in BASES}
    possible = [base for base in BASES if refusals[base] is None]
    allowed = ", ".join(possible) if possible else "none"
    if flags.base != "auto":
        if refusals[flags.base] is not None:
            raise SpecverifyError(
                f"SGLANG_SPECVERIFY_BASE={flags.base} cannot serve here: {refusals[flags.base]}",
                f"unset it, or choose one that can: {allowed}",
            )
        chosen, reason = flags.base, f"SGLANG_SPECVERIFY_BASE={flags.base}"
    else:
        preferred = [base for base in hardware.facts.preference if refusals[base] is None]
        if not preferred:
            why = "; ".join(f"{base}: {refusals[base]}" for base in hardware.facts.preference)
            raise SpecverifyError(
                f"no base can serve this on {hardware.display}: {why}",
                f"set SGLANG_SPECVERIFY_BASE to one that can ({allowed})"
                if possible
                else f"change what the reasons name, or leave {PLUGIN} out: SGLang then chooses a backend",
            )
        chosen = preferred[0]
        reason = _reason(chosen, hardware, refusals)
    rejected = tuple(
        Rejected(base, refusals[base] or f"possible, not preferred: SGLANG_SPECVERIFY_BASE={base} chooses it")
        for base in BASES
        if base != chosen
    )
    return BaseDecision(chosen, reason, rejected)


def _reason(chosen: str, hardware: Hardware, refusals: dict[str, str | None]) -> str:
    first = hardware.facts.preference[0]
    if chosen != first:
        return f"{first} is preferred on {hardware.display}, but: {refusals[first]}"
    if not hardware.has_gpu:
        return "no GPU: triton as the name and the parent class"
    if hardware.family == "other":
        return f"{hardware.display} has no preference of its own: triton runs everywhere"
    return f"preferred on {hardware.display}"


def refusal_of(
    base: str, hardware: Hardware, model: ModelFacts, server: ServerFacts, installed: frozenset[str], flags: Flags
) -> str | None:
    """Why `base` cannot serve this, or None."""
    if base not in hardware.possible_bases:
        return f"{base} does not run on {hardware.display}" if hardware.has_gpu else f"{base} needs a GPU"
    if base == "aiter" and "aiter" not in installed:
        return "the package aiter is not installed"
    if (barred := model_refusal(base, model.architectures)) is not None:
        return barred
    if server.algorithm == "UNO" and base != "fa3":
        return "SGLang serves UNO with fa3 alone"
    if base == "triton":
        return _triton_refusal(server)
    if base in ("fa3", "fa4"):
        refusal = _flash_refusal(base, hardware, model, server)
        if refusal is not None:
            return refusal
    if base in ("fa3", "fa4") and server.topk > 1 and server.plan_stream:
        return f"SGLang's {base} raises at the first verify of a tree under SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
    if base == "fa4" and server.topk > 1 and server.page_size > 1:
        return f"SGLang refuses fa4 for topk {server.topk} (> 1) with page size {server.page_size} (> 1)"
    if base == "aiter" and server.deterministic:
        return "SGLang refuses aiter with --enable-deterministic-inference"
    if base == "aiter" and server.kv_cache_dtype not in (*_PLAIN_CACHES, *_FP8):
        return f"aiter does not read a {server.kv_cache_dtype} cache"
    if base == "aiter" and server.topk > 1 and server.page_size > 1:
        return f"SGLang refuses aiter for topk {server.topk} (> 1) with page size {server.page_size} (> 1)"
    if base == "aiter" and (server.topk > 1 or server.algorithm == "NGRAM"):
        unserved = _unserved_tree(hardware, model, server, flags)
        if unserved is not None:
            # SGLang builds it with its default of topk 1, refuses nothing, and drops the tree's mask under unified attention.
            return (
                f"SGLang's aiter backend would verify a tree as a chain, and no kernel of the plugin takes this one: {unserved}"
            )
    if server.algorithm == "FROZEN_KV_MTP" and server.topk > 1:
        return f"SGLang's frozen-KV MTP drafts with topk {server.topk} (> 1) do not run on {base}"
    return None


def _unserved_tree(hardware: Hardware, model: ModelFacts, server: ServerFacts, flags: Flags) -> str | None:
    """Why a tree over aiter would not be served by the plugin, as far as resolution can tell; the backends ask again."""
    if flags.disable:
        return "SGLANG_SPECVERIFY_DISABLE=1"
    if not flags.tree:
        return "SGLANG_SPECVERIFY_TREE=0"
    if not flags.draft_decode and server.algorithm != "NGRAM":
        return "SGLANG_SPECVERIFY_DRAFT_DECODE=0"
    if model.is_mla:
        return "MLA"
    if model.max_head_dim > MAX_HEAD_DIM:
        return f"head dim {model.max_head_dim} (> {MAX_HEAD_DIM})"
    if server.dtype in ("float32", "float") or server.kv_cache_dtype == "float32":
        return "float32"
    if hardware.family == "gfx942" and server.kv_cache_dtype in _FP8:
        return f"a {server.kv_cache_dtype} cache on gfx942"
    if server.plan_stream:
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM prepares verify before the draft has filled the tree's mask"
    return None


def _triton_refusal(server: ServerFacts) -> str | None:
    # FP4 caches are SGLang's Triton backend's own; MXFP8 needs FA4's block scales.
    return "only fa4 reads an mxfp8 cache" if server.kv_cache_dtype == "mxfp8" else None


def _flash_refusal(base: str, hardware: Hardware, model: ModelFacts, server: ServerFacts) -> str | None:
    cache = server.kv_cache_dtype
    if server.dtype in ("float32", "float") or cache == "float32":
        return f"{base} has no float32 kernels"
    if base == "fa3":
        if model.is_mla and hardware.arch != "sm_90":
            return f"fa3 serves MLA on SM90 alone, not on {hardware.display}"
        if cache not in (*_PLAIN_CACHES, "fp8_e4m3"):
            return f"fa3 does not read a {cache} cache"
        if model.max_head_dim > 256 and not model.is_mla:
            return f"fa3 has no kernel for head dim {model.max_head_dim} (> 256)"
        return None
    blackwell = hardware.family in ("sm100", "sm103", "sm107")
    if cache not in (*_PLAIN_CACHES, "fp8_e4m3", "mxfp8"):
        return f"fa4 does not read a {cache} cache"
    if cache not in _PLAIN_CACHES and not blackwell:
        return f"fa4 reads an {cache} cache on SM100 and its successors alone, not on {hardware.display}"
    if not model.is_mla:
        for qk, v in sorted(model.head_dims):
            if not _fa4_serves(qk, v, blackwell):
                width = f"{qk}" if qk == v else f"{qk} with {v} for V"
                return f"fa4 on {hardware.display} has no paged kernel for head dim {width}"
    return None


def _fa4_serves(qk: int, v: int, blackwell: bool) -> bool:
    """FA4's paged kernels: SM100's one for head dim 256 asserts that no cache lengths are given."""
    if blackwell:
        return (qk <= 128 and v <= 128) or (qk, v) == (192, 128)
    return qk <= 256 and v <= 256


def check_server(server: ServerFacts) -> None:
    """Refuse at start-up what no route and no base can serve right.

    Raises:
        SpecverifyError: two-batch overlap with a tree; NGRAM trees on pages.
    """
    if server.two_batch_overlap and server.topk > 1:
        # SGLang slices a tree's mask by FULL_MASK offsets when it splits a batch in two.
        raise SpecverifyError(
            f"--enable-two-batch-overlap with topk {server.topk} (> 1) is not served: the batch's tree mask cannot be split",
            "leave --enable-two-batch-overlap out, or use --speculative-eagle-topk 1",
        )
    if server.algorithm == "NGRAM" and server.topk > 1 and server.page_size > 1:
        raise SpecverifyError(
            f"NGRAM with breadth {server.topk} (> 1) needs page size 1; page size {server.page_size} came",
            "use --page-size 1, or --speculative-ngram-max-bfs-breadth 1",
        )


def check_request(
    attention: str | None,
    prefill: str | None,
    decode: str | None,
    draft: str | None,
    *,
    mode: str = "prefill",
    speculation: bool = False,
) -> bool:
    """Whether the plugin is asked for at all; refuses a request that verify would not reach.

    Args:
        attention, prefill, decode, draft: the four backend names as the user gave them, None where not.
        mode: `--speculative-attention-mode`: whose backend verifies, the "prefill" or the "decode" one.
        speculation: whether a speculative algorithm is on.

    Raises:
        SpecverifyError: the plugin serves a half of the target that verify does not run on.
    """
    target = (attention, prefill, decode)
    if speculation and PLUGIN in target:
        verifies = (prefill if mode == "prefill" else decode) or attention
        if verifies != PLUGIN:
            other = "decode" if mode == "prefill" else "prefill"
            raise SpecverifyError(
                f"verify would not reach the plugin: with --speculative-attention-mode {mode} the {mode} backend verifies, "
                f"and that is {verifies or 'the one SGLang picks'}",
                f"use --attention-backend {PLUGIN}, or --{mode}-attention-backend {PLUGIN}, "
                f"or --speculative-attention-mode {other}",
            )
    return PLUGIN in (*target, draft)
