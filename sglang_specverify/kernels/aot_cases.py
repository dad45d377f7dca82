"""Calls to compile ahead of time: every launch that the tables hold, on the shapes and types that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from sglang_specverify.kernels.arguments import (
    DraftArguments,
    Kind,
    Problem,
    VerifyArguments,
    check_draft_decode,
    check_verify,
)
from sglang_specverify.kernels.configured import configured_launches
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.run import table_facts
from sglang_specverify.kernels.table_schema import Entry, TableFacts
from sglang_specverify.kernels.tables import find, read, rule

#: fused and fused_split are variants of `verify_attention`; tree_suffix is `tree_suffix_merge`.
Operation = Literal["fused", "fused_split", "tree_suffix"]

#: Operation, and which drafts a row sees there.
OPERATIONS: tuple[tuple[Operation, Kind], ...] = (
    ("fused", "chain"), ("fused", "qlen_only"), ("fused", "full_mask"), ("fused", "branches"),
    ("fused_split", "chain"), ("fused_split", "qlen_only"), ("fused_split", "full_mask"), ("fused_split", "branches"),
    ("tree_suffix", "chain"), ("tree_suffix", "qlen_only"), ("tree_suffix", "full_mask"),
)  # fmt: skip

#: Head dims of K and of V.
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))

#: Caches by name. CDNA3 has FP8 types of its own. "fp32" is one more, with queries of that type: no table knows those.
CACHES = ("bf16", "fp16", "e4m3", "e5m2")
_CACHE_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3 on gfx942": torch.float8_e4m3fnuz,
    "e5m2 on gfx942": torch.float8_e5m2fnuz,
}

#: What else a model or a server asks for; one is enough for a case.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window_sinks": {"window": 127, "sinks": True},
    "softcap_window": {"softcap": 50.0, "window": 4096},
    "page_64": {"page_size": 64},
    "page_16_map": {"page_size": 16, "slot_map": True},
    "head_scales": {"scales": True},
    # More than 2 GB: on AMD other load instructions.
    "large_pool": {"slots": 1 << 24},
    "ragged": {"ragged": True},
}

_KV_HEADS, _STEPS = 8, 5
#: Batches that a call may have: few requests, some, and enough to fill any device.
_BATCHES = (8, 1, 64)
#: Any number of programs that run at once; it sets sizes and no instruction.
_PROGRAMS = 264


@dataclass(frozen=True)
class Case:
    """One call on one architecture.

    Attributes:
        rows: packed query rows of a KV head, at most; so many as `group` divides.
        group: query heads per KV head.
        feature: one of `FEATURES`.
        batch: requests.
        deterministic: whether the call's bits may depend on its own request only.
    """

    arch: str
    operation: Operation
    kind: Kind
    dims: tuple[int, int]
    cache: str
    rows: int
    group: int = 4
    feature: str = "plain"
    batch: int = _BATCHES[0]
    deterministic: bool = False

    @property
    def name(self) -> str:
        dims = "x".join(map(str, dict.fromkeys(self.dims)))
        batch = "" if self.batch == _BATCHES[0] else f" batch{self.batch}"
        end = f"{batch} {self.feature}" + (" deterministic" if self.deterministic else "")
        return f"{self.arch} {self.operation} {self.kind} d{dims} {self.cache} rows{self.rows}{end}"

    @property
    def kernel(self) -> str:
        """Its name in the tables."""
        return "tree_suffix" if self.operation == "tree_suffix" else "fused"

    def facts(self) -> TableFacts:
        a, problem = self.arguments()
        split = self.operation == "fused_split"
        return table_facts(problem, a.k_cache.dtype, a.q.dtype, split=split, deterministic=self.deterministic)

    def configured(self) -> tuple[LaunchConfig, int, str]:
        """The launch configuration, the spilled bytes that it accepts, and where both stand."""
        return configured(self.arch, self.kernel, self.facts())

    def launch(self, config: LaunchConfig) -> Launch:
        """The launch of attention with tensors on the "meta" device."""
        # Behind it stands one launch where `config` has parts combined by one.
        return self.launches(config)[-2 if self.operation == "fused_split" and config.combine == "launch" else -1]

    def launches(self, config: LaunchConfig) -> list[Launch]:
        """All launches of the call: its plan's, attention, and the one that combines parts."""
        a, problem = self.arguments()
        out = meta(problem.rows, problem.q_heads, problem.v_head_dim, dtype=a.q.dtype)
        lse = meta(problem.rows, problem.q_heads, dtype=torch.float32) if a.return_lse else None
        divide, merge = self.operation == "fused_split", self.operation == "tree_suffix"
        return configured_launches(a, problem, out, lse, config, self.arch, divide=divide, merge=merge, programs=_PROGRAMS)

    def arguments(self) -> tuple[VerifyArguments | DraftArguments, Problem]:
        """The call, checked, with tensors on the "meta" device."""
        asked = FEATURES[self.feature]
        queries, heads = max(1, self.rows // self.group), self.group * _KV_HEADS
        page_size, window, slots = asked.get("page_size", 1), asked.get("window", -1), asked.get("slots", 1 << 16)
        cache = cache_type(self.cache, self.arch)
        dim, v_dim = self.dims
        common: dict[str, Any] = {
            "q": meta(self.batch * queries, heads, dim, dtype=cache if self.cache in ("fp16", "fp32") else torch.bfloat16),
            "k_cache": meta(slots, _KV_HEADS, dim, dtype=cache),
            "v_cache": meta(slots, _KV_HEADS, v_dim, dtype=cache),
            "table": meta(self.batch, 1 << 15, dtype=torch.int32),
            "row_ids": meta(self.batch, dtype=torch.int32),
            "prefix_lens": meta(self.batch, dtype=torch.int32),
            "page_size": page_size,
            "slot_map": meta(slots, dtype=torch.int64) if asked.get("slot_map") else None,
            "window": window,
            "softcap": asked.get("softcap", 0.0),
            "sinks": meta(heads, dtype=torch.float32) if asked.get("sinks") else None,
            "k_scale": meta(_KV_HEADS, dtype=torch.float32) if asked.get("scales") else 1.0,
            "v_scale": meta(_KV_HEADS, dtype=torch.float32) if asked.get("scales") else 1.0,
            "sm_scale": None,
            "deterministic": self.deterministic,
            "out": None,
            "lse": None,
            "return_lse": self.feature != "plain" or self.operation == "tree_suffix",
        }
        if self.kind == "branches":
            drafted = meta(self.batch, queries, _STEPS, dtype=torch.int64)
            draft = DraftArguments(**common, draft_slots=drafted, topk=queries, step=_STEPS - 1)
            return draft, check_draft_decode(draft)
        full, ragged = self.kind == "full_mask", bool(asked.get("ragged"))
        mask = {"qlen_only": (self.batch, queries, queries), "full_mask": (1 << 20,)}
        verify = VerifyArguments(
            **common,
            num_draft_tokens=queries,
            q_offsets=meta(self.batch + 1, dtype=torch.int32) if ragged else None,
            mask=None if self.kind == "chain" else meta(*mask[self.kind], dtype=torch.bool),
            mask_layout="full_mask" if full else "qlen_only",
            mask_offsets=meta(self.batch + 1, dtype=torch.int64) if full else None,
            positions=meta(self.batch * queries, dtype=torch.int64) if window >= 0 else None,
        )
        return verify, check_verify(verify)


def configured(arch: str, kernel: str, facts: TableFacts) -> tuple[LaunchConfig, int, str]:
    """The launch configuration of a call, the spilled bytes that it accepts, and where both stand."""
    found = find(arch, kernel, facts)
    if isinstance(found, str):
        return rule(arch, kernel, facts), 0, "rule"
    return found[1].launch, found[1].spill_bytes, f"{kernel} entry {found[0]}"


def cache_type(cache: str, arch: str) -> torch.dtype:
    """The type of a cache of that name, as `arch` has it."""
    return _CACHE_TYPES.get(f"{cache} on {arch}", _CACHE_TYPES[cache])


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory: it stands for its type, its size and an alignment of 16."""
    return torch.empty(shape, dtype=dtype, device="meta")


def serves(kind: str, feature: str) -> bool:
    """Whether there is such a call: ragged rows have no common W, and branches always have one."""
    return feature != "ragged" or kind in ("chain", "full_mask")


def shipped(arch: str) -> Iterator[Case]:
    """Calls that together reach every entry of the table of `arch`, each with every shape and cache type that it serves.

    FP16 caches, which compile like BF16 ones, and E5M2 ones come with one head dim; features take turns. Behind them, for
    every range of rows that an entry divides by how full the device is, what serves a deterministic call, which never says that.
    """
    features, groups, turn = tuple(FEATURES), (4, 8, 1, 5), 0
    for (operation, kind), dims, cache in product(OPERATIONS, DIMS, CACHES):
        if cache in ("fp16", "e5m2") and dims != (128, 128):
            continue
        for rows, batch in _sizes(arch, "tree_suffix" if operation == "tree_suffix" else "fused"):
            turn += 1
            feature = next(name for k in range(len(features)) if serves(kind, name := features[(turn + k) % len(features)]))
            yield Case(arch, operation, kind, dims, cache, rows, groups[turn % len(groups)], feature, batch)
    for operation in ("fused", "fused_split", "tree_suffix"):
        for rows in _rows_by_total(arch, operation):
            yield Case(arch, operation, "qlen_only", (128, 128), "bf16", rows, deterministic=True)


def _rows_by_total(arch: str, operation: Operation) -> tuple[int, ...]:
    """Row counts for which the table of `arch` asks how many rows there are in all."""
    table, kernel = read(arch), "tree_suffix" if operation == "tree_suffix" else "fused"
    entries = () if table is None else table.kernels[kernel]
    asking = [when for when in map(_when, entries) if (operation == "fused_split") in when.get("split", (False, True))]
    named = {when.get("rows", (1, None)) for when in asking if "total_rows" in when}
    return tuple(sorted(_size(rows, (1, None))[0] for rows in named))


def _sizes(arch: str, kernel: str) -> tuple[tuple[int, int], ...]:
    """Row counts and batches in every range that an entry names: the most rows, or four times the least."""
    table = read(arch)
    entries = () if table is None else table.kernels[kernel]
    named: set[tuple[Any, Any]] = {
        (when.get("rows", (1, None)), when.get("total_rows", (1, None))) for when in map(_when, entries)
    }
    if not named:
        named = {((1, 16), (1, None)), ((17, 64), (1, None)), ((65, None), (1, None))}
    return tuple(sorted({_size(rows, total) for rows, total in named}))


def _when(entry: Entry) -> dict[str, tuple[Any, ...]]:
    return dict(entry.when)


def _size(rows: tuple[int, int | None], total: tuple[int, int | None]) -> tuple[int, int]:
    count = 4 * rows[0] if rows[1] is None else rows[1]
    fits = (batch for batch in _BATCHES if total[0] <= batch * _KV_HEADS * count <= (total[1] or 1 << 62))
    return count, next(fits, _BATCHES[0])
