"""A step's metadata for the fused kernel: made on the device by one launch, shared by all layers of the step.

It divides the prefixes over programs: a list of work items (a request and a part of its prefix; the last part takes the
drafts too) and a counter for each row tile of each request and KV head. With N program slots for each pair of row tile and
KV head, parts are at least (sum of L) / N long, so that there are at most N + bs items, and at most 2 N of them belong to
a request with more than one: that bounds the buffers without knowing a length. In deterministic mode the number of parts
depends on the request's own length only. And it packs the tree masks into bits.

    buffer (int32):  items [capacity, 8] | counters [bs, Hkv, row tiles] | number of items | bits [rows, words]
                     | seen [bs, 64 words]

Where a second launch combines the parts, nobody counts, and in place of the counters stand each request's first partial and
number of parts, [bs, 2].

Bits are int64 and begin at the prefix's last multiple of 64: bit b of word w is the key at index L // 64 * 64 + 64 w + b, so that
tiles of keys need no shift. `seen` is one byte a key: whether some row of the request sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.launch import Launch, LaunchConfig

#: int32 words of an item: request (-1: none), first key, one past the last, number of the part, parts, first partial, L, and
#: the row of the table.
ITEM_WORDS = 8

#: Boundaries of parts are multiples of this, and so of every block of keys.
ALIGN = 128

#: A shorter part costs more in combining than it saves, by the kernel that reads it and by who combines (`launch.COMBINATIONS`).
MIN_CHUNKS = {("fused", "last"): 256, ("fused", "launch"): 128, ("specialized", "last"): 384, ("specialized", "launch"): 256}

#: In deterministic mode a prefix up to this long is one part.
DETERMINISTIC_CHUNK = 1024

#: What a program costs beside its keys, in keys: launch, loading Q, drafts, writing its part. Measured on SM90.
OVERHEAD_KEYS = 192.0

#: Most programs that a plan aims to fill, for each multiprocessor.
MAX_CTAS_PER_SM = 2


@dataclass(frozen=True)
class Shape:
    """What a plan and its workspace depend on, beside the batch.

    Attributes:
        rows: packed query rows of a KV head: W (or topk) times query heads per KV head.
        kv_heads: KV heads.
        v_head_dim: columns of V.
        config: launch configuration of the kernel that will follow the plan.
        programs: programs that run at once.
        deterministic: parts by the request's own length only.
    """

    rows: int
    kv_heads: int
    v_head_dim: int
    config: LaunchConfig
    programs: int
    deterministic: bool

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.config.block_m)

    @property
    def slots(self) -> float:
        """Program slots for each pair of row tile and KV head."""
        return self.programs / (self.row_tiles * self.kv_heads)

    @property
    def max_splits(self) -> int:
        """Parts of a prefix in deterministic mode: fewer where a part has many rows, which bounds the scratch."""
        return max(1, min(16, 512 // (self.row_tiles * self.config.block_m)))

    def capacity(self, batch: int) -> int:
        """Items that a batch may need."""
        return batch * self.max_splits if self.deterministic else batch + math.ceil(self.slots)

    def partials(self, batch: int) -> int:
        """Parts of divided prefixes that a batch may have, for each pair of row tile and KV head. A whole one is no part."""
        if not self.deterministic:
            return 2 * math.ceil(self.slots)
        return batch * self.max_splits if self.max_splits > 1 else 0

    def counters(self, batch: int) -> int:
        """Entries of the counters, or of what stands in their place."""
        return batch * (2 if self.config.combine == "launch" else self.kv_heads * self.row_tiles)

    def partial_tiles(self, batch: int) -> int:
        return self.partials(batch) * self.kv_heads * self.row_tiles

    def workspace_bytes(self, batch: int) -> int:
        """Bytes of scratch: an FP32 output tile and an FP32 LSE for each partial tile."""
        return self.partial_tiles(batch) * self.config.block_m * (padded(self.v_head_dim) + 1) * 4


def padded(dim: int) -> int:
    """A head dim as the kernel holds it: the next power of two, 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Tree:
    """The size of packed masks: `rows` query rows in all, `words` int64 words each."""

    rows: int
    words: int

    def size(self, batch: int) -> int:
        """int32 entries: two for each word, and sixteen for the bytes of a request's word."""
        return (2 * self.rows + 16 * batch) * self.words


@dataclass(frozen=True)
class Plan:
    """A step's metadata in device memory; made by `plan_verify_attention`, used by every layer of the step.

    Attributes:
        buffer: int32, see the module. The kernel may count in it and leaves the counters at 0.
        batch: requests it was made for.
        shape: what it was made for; a call of another shape refuses it.
        window: the window it was made for. Only a division depends on it: a plan without one serves every window.
        divides: whether prefixes are divided; without it there are no items and no counters.
        tree: the size of the packed masks, None for chains and branches.
        call: what else a call must have in common with it: kind, ragged, head dim, page size, dtypes of Q and of the cache.
            Empty for a plan that its own call makes.
        undivided_config: launch configuration of a kernel that does without the division; the shape's where None.
        kernel: "fused" or "specialized": whose row tiles the division counts.
    """

    buffer: torch.Tensor
    batch: int
    shape: Shape
    window: int
    divides: bool
    tree: Tree | None
    call: tuple[object, ...] = ()
    undivided_config: LaunchConfig | None = None
    kernel: str = "fused"

    def undivided(self) -> Plan:
        """The same packed masks in the same memory, without the division: for layers of another window than the plan's.

        It holds what the buffer holds, so whatever fills this plan anew fills that one too.
        """
        if not self.divides:
            return self
        shape = replace(self.shape, config=self.undivided_config or self.shape.config)
        return replace(self, buffer=self.buffer[self.bits_at :], shape=shape, divides=False)

    @property
    def combined_by_launch(self) -> bool:
        """Whether the parts of divided prefixes are combined by a second launch."""
        return self.divides and self.shape.config.combine == "launch"

    @property
    def capacity(self) -> int:
        return self.shape.capacity(self.batch) if self.divides else 0

    @property
    def counters_at(self) -> int:
        return self.capacity * ITEM_WORDS

    @property
    def items_at(self) -> int:
        """Where the number of items stands."""
        return self.counters_at + (self.shape.counters(self.batch) if self.divides else 0)

    @property
    def bits_at(self) -> int:
        end = self.items_at + int(self.divides)
        # To 16 bytes, which the kernels' loads of it rely on.
        return -(-end // 4) * 4

    @property
    def words(self) -> int:
        """int32 entries that the buffer needs."""
        return self.bits_at + (0 if self.tree is None else self.tree.size(self.batch))

    @property
    def bits(self) -> torch.Tensor | None:
        """int64 [rows * words]."""
        if self.tree is None:
            return None
        return self.buffer[self.bits_at :][: 2 * self.tree.rows * self.tree.words].view(torch.int64)

    @property
    def seen(self) -> torch.Tensor | None:
        """uint8 [bs * words * 64]."""
        if self.tree is None:
            return None
        start = self.bits_at + 2 * self.tree.rows * self.tree.words
        return self.buffer[start:][: 16 * self.batch * self.tree.words].view(torch.uint8)


@dataclass(frozen=True)
class Masks:
    """The masks of a step's trees, as `verify_attention` takes them."""

    mask: torch.Tensor
    full: bool
    offsets: torch.Tensor | None
    q_offsets: torch.Tensor | None
    queries: int


def with_buffer(plan: Plan, device: torch.device, out: torch.Tensor | None) -> Plan:
    """`plan` over `out`, a new buffer where that is None; not filled yet.

    Raises:
        ArgumentError: a buffer of another type or device, or too small.
    """
    if out is None:
        out = torch.empty(plan.words, dtype=torch.int32, device=device)
    checks.tensor("out", out, (f">= {plan.words}",), (torch.int32,), device)
    misaligned = device.type != "meta" and out.data_ptr() % 16 != 0
    if len(out) < plan.words or not out.is_contiguous() or misaligned:
        came = f"{len(out)} entries with strides {list(out.stride())}" + (", not at a multiple of 16 bytes" if misaligned else "")
        raise ArgumentError("out", came, f"{plan.words} or more, contiguous, at a multiple of 16 bytes")
    return replace(plan, buffer=out)


def plan_launch(prefix_lens: torch.Tensor, row_ids: torch.Tensor, plan: Plan, masks: Masks | None = None) -> Launch:
    """The launch that fills `plan.buffer`: for each request a program that divides, and some that pack its masks."""
    from sglang_specverify.kernels.plan_kernel import plan_kernel

    return Launch(
        kernel=plan_kernel,
        grid=(plan.batch, programs_for_a_request(plan, masks), 1),
        arguments={"prefix_lens": prefix_lens, "row_ids": row_ids, **plan_arguments(plan, masks)},
        constants=plan_constants(plan, masks),
        options={"num_warps": plan_warps(plan)},
    )


def programs_for_a_request(plan: Plan, masks: Masks | None) -> int:
    """Programs that fill a request's part of the buffer: one divides, and some pack each word of its masks."""
    return int(plan.divides) + (0 if plan.tree is None else plan.tree.words * packers(masks))


def packers(masks: Masks | None) -> int:
    """Programs for a word: one for every 32 rows; where that is more than one, others for what all rows see together."""
    blocks = _row_blocks(masks)
    return blocks + (64 // _seen_keys(masks) if blocks > 1 else 0)


def plan_warps(plan: Plan) -> int:
    """By the requests that a dividing program reads at once, and for packing."""
    block = _block_batch(plan.batch) if plan.divides else 1
    return 8 if block > 256 else 4 if block > 64 or plan.tree is not None else 1


def plan_arguments(plan: Plan, masks: Masks | None) -> dict[str, Any]:
    """What the programs that fill `plan.buffer` take, beside the lengths and the rows of the table."""
    return {
        "plan": plan.buffer,
        "batch": plan.batch,
        "capacity": plan.capacity,
        "window": plan.window,
        "slots": float(plan.shape.slots),
        "overhead": OVERHEAD_KEYS,
        "counters_at": plan.counters_at,
        "counters": plan.shape.counters(1),
        "mask": None if masks is None else masks.mask.view(torch.uint8),
        "mask_offsets": None if masks is None else masks.offsets,
        "q_offsets": None if masks is None else masks.q_offsets,
        "bits": plan.bits,
        "seen": plan.seen,
        "queries": 0 if masks is None else masks.queries,
        "words": 0 if plan.tree is None else plan.tree.words,
    }


def plan_constants(plan: Plan, masks: Masks | None) -> dict[str, Any]:
    """The constants of those programs; of what one does not do they hold nothing that varies, so that fewer are compiled."""
    divides, deterministic = plan.divides, plan.divides and plan.shape.deterministic
    return {
        "SPLIT": divides,
        "TREE": plan.tree is not None,
        "FULL_MASK": masks is not None and masks.full,
        "RAGGED": masks is not None and masks.q_offsets is not None,
        "HAS_WINDOW": divides and plan.window >= 0,
        "DETERMINISTIC": deterministic,
        "BY_LAUNCH": plan.combined_by_launch,
        "MAX_SPLITS": plan.shape.max_splits if deterministic else 1,
        # An undivided plan of the specialised kernel has the fused one's configuration: a pair that nothing is looked up for.
        "MIN_CHUNK": (
            1 if not divides else DETERMINISTIC_CHUNK if deterministic else MIN_CHUNKS[plan.kernel, plan.shape.config.combine]
        ),
        "ALIGN": ALIGN,
        "BLOCK_BATCH": _block_batch(plan.batch) if divides else 16,
        "BLOCK_ITEMS": 64,
        "CANDIDATES": 16,
        "ROW_BLOCKS": _row_blocks(masks),
        "SEEN_ROWS": _seen_rows(masks),
        "SEEN_KEYS": _seen_keys(masks),
    }


def _block_batch(batch: int) -> int:
    return max(16, 1 << (batch - 1).bit_length()) if batch else 16


def _row_blocks(masks: Masks | None) -> int:
    return 1 if masks is None else -(-masks.queries // 32)


def _seen_rows(masks: Masks | None) -> int:
    return 64 if masks is None else max(64, 1 << (masks.queries - 1).bit_length())


def _seen_keys(masks: Masks | None) -> int:
    """Keys of a word that one program looks up in all rows: 4096 bytes at once, so fewer keys where there are many rows."""
    return min(64, max(8, 4096 // _seen_rows(masks)))
