"""One engine without a server: SGLang's pools, layers and published configuration, and requests at random slots.

The runner is the one stand-in. Batches are made here and not by SGLang's workers, so that a mask, a slot or a length is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """What one row of the table runs. `mode`: "tree", "chain", "draft" or "extend"."""

    base: str
    mode: str
    page_size: int = 1
    cache: torch.dtype = torch.bfloat16
    scales: tuple[float, float] | None = None
    window: int = -1
    sinks: bool = False
    softcap: float = 0.0
    width: int = 16
    topk: int = 4
    steps: int = 3
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 4096
    layers: int = 2
    kernel: str = "auto"

    @property
    def name(self) -> str:
        extra = [f"window {self.window}"] * (self.window >= 0) + ["sinks"] * self.sinks + ["cap"] * (self.softcap > 0)
        return ", ".join([f"{self.base} {self.mode}", *extra, *([] if self.kernel == "auto" else [self.kernel])])

    @property
    def cache_name(self) -> str:
        return "bf16" if self.cache == torch.bfloat16 else "fp8"

    @property
    def rows(self) -> int:
        """Rows of Q of a request."""
        return self.topk if self.mode == "draft" else self.width

    @property
    def slots(self) -> int:
        """Write slots of a request."""
        return self.topk * self.steps if self.mode == "draft" else self.width

    def tiny(self) -> Case:
        """The same for the interpreter."""
        page, window = min(self.page_size, 16), min(self.window, 6)
        return replace(self, page_size=page, window=window, width=min(self.width, 8), q_heads=4, kv_heads=2, head_dim=32,
                       context=256, layers=1)  # fmt: skip


class Engine:
    """Pools for `requests` of a case. Row and slot 0 are nobody's, as in SGLang."""

    def __init__(self, case: Case, requests: int, device: str) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.runtime_context import get_context, get_parallel

        self.case, self.device, self.requests = case, device, requests
        self._published = get_context().override_server_args(
            device=device, attention_backend=case.base, page_size=case.page_size, chunked_prefill_size=-1, tp_size=1,
            speculative_algorithm="EAGLE", speculative_eagle_topk=1 if case.mode == "chain" else case.topk,
            speculative_num_steps=case.steps, speculative_num_draft_tokens=case.width, enable_deterministic_inference=False,
        )  # fmt: skip
        self.server_args = self._published.install()
        self._ranks = get_parallel().override(attn_dcp_rank=0)
        self._ranks.__enter__()
        self.random = torch.Generator(device="cpu").manual_seed(7)
        pages = (requests + 1) * (case.context // case.page_size + case.topk + 1)
        slots = pages * case.page_size
        self.pool = MHATokenToKVPool(
            slots, page_size=case.page_size, dtype=case.cache, head_num=case.kv_heads, head_dim=case.head_dim,
            layer_num=case.layers, device=device, enable_memory_saver=False, enable_alt_stream=False,
        )  # fmt: skip
        paged = case.page_size > 1
        self.allocator: Any = (
            PagedTokenToKVPoolAllocator(slots, case.page_size, case.cache, device, self.pool, need_sort=False)
            if paged
            else TokenToKVPoolAllocator(slots, case.cache, device, self.pool, need_sort=False)
        )
        self.rows = ReqToTokenPool(requests + 2, case.context, device, enable_memory_saver=False)
        self.rows.req_to_token.zero_()
        self.pages = pages
        self.layers = [
            RadixAttention(case.q_heads, case.head_dim, case.head_dim**-0.5, case.kv_heads, index, logit_cap=case.softcap,
                           sliding_window_size=case.window)
            for index in range(case.layers)
        ]  # fmt: skip
        for layer in self.layers:
            if case.scales is not None:
                layer.k_scale, layer.v_scale = (torch.tensor(scale, device=device) for scale in case.scales)
                layer.k_scale_float, layer.v_scale_float = case.scales
            for buffer in self.pool.get_kv_buffer(layer.layer_id):
                buffer.copy_(self.normal(*buffer.shape).to(buffer.dtype))

    def close(self) -> None:
        self._ranks.__exit__(None, None, None)
        self._published.restore()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(torch.bfloat16).to(self.device)

    def runner(self) -> Any:
        """The attributes of a `ModelRunner` that the backends read."""
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        c, is_draft = self.case, self.case.mode in ("draft", "extend")
        config = SimpleNamespace(
            attention_arch=AttentionArch.MHA, context_len=c.context, head_dim=c.head_dim, v_head_dim=c.head_dim,
            swa_v_head_dim=c.head_dim, is_encoder_decoder=False, model_is_mrope=False, vocab_size=1 << 20,
            get_max_num_attention_heads=lambda: c.q_heads, get_num_kv_heads=lambda *_: c.kv_heads,
            hf_config=SimpleNamespace(architectures=["TestForCausalLM"], get_text_config=lambda: SimpleNamespace()),
            hf_text_config=SimpleNamespace(num_attention_heads=c.q_heads), is_local_attention_model=False,
            linear_attn_registry_result=None, requires_mm_token_modalities=False, dtype=torch.bfloat16, is_multimodal=False,
            num_attention_heads=c.q_heads,
        )  # fmt: skip
        translator = KVIndexTranslator(
            req_to_token=self.rows.req_to_token, token_to_kv_pool_allocator=self.allocator, token_to_kv_pool=self.pool,
            page_size=c.page_size, device=self.device, is_draft_worker=is_draft,
        )  # fmt: skip
        return SimpleNamespace(
            device=self.device, gpu_id=0, dtype=torch.bfloat16, kv_cache_dtype=c.cache, page_size=c.page_size,
            kv_cache_dtype_str="auto" if c.cache == torch.bfloat16 else "fp8_e4m3", req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool, token_to_kv_pool_allocator=self.allocator, kv_index_translator=translator,
            server_args=self.server_args, model=torch.nn.ModuleList(self.layers), model_config=config,
            spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE"), is_draft_worker=is_draft, attention_chunk_size=None,
            prefill_attention_backend_str=c.base, lora_manager=None, ngram_embedding_manager=SimpleNamespace(enabled=False),
            sliding_window_size=c.window if c.window >= 0 else None,
            decode_num_tokens_per_req=lambda **_: c.width,
        )  # fmt: skip


@dataclass
class Load:
    """Real requests of one replay: their prefix lengths, write slots [bs, slots], trees [bs, W, W] and depths [bs, W]."""

    lens: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    depth: torch.Tensor


def draw(engine: Engine, lens: list[int]) -> Load:
    """New rows for requests of these prefix lengths, at random pages; row r + 1 is request r's."""
    c, table = engine.case, engine.rows.req_to_token
    free = (torch.randperm(engine.pages - 1, generator=engine.random) + 1).tolist()
    writes = []
    table.zero_()
    for r, length in enumerate(lens):
        chain = c.mode == "draft" and c.topk == 1
        # The draft of a chain lies behind its prefix; branches have pages of their own.
        own = c.steps if chain else 0 if c.mode == "draft" else c.width
        count = -(-(length + own) // c.page_size)
        pages = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        slots = (pages[:, None] * c.page_size + torch.arange(c.page_size)).flatten()
        if c.mode == "draft" and not chain:
            branches = torch.tensor([free.pop() for _ in range(c.topk * -(-c.steps // c.page_size))]).view(c.topk, -1)
            places = (branches[:, :, None] * c.page_size + torch.arange(c.page_size)).view(c.topk, -1)
            writes.append(places[:, : c.steps].flatten())
        else:
            writes.append(slots[length : length + own])
        table[r + 1, : len(slots)] = slots.to(device=engine.device, dtype=table.dtype)
    mask = torch.zeros(len(lens), c.width, c.width, dtype=torch.bool)
    depth = torch.zeros(len(lens), c.width, dtype=torch.int64)
    for r in range(len(lens)):
        for i in range(c.width):
            if i:
                # No deeper than a draft of so many steps draws them.
                parents = (depth[r, :i] < c.steps).nonzero().flatten()
                parent = int(parents[torch.randint(len(parents), (1,), generator=engine.random)])
                mask[r, i], depth[r, i] = mask[r, parent], depth[r, parent] + 1
            mask[r, i, i] = True
    move = torch.stack(writes).to(engine.device), mask.to(engine.device), depth.to(engine.device)
    return Load(torch.tensor(lens, device=engine.device), *move)
