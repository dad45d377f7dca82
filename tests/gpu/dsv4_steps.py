"""A step of SGLang's dsv4 backend on one layer: lists as SGLang makes them, at addresses that a graph keeps, and the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends.dsv4 import SpecverifyDeepseekV4Backend
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from tests.backends import dsv4

#: Slots that hold rows, of both caches of a layer: more than a page of each.
WRITTEN = 400
WINDOW, BEYOND = 128, 2**31 - 1


@dataclass
class Step:
    """A step's queries and lists at fixed addresses, and what it attends to. Heads past the `real` ones are SGLang's padding."""

    device: str
    layer: int
    layout: str
    tokens: int
    width: int = 512
    real: int = 64
    gap: int = 0
    backend: Any = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.layer)
        pool = dsv4.make_pool(self.layout, device=self.device)
        self.window, self.extra = dsv4.fill(pool, self.layer, WRITTEN, g)
        if self.gap:
            _spread_pages(pool, self.layer, self.gap)
        self.pool = pool
        self.backend = SpecverifyDeepseekV4Backend(dsv4.make_runner(pool, device=self.device))
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        seam = self.backend._flash_mla_with_kvcache
        self.backend._flash_mla_with_kvcache = lambda **call: self.seen.append(seam(**call)) or self.seen[-1]
        self.q = torch.zeros(self.tokens, dsv4.HEADS, 512, dtype=torch.bfloat16, device=self.device)
        self.sink = torch.randn(dsv4.HEADS, generator=g).to(self.device)
        self.lists = lists_of(self.tokens, self.width, 0, 0.0)
        self.lists = {name: value.to(self.device) for name, value in self.lists.items()}
        self.backend.forward_metadata = dsv4.metadata(dsv4.RATIOS[self.layer], self.lists)
        self.draw(0)

    def draw(self, seed: int, *, missing: float = 0.1, padded: int = 0, chain: bool = False) -> None:
        """Other queries and lists, in place; the last `padded` rows are SGLang's padding."""
        g = torch.Generator().manual_seed(100 + seed)
        self.q[:, : self.real] = (torch.randn(self.tokens, self.real, 512, generator=g) * 2).to(self.q)
        fresh = lists_of(self.tokens, self.width, seed, missing, chain=chain)
        if padded:
            fresh["swa"][-padded:], fresh["swa_lens"][-padded:] = 0, 1
            fresh["extra"][-padded:], fresh["extra_lens"][-padded:] = -1, 1
        for name, value in fresh.items():
            self.lists[name].copy_(value)

    def run(self, mode: ForwardMode = ForwardMode.DECODE) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, 1, H, 512], lse [T, 1, H]) of the step, through SGLang's forward pass."""
        self.seen.clear()
        out = dsv4.attend(self.backend, self.layer, self.q, self.sink, mode)
        (found,) = self.seen
        assert out.data_ptr() == found[0].data_ptr()
        return out[:, None], found[1].transpose(1, 2)

    def expected(self) -> Any:
        keys = []
        for row in range(self.tokens):
            parts = [listed(self.window, self.lists["swa"][row], self.lists["swa_lens"][row])]
            if self.extra is not None:
                parts.append(listed(self.extra, self.lists["extra"][row], self.lists["extra_lens"][row]))
            keys.append(torch.cat(parts))
        return dsv4.expected(self.q, self.sink, keys)

    def wrong(self, results: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
        return rejections(*results, self.expected())


def lists_of(tokens: int, width: int, seed: int, missing: float, *, chain: bool = False) -> dict[str, torch.Tensor]:
    """SGLang's lists of a step: int32 windows [T, 128] and selected rows [T, width], with lengths of at least 1.

    Of a chain, six rows a request, each row's window begins one slot after that of the row before.
    """
    g = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        slots = torch.randint(0, WRITTEN, shape, generator=g, dtype=torch.int32)
        chance = torch.rand(shape, generator=g)
        slots[chance < missing / 2] = -1
        slots[(chance >= missing / 2) & (chance < missing)] = BEYOND
        return slots

    swa, lens = some(tokens, WINDOW), torch.randint(1, WINDOW + 1, (tokens,), generator=g, dtype=torch.int32)
    if chain:
        order = torch.stack([torch.randperm(WRITTEN, generator=g) for _ in range(-(-tokens // 6))]).int()
        swa = torch.stack([order[row // 6, row % 6 : row % 6 + WINDOW] for row in range(tokens)])
        lens = torch.full((tokens,), WINDOW, dtype=torch.int32)
    # A window is never without its own token.
    swa[:, 0] = torch.randint(0, WRITTEN, (tokens,), generator=g, dtype=torch.int32) if not chain else swa[:, 0]
    extra = torch.randint(1, width + 1, (tokens,), generator=g, dtype=torch.int32)
    return {"swa": swa, "swa_lens": lens, "extra": some(tokens, width), "extra_lens": extra}


def listed(cache: torch.Tensor, slots: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    slots = slots[: int(length)].long()
    return cache[slots[(slots >= 0) & (slots < len(cache))]]


def _spread_pages(pool: Any, layer: int, gap: int) -> None:
    """Pages of both caches `gap` bytes further apart, NaN in between."""

    def wide(buffer: torch.Tensor) -> torch.Tensor:
        found = torch.full((buffer.shape[0], buffer.shape[1] + gap), 0xFF, dtype=torch.uint8, device=buffer.device)
        found[:, : buffer.shape[1]] = buffer.view(torch.uint8)
        return found

    swa = wide(pool.get_swa_key_buffer_radix(layer))
    pool.get_swa_key_buffer_radix = lambda layer_id: swa
    if dsv4.RATIOS[layer]:
        extra = wide(pool.get_extra_key_buffer(layer))
        pool.get_extra_key_buffer = lambda layer_id: extra
