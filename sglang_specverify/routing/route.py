"""Which kernel serves one attention call, and why not another. Pure; reads no tensor.

Default deny: a route takes a call only if it knows everything in it. Everything else goes to the
base, that is to SGLang's own code, with the reason. A new kernel is a new row of `ROUTES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing.base import Rejected
from sglang_specverify.routing.facts import CallFacts, LayerFacts, LayerKind, Mode, ServerFacts

#: The name of "SGLang's own code serves", where a kernel's name would stand.
STOCK = "stock"

#: Modes that the plugin is for. The others are stock on a GPU by design; without one the reference takes all.
CLAIMED = frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND})

#: As `--kv-cache-dtype` spells them, and as torch does once resolved.
_KV_CACHES = frozenset(
    {"auto", "float32", "bfloat16", "bf16", "float16", "half", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2"}
)

#: Their lengths and masks are read in `backends/steps.py`. The drafts of others (frozen-KV MTP, DFLASH, DSPARK, UNO)
#: use the same modes with other lengths.
_KNOWN_ALGORITHMS = frozenset({None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"})


@dataclass(frozen=True)
class Case:
    """Everything a route may look at."""

    hardware: Hardware
    server: ServerFacts
    layer: LayerFacts
    mode: Mode
    flags: Flags
    call: CallFacts


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


def _refuse_reference(case: Case) -> str | None:
    if case.hardware.has_gpu:
        return f"the FP64 reference serves without a GPU, and this is {case.hardware.display}"
    if case.flags.kernels == "triton":
        return "SGLANG_SPECVERIFY_KERNELS=triton asks for Triton kernels, and this version has none"
    return None


ROUTES: tuple[Route, ...] = (
    Route(
        name="reference",
        modes=frozenset(Mode),
        layers=frozenset({LayerKind.FULL, LayerKind.WINDOW}),
        dtypes=frozenset({"float32", "bfloat16", "float16", "half", "auto"}),
        kv_caches=_KV_CACHES,
        algorithms=_KNOWN_ALGORITHMS,
        arguments=frozenset({"sinks"}),
        cuda_graphs=False,
        refuse=_refuse_reference,
    ),
)


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
    opted_out = _opt_out(case)
    # A layer of another kind of state never reaches the attention backend, so it cannot be missed there.
    meant = mode in CLAIMED or not hardware.has_gpu
    claimed = meant and opted_out is None and layer.kind is not LayerKind.LINEAR
    stock = Rejected(STOCK, f"SGLang's {server.base} could serve, but a route of the plugin comes first")
    rejected: list[Rejected] = []
    for route in ROUTES:
        refusal = opted_out or _refusal(route, case)
        if refusal is None:
            later = (Rejected(other.name, _refusal(other, case) or f"{route.name} comes first") for other in _after(route))
            return Decision(route.name, _served_reason(route, case), (*rejected, *later, stock), claimed)
        rejected.append(Rejected(route.name, refusal))
    return Decision(STOCK, _stock_reason(case, opted_out, rejected), tuple(rejected), claimed)


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
    if case.mode is Mode.TARGET_VERIFY and case.server.topk > 1 and not case.flags.tree:
        return "SGLANG_SPECVERIFY_TREE=0"
    if case.mode is Mode.TARGET_VERIFY and case.server.topk <= 1 and not case.flags.chain:
        return "SGLANG_SPECVERIFY_CHAIN=0"
    if case.mode is Mode.DRAFT_EXTEND and not case.flags.chain:
        return "SGLANG_SPECVERIFY_CHAIN=0"
    if case.mode is Mode.DRAFT_DECODE and not case.flags.draft_decode:
        return "SGLANG_SPECVERIFY_DRAFT_DECODE=0"
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


def _served_reason(route: Route, case: Case) -> str:
    return f"{case.hardware.display}: {route.name} knows everything in this call"


def _stock_reason(case: Case, opted_out: str | None, rejected: list[Rejected]) -> str:
    if case.layer.kind is LayerKind.LINEAR:
        return f"{case.layer.kind.value}: SGLang's own backend for it serves, no attention kernel runs"
    serves = f"SGLang's {case.server.base} serves"
    if opted_out is not None:
        return f"{opted_out}: {serves}"
    if not case.hardware.has_gpu:
        return f"{rejected[0].reason}: {serves}"
    if case.mode not in CLAIMED:
        return f"{case.mode.value} is SGLang's own on a GPU: {serves}"
    # A refusal that a later kernel would have too is more use to a reader than "no kernel yet".
    if case.layer.kind not in (LayerKind.FULL, LayerKind.WINDOW):
        return f"no kernel of this plugin for layers of {case.layer.kind.value} in this version: {serves}"
    return f"no kernel of this plugin for {case.hardware.display} in this version: {serves}"
