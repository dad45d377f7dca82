"""Which kernel serves one attention call, and why not another. Pure; reads no tensor.

Default deny: a route takes a call only if it knows everything in it. Everything else goes to the
base, that is to SGLang's own code, with the reason. A new kernel is a new row of `ROUTES` in `rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing import chain
from sglang_specverify.routing.base import Rejected
from sglang_specverify.routing.facts import CallFacts, LayerFacts, LayerKind, Mode, ServerFacts
from sglang_specverify.routing.rows import CLAIMED, FLASH, FP8_CACHES, ROUTES, Case, Route

__all__ = ["CLAIMED", "ROUTES", "STOCK", "Case", "Decision", "Route", "decide", "require"]

#: The name of "SGLang's own code serves", where a kernel's name would stand.
STOCK = "stock"


@dataclass(frozen=True)
class Decision:
    """Who serves a case.

    Attributes:
        kernel: a route's name, or "stock".
        reason: why this one.
        rejected: every alternative, each with its reason.
        claimed: whether the plugin is meant to serve the case: only then may `require` refuse.
    """

    kernel: str
    reason: str
    rejected: tuple[Rejected, ...]
    claimed: bool

    @property
    def served(self) -> bool:
        """Whether a kernel of the plugin serves."""
        return self.kernel != STOCK


def decide(
    hardware: Hardware,
    server: ServerFacts,
    layer: LayerFacts,
    mode: Mode,
    flags: Flags,
    call: CallFacts = CallFacts(),  # noqa: B008 - frozen and empty
) -> Decision:
    """The kernel for one layer in one mode: the first route that refuses nothing, else the base."""
    case = Case(hardware, server, layer, mode, flags, call)
    left = _opt_out(case) or _by_design(case)
    # A layer of another kind of state never reaches the attention backend, so it cannot be missed there.
    claimed = left is None and layer.kind is not LayerKind.LINEAR
    stock = Rejected(STOCK, f"SGLang's {server.base} could serve, but a route of the plugin comes first")
    rejected: list[Rejected] = []
    for route in ROUTES:
        refusal = left or _refusal(route, case)
        if refusal is None:
            later = (Rejected(other.name, _refusal(other, case) or f"{route.name} comes first") for other in _after(route))
            return Decision(route.name, route.serves(case), (*rejected, *later, stock), claimed)
        rejected.append(Rejected(route.name, refusal))
    return Decision(STOCK, _stock_reason(case, left, rejected), tuple(rejected), claimed)


def require(decision: Decision, flags: Flags) -> None:
    """Refuse a fallback where the user wants none.

    Raises:
        SpecverifyError: `SGLANG_SPECVERIFY_STRICT=1` and a case that the plugin claims is not served. What is
            stock by design (decode and prefill on a GPU) and what the user opted out of is no such case.
    """
    if flags.strict and decision.claimed and not decision.served:
        raise SpecverifyError(
            f"SGLANG_SPECVERIFY_STRICT=1 and not served by the plugin: {decision.reason}",
            "change what the reason names, or unset SGLANG_SPECVERIFY_STRICT to let SGLang serve it",
        )


def _after(route: Route) -> tuple[Route, ...]:
    return ROUTES[ROUTES.index(route) + 1 :]


def _opt_out(case: Case) -> str | None:
    """The flag by which the user took this case from the plugin, or None."""
    if case.flags.disable:
        return "SGLANG_SPECVERIFY_DISABLE=1"
    if case.mode is Mode.TARGET_VERIFY and case.is_tree and not case.flags.tree:
        return "SGLANG_SPECVERIFY_TREE=0"
    if case.mode is Mode.TARGET_VERIFY and not case.is_tree and case.server.base == "aiter" and not case.flags.aiter_verify:
        return "SGLANG_SPECVERIFY_AITER_VERIFY=0"
    if case.mode is Mode.TARGET_VERIFY and not case.is_tree and not case.flags.chain:
        return "SGLANG_SPECVERIFY_CHAIN=0"
    if case.mode is Mode.DRAFT_EXTEND and not case.flags.chain:
        return "SGLANG_SPECVERIFY_CHAIN=0"
    if case.mode is Mode.DRAFT_DECODE and not case.flags.draft_decode:
        return "SGLANG_SPECVERIFY_DRAFT_DECODE=0"
    return None


def _by_design(case: Case) -> str | None:
    """Why the plugin leaves this case to SGLang's own code unasked, or None."""
    kernels = case.hardware.has_gpu or case.flags.kernels == "triton"
    if kernels and case.mode not in CLAIMED:
        return f"{case.mode.value} is SGLang's own on a GPU" if case.hardware.has_gpu else f"{case.mode.value} is SGLang's own"
    verifies_chain = case.mode is Mode.TARGET_VERIFY and not case.is_tree
    if case.hardware.family == "gfx942" and (verifies_chain or case.mode is Mode.DRAFT_EXTEND) and not case.flags.gfx942:
        return "gfx942 keeps SGLang's kernels for chains and draft extend (SGLANG_SPECVERIFY_GFX942=1 admits the plugin's)"
    if case.flags.chain_kernel == "fused" or case.server.base not in (*FLASH, "aiter"):
        return None
    of_chains = case.mode is Mode.DRAFT_EXTEND or (not case.is_tree and case.mode in CLAIMED)
    if of_chains and case.flags.chain_kernel == "base":
        return "SGLANG_SPECVERIFY_CHAIN_KERNEL=base"
    if case.server.base == "aiter":
        return _aiter_keeps(case)
    return _flash_keeps(case) if of_chains else None


def _flash_keeps(case: Case) -> str | None:
    """Why a case of chains stays with FlashAttention, or None where it does not."""
    takes = "(SGLANG_SPECVERIFY_CHAIN_KERNEL=fused takes them)"
    if case.mode is not Mode.TARGET_VERIFY:
        return f"FlashAttention keeps the drafts of chains and draft extend {takes}"
    server, layer = case.server, case.layer
    plain = layer.kind is LayerKind.FULL and layer.window < 0 and layer.softcap == 0
    plain = plain and not case.has_sinks and server.kv_cache_dtype not in FP8_CACHES
    facts = chain.ChainFacts(
        arch=case.hardware.arch,
        rows=server.num_draft_tokens * layer.group,
        kv_heads=layer.kv_heads,
        head_dims=(layer.head_dim, layer.v_head_dim),
        requests=server.requests,
        plain=plain,
        deterministic=server.deterministic,
    )
    if why := chain.keeps(facts):
        return f"FlashAttention keeps chains {takes}: {why}"
    # Nobody asked for it, so what no route can take is no miss.
    refusals = {route.name: _refusal(route, case) for route in ROUTES}
    return None if None in refusals.values() else f"FlashAttention keeps chains: {refusals['fused']}"


def _aiter_keeps(case: Case) -> str | None:
    """Why a case of chains stays with aiter's kernels, or None where it does not."""
    server = case.server
    if case.mode is Mode.TARGET_VERIFY and not case.is_tree and server.unified_verify:
        return "aiter's unified attention keeps chains (SGLANG_SPECVERIFY_CHAIN_KERNEL=fused takes them)"
    if case.mode is Mode.DRAFT_EXTEND:
        return "aiter keeps draft extend (SGLANG_SPECVERIFY_CHAIN_KERNEL=fused takes it)"
    # Its paged attention takes neither a window nor sinks.
    if case.mode is Mode.DRAFT_DECODE and not case.is_tree and (server.unified or (case.layer.window < 0 and not case.has_sinks)):
        return "aiter keeps the steps of a chain (SGLANG_SPECVERIFY_CHAIN_KERNEL=fused takes them)"
    return None


def _refusal(route: Route, case: Case) -> str | None:
    """Why `route` does not take `case`, or None. What nobody knows comes before what this route does not."""
    server, layer = case.server, case.layer
    if layer.kind not in route.layers:
        return f"{route.name} does not know layers of {layer.kind.value}"
    if layer.unknown:
        return f"{route.name} does not know what the layer sets: {_names(layer.unknown)}"
    if server.unknown:
        return f"{route.name} does not know a state in force: {_names(server.unknown)}"
    if server.two_batch_overlap:
        return f"{route.name} does not know two-batch overlap"
    if unknown := case.call.arguments - route.arguments:
        return f"{route.name} does not know what the call passes: {_names(unknown)}"
    if case.mode not in route.modes:
        return f"{route.name} does not serve {case.mode.value}"
    if server.algorithm not in route.algorithms:
        return f"{route.name} does not know the batches of {server.algorithm}"
    if server.kv_cache_dtype not in route.kv_caches:
        return f"{route.name} does not read a {server.kv_cache_dtype} cache"
    if server.dtype not in route.dtypes:
        return f"{route.name} does not compute in {server.dtype}"
    if refusal := route.refuse(case):
        return refusal
    if layer.kv_heads < 1 or layer.q_heads % layer.kv_heads:
        return f"{route.name} needs query heads in a whole ratio to KV heads: {layer.q_heads} to {layer.kv_heads} came"
    if server.cuda_graph and not route.cuda_graphs:
        return f"{route.name} cannot be recorded into a CUDA graph: start with --disable-cuda-graph"
    return None


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _stock_reason(case: Case, left: str | None, rejected: list[Rejected]) -> str:
    if case.layer.kind is LayerKind.LINEAR:
        return f"{case.layer.kind.value}: SGLang's own backend for it serves, no attention kernel runs"
    serves = f"SGLang's {case.server.base} serves"
    if left is not None:
        return f"{left}: {serves}"
    # Of the rows, the one that the user would expect: each of the others refuses the machine or the kind of draft.
    wanted = "fused" if case.hardware.has_gpu or case.flags.kernels == "triton" else "reference"
    reason = next((row.reason for row in rejected if row.name == wanted), rejected[0].reason)
    return f"{reason}: {serves}"
