"""One pool of K and V for all points, and a point's tensors over it.

A pool of 90 GB takes longer to make than a point to measure. Its values are random and independent of the shape they are
viewed in. The keys that a point plants, to make a wrong visible set show, are taken out again behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.inputs import FP8_SCALES, NEEDLES, Inputs
from benchmarks.long_context_points import layout, slot_bytes
from benchmarks.points import Point, work

#: Elements made at once.
_PART = 1 << 28


@dataclass
class Pool:
    """Flat memory for K and for V, of normal values over the scale of their type.

    Attributes:
        k, v: uint8.
        cache: type of what is in it, "" before anything is.
        filled: elements of each that hold values of that type.
    """

    k: torch.Tensor
    v: torch.Tensor
    cache: str = ""
    filled: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def bytes(self) -> int:
        return self.k.numel() + self.v.numel()

    @property
    def half(self) -> torch.dtype:
        """Triton's interpreter computes with no bf16."""
        return torch.bfloat16 if self.k.device.type == "cuda" else torch.float16

    def view(self, point: Point, layers: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[layers, slots, Hkv, D] of K and of V."""
        count = layers * slots * point.kv_heads * point.head_dim
        self._fill(point.cache, count)
        shape = (layers, slots, point.kv_heads, point.head_dim)
        k, v = (flat.view(self._dtype(point.cache))[:count].view(shape) for flat in (self.k, self.v))
        return k, v

    def whole(self, point: Point) -> tuple[torch.Tensor, torch.Tensor]:
        """[slots, Hkv, D] of K and of V, all that the pool holds; beyond `filled` it is anything."""
        slots = self.bytes // slot_bytes(point)
        shape = (slots, point.kv_heads, point.head_dim)
        k, v = (flat.view(self._dtype(point.cache))[: math.prod(shape)].view(shape) for flat in (self.k, self.v))
        return k, v

    def _dtype(self, cache: str) -> torch.dtype:
        return torch.float8_e4m3fn if cache == "e4m3" else self.half

    def _fill(self, cache: str, count: int) -> None:
        if cache != self.cache:
            self.cache, self.filled = cache, 0
        dtype = self._dtype(cache)
        for start in range(self.filled, count, _PART):
            for flat, scale in zip((self.k, self.v), scales_of(cache), strict=True):
                part = flat.view(dtype)[start : min(start + _PART, count)]
                values = torch.randn(part.shape, generator=self.generator, device=flat.device, dtype=self.half)
                part.copy_(values.div_(scale))
        self.filled = max(self.filled, count)


def make_pool(size: int, device: torch.device, seed: int = 0) -> Pool:
    """A pool of `size` bytes; nothing is in it until a point needs it."""
    k, v = (torch.empty(size // 32 * 16, dtype=torch.uint8, device=device) for _ in range(2))
    return Pool(k, v, generator=torch.Generator(device).manual_seed(seed))


def scales_of(cache: str) -> tuple[float, float]:
    return FP8_SCALES if cache == "e4m3" else (1.0, 1.0)


@contextmanager
def inputs_over(
    pool: Pool, point: Point, lengths: Sequence[int] | None = None, most_layers: int | None = None, seed: int = 0
) -> Iterator[Inputs]:
    """The tensors of a chain while the block runs; the pool is afterwards what it was.

    Args:
        lengths: L of each request in place of the point's, for checks.
    """
    device, bs, w = pool.k.device, point.batch, point.width
    generator = torch.Generator(device).manual_seed(seed)
    lens = list(lengths or point.lengths())
    layers, slots = layout(point, pool.bytes)
    layers = layers if most_layers is None else min(layers, most_layers)
    k, v = pool.view(point, layers, slots)

    ends = torch.tensor(lens, device=device) + w
    inside = torch.arange(max(lens) + w, device=device) < ends[:, None]
    row_ids = torch.randperm(bs, generator=generator, device=device).int()
    by_request = torch.zeros(inside.shape, dtype=torch.int32, device=device)
    by_request[inside] = torch.randperm(slots, generator=generator, device=device)[: int(ends.sum())].int()
    table = torch.empty_like(by_request)
    table[row_ids.long()] = by_request

    q = torch.randn(bs * w, point.q_heads, point.head_dim, generator=generator, device=device)
    k_scale, v_scale = scales_of(point.cache)
    planted, before = _plant(point, lens, by_request.long(), q, k[0], k_scale, generator)
    steps = torch.arange(w, device=device)
    prefix_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    chain = torch.ones(w, w, dtype=torch.bool, device=device).tril()
    try:
        yield Inputs(
            point, lens, q.to(pool.half), k, v, table, row_ids, prefix_lens, by_request.long(),
            chain.expand(bs, -1, -1).contiguous(), (prefix_lens.long()[:, None] + steps).flatten(), None, None, k_scale, v_scale,
            work=work(point, [list(range(w))] * bs, [list(range(1, w + 1))] * bs),
        )  # fmt: skip
    finally:
        k[0, planted] = before


def _plant(
    point: Point,
    lengths: Sequence[int],
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn q, the drafts' keys and some prefix keys (the first and the last among them) towards one direction, so that these
    share half of every row's weight: without them a draft of a prefix of a million weighs nothing, and nothing would show
    whether it was read. As `benchmarks.inputs` does it.

    Returns:
        the slots of these keys, and what was in them.
    """
    device, bs, w = q.device, point.batch, point.width
    lens = torch.tensor(lengths, device=device)
    # In FP64: FP32 has no number for the last of 2^24 keys.
    draws = torch.rand(bs, NEEDLES, generator=generator, device=device, dtype=torch.float64)
    last = (lens[:, None] - 1).clamp(min=0)
    places = torch.cat([torch.zeros_like(last), last, (draws * lens[:, None]).long().minimum(last),
                        lens[:, None] + torch.arange(w, device=device)], 1)  # fmt: skip
    marked = slots.gather(1, places)
    direction = torch.randn(point.kv_heads, point.head_dim, generator=generator, device=device)
    direction /= direction.norm(dim=-1, keepdim=True)
    # These keys score `gap` above the others' mean, which vary by 1 from q and k, and by gap / sqrt(D) from q's turn.
    gaps = [max(1.0, math.log(max(1, n) / (NEEDLES + w))) / (1 - 0.5 * point.head_dim**-0.5) for n in lengths]
    strength = (torch.tensor(gaps, device=device) * math.sqrt(point.head_dim)).sqrt()
    towards = direction.repeat_interleave(point.q_heads // point.kv_heads, 0)
    rows = strength.repeat_interleave(w)[:, None, None]
    q += (rows - (q * towards).sum(-1, keepdim=True)) * towards
    before = k[marked]
    # Half as much of their own, so that no planted key is lost among the others.
    keys = before.to(torch.float32) * (0.5 * k_scale)
    keys += (strength[:, None, None, None] - (keys * direction).sum(-1, keepdim=True)) * direction
    k[marked] = (keys / k_scale).to(k.dtype)
    return marked, before


def last_element(made: Inputs) -> int:
    """The largest offset of K that the calls read, in elements from the start of a layer."""
    return (int(made.table.max()) + 1) * made.k.stride(1) - 1


def beyond_32_bits(made: Inputs) -> bool:
    return last_element(made) >= 1 << 31
