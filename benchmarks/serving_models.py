"""Tiny models with heads of a real shape, so that every kernel of the plugin has something to serve."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from sglang_specverify.demo import models


@dataclass(frozen=True)
class Shape:
    """Attention heads of a model and the drafts of its trees."""

    q_heads: int
    kv_heads: int
    head_dim: int
    topk: int
    steps: int
    tree_tokens: int


#: Attention of an 8B model on a hidden state of 256: 128 query rows for each KV head and request, which the kernel with
#: specialised warps takes. A tree of five levels with 32 nodes leaves out some of the likely paths, so the accept length says
#: something.
REAL = Shape(q_heads=32, kv_heads=8, head_dim=128, topk=4, steps=4, tree_tokens=32)
#: What the reference on a CPU serves in seconds.
TINY = Shape(q_heads=8, kv_heads=2, head_dim=32, topk=4, steps=3, tree_tokens=8)

#: Positions in the model's configuration; servers are started with less.
POSITIONS = 131072


def build(kind: str, root: Path, dtype: str, shape: Shape) -> Path:
    """`demo.models.build` with other heads; once for each kind. The weights' sizes follow from the module's constants."""
    directory = root / f"{kind}-{dtype}"
    if directory.exists():
        return directory
    heads = {"Q_HEADS": shape.q_heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "CONTEXT_LENGTH": POSITIONS}
    with ExitStack() as patches:
        for name, value in heads.items():
            patches.enter_context(mock.patch.object(models, name, value))
        return models.build(kind, directory, dtype)
