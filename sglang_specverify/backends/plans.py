"""What the layers of one step share on the device: plans of the kernels by the shape of a layer, and their scratch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_specverify.kernels.plan import Plan
from sglang_specverify.kernels.specialized import is_aligned

logger = logging.getLogger(__name__)

#: A window up to so many keys is not worth dividing over programs.
SHORT_WINDOW = 512

#: Kernels that read the prefix themselves, and may have it divided over programs.
WHOLE = ("fused", "specialized")

#: Kernels that merge the drafts into the result of FlashAttention's pass over the prefix.
AFTER_PREFIX_PASS = ("prefix_tile", "prefix_gather", "prefix_flash")

#: Of these, the ones that take each row's own drafts out of a list.
OWN_DRAFTS = ("prefix_gather", "prefix_flash")


@dataclass(frozen=True)
class Dims:
    """What a plan depends on of a layer, apart from its window."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Served:
    """Layers of one mode that a kernel of the plugin serves and that need the same plan.

    `window` is 0 for windows too short to divide, -1 for none.
    """

    dims: Dims
    window: int
    kernel: str

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, head_dim: int, v_head_dim: int, window: int, kernel: str) -> Served:
        dims = Dims(q_heads, kv_heads, head_dim, v_head_dim)
        return cls(dims, 0 if 0 <= window <= SHORT_WINDOW else window, kernel)

    @property
    def divides(self) -> bool:
        """Whether these layers read a prefix that may be divided over programs."""
        return self.kernel in WHOLE and self.window != 0


class Scratch:
    """One buffer for a backend, which grows; whoever holds an older one, such as a captured graph, keeps it."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def size(self) -> int:
        return self._buffer.numel()

    def of(self, size: int) -> torch.Tensor:
        """At least `size` bytes, undefined."""
        if size > self._buffer.numel():
            logger.info("specverify: scratch for divided prefixes: %.1f MB", size / 1e6)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer


@dataclass
class Plans:
    """The plans of one step. A graph's step makes each anew at every replay, in the buffer it had when it was captured."""

    deterministic: bool
    #: The FP8 type in which the base's own decode takes Q, or None: verify and decode must see the same Q.
    q_type: torch.dtype | None = None
    #: Whether it takes what is out of that type's range as its largest value.
    saturates: bool = False
    by_layer: dict[Served, Plan] = field(default_factory=dict)
    workspace: torch.Tensor | None = None
    #: Each row's visible draft slots first, int32 [rows, W], and how many they are, int32 [rows], where a layer gathers them.
    suffix: tuple[torch.Tensor, torch.Tensor] | None = None
    #: The buffers of the plans, in the order in which they are made.
    buffers: list[torch.Tensor] = field(default_factory=list)

    def query(self, q: torch.Tensor, served: Served | None = None) -> torch.Tensor:
        """Q as the base's own decode represents it, in its own type, and as the layer's kernel takes it."""
        if self.q_type is not None:
            if self.saturates:
                most = torch.finfo(self.q_type).max
                q = q.clamp(-most, most)
            return q.to(self.q_type).to(q.dtype)
        # No layout of SGLang's models is known for which this copies; a server must not stop for one that is not known.
        return q if served is None or served.kernel != "specialized" or is_aligned(q) else q.contiguous()

    def options(self, served: Served) -> dict[str, Any]:
        """The arguments by which a kernel call of such a layer takes its part; which variant runs follows from the plan."""
        plan = self.by_layer.get(served)
        divides = plan is not None and plan.divides
        # By name, so that what was decided and said is what runs, or an error.
        variant = "specialized_split" if divides else "specialized"
        return {
            "deterministic": self.deterministic,
            "variant": variant if served.kernel == "specialized" else "auto",
            "plan": plan,
            "workspace": self.workspace if divides else None,
        }


def groups(layers: Iterable[Served]) -> list[list[Served]]:
    """Layers by what one plan serves, with the layers that divide nothing beside those that do, which come first."""
    found: dict[tuple[Dims, int, str], list[Served]] = {}
    layers = sorted(layers, key=lambda one: (not one.divides, one.window, one.kernel))
    for one in layers:
        home = (one.dims, one.window, one.kernel)
        if not one.divides:
            # Any plan of these dims holds what they read of it: the packed masks.
            home = next((key for key in found if key[0] == one.dims), (one.dims, -1, "fused"))
        found.setdefault(home, []).append(one)
    return list(found.values())
