"""Which whole servers run on a GPU: a cover of what one may be started with, and the kernels that it does not reach. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, product

from benchmarks.serving_models import Shape

#: The two values of each factor; the first is what a server gets unasked.
FACTORS: dict[str, tuple[object, object]] = {
    "shape": ("tree", "chain"),
    "page_size": (1, 64),
    "cache": ("bf16", "fp8_e4m3"),
    "graphs": (True, False),
    "overlap": (True, False),
}


@dataclass(frozen=True)
class Row:
    """One server. `kind`: "plugin", "stock" (SGLang's own backend, speculating) or "plain" (that, without speculation).

    `served` names the modes that a kernel of the plugin must serve; with `faults` verify is broken on purpose afterwards.
    `options` are further arguments of SGLang's.
    """

    name: str
    kind: str
    shape: str = "tree"
    page_size: int = 1
    cache: str = "bf16"
    graphs: bool = True
    overlap: bool = True
    base: str = "fa3"
    flags: dict[str, str] = field(default_factory=dict)
    served: tuple[str, ...] = ()
    faults: bool = False
    options: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        """The server whose tokens these must be: of the same cache, without speculation."""
        return f"plain-{self.cache}"

    @property
    def stock(self) -> str:
        """The server whose accept length this must have: drafts and cache alike, over the same base."""
        return f"stock-{self.base}-{self.shape}-{self.cache}"


TREE_MODES = ("target_verify", "draft_decode")
CHAIN_MODES = (*TREE_MODES, "draft_extend")
_FUSED_CHAIN = {"SGLANG_SPECVERIFY_CHAIN_KERNEL": "fused"}

#: Any two values of two factors meet in one of these. Chains are FlashAttention's unless asked for: two of three are.
COVER = (
    Row("tree-page1-bf16", "plugin", served=TREE_MODES),
    Row("tree-page64-fp8", "plugin", page_size=64, cache="fp8_e4m3", served=TREE_MODES),
    Row("tree-page1-bf16-eager", "plugin", graphs=False, overlap=False, served=TREE_MODES, faults=True),
    Row("chain-page64-bf16-eager", "plugin", shape="chain", page_size=64, graphs=False, overlap=False, flags=_FUSED_CHAIN,
        served=CHAIN_MODES),
    Row("chain-page64-fp8", "plugin", shape="chain", page_size=64, cache="fp8_e4m3", overlap=False, flags=_FUSED_CHAIN,
        served=CHAIN_MODES),
    Row("chain-page1-fp8-eager", "plugin", shape="chain", cache="fp8_e4m3", graphs=False),
)  # fmt: skip


def _tree_kernel(name: str) -> dict[str, str]:
    return {"SGLANG_SPECVERIFY_TREE_KERNEL": name}


#: The tree kernels by name, where the rule above does not take them, and the other base.
EXTRA = (
    Row("fused-page64-fp8", "plugin", page_size=64, cache="fp8_e4m3", flags=_tree_kernel("fused"), served=TREE_MODES),
    Row("tile-page64-bf16", "plugin", page_size=64, flags=_tree_kernel("tile"), served=TREE_MODES),
    Row("gather-page1-bf16", "plugin", flags=_tree_kernel("gather"), served=TREE_MODES),
    Row("triton-tree-page1-bf16", "plugin", base="triton", flags={"SGLANG_SPECVERIFY_BASE": "triton"},
        served=(*TREE_MODES, "draft_extend")),
    Row("triton-chain-page1-bf16", "plugin", shape="chain", base="triton", flags={"SGLANG_SPECVERIFY_BASE": "triton"},
        served=CHAIN_MODES),
)  # fmt: skip

#: Heads over two GPUs, beside the same servers on one; asked for by "tensor-parallel" alone, as all other rows need one GPU.
_TWO_GPUS = ("--tp-size", "2")
TENSOR_PARALLEL = (
    Row("tree-page1-bf16-tp2", "plugin", served=TREE_MODES, options=_TWO_GPUS),
    Row("triton-chain-page64-bf16-tp2", "plugin", shape="chain", page_size=64, base="triton",
        flags={"SGLANG_SPECVERIFY_BASE": "triton"}, served=CHAIN_MODES, options=_TWO_GPUS),
)  # fmt: skip

#: What `--dry-run` picks for a machine without a GPU: no graphs, no FP8 cache, the base and its stock are triton.
DRY = (
    Row("tree-page1-bf16-eager", "plugin", graphs=False, overlap=False, base="triton", served=TREE_MODES, faults=True),
    Row("chain-page64-bf16-eager", "plugin", shape="chain", page_size=64, graphs=False, base="triton", served=CHAIN_MODES),
)


def factors_of(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in FACTORS)


def missing_pairs(rows: tuple[Row, ...]) -> list[tuple[str, object, str, object]]:
    """Pairs of values of two factors that no row has."""
    return [
        (one, a, other, b)
        for one, other in combinations(FACTORS, 2)
        for a, b in product(FACTORS[one], FACTORS[other])
        if not any(getattr(row, one) == a and getattr(row, other) == b for row in rows)
    ]


def with_references(rows: tuple[Row, ...]) -> list[Row]:
    """`rows` behind the servers that they are compared with, each once; those first, as every row waits for one.

    Pages, graphs and the overlap schedule change no draft and no acceptance, so stock servers differ by shape, cache and base.
    """
    base = rows[0].base if rows else "fa3"
    plain = {row.baseline: Row(row.baseline, "plain", cache=row.cache, base=base) for row in rows}
    stock = {row.stock: Row(row.stock, "stock", shape=row.shape, cache=row.cache, base=row.base) for row in rows}
    return [*plain.values(), *stock.values(), *rows]


def drafts(row: Row, shape: Shape, models: dict[str, str]) -> list[str]:
    """SGLang's arguments for the drafts of a row. A chain is drafted by the target itself, a tree by a model that ranks the truth
    second, so that only other branches than the first are accepted."""
    if row.kind == "plain":
        return []
    tree = row.shape == "tree"
    steps, topk = (shape.steps, shape.topk) if tree else (3, 1)
    return [
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", models["mirror" if tree else "copy"]),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(shape.tree_tokens if tree else steps + 1)),
    ]


@dataclass(frozen=True)
class Size:
    """What every server of a run has: a context and slots of the cache in tokens, requests at once, all of them captured."""

    has_gpu: bool
    context: int
    tokens: int
    requests: int

    @property
    def dtype(self) -> str:
        """FlashAttention has no float32, and Triton's interpreter computes no other type rightly."""
        return "bfloat16" if self.has_gpu else "float32"


def arguments(row: Row, shape: Shape, models: dict[str, str], size: Size) -> list[str]:
    """SGLang's arguments for a row."""
    given = [
        *("--model-path", models["target"], "--dtype", size.dtype, "--context-length", str(size.context)),
        *("--max-total-tokens", str(size.tokens), "--max-running-requests", str(size.requests)),
        *("--page-size", str(row.page_size)),
        *("--chunked-prefill-size", "2048", "--decode-log-interval", "4", "--log-level", "info"),
        *drafts(row, shape, models),
        *row.options,
    ]
    if row.kind != "plugin":
        given += ["--attention-backend", row.base if size.has_gpu or row.kind == "stock" else "torch_native"]
    if not row.overlap:
        given.append("--disable-overlap-schedule")
    if not size.has_gpu:
        return given
    if row.cache != "bf16":
        given += ["--kv-cache-dtype", row.cache]
    # The slots above size the pool. The share is large because SGLang leaves the rest of what was free at the start to others,
    # who may have taken more than that by then. What is switched off takes only time to start: kernels compiled at first use, and
    # graphs for prompts of every length.
    given += ["--mem-fraction-static", "0.9", "--sampling-backend", "pytorch", "--disable-prefill-cuda-graph"]
    return given + (["--cuda-graph-max-bs-decode", str(size.requests)] if row.graphs else ["--disable-cuda-graph"])
