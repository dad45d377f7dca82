"""Tensors for one point: random slots of a pool, random trees, and keys that make a wrong visible set show.

K and V exist once for each of several layers. Table, mask, lengths and q are shared between them, as in a model: a
call on the next layer finds its K and V no longer in the L2 cache, if the layers between are larger than that.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from benchmarks.points import CACHE_BYTES, DRAFT_STEP, TREE_DEPTH, Point, Work, work

#: Twice the L2 cache of an H200: what must be read before a layer comes round again.
ROTATED_BYTES = 120 << 20
#: What all layers of the pool may take together, unless one layer needs more.
POOL_BYTES = 24 << 30
MOST_LAYERS = 256
#: Slots of a layer, where that fits: calls of few tokens scatter over a large pool, not over their own few pages.
POOL_SLOTS = 1 << 18

#: Prefix keys of a request that weigh as much as a draft key.
NEEDLES = 8
FP8_SCALES = (0.5, 2.0)


@dataclass(frozen=True)
class Inputs:
    """A point's tensors; shapes and types are those of `verify_attention`.

    Attributes:
        lengths: L of each request, on the host.
        q: [bs*W, Hq, D].
        k, v: [layers, slots, Hkv, D].
        table: int32 [bs, pages]; row r belongs to request `row_ids[r]`.
        slots: int64 [bs, width], slot of every position; entries past L + W mean nothing.
        mask: bool [bs, W, W], draft j visible to draft i; None for a draft decode.
        positions: int64 [bs*W].
        draft_slots: int32 [bs, topk, DRAFT_STEP + 1], for a draft decode.
        k_scale, v_scale: of an FP8 cache; else 1.
        work: bytes and FLOPs of one call.
    """

    point: Point
    lengths: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    row_ids: torch.Tensor
    prefix_lens: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor
    draft_slots: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: float
    v_scale: float
    work: Work

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def sm_scale(self) -> float:
        return float(self.point.head_dim**-0.5)


def tree(width: int, depth: int, draw: random.Random) -> tuple[torch.Tensor, list[int]]:
    """A random tree: bool [W, W] of which ancestors (and itself) each node sees, and each node's level from 0 on."""
    mask = torch.zeros(width, width, dtype=torch.bool)
    levels: list[int] = []
    for node in range(width):
        if node:
            parent = draw.choice([other for other in range(node) if levels[other] < depth - 1])
            mask[node] = mask[parent]
        levels.append(levels[parent] + 1 if node else 0)
        mask[node, node] = True
    return mask, levels


def layers_for(point: Point, slots: int) -> int:
    """Layers that together exceed the L2 cache twice, within what the pool may take."""
    return max(1, min(_layers_wanted(point), POOL_BYTES // (slots * _slot_bytes(point))))


def pool_slots(point: Point) -> int:
    """Slots of one layer: a quarter more than are used, more where memory allows, whole pages."""
    used = sum(point.lengths()) + point.batch * (_drafts(point) + point.page_size)
    roomy = min(POOL_SLOTS, POOL_BYTES // (_layers_wanted(point) * _slot_bytes(point)))
    # Whole pages, rounded down unless the calls themselves need them: rounding up could cost a layer.
    return max(-(-(used * 5 // 4) // point.page_size), roomy // point.page_size) * point.page_size


def _slot_bytes(point: Point) -> int:
    return 2 * point.kv_heads * point.head_dim * CACHE_BYTES[point.cache]


def _layers_wanted(point: Point) -> int:
    read = (sum(point.lengths()) + point.batch * _drafts(point)) * _slot_bytes(point)
    return min(-(-ROTATED_BYTES // read), MOST_LAYERS)


def make(point: Point, device: torch.device, seed: int = 0, most_layers: int | None = None) -> Inputs:
    """The tensors of a point; the same for the same seed and device.

    On a CPU 16-bit tensors are fp16, since Triton's interpreter computes with no bf16, and there is one layer and a
    small pool.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    lengths, drafts = point.lengths(), _drafts(point)
    generator = torch.Generator(device).manual_seed(seed)
    small = sum(lengths) + len(lengths) * (drafts + point.page_size) + 64
    count = pool_slots(point) if device.type == "cuda" else -(-small // point.page_size) * point.page_size
    layers = layers_for(point, count) if device.type == "cuda" else 1
    layers = layers if most_layers is None else min(layers, most_layers)

    pages = [-(-(length + drafts) // point.page_size) for length in lengths]
    order = torch.randperm(count // point.page_size, generator=generator, device=device).int()
    table = torch.zeros(point.batch, max(pages), dtype=torch.int32, device=device)
    row_ids = torch.randperm(point.batch, generator=generator, device=device).int()
    taken = 0
    for request, row in enumerate(row_ids.tolist()):
        table[row, : pages[request]] = order[taken : taken + pages[request]]
        taken += pages[request]
    inside = torch.arange(point.page_size, device=device)
    slots = (table[row_ids.long()].long()[:, :, None] * point.page_size + inside).flatten(1)

    masks, depths = _masks(point, seed)
    rows = point.batch * point.width
    q = torch.randn(rows, point.q_heads, point.head_dim, generator=generator, device=device)
    scales = FP8_SCALES if point.cache == "e4m3" else (1.0, 1.0)
    k, v = (_cache(point, layers, count, scale, dtype, generator, device) for scale in scales)
    direction = torch.randn(point.kv_heads, point.head_dim, generator=generator, device=device)
    direction /= direction.norm(dim=-1, keepdim=True)
    _plant(point, lengths, slots, q, k[0], direction, scales[0], random.Random(seed))

    draft_slots = None
    if point.kind == "draft":
        columns = torch.tensor(lengths, device=device)[:, None] + torch.arange(drafts, device=device)
        draft_slots = slots.gather(1, columns).view(point.batch, point.width, -1).int()
    visible = [[DRAFT_STEP + 1] * point.width] * point.batch if masks is None else _visible(point, masks, depths)
    sinks = torch.randn(point.q_heads, generator=generator, device=device) if point.sinks else None
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions = (lens.long()[:, None] + torch.tensor(depths, device=device)).flatten()
    mask = None if masks is None else masks.to(device)
    return Inputs(
        point, lengths, q.to(dtype), k, v, table, row_ids, lens, slots, mask, positions, draft_slots, sinks, *scales,
        work=work(point, depths, visible),
    )  # fmt: skip


def _drafts(point: Point) -> int:
    """Slots of a request behind its prefix."""
    return point.width * (DRAFT_STEP + 1) if point.kind == "draft" else point.width


def _masks(point: Point, seed: int) -> tuple[torch.Tensor | None, list[list[int]]]:
    if point.kind == "draft":
        return None, [[DRAFT_STEP] * point.width] * point.batch
    if point.kind == "chain":
        chain = torch.ones(point.width, point.width, dtype=torch.bool).tril()
        return chain.expand(point.batch, -1, -1).contiguous(), [list(range(point.width))] * point.batch
    draw = random.Random(seed)
    trees = [tree(point.width, TREE_DEPTH, draw) for _ in range(point.batch)]
    return torch.stack([mask for mask, _ in trees]), [levels for _, levels in trees]


def _visible(point: Point, masks: torch.Tensor, depths: list[list[int]]) -> list[list[int]]:
    """Draft keys that each row sees."""
    depth = torch.tensor(depths)
    near = depth[:, :, None] - depth[:, None, :] <= point.window if point.window >= 0 else torch.tensor(True)
    return [list(map(int, row)) for row in (masks & near).sum(-1).tolist()]


def _cache(
    point: Point, layers: int, slots: int, scale: float, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """[layers, slots, Hkv, D] of normal values over `scale`; made layer by layer, for what lies between is larger."""
    kept = torch.float8_e4m3fn if point.cache == "e4m3" else dtype
    cache = torch.empty(layers, slots, point.kv_heads, point.head_dim, dtype=kept, device=device)
    step = max(1, (1 << 28) // (point.kv_heads * point.head_dim))
    for layer in cache:
        for part in layer.split(step):
            part.copy_(torch.randn(part.shape, generator=generator, device=device, dtype=dtype) / scale)
    return cache


def _plant(
    point: Point,
    lengths: list[int],
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    direction: torch.Tensor,
    k_scale: float,
    draw: random.Random,
) -> None:
    """Turn q, the drafts' keys and a few prefix keys towards one direction, so that these share half of every row's weight.

    With plain random values a long prefix averages to nothing and a draft weighs 1/L: nothing would show whether either
    was read. The needles are the first and the last prefix key, and others at random, half of them within the window.
    """
    towards = direction.repeat_interleave(point.q_heads // point.kv_heads, 0)
    for request, length in enumerate(lengths):
        reach = min(length, point.window) if point.window >= 0 else length
        needles = {0, length - 1} if length else set()
        for number in range(min(NEEDLES, length)):
            needles.add(length - 1 - draw.randrange(max(1, reach if number % 2 else length)))
        places = [*needles, *range(length, length + _drafts(point))]
        marked = slots[request, torch.tensor(places, device=slots.device)]
        # Planted keys score `gap` above the others' mean. Those vary by 1 from q and k, and by gap / sqrt(D) from q's turn.
        gap = max(1.0, math.log(max(1, reach) / (NEEDLES + TREE_DEPTH))) / (1 - 0.5 * point.head_dim**-0.5)
        strength = math.sqrt(gap * math.sqrt(point.head_dim))
        rows = q[request * point.width : (request + 1) * point.width]
        rows += (strength - (rows * towards).sum(-1, keepdim=True)) * towards
        # Half as much of their own, so that no planted key is lost among the others.
        keys = k[marked].float() * (0.5 * k_scale)
        keys += (strength - (keys * direction).sum(-1, keepdim=True)) * direction
        k[marked] = (keys / k_scale).to(k.dtype)
