"""What a route decision may know: plain values, no tensor, no engine object."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(str, Enum):
    """What a forward pass is for, in SGLang's terms."""

    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"
    DECODE = "decode"
    PREFILL = "prefill"


def algorithm_name(given: str | None) -> str | None:
    """A speculative algorithm as SGLang spells it once resolved: it takes any case, and NEXTN is EAGLE."""
    name = (given or "").upper() or None
    return "EAGLE" if name == "NEXTN" else name


#: Algorithms whose draft is a model of its own, or layers of the target's checkpoint.
DRAFT_MODELS = ("EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP")


class LayerKind(str, Enum):
    FULL = "full attention"
    WINDOW = "sliding window"
    MLA = "MLA"
    CROSS = "cross attention"
    ENCODER = "encoder attention"
    LINEAR = "linear attention or state space"


@dataclass(frozen=True)
class LayerFacts:
    """One attention layer on one rank. `window` is -1 for none; head counts are a rank's own."""

    kind: LayerKind
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = -1
    softcap: float = 0.0
    has_sinks: bool = False
    #: Layer attributes that are set and that no route knows, such as "xai_temperature_len".
    unknown: frozenset[str] = frozenset()

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // max(1, self.kv_heads)


@dataclass(frozen=True)
class ServerFacts:
    """What one server was started with, after resolution."""

    base: str
    algorithm: str | None = None
    topk: int = 1
    num_steps: int = 0
    num_draft_tokens: int = 0
    page_size: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    cuda_graph: bool = True
    deterministic: bool = False
    #: The most tokens that a request may have; 0 where not known.
    context: int = 0
    #: The most requests at once that the server was started with; 0 where it was not said.
    requests: int = 0
    #: SGLang's own switch: whether its Triton backend may divide the prefix of a chain that it verifies.
    splitkv_verify: bool = True
    #: Over aiter: whether SGLang decodes by its unified attention, and whether it verifies chains by it.
    unified: bool = False
    unified_verify: bool = False
    #: Backend states in force that no route knows, such as "decode context parallelism".
    unknown: frozenset[str] = frozenset()
    two_batch_overlap: bool = False
    #: SGLang prepares verify on a stream of its own, before the draft has filled the tree's mask.
    plan_stream: bool = False


@dataclass(frozen=True)
class CallFacts:
    """What one forward call carries beyond Q, K and V: the names of its arguments that are not None."""

    arguments: frozenset[str] = frozenset()
