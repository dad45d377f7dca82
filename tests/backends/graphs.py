"""CUDA graphs as SGLang's runners use them, on a CPU: buffers of fixed address, a batch that is captured over them, replays.

A graph replays what was recorded between `init_forward_metadata_in_graph` and the last layer. Here the same code runs again over
the captured batch and its buffers, and `Graph.addresses` says where it reads: nothing else of a real batch reaches it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from tests.backends.batches import Batch, draft_keys
from tests.backends.compare import Inputs, assert_close, expected, inputs, limit, run
from tests.backends.engine import Engine


class Buffers:
    """What a runner allocates once: for `requests` of them, `width` rows each, `slots` write slots each."""

    def __init__(self, requests: int, width: int, slots: int, fill: int) -> None:
        self.fill, self.width, self.slots = fill, width, slots
        self.input_ids = torch.zeros(requests * width, dtype=torch.int64)
        self.req_pool_indices = torch.zeros(requests, dtype=torch.int64)
        self.seq_lens = torch.full((requests,), fill, dtype=torch.int64)
        self.seq_lens_cpu = torch.full((requests,), fill, dtype=torch.int64)
        self.extend_seq_lens = torch.full((requests,), width, dtype=torch.int32)
        self.out_cache_loc = torch.zeros(requests * slots, dtype=torch.int64)
        self.positions = torch.zeros(requests * width, dtype=torch.int64)
        self.mamba_track_indices = None
        # What the runner has there before a draft stage made one: FULL_MASK, all visible.
        self.custom_mask = torch.ones(requests * width * (width + fill), dtype=torch.bool)

    def load(self, forward: ForwardBatch) -> None:
        """A real batch, and beside it padded requests: the fill length, row 0, slot 0."""
        rows = forward.batch_size
        self.seq_lens.fill_(self.fill)[:rows] = forward.seq_lens
        self.req_pool_indices.zero_()[:rows] = forward.req_pool_indices
        self.out_cache_loc.zero_()[: len(forward.out_cache_loc)] = forward.out_cache_loc
        self.positions.zero_()[: len(forward.positions)] = forward.positions
        self.extend_seq_lens.fill_(self.width)
        if forward.extend_seq_lens is not None:
            self.extend_seq_lens[:rows] = forward.extend_seq_lens


class Graph:
    """One captured batch size of one backend. `mode` is that of the pass."""

    def __init__(self, engine: Engine, backend: Any, buffers: Buffers, mode: ForwardMode, requests: int) -> None:
        self.engine, self.backend, self.buffers, self.mode, self.requests = engine, backend, buffers, mode, requests
        b, rows = buffers, requests * buffers.width
        self.batch = ForwardBatch(
            forward_mode=mode, batch_size=requests, input_ids=b.input_ids[:rows],
            req_pool_indices=b.req_pool_indices[:requests], seq_lens=b.seq_lens[:requests],
            seq_lens_cpu=b.seq_lens_cpu[:requests], out_cache_loc=b.out_cache_loc[: requests * b.slots],
            seq_lens_sum=requests * b.fill, positions=b.positions[:rows], return_logprob=False,
            extend_seq_lens=b.extend_seq_lens[:requests] if mode.is_draft_extend_v2() else None,
            extend_seq_lens_cpu=[b.width] * requests if mode.is_draft_extend_v2() else None, spec_info=self._spec(),
        )  # fmt: skip
        backend.kv_index_translator.bind_runner_slots(self.batch)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        backend.init_forward_metadata_in_graph(self.batch)

    def _spec(self) -> Any:
        s, b = self.engine.setup, self.buffers
        if self.mode.is_draft_extend_v2():
            return EagleDraftExtendInput(num_tokens_per_req=b.width)
        if self.mode.is_decode():
            return EagleDraftInput(topk_p=torch.ones(self.requests, s.topk), topk_index=torch.zeros(self.requests, s.topk))
        if s.algorithm == "NGRAM":
            return NgramVerifyInput(draft_token=None, custom_mask=b.custom_mask, positions=None, draft_token_num=b.width)
        names = ("draft_token", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
                 "retrieve_cum_len", "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu")  # fmt: skip
        nothing: dict[str, Any] = dict.fromkeys(names)
        return EagleVerifyInput(custom_mask=b.custom_mask, spec_steps=s.steps, topk=s.topk, draft_token_num=b.width, **nothing)

    def bound(self) -> Any:
        """The plugin's step of this graph."""
        bound = getattr(self.backend, "full_attn_backend", self.backend)._bound
        return bound[self.requests if self.mode.is_decode() else next(k for k in bound if k[1] == self.requests)]

    def addresses(self) -> dict[str, int]:
        """Where the layers of this graph read."""
        step = self.bound().step
        tensors = {
            "lens": step.prefix_lens, "table": step.full.table, "rows": step.row_ids, "mask": step.mask,
            "positions": step.positions, "offsets": step.q_offsets, "slots": step.full.draft_slots,
            "workspace": step.plans.workspace, **({} if step.plans.suffix is None else {"suffix": step.plans.suffix[0]}),
            **({} if step.window is None else {"window": step.window.table, "window slots": step.window.write_slots}),
            **{f"plan {i}": plan.buffer for i, plan in enumerate(step.plans.by_layer.values())},
        }  # fmt: skip
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}

    def load(self, batch: Batch) -> None:
        """What happens outside the graph before a replay."""
        forward, b = batch.forward, self.buffers
        b.load(forward)
        if self.mode.is_target_verify():
            view = build_replay_fb_view(
                forward_batch=forward, buffers=b, bs=self.requests, raw_bs=forward.batch_size,
                num_tokens=self.requests * b.width, global_num_tokens_cpu=None, seq_len_fill_value=b.fill,
                capture_forward_mode=self.mode, is_encoder_decoder=False,
            )  # fmt: skip
        else:
            padded = {
                "batch_size": self.requests, "forward_mode": self.mode, "seq_lens": b.seq_lens[: self.requests],
                "req_pool_indices": b.req_pool_indices[: self.requests], "positions": b.positions,
                "out_cache_loc": b.out_cache_loc[: self.requests * b.slots],
            }  # fmt: skip
            view = SimpleNamespace(**{**vars(forward), **padded})
        self.backend.init_forward_metadata_out_graph(view)

    def replay(self, batch: Batch, **how: Any) -> None:
        """Load and run one batch, every layer against the sum over its own keys."""
        self.load(batch)
        before = self.addresses()
        self.backend.init_forward_metadata_in_graph(self.batch)
        self.run(batch, **how)
        assert self.addresses() == before

    def run(self, batch: Batch, **how: Any) -> None:
        """The layers of the captured batch, whose padded rows are NaN."""
        if self.mode.is_decode():
            self._run_draft(batch, **how)
            return
        for layer in self.engine.layers:
            self._layer(layer, self.backend, batch, **how)

    def _run_draft(self, batch: Batch, **how: Any) -> None:
        s, whole, mine = self.engine.setup, self.batch.out_cache_loc, batch.forward.out_cache_loc
        slots = per_step_draft_out_cache_loc(whole, self.requests, s.topk, s.steps)
        own = per_step_draft_out_cache_loc(mine, batch.forward.batch_size, s.topk, s.steps)
        for step in range(s.steps - 1):
            self.batch.out_cache_loc, batch.forward.out_cache_loc = slots[step], own[step]
            batch.keys, batch.positions = draft_keys(self.engine, step)
            for layer in self.engine.layers:
                self._layer(layer, self.backend.attn_backends[step], batch, **how)
        self.batch.out_cache_loc, batch.forward.out_cache_loc = whole, mine

    def _layer(self, layer: Any, backend: Any, batch: Batch, **how: Any) -> None:
        x = inputs(self.engine, batch.forward, **how)
        rows = self.requests * self.buffers.width
        padded = [torch.full((rows, *one.shape[1:]), torch.nan, dtype=one.dtype) for one in (x.q, x.k, x.v)]
        for into, one in zip(padded, (x.q, x.k, x.v), strict=True):
            into[: len(one)] = one
        out = run(backend, layer, self.batch, Inputs(*padded, x.more))
        assert_close(out[: len(batch.keys)], expected(self.engine, layer, batch, x), limit(self.backend, out.dtype))


def buffers_for(engine: Engine, backend: Any, mode: ForwardMode, requests: int) -> Buffers:
    """A runner's buffers for up to `requests`, and the backend's, made as a runner has them made."""
    s = engine.setup
    width = s.topk if mode.is_decode() else s.draft_tokens
    one = backend.attn_backends[0] if mode.is_decode() else backend
    backend.init_cuda_graph_state(requests, requests * width)
    return Buffers(requests, width, width * s.steps if mode.is_decode() else width, one.get_cuda_graph_seq_len_fill_value())
