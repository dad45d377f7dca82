"""Whether a chain over FlashAttention is verified by the plugin's kernel. Pure.

FlashAttention 3 is at the memory's bandwidth where a batch holds many tokens, and so is the plugin's kernel; where it holds few,
what every launch takes decides. By `benchmarks/results/latency-h200.json` the plugin's kernel, which divides prefixes and
combines their parts by a second launch, takes 0.69 to 0.97 of FlashAttention's time with up to 8 requests of 1024 to 32768
tokens, and was not timed at longer ones. Before, when its last program combined, the two were within 2 % of each other up to a
million tokens there (`long-context-h200.json`); with 64 requests or 64 rows it was behind by up to 56 %. A captured graph is
one program for every length, so the choice goes by what the server knows: how many requests it lets in, and the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

#: On this architecture.
ARCH = "sm_90"
#: As measured: requests, query rows of a KV head with so many and with one, KV heads, head dim.
MOST_REQUESTS, MOST_ROWS, MOST_ROWS_ALONE, MOST_KV_HEADS, HEAD_DIM = 8, 16, 32, 8, 128


@dataclass(frozen=True)
class ChainFacts:
    """What the choice may know.

    Attributes:
        arch: the architecture, such as "sm_90".
        rows: query rows of a KV head in one request: draft tokens times the heads that share it.
        kv_heads: of the layer on this rank.
        head_dims: of K and of V.
        requests: the most that run at once; 0 where not known.
        plain: full attention without a window, sinks, a soft cap or an FP8 cache.
        deterministic: rows must not depend on the rest of the batch.
    """

    arch: str
    rows: int
    kv_heads: int
    head_dims: tuple[int, int]
    requests: int
    plain: bool
    deterministic: bool


def keeps(facts: ChainFacts) -> str | None:
    """Why FlashAttention is to verify a chain, or None where the plugin's kernel was faster."""
    if facts.arch != ARCH:
        return f"the two were compared on SM90 alone, not on {facts.arch}"
    if facts.deterministic:
        return "with deterministic inference the two were not compared"
    if not facts.plain or facts.head_dims != (HEAD_DIM, HEAD_DIM):
        return f"the two were compared for full attention of head dim {HEAD_DIM} without sinks, soft cap and FP8 cache"
    if facts.kv_heads > MOST_KV_HEADS:
        return f"the two were compared with up to {MOST_KV_HEADS} KV heads, not with {facts.kv_heads}"
    if not 0 < facts.requests <= MOST_REQUESTS:
        known = f"{facts.requests} requests at once" if facts.requests else "no limit of requests"
        return f"{known}; the plugin's kernel was faster with {MOST_REQUESTS} or fewer (--max-running-requests)"
    most = MOST_ROWS_ALONE if facts.requests == 1 else MOST_ROWS
    if facts.rows > most:
        return f"{facts.rows} query rows for each KV head; the plugin's kernel was faster with {most} or fewer"
    return None
