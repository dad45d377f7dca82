"""How a tree is verified over FlashAttention: one kernel, or its prefix pass and the tree tile. Pure.

A captured graph is one program for every length that it will be replayed with, and no length is known on the host when it is
captured. So the choice looks at what the server knows for good, and must not fall behind SGLang's own at any length. By
`benchmarks/results/verify-attention-h200.json` and `latency-trees-h200.json`, where the kernel with specialised warps serves, the
one kernel is up to twice as fast as the prefix pass and the tile at short prefixes, ahead of them up to 32768 tokens with one
request of W 64, and behind them at long ones of several requests: by an eighth at 16384 tokens with 8 of W 64. SGLang's own was
ahead of it nowhere by more than a hundredth, up to 32768 tokens. Without that kernel the one kernel is ahead at 384 and behind
at 2048.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A context up to this long leaves the one kernel ahead of SGLang's, or within a hundredth of it, at every prefix that it can
#: hold; the second, where that is the kernel with specialised warps: with 8 requests and W 64 a key costs it a fifth more than
#: SGLang's two passes, which takes some 44000 keys to use up what their second pass and merge cost beside.
SHORT_CONTEXT, SPECIALIZED_CONTEXT = 1024, 40960
#: Up to so many query rows of a KV head the prefix is a matter of bandwidth, which both reach, and one launch is fewer.
FEW_ROWS = 32

#: What the kernel with specialised warps takes, and the rows of a KV head from which its tiles are worth it;
#: `kernels/specialized.py` and `kernels/variants.py`, which a light import must not reach, say the same, and the tests compare.
SPECIALIZED_ARCH, SPECIALIZED_HEAD_DIMS, SPECIALIZED_ROWS = "sm_90", (64, 128), 64

#: What the gathered suffix was made for: it holds a row's whole suffix in registers.
MAX_GATHERED, MAX_GATHERED_DIM = 64, 128

#: Drafts of a request up to which each row's own are listed; `kernels/compact.py` says the same, and the tests compare.
MAX_LISTED = 256


def depth(algorithm: str | None, num_steps: int, num_draft_tokens: int) -> int:
    """The most draft tokens that a row sees, itself included: a path from the root. NGRAM's may be the whole draft."""
    return num_draft_tokens if algorithm == "NGRAM" else min(num_draft_tokens, num_steps + 1)


@dataclass(frozen=True)
class TreeFacts:
    """What the choice may know.

    Attributes:
        arch: the architecture, such as "sm_90".
        width: draft tokens of a request.
        group: query heads that share a KV head.
        context: the most tokens that a request may have; 0 where not known.
        deterministic: rows must not depend on the rest of the batch.
        specialized: whether the kernel with specialised warps takes these layers.
    """

    arch: str
    width: int
    group: int
    context: int
    deterministic: bool
    specialized: bool = False

    @property
    def short(self) -> int:
        """The longest context that is short."""
        return SPECIALIZED_CONTEXT if self.specialized else SHORT_CONTEXT


def refuse_tile(facts: TreeFacts) -> str | None:
    """Why the prefix pass and the tree tile are not the better choice, or None where they are."""
    if facts.arch != "sm_90":
        return f"the prefix pass and the tree tile were measured on SM90 alone, not on {facts.arch}"
    if facts.deterministic:
        return "deterministic inference: the one kernel divides a prefix by its own length only"
    if 0 < facts.context <= facts.short:
        return (
            f"a context of {facts.context} tokens is short: the one kernel is faster at short prefixes, "
            "and not behind SGLang's own at long ones"
        )
    if facts.width * facts.group <= FEW_ROWS:
        return f"{facts.width * facts.group} query rows for each KV head are few: the one kernel reads the prefix as fast"
    return None
