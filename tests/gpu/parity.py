"""The rows of `backend_parity`: build a backend, run it eager and in graphs, compare. Import after `environment.prepare`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput

from sglang_specverify.door import scheduler
from sglang_specverify.hardware import detect
from sglang_specverify.kernels import draft_decode_attention_reference, verify_attention_reference
from tests.gpu.engine import Case, Engine, Load, draw

FP8 = torch.float8_e4m3fn
CASES = (
    Case("fa3", "tree", kernel="tile"),
    Case("fa3", "tree", kernel="tile", page_size=64, cache=FP8, scales=(0.5, 2.0)),
    Case("fa3", "tree", kernel="tile", sinks=True, softcap=30.0),
    Case("fa3", "tree", kernel="gather", page_size=64),
    Case("fa3", "tree", kernel="flash", page_size=64, sinks=True),
    Case("fa3", "tree", kernel="flash", page_size=64, cache=FP8, scales=(0.5, 2.0)),
    Case("fa4", "tree", kernel="flash"),
    Case("fa4", "tree", kernel="flash", softcap=30.0),
    Case("fa3", "tree", kernel="fused"),
    Case("fa3", "tree", kernel="fused", cache=FP8, page_size=64),
    Case("fa3", "tree", window=127, sinks=True, page_size=64),
    Case("fa3", "draft"),
    Case("fa3", "draft", page_size=64, cache=FP8),
    Case("fa3", "chain", width=4),
    Case("fa3", "extend", page_size=64),
    Case("triton", "tree"),
    Case("triton", "tree", page_size=64, cache=FP8, scales=(0.5, 2.0)),
    Case("triton", "chain", width=4),
    Case("triton", "chain", width=4, page_size=64, cache=FP8),
    Case("triton", "draft", page_size=64),
    Case("triton", "extend", width=4),
    Case("aiter", "tree"),
    Case("aiter", "tree", cache=FP8, scales=(0.5, 2.0)),
    Case("aiter", "tree", window=127, sinks=True),
    Case("aiter", "draft"),
    Case("aiter", "chain", width=4),
    Case("aiter", "chain", width=4, page_size=64, cache=FP8, scales=(0.5, 2.0)),
    Case("aiter", "draft", topk=1),
    Case("aiter", "draft", topk=1, page_size=64),
    Case("aiter", "extend", width=4, topk=1),
)

#: 16-bit weights and outputs. FlashAttention's FP8 rounds the weights to three bits of mantissa too.
BOUND, FP8_TILE_BOUND = 2.0**-6, 2.0**-3
MODES = {"tree": ForwardMode.TARGET_VERIFY, "chain": ForwardMode.TARGET_VERIFY, "draft": ForwardMode.DECODE,
         "extend": ForwardMode.DRAFT_EXTEND_V2}  # fmt: skip
_NAMES = {"tree": "target_verify", "chain": "target_verify", "draft": "draft_decode", "extend": "draft_extend"}


class Graph:
    """Buffers of fixed address for `requests`, a batch over them, and the layers' inputs and outputs."""

    def __init__(self, engine: Engine, backend: Any, requests: int) -> None:
        c, d = engine.case, engine.device
        self.engine, self.backend, self.requests, self.case = engine, backend, requests, c
        rows = requests * c.rows
        zeros = {"dtype": torch.int64, "device": d}
        self.seq_lens, self.pool_rows = torch.ones(requests, **zeros), torch.zeros(requests, **zeros)
        self.extend = torch.full((requests,), c.width, dtype=torch.int32, device=d)
        self.slots, self.positions = torch.zeros(requests * c.slots, **zeros), torch.zeros(rows, **zeros)
        self.q = [
            engine.normal(rows, c.q_heads * c.head_dim) for _ in range(c.layers * (c.steps - 1 if c.mode == "draft" else 1))
        ]
        self.k, self.v = ([engine.normal(rows, c.kv_heads, c.head_dim) for _ in self.q] for _ in range(2))
        self.sinks = torch.linspace(-1.0, 1.0, c.q_heads, device=d).to(torch.bfloat16) if c.sinks else None
        self.out: list[torch.Tensor] = []
        extending = c.mode == "extend"
        self.batch = ForwardBatch(
            forward_mode=MODES[c.mode], batch_size=requests, input_ids=torch.zeros(rows, **zeros),
            req_pool_indices=self.pool_rows, seq_lens=self.seq_lens, seq_lens_cpu=torch.ones(requests, dtype=torch.int64),
            out_cache_loc=self.slots, seq_lens_sum=requests, positions=self.positions, return_logprob=False,
            extend_seq_lens=self.extend if extending else None,
            extend_seq_lens_cpu=[c.width] * requests if extending else None, spec_info=self._spec(),
        )  # fmt: skip
        (backend.attn_backends[0] if c.mode == "draft" else backend).kv_index_translator.bind_runner_slots(self.batch)

    def _spec(self) -> Any:
        c, d = self.case, self.engine.device
        if c.mode == "draft":
            return EagleDraftInput(topk_p=torch.ones(self.requests, c.topk, device=d),
                                   topk_index=torch.zeros(self.requests, c.topk, dtype=torch.int64, device=d))  # fmt: skip
        if c.mode == "extend":
            return EagleDraftExtendInput(num_tokens_per_req=c.width)
        names = ("draft_token", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
                 "retrieve_cum_len", "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu")  # fmt: skip
        nothing: dict[str, Any] = dict.fromkeys(names)
        published = self.backend.verify_mask
        mask = None if published is None else published.buffer
        topk = 1 if c.mode == "chain" else c.topk
        return EagleVerifyInput(custom_mask=mask, spec_steps=c.steps, topk=topk, draft_token_num=c.width, **nothing)

    def load(self, load: Load) -> None:
        """Requests of `load`, then padded ones: length 1, row 0, slot 0."""
        c, count = self.case, len(load.lens)
        self.seq_lens.fill_(1)[:count] = load.lens + (c.width if c.mode == "extend" else 0)
        self.pool_rows.zero_()[:count] = torch.arange(1, count + 1, device=self.engine.device)
        self.slots.zero_()[: count * c.slots] = load.slots.flatten()
        ahead = load.depth if c.mode == "tree" else torch.arange(c.rows, device=self.engine.device) * (c.mode != "draft")
        self.positions.zero_()[: count * c.rows] = (load.lens[:, None] + ahead).expand(count, c.rows).flatten()
        if c.mode == "tree":
            self.backend.verify_mask.buffer[: load.mask.numel()] = load.mask.flatten()

    def layers(self) -> None:
        """Every layer, in every step of a draft."""
        c, self.out = self.case, []
        whole, more = self.batch.out_cache_loc, {} if self.sinks is None else {"sinks": self.sinks}
        inputs = zip(self.q, self.k, self.v, strict=True)
        for step in range(c.steps - 1 if c.mode == "draft" else 1):
            backend = self.backend
            if c.mode == "draft":
                backend = self.backend.attn_backends[step]
                self.batch.out_cache_loc = whole.view(self.requests * c.topk, c.steps)[:, step].contiguous()
            with forward_context(ForwardContext(attn_backend=backend)):
                for layer in self.engine.layers:
                    q, k, v = next(inputs)
                    self.out.append(layer(q, k.clone(), v.clone(), self.batch, **more))
        self.batch.out_cache_loc = whole

    def error(self, load: Load) -> float:
        """The largest error of any layer, relative to the largest value of a row's head; infinite where not finite."""
        c, e, count = self.case, self.engine, len(load.lens)
        rows, worst = count * c.rows, 0.0
        table = e.rows.req_to_token[1 : count + 1].to(torch.int32)
        ids = torch.arange(count, dtype=torch.int32, device=e.device)
        for number, got in enumerate(self.out):
            layer = e.layers[number % c.layers]
            q = self.q[number][:rows].view(rows, c.q_heads, c.head_dim)
            # As the base's own decode takes Q; SGLang's aiter backend verifies chains by it as it is.
            if c.cache == FP8 and (c.base == "fa3" or (c.base, c.mode) == ("aiter", "tree")):
                q = q.to(FP8).to(q.dtype)
            scales = c.scales or (1.0, 1.0)
            options = {"window": c.window, "softcap": c.softcap, "sinks": None if self.sinks is None else self.sinks.float(),
                       "k_scale": scales[0], "v_scale": scales[1]}  # fmt: skip
            # FP64 in, so that the reference is not rounded; and not every device indexes FP8.
            keys, values = (cache.float() for cache in e.pool.get_kv_buffer(layer.layer_id))
            tensors = (q.double(), keys, values, table, ids, load.lens)
            if c.mode == "draft":
                slots = load.slots.view(count, c.topk, c.steps)
                want = draft_decode_attention_reference(*tensors, slots, topk=c.topk, step=number // c.layers, **options)
            else:
                tree = {"mask": load.mask, "positions": self.positions[:rows]} if c.mode == "tree" else {}
                want = verify_attention_reference(*tensors, num_draft_tokens=c.width, **tree, **options)
            got, want = got[:rows].view(want.shape).double(), want.double()
            off = (got - want).abs().amax(-1) / want.abs().amax(-1)
            worst = max(worst, float(off.nan_to_num(torch.inf).max()))
        return worst


def bound(case: Case, kernel: str) -> float:
    """The largest error that a row may have."""
    return FP8_TILE_BOUND if case.cache == FP8 and case.base == "fa3" and kernel not in ("fused", "specialized") else BOUND


def cases(device: str) -> tuple[Case, ...]:
    """Those whose base runs here: FlashAttention on NVIDIA, aiter on AMD where it is installed; on a CPU stand-ins for both."""
    if device != "cuda":
        return CASES
    if torch.version.hip is None:
        return tuple(case for case in CASES if case.base != "aiter")
    bases = {"triton"} if find_spec("aiter") is None else {"triton", "aiter"}
    # The FP8 of gfx942 is another.
    plain = detect().family == "gfx942"
    return tuple(case for case in CASES if case.base in bases and not (plain and case.cache == FP8))


def build(engine: Engine) -> Any:
    c, runner = engine.case, engine.runner()
    *_, more = scheduler._CLASSES[c.base]
    if c.mode == "draft":
        return scheduler._class(c.base, 1)(runner, c.topk, c.steps, **more)
    return scheduler._class(c.base, 0)(runner, part="draft extend" if c.mode == "extend" else "target", **more)


def lengths(case: Case, count: int, most: int, seed: int) -> list[int]:
    """`count` prefix lengths up to `most`: one of them nothing, one the whole of it, the rest anywhere."""
    random = torch.Generator().manual_seed(seed)
    some = torch.randint(1, most, (count,), generator=random).tolist()
    return [0, most, *some][:count] if case.mode != "draft" else [1, most, *some][:count]


def record(graph: Graph, overwrite: bool) -> Any:
    """A graph of metadata and layers; with `overwrite`, every row becomes somebody else's between the two."""
    saved = graph.engine.rows.req_to_token.clone()

    def once() -> None:
        graph.backend.init_forward_metadata_in_graph(graph.batch)
        if overwrite:
            graph.engine.rows.req_to_token.fill_(1)
        graph.layers()

    if graph.engine.device == "cpu":
        return once
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            once()
            once()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            once()
    graph.engine.rows.req_to_token.copy_(saved)
    return captured.replay


def run(case: Case, device: str) -> dict[str, Any]:
    """One row of the table: errors by column, the kernel that was decided, microseconds of a replay."""
    os.environ["SGLANG_SPECVERIFY_TREE_KERNEL"] = case.kernel
    # The verify of chains that the plugin leaves to aiter, and the draft steps that need their lengths corrected.
    os.environ["SGLANG_USE_AITER_UNIFIED_ATTN"] = str(int(case.base == "aiter"))
    requests = 3 if device == "cpu" else 8
    most = case.context - 2 * case.width - 1
    engine = Engine(case, requests, device)
    row: dict[str, Any] = {}
    try:
        backend = build(engine)
        row["kernel"] = "+".join(sorted({r["kernel"] for r in backend.routes.report() if r["mode"] == _NAMES[case.mode]}))
        graph = Graph(engine, backend, requests)
        load = draw(engine, lengths(case, requests, most // 4, 1))
        graph.load(load)
        with torch.no_grad():
            backend.init_forward_metadata(eager_view(graph))
            graph.layers()
        row["eager"] = graph.error(load)
        backend.init_cuda_graph_state(requests, requests * case.rows)
        backend.init_forward_metadata_out_graph(graph.batch, in_capture=True)
        replay = record(graph, overwrite=False)
        for name, count, longest in (
            ("graph", requests, most // 4),
            ("longer", requests, most),
            ("fewer", requests - 2, most // 2),
        ):
            load = draw(engine, lengths(case, count, longest, count + longest))
            graph.load(load)
            backend.init_forward_metadata_out_graph(graph.batch)
            with torch.no_grad():
                replay()
            row[name] = graph.error(load)
        row["us"] = timed(replay, device)
        if row["kernel"] != "stock":
            saved = engine.rows.req_to_token.clone()
            replay = record(graph, overwrite=True)
            graph.load(load)
            with torch.no_grad():
                replay()
            engine.rows.req_to_token.copy_(saved)
            row["rows lost"] = graph.error(load)
    finally:
        engine.close()
    return row


def eager_view(graph: Graph) -> ForwardBatch:
    """The batch as an eager runner has it; SGLang's own extend also asks for the prefix lengths."""
    batch, c = graph.batch, graph.case
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    if c.mode == "extend":
        batch.extend_prefix_lens = batch.seq_lens - batch.extend_seq_lens
        batch.extend_prefix_lens_cpu = batch.extend_prefix_lens.tolist()
        batch.spec_info.num_accept_tokens = batch.extend_seq_lens
        batch.spec_info.num_correct_drafts = batch.extend_seq_lens - 1
    return batch


def timed(replay: Any, device: str) -> float:
    """Microseconds of a replay, the best of a few rounds."""
    if device == "cpu":
        return float("nan")
    best = float("inf")
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            replay()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) * 100)
    return best
