"""Calls of DeepSeek-V4.1 sparse MLA decode for tests, and what a kernel with the roundings of a contract would give, in FP32."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_specverify.kernels.sparse_mla.formats import DIM, FORMATS, allocate_cache, decode_rows, e4m3_table
from sglang_specverify.kernels.sparse_mla.quantize import deepseek_v41_quantize_cache
from sglang_specverify.kernels.sparse_mla.reference import Reference, reference_decode
from sglang_specverify.kernels.sparse_mla.rounding import to_e4m3

from .cases import generator


def build(
    seed: int = 0, *, batch: int = 2, queries: int = 1, heads: int = 4, window: int = 128, topk: int = 512, page_rows: int = 64,
    swa_format: str = "swa_mxfp8",
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `reference_decode`: normal q and rows, every list a random choice of slots.

    Sinks are about the LSE of 640 such keys, 7: one around 0 would have a thousandth of the weight, and no gate would see it.
    """
    gen = generator(seed)

    def pool(name: str, needed: int) -> torch.Tensor:
        pages = -(-(needed + needed // 4 + 1) // page_rows)
        x = torch.randn(pages * page_rows, DIM, generator=gen)
        return deepseek_v41_quantize_cache(x, name, page_rows)

    def choice(cache: torch.Tensor, width: int) -> torch.Tensor:
        slots = len(cache) * page_rows
        lists = [torch.randperm(slots, generator=gen)[:width] for _ in range(batch * queries)]
        return torch.stack(lists).view(batch, queries, width).int()

    swa, main = pool(swa_format, window), pool("main_kv_fp4", topk)
    return {
        "q": torch.randn(batch, queries, heads, DIM, generator=gen).bfloat16(), "swa_cache": swa,
        "swa_indices": choice(swa, window), "main_cache": main, "main_indices": choice(main, topk),
        "sink": 6 + torch.randn(heads, generator=gen), "swa_lens": None, "main_lens": None, "swa_format": swa_format,
        "swa_page_rows": page_rows, "main_page_rows": page_rows,
    }  # fmt: skip


def probe(**changes: Any) -> tuple[dict[str, Any], Reference]:
    """q = 0 and row s of both pools equal to e_s and e_(256 + s): the output counts how often each slot was read, evenly."""
    eye = torch.eye(DIM)
    a: dict[str, Any] = {
        "q": torch.zeros(1, 2, 2, DIM).bfloat16(),
        "swa_cache": deepseek_v41_quantize_cache(eye[:12], "swa_mxfp8", 4),
        "swa_indices": torch.tensor([[[0, 3, 4, 11], [1, 2, 9, 10]]]),
        "main_cache": deepseek_v41_quantize_cache(eye[256:266], "main_kv_fp4", 5),
        "main_indices": torch.tensor([[[0, 9, 5], [7, 6, 8]]]),
        "swa_page_rows": 4,
        "main_page_rows": 5,
    }
    a |= changes
    return a, reference_decode(**a)


def poisoned(kind: str, pages: int, page_rows: int) -> torch.Tensor:
    """A cache of nothing but NaN: E4M3 codes or scales 0x7F, and in FP4 nibbles 7 and 15 with such scales."""
    return allocate_cache(FORMATS[kind], pages, page_rows, "cpu").fill_(0x7F)


@dataclass(frozen=True)
class Faults:
    """What the emulated kernel does wrong; by default nothing.

    Attributes:
        sinks: how often the sink is counted.
        sink_in_lse: whether the LSE has it too.
        base2: whether the LSE is to base 2.
    """

    sinks: int = 1
    sink_in_lse: bool = False
    base2: bool = False


@dataclass(frozen=True)
class Emulation:
    """A kernel's arithmetic on the keys that it found.

    Attributes:
        contract: "exact" rounds P to BF16, "e4m3" main rows and 448 P to E4M3; the output is rounded to BF16.
        splits: parts of the list, each with a maximum of its own.
        bf16_partials: whether the parts' outputs are rounded to BF16.
    """

    contract: str = "exact"
    splits: int = 1
    bf16_partials: bool = False
    faults: Faults = field(default_factory=Faults)

    def but(self, **changes: Any) -> Emulation:
        return replace(self, **changes)

    def run(self, a: dict[str, Any], keys: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out bf16 [B, Sq, H, 512], lse [B, Sq, H]); `keys`, FP64 [n, 512] for each query row, replace those of the call."""
        q = a["q"]
        keys = keys_of(a, self.contract) if keys is None else keys
        results = [self.row(row, k.float(), a["sink"]) for row, k in zip(q.flatten(0, 1).float(), keys, strict=True)]
        out, lse = (torch.stack(parts) for parts in zip(*results, strict=True))
        return out.view(q.shape).bfloat16(), lse.view(q.shape[:3])

    def row(self, q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if len(keys) == 0:
            return torch.zeros_like(q), torch.full(q.shape[:1], -torch.inf)
        parts = [self._part(q, part) for part in keys.chunk(self.splits)]
        lses = torch.stack([lse for _, lse in parts])
        lse = torch.logsumexp(lses, 0)
        total = lse
        if sink is not None:
            for _ in range(self.faults.sinks):
                total = torch.logaddexp(total, sink)
        out = sum(torch.exp(part_lse - total)[:, None] * part for part, part_lse in parts)
        lse = total if self.faults.sink_in_lse else lse
        return out, lse * 1.4426950408889634 if self.faults.base2 else lse  # type: ignore[return-value]

    def _part(self, q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = (q @ keys.T) * DIM**-0.5
        peak = z.amax(dim=1, keepdim=True)
        p = torch.exp(z - peak)
        total = p.sum(dim=1, keepdim=True)
        rounded = p.bfloat16().float()
        if self.contract == "e4m3":
            rounded = e4m3_table()[to_e4m3(448 * p.double()).long()].float() / 448
        out = (rounded @ keys) / total
        return out.bfloat16().float() if self.bf16_partials else out, (peak + total.log())[:, 0]


def keys_of(a: dict[str, Any], contract: str = "exact") -> list[torch.Tensor]:
    """Each query row's keys, FP64 [n, 512], of a call whose entries all count."""
    found = []
    for b in range(a["q"].shape[0]):
        for s in range(a["q"].shape[1]):
            swa = decode_rows(a["swa_cache"], a["swa_indices"][b, s], a["swa_format"], a["swa_page_rows"])
            main = decode_rows(a["main_cache"], a["main_indices"][b, s], "main_kv_fp4", a["main_page_rows"])
            if contract == "e4m3":
                main = e4m3_table()[to_e4m3(main).long()]
            found.append(torch.cat([swa, main]))
    return found
