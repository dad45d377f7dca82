"""Whether a chain over FlashAttention is verified by the plugin's kernel. Pure.

FlashAttention 3 is at the memory's bandwidth where a batch holds many tokens, and so is the plugin's kernel; where it holds few,
what every launch takes decides. By `benchmarks/results/latency-h200.json` the plugin's kernel, which divides prefixes and
combines their parts by a second launch, takes 0.69 to 0.97 of FlashAttention's time there, with 16 to 64 query rows for each KV
head and 1 to 8 requests. By `long-context-h200.json`, where its last program still combined, it takes up to 1.02 of it at a
million tokens with 16 and 32 rows, 1.56 with 64, and up to 1.13 with 64 requests. A captured graph is one program for every
length, so the choice must not fall behind at any: it looks at how many requests the server lets in, and at the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Measured up to these.
MOST_REQUESTS, MOST_ROWS, MOST_HEAD_DIM = 8, 32, 128
#: On this architecture.
ARCH = "sm_90"


@dataclass(frozen=True)
class ChainFacts:
    """What the choice may know.

    Attributes:
        arch: the architecture, such as "sm_90".
        rows: query rows of a KV head in one request: draft tokens times the heads that share it.
        head_dim: of K and V, the larger.
        requests: the most that run at once; 0 where not known.
        plain: full attention without a window, sinks, a soft cap or an FP8 cache.
        deterministic: rows must not depend on the rest of the batch.
    """

    arch: str
    rows: int
    head_dim: int
    requests: int
    plain: bool
    deterministic: bool


def keeps(facts: ChainFacts) -> str | None:
    """Why FlashAttention is to verify a chain, or None where the plugin's kernel is faster."""
    if facts.arch != ARCH:
        return f"the two were compared on SM90 alone, not on {facts.arch}"
    if facts.deterministic:
        return "with deterministic inference the two were not compared"
    if not facts.plain or facts.head_dim > MOST_HEAD_DIM:
        return f"the two were compared for full attention without sinks, soft cap, FP8 cache and head dims over {MOST_HEAD_DIM}"
    if facts.rows > MOST_ROWS:
        return f"{facts.rows} query rows for each KV head; the plugin's kernel is ahead at every length with {MOST_ROWS} or fewer"
    if not 0 < facts.requests <= MOST_REQUESTS:
        known = f"{facts.requests} requests at once" if facts.requests else "no limit of requests"
        return f"{known}; the plugin's kernel is ahead with {MOST_REQUESTS} or fewer (--max-running-requests)"
    return None
