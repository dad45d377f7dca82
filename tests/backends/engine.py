"""One SGLang engine without a server: published configuration, pools, allocator, layers and a runner, all on the CPU.

Everything that a backend reads is SGLang's own object; the runner is the one stand-in, with the attributes that backends
ask a `ModelRunner` for and no others, so that a new one shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.backends import hybrid

DEVICE = "cpu"


@dataclass(frozen=True)
class Setup:
    """What one engine serves. `windows` has one entry a layer, -1 for full attention; sizes are in tokens."""

    algorithm: str | None = "EAGLE"
    topk: int = 1
    steps: int = 3
    draft_tokens: int = 4
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    windows: tuple[int, ...] = (-1,)
    window_pool: bool = False
    #: A hybrid's target, in which each of these layers follows a linear one, or its draft of one layer.
    hybrid: bool = False
    hybrid_draft: bool = False
    softcap: float = 0.0
    #: The name under which the model keeps the sinks of its layers, which then come with every call.
    sinks: str | None = None
    scales: tuple[float, float] | None = None
    context: int = 256
    slots: int = 1024
    pool_rows: int = 12
    requests: int | None = None
    draft_window: int | None = None
    seed: int = 0

    def but(self, **changes: Any) -> Setup:
        return replace(self, **changes)


@dataclass
class Request:
    """One request: its row of `req_to_token`, its prefix length, and the full-pool slot of each position."""

    row: int
    length: int
    slots: list[int]


class Engine:
    """See the module. `requests` are in batch order; their rows and slots are shuffled."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.generator = torch.Generator().manual_seed(setup.seed)
        self._published = get_context().override_server_args(
            device=DEVICE,
            attention_backend="triton",
            page_size=setup.page_size,
            chunked_prefill_size=-1,
            tp_size=1,
            speculative_algorithm=setup.algorithm,
            speculative_eagle_topk=setup.topk if setup.algorithm else None,
            speculative_num_steps=setup.steps if setup.algorithm else None,
            speculative_num_draft_tokens=setup.draft_tokens if setup.algorithm else None,
            speculative_draft_window_size=setup.draft_window,
            # Two, not eight: each split is a program of the interpreter.
            triton_attention_num_kv_splits=2,
            enable_deterministic_inference=False,
            max_running_requests=setup.requests,
        )
        self.server_args = self._published.install()
        # One rank of one: what a scheduler process learns when its groups are built.
        self._ranks = get_parallel().override(attn_dcp_rank=0)
        self._ranks.__enter__()
        self.hybrid = hybrid.config_of(len(setup.windows)) if setup.hybrid or setup.hybrid_draft else None
        self.layer_ids = self.hybrid.full_attention_layer_ids if setup.hybrid else list(range(len(setup.windows)))
        self.req_to_token_pool = self._requests()
        self.pool, self.allocator = self._pools()
        self.random.shuffle(self.req_to_token_pool.free_slots)
        self._shuffle_free()
        # What a row holds before it is written is not a slot of anybody: a read of it must show.
        self.req_to_token_pool.req_to_token.fill_(0)
        self.layers = [self._layer(index, window) for index, window in zip(self.layer_ids, setup.windows, strict=True)]
        self.requests: list[Request] = []

    def close(self) -> None:
        self._ranks.__exit__(None, None, None)
        self._published.restore()

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.setup.cache_dtype or self.setup.dtype

    @property
    def is_window_pool(self) -> bool:
        return isinstance(self.pool, SWAKVPool)

    def _requests(self) -> ReqToTokenPool:
        s = self.setup
        if self.hybrid is not None:
            return hybrid.request_pool(self.hybrid, s.pool_rows, s.context, s.draft_tokens, DEVICE)
        return ReqToTokenPool(s.pool_rows, s.context, DEVICE, enable_memory_saver=False)

    def _pools(self) -> tuple[Any, Any]:
        s = self.setup
        common: dict[str, Any] = {
            "page_size": s.page_size,
            "dtype": self.cache_dtype,
            "head_num": s.kv_heads,
            "head_dim": s.head_dim,
            "device": DEVICE,
            "enable_memory_saver": False,
        }
        if s.v_head_dim is not None:
            common["v_head_dim"] = s.v_head_dim
        if s.window_pool:
            of = [[i for i, window in enumerate(s.windows) if (window > -1) == kind] for kind in (True, False)]
            pool = SWAKVPool(
                size=s.slots, size_swa=s.slots // 2, swa_attention_layer_ids=of[0], full_attention_layer_ids=of[1],
                enable_kv_cache_copy=True, **common,
            )  # fmt: skip
            return pool, SWATokenToKVPoolAllocator(
                s.slots, s.slots // 2, s.page_size, self.cache_dtype, DEVICE, pool, need_sort=False
            )
        if self.hybrid is not None:
            pool: Any = hybrid.key_pool(self.layer_ids, self.req_to_token_pool, s.slots, common)
        else:
            pool = MHATokenToKVPool(
                s.slots, layer_num=len(s.windows), enable_alt_stream=False, enable_kv_cache_copy=True, **common
            )
        if s.page_size == 1:
            return pool, TokenToKVPoolAllocator(s.slots, self.cache_dtype, DEVICE, pool, need_sort=False)
        return pool, PagedTokenToKVPoolAllocator(s.slots, s.page_size, self.cache_dtype, DEVICE, pool, need_sort=False)

    def _shuffle_free(self) -> None:
        parts = [self.allocator] if not self.is_window_pool else [
            self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator,
        ]  # fmt: skip
        for part in parts:
            order = torch.randperm(len(part.free_pages), generator=self.generator)
            part.free_pages = part.free_pages[order]

    def _layer(self, index: int, window: int) -> RadixAttention:
        s = self.setup
        layer = RadixAttention(
            s.q_heads, s.head_dim, s.head_dim**-0.5, s.kv_heads, index,
            logit_cap=s.softcap, v_head_dim=-1 if s.v_head_dim is None else s.v_head_dim, sliding_window_size=window,
        )  # fmt: skip
        if s.scales is not None:
            layer.k_scale, layer.v_scale = (torch.tensor(scale) for scale in s.scales)
            layer.k_scale_float, layer.v_scale_float = s.scales
        return layer

    def sinks(self) -> torch.Tensor:
        """Of every layer, one for each query head."""
        return torch.linspace(-1.0, 1.0, self.setup.q_heads).to(self.setup.dtype)

    def _owner(self, layer: RadixAttention) -> torch.nn.Module:
        """The module of a model that calls the layer."""
        owner = torch.nn.Module()
        owner.attn = layer
        if self.setup.sinks is not None:
            setattr(owner, self.setup.sinks, torch.nn.Parameter(self.sinks(), requires_grad=False))
        return owner

    def runner(self, *, is_draft: bool = False, stock_decode_window: bool = False) -> Any:
        """The attributes of a `ModelRunner` that the backends read.

        `stock_decode_window` widens the window by the one key by which SGLang's Triton decode (window keys, its own
        included) falls short of its own extend and of FlashAttention (window + 1).
        """
        s = self.setup
        window = max(s.windows)
        v_dim = s.head_dim if s.v_head_dim is None else s.v_head_dim
        algorithm = SpeculativeAlgorithm.from_string(s.algorithm)
        config = SimpleNamespace(
            attention_arch=AttentionArch.MHA, context_len=s.context, head_dim=s.head_dim, v_head_dim=v_dim,
            swa_v_head_dim=v_dim, is_encoder_decoder=False, model_is_mrope=False, vocab_size=1 << 20,
            get_max_num_attention_heads=lambda: s.q_heads, get_num_kv_heads=lambda *_: s.kv_heads,
            hf_config=self.hybrid or SimpleNamespace(architectures=["TestForCausalLM"], get_text_config=SimpleNamespace),
            hf_text_config=SimpleNamespace(num_attention_heads=s.q_heads), is_local_attention_model=False,
            linear_attn_registry_result=None, requires_mm_token_modalities=False, dtype=s.dtype, is_multimodal=False,
            num_attention_heads=s.q_heads,
        )  # fmt: skip
        translator = KVIndexTranslator(
            req_to_token=self.req_to_token_pool.req_to_token, token_to_kv_pool_allocator=self.allocator,
            token_to_kv_pool=self.pool, page_size=s.page_size, device=DEVICE, is_draft_worker=is_draft,
        )  # fmt: skip
        return SimpleNamespace(
            device=DEVICE, gpu_id=0, dtype=s.dtype, kv_cache_dtype=self.cache_dtype, page_size=s.page_size,
            req_to_token_pool=self.req_to_token_pool, token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator, kv_index_translator=translator, server_args=self.server_args,
            model=torch.nn.ModuleList(self._owner(layer) for layer in self.layers), model_config=config, spec_algorithm=algorithm,
            is_draft_worker=is_draft, attention_chunk_size=None, use_mla_backend=False, prefill_attention_backend_str="triton",
            kv_cache_dtype_str="auto" if s.cache_dtype is None else "fp8_e4m3", lora_manager=None,
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            sliding_window_size=None if window < 0 else window + int(stock_decode_window),
            decode_num_tokens_per_req=lambda **_: s.draft_tokens if s.algorithm else 1,
        )  # fmt: skip

    def add(self, length: int, room: int, *, like: Request | None = None, shared: int = 0) -> Request:
        """A request of `length` tokens with slots for `room` more; the first `shared` (whole pages) are those of `like`."""
        end = length + room
        if self.setup.page_size > 1:
            end += -end % self.setup.page_size
        assert end <= self.setup.context, "the setup's context is too small for this request"
        assert shared % self.setup.page_size == 0, "the prefix cache shares whole pages"
        prefix = [] if like is None else like.slots[:shared]
        slots = prefix + self._allocate(len(prefix), end, prefix[-1] if prefix else -1)
        row = self.req_to_token_pool.alloc_rows(1)[0]
        self.req_to_token_pool.write((row, slice(0, end)), torch.tensor(slots, dtype=torch.int32))
        request = Request(row, length, slots)
        self.requests.append(request)
        return request

    def release(self) -> None:
        """Give back every request's row and slots; the next ones come in another order."""
        self.req_to_token_pool.free_slots += [request.row for request in self.requests]
        self.requests.clear()
        self.allocator.clear()
        self._shuffle_free()

    def _allocate(self, start: int, end: int, last: int) -> list[int]:
        if self.setup.page_size == 1:
            got = self.allocator.alloc(end - start)
        else:
            begin, stop, before = (torch.tensor([value]) for value in (start, end, last))
            got = self.allocator.alloc_extend(begin, begin, stop, stop, before, end - start)
        assert got is not None, "the setup's pool is too small for this request"
        return got.tolist()

    def fill(self, *, one_hot: bool = False) -> None:
        """Put the K and V of every request's prefix into the cache through the pool's own write, and NaN everywhere else."""
        prefixes = {slot for request in self.requests for slot in request.slots[: request.length]}
        slots = torch.tensor(sorted(prefixes), dtype=torch.int64)
        window_slots = self.pool.translate_loc_from_full_to_swa(slots) if self.is_window_pool else None
        for layer in self.layers:
            for buffer in self.pool.get_kv_buffer(layer.layer_id):
                buffer.copy_(torch.full_like(buffer, torch.nan, dtype=torch.float32))
            k, v = self.fresh_kv(slots, one_hot=one_hot)
            scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
            self.pool.set_kv_buffer(layer, KVWriteLoc(slots, window_slots), k, v, *scales)

    def fresh_kv(self, slots: torch.Tensor, *, one_hot: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V for tokens that go to `slots`; with `one_hot`, V says the slot."""
        s = self.setup
        v_dim = s.head_dim if s.v_head_dim is None else s.v_head_dim
        k = self.normal(len(slots), s.kv_heads, s.head_dim)
        if not one_hot:
            return k, self.normal(len(slots), s.kv_heads, v_dim)
        v = torch.zeros(len(slots), s.kv_heads, v_dim, dtype=s.dtype)
        v[torch.arange(len(slots)), :, slots] = 1
        return k, v

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.setup.dtype)
