"""SGLang's dsv4 backend with no server around it: its real class, pool and attention metadata, with rows in the pool.

Everything is on the CPU unless a device is named. What is not there is FlashMLA, whose module a stand-in takes the place of, and
the JIT store kernel: pages are written by the plain PyTorch quantisers that SGLang tests its formats with, and read back by their
inverses for the oracle. Every other byte of a pool is 0xFF, which reads as NaN in all formats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as witness

from sglang_specverify.kernels.sparse_mla.reference import Reference

if TYPE_CHECKING:
    import pytest

PAGE, SLOTS, HEADS = 256, 512, 64
#: Layer -> compress ratio.
RATIOS = (0, 2, 1)
_STAND_IN = "sglang.kernels.ops.attention.flash_mla_interface"


@contextmanager
def published(**arguments: Any) -> Iterator[None]:
    """SGLang's configuration of a chain with two draft tokens on one rank."""
    line: dict[str, Any] = {
        "device": "cpu", "attention_backend": "dsv4", "page_size": PAGE, "chunked_prefill_size": -1, "tp_size": 1,
        "dsv4_attn_backend": "flashmla", "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1,
        "speculative_num_steps": 1, "speculative_num_draft_tokens": 2,
    }  # fmt: skip
    published = get_context().override_server_args(**line | arguments)
    published.install()
    try:
        with get_parallel().override(attn_dcp_rank=0, attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0):
            yield
    finally:
        published.restore()


def stand_in(monkeypatch: pytest.MonkeyPatch | Any, attend: Callable[..., Any]) -> None:
    """FlashMLA's interface with `attend` for its decode, on a machine that SGLang takes for one with CUDA."""
    module = ModuleType(_STAND_IN)
    found: dict[str, Any] = {
        "flash_mla_with_kvcache": attend,
        "SPLIT_KV_MIN_TOPK": 641,
        "get_mla_metadata": lambda: (SimpleNamespace(), None),
    }
    module.__dict__.update(found)
    monkeypatch.setitem(sys.modules, _STAND_IN, module)
    monkeypatch.setattr(deepseek_v4_backend, "is_cuda", lambda: True)


def make_pool(
    layout: str = "v41", compressed: str | None = "auto", ratios: tuple[int, ...] = RATIOS, *, device: str = "cpu"
) -> Any:
    """The pool of three layers, of which the last two have selected rows of their own."""
    high = PAGE * 2 if 4 in ratios else 0
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=4, swa_size=SLOTS, c4_size=high // 4, c128_size=0, c4_state_pool_size=8 if high else 0,
        c128_state_pool_size=0, page_size=PAGE, swa_page_size=PAGE, dtype=torch.uint8, c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128, layer_num=len(ratios),
        device=device, enable_memory_saver=False, compression_ratios=list(ratios), full_size=SLOTS, kv_layout=layout,
        kv_source_layers=[layer for layer, ratio in enumerate(ratios) if ratio in (1, 2)], compressed_kv_layout=compressed,
    )  # fmt: skip


def make_runner(pool: Any, *, draft: bool = False, device: str = "cpu") -> Any:
    """What the backend asks a model runner for."""
    text = SimpleNamespace(model_type="deepseek_v41", index_topk=512, candidate_topk_blocks=0, candidate_block_size=0)
    return SimpleNamespace(
        device=device,
        page_size=PAGE,
        model_config=SimpleNamespace(context_len=SLOTS, head_dim=512, v_head_dim=512, hf_text_config=text, hf_config=text),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, SLOTS, dtype=torch.int32, device=device)),
        token_to_kv_pool=pool,
        hisparse_coordinator=None,
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
        is_draft_worker=draft,
        server_args=SimpleNamespace(),
        draft_attention_backend=None,
    )


def fill(pool: Any, layer: int, written: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write the first `written` slots of both caches of a layer; FP64 [slots, 512] of what each means, by SGLang's inverses.

    `generator` is one of the CPU, where the rows are made.
    """
    interleaved = pool.get_swa_key_layout().is_interleaved
    found = [_write(pool.get_swa_key_buffer_radix(layer), PAGE, written, False, interleaved, generator)]
    ratio = RATIOS[layer]
    if ratio:
        rows = PAGE // ratio
        assert pool.get_extra_key_page_size(layer) == rows
        found.append(_write(pool.get_extra_key_buffer(layer), rows, written, True, interleaved, generator))
    return found[0], found[1] if ratio else None


def _write(buffer: torch.Tensor, rows: int, written: int, fp4: bool, interleaved: bool, g: torch.Generator) -> torch.Tensor:
    values, scales = (256, 32) if fp4 else (512, 16)
    pages = -(-written // rows)
    x = torch.randn(pages, rows, 512, generator=g).to(torch.bfloat16)
    block = (witness.quantize_k_cache_v41_fp4 if fp4 else witness.quantize_k_cache_v41)(x)
    back = (witness.dequantize_k_cache_v41_fp4 if fp4 else witness.dequantize_k_cache_v41)(block, rows)
    flat = witness.interleave_pages(block, rows, values, scales)[:, : rows * (values + scales)].view(pages * rows, -1)
    flat[written:] = 0xFF
    split = flat.view(pages, -1) if interleaved else _block_split(flat.view(pages, rows, -1), values)
    buffer.view(torch.uint8).fill_(0xFF)
    buffer.view(torch.uint8)[:pages, : split.shape[1]] = split
    return back.reshape(pages * rows, 512)[:written].double().to(buffer.device)


def _block_split(rows: torch.Tensor, values: int) -> torch.Tensor:
    return torch.cat([rows[:, :, :values].flatten(1), rows[:, :, values:].flatten(1)], dim=1)


def metadata(ratio: int, lists: dict[str, torch.Tensor]) -> Any:
    """SGLang's attention metadata of a step, with the lists of the window and of one ratio."""
    tokens, device = len(lists["swa"]), lists["swa"].device
    none = torch.zeros(tokens, dtype=torch.int32, device=device)
    core = deepseek_v4_backend.DSV4AttnMetadata(
        page_size=PAGE, page_table=none[:, None], raw_out_loc=none, cuda_int32_kwargs={"device": device, "dtype": torch.int32},
        seq_lens_casual=none, positions_casual=none, swa_page_indices=lists["swa"], swa_topk_lengths=lists["swa_lens"],
        index_topk=512, present_ratios=(1, 2), low_ratios=(1, 2),
    )  # fmt: skip
    core.c0_flashmla_metadata = core.c1_flashmla_metadata = core.c2_flashmla_metadata = SimpleNamespace()
    if ratio:
        core.set_sparse_topk(ratio, page_indices=lists["extra"], topk_lengths=lists["extra_lens"])
    return deepseek_v4_backend.DSV4Metadata(core, None)


def attend(backend: Any, layer: int, q: torch.Tensor, sink: torch.Tensor, mode: ForwardMode) -> torch.Tensor:
    """One layer through SGLang's own forward pass."""
    k = torch.zeros(len(q), 512, dtype=torch.bfloat16, device=q.device)
    batch = SimpleNamespace(forward_mode=mode)
    module = SimpleNamespace(layer_id=layer, tp_q_head_num=q.shape[1], v_head_dim=512)
    out: torch.Tensor = backend.forward(q, k, k, module, batch, RATIOS[layer], save_kv_cache=False, attn_sink=sink)
    return out


def expected(q: torch.Tensor, sink: torch.Tensor, keys: list[torch.Tensor]) -> Reference:
    """FP64 attention of q [T, H, 512] over each row's own keys, with what its errors scale with."""
    out, lse, share = [], [], []
    for row, own in zip(q.double(), keys, strict=True):
        z = 512**-0.5 * row @ own.T
        lse.append(torch.logsumexp(z, dim=1))
        weights = torch.exp(z - torch.logaddexp(lse[-1], sink.double())[:, None])
        out.append(weights @ own)
        share.append(weights @ own.abs())
    shapes = [torch.stack(found)[:, None] for found in (out, lse, share)]
    return Reference(shapes[0], shapes[1], shapes[2], torch.zeros_like(shapes[0]), torch.ones(len(q), 1, 1).bool())
