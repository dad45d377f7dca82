"""Forward batches of one engine in every mode, through SGLang's own preparation, and what each row of Q may see.

What a row may see is listed here key by key from the requests alone: nothing of it comes from a mask, a snapshot or an
index list that a backend reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode, organize_draft_results
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input, prepare_for_draft
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import select_top_k_tokens

from tests.backends.engine import Engine, Request

#: Position and full-pool slot of a key.
Key = tuple[int, int]


@dataclass
class Batch:
    """One forward pass. `keys[t]` is what row t of Q sees, windows aside; `positions[t]` is where it stands."""

    forward: ForwardBatch
    keys: list[list[Key]]
    positions: list[int]


class Schedule(SimpleNamespace):
    """A `ScheduleBatch` of which only what is set is there: anything else is None, as in a plain request's batch."""

    def __getattr__(self, name: str) -> Any:
        return None


def schedule(engine: Engine, mode: ForwardMode, lens: list[int], **more: Any) -> Schedule:
    requests = engine.requests
    return Schedule(
        forward_mode=mode,
        reqs=[SimpleNamespace(lora_id=None, rid=str(i), token_type_ids=None, token_indices_to_pool=None, decision_layout=None,
                              extend_end=0, full_untruncated_fill_ids=[]) for i in range(len(requests))],
        req_pool_indices=torch.tensor([r.row for r in requests], dtype=torch.int64),
        seq_lens=torch.tensor(lens, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(lens, dtype=torch.int64),
        device="cpu",
        token_to_kv_pool_allocator=engine.allocator,
        req_to_token_pool=engine.req_to_token_pool,
        return_logprob=False,
        is_prefill_only=False,
        model_config=SimpleNamespace(vocab_size=1 << 20),
        **more,
    )  # fmt: skip


def init(engine: Engine, runner: Any, batch: Schedule) -> ForwardBatch:
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
    )


def prefix_keys(request: Request, length: int | None = None) -> list[Key]:
    return list(enumerate(request.slots[: request.length if length is None else length]))


def extend(
    engine: Engine, runner: Any, new: list[int], *, mode: ForwardMode = ForwardMode.EXTEND, spec_info: Any = None
) -> Batch:
    """Prefill (or MIXED) of `new[r]` tokens after each request's prefix."""
    lens = [r.length + n for r, n in zip(engine.requests, new, strict=True)]
    return _extend(engine, runner, mode, lens, [r.length for r in engine.requests], new, spec_info)


def draft_extend(engine: Engine, runner: Any, *, front: int = 0, new: list[int] | None = None) -> Batch:
    """Draft extend: `seq_lens` counts the window of tokens just verified, and `front` rows before it may be written again.

    `new` makes it ragged, as after a draft that kept only the accepted tokens.
    """
    count = engine.setup.draft_tokens
    new = [count] * len(engine.requests) if new is None else new
    prefix = [max(r.length - front, 0) for r in engine.requests]
    accepted = torch.tensor(new)
    spec = EagleDraftExtendInput(num_correct_drafts=accepted - 1, num_accept_tokens=accepted, num_front_tokens=front)
    spec.num_tokens_per_req = count + front
    rows = [r.length + n - p for r, n, p in zip(engine.requests, new, prefix, strict=True)]
    return _extend(
        engine, runner, ForwardMode.DRAFT_EXTEND_V2, [r.length + n for r, n in zip(engine.requests, new, strict=True)],
        prefix, rows, spec,
    )  # fmt: skip


def _extend(
    engine: Engine, runner: Any, mode: ForwardMode, lens: list[int], prefix: list[int], rows: list[int], spec_info: Any
) -> Batch:
    spans = [(r, p, p + n) for r, p, n in zip(engine.requests, prefix, rows, strict=True)]
    total = sum(rows)
    batch = schedule(
        engine, mode, lens, spec_info=spec_info, prefix_lens=prefix, extend_lens=rows, extend_num_tokens=total,
        input_ids=torch.zeros(total, dtype=torch.int64),
        out_cache_loc=torch.tensor([slot for r, first, last in spans for slot in r.slots[first:last]]),
    )  # fmt: skip
    places = [(r, p) for r, first, last in spans for p in range(first, last)]
    return Batch(init(engine, runner, batch), [prefix_keys(r, p + 1) for r, p in places], [p for _, p in places])


def decode(engine: Engine, runner: Any) -> Batch:
    """Plain decode: `seq_lens` counts the token being decoded."""
    lens = [r.length + 1 for r in engine.requests]
    batch = schedule(
        engine, ForwardMode.DECODE, lens, input_ids=torch.zeros(len(lens), dtype=torch.int64),
        out_cache_loc=torch.tensor([r.slots[r.length] for r in engine.requests]),
    )  # fmt: skip
    keys = [prefix_keys(r, r.length + 1) for r in engine.requests]
    return Batch(init(engine, runner, batch), keys, [r.length for r in engine.requests])


def idle(engine: Engine, runner: Any, *, padding: int = 0) -> Batch:
    """A data-parallel rank without work, or one whose batch was padded with requests of one token in row 0."""
    empty = torch.zeros(padding, dtype=torch.int64)
    batch = schedule(engine, ForwardMode.IDLE, [1] * padding, input_ids=empty, out_cache_loc=empty)
    batch.req_pool_indices = empty
    return Batch(init(engine, runner, batch), [], [])


@dataclass(frozen=True)
class Tree:
    """What the draft stage drew: `select` and `organize` results of SGLang's own functions."""

    parents: torch.Tensor
    index: torch.Tensor
    tokens: torch.Tensor


def draw_tree(engine: Engine) -> Tree:
    """A random EAGLE draft of every request: a tree where topk > 1, else a chain."""
    s, bs = engine.setup, len(engine.requests)
    scores, lists = None, ([], [], [])
    with torch.compiler.set_stance("force_eager"):
        for step in range(s.steps):
            rows = bs if step == 0 else bs * s.topk
            p = torch.rand(rows, s.topk, generator=engine.generator) * 0.9 + 0.05
            ids = torch.arange(rows * s.topk).view(rows, s.topk)
            _, _, scores, info = select_top_k_tokens(step, p, ids, None, scores, s.topk)
            for into, one in zip(lists, info, strict=True):
                into.append(one)
    parents, index, tokens = organize_draft_results(*lists, s.draft_tokens)
    return Tree(parents, index, tokens)


def verify(engine: Engine, runner: Any, backend: Any, tree: Tree, *, mask_mode: TreeMaskMode | None = None) -> Batch:
    """Target verify of EAGLE, EAGLE3 or STANDALONE: the mask goes where `backend` publishes, in that layout.

    `mask_mode` stands for a draft stage that knows of no published mask.
    """
    s = engine.setup
    lens = [r.length for r in engine.requests]
    batch = schedule(engine, ForwardMode.DECODE, lens)
    batch.seq_lens_sum = sum(lens)
    seen = SimpleNamespace(verify_mask=None, max_context_len=s.context) if mask_mode is not None else backend
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=seen, model_config=runner.model_config))
    spec = build_eagle_verify_input(
        batch, SimpleNamespace(bonus_tokens=torch.zeros(len(lens), dtype=torch.int64)), tree.parents, tree.index,
        tree.tokens, None, target_worker=worker, topk=s.topk, num_steps=s.steps, num_draft_tokens=s.draft_tokens,
        tree_mask_mode=default_tree_mask_mode() if mask_mode is None else mask_mode, device="cpu",
    )  # fmt: skip
    links = (spec.retrieve_next_token.tolist(), spec.retrieve_next_sibling.tolist())
    return _verify(engine, runner, spec, [_ancestors(first, other) for first, other in zip(*links, strict=True)])


def ngram(engine: Engine, runner: Any, parents: list[list[int]], *, full_mask: bool = False) -> Batch:
    """Target verify of NGRAM: `parents[r][i]` is the parent of draft i of request r, the root's is -1."""
    lines = [_lines(row) for row in parents]
    masks, positions = [], []
    for request, lined in zip(engine.requests, lines, strict=True):
        bits = torch.zeros(len(lined), len(lined), dtype=torch.bool)
        for i, line in enumerate(lined):
            bits[i, line] = True
        whole = torch.cat([torch.ones(len(lined), request.length, dtype=torch.bool), bits], dim=1)
        masks.append((whole if full_mask else bits).flatten())
        positions += [request.length + len(line) - 1 for line in lined]
    spec = NgramVerifyInput(
        draft_token=torch.zeros(len(positions), dtype=torch.int64), custom_mask=torch.cat(masks),
        positions=torch.tensor(positions), draft_token_num=engine.setup.draft_tokens,
    )  # fmt: skip
    return _verify(engine, runner, spec, lines)


def draw_parents(engine: Engine) -> list[list[int]]:
    """Irregular trees (chains where topk is 1), one a request."""
    s = engine.setup
    any_parent = s.topk > 1
    return [[-1] + [engine.random.randrange(i) if any_parent else i - 1 for i in range(1, s.draft_tokens)]
            for _ in engine.requests]  # fmt: skip


def _verify(engine: Engine, runner: Any, spec: Any, lines: list[list[list[int]]]) -> Batch:
    lens = [r.length for r in engine.requests]
    batch = schedule(engine, ForwardMode.TARGET_VERIFY, lens, spec_info=spec, input_ids=spec.draft_token)
    batch.out_cache_loc = assign_extend_cache_locs_uniform_func(
        req_pool_indices=batch.req_pool_indices, req_to_token=engine.req_to_token_pool.req_to_token,
        start_offset=batch.seq_lens, batch_size=len(lens), draft_token_num=spec.draft_token_num, device="cpu",
    )  # fmt: skip
    keys, positions = [], []
    for request, lined in zip(engine.requests, lines, strict=True):
        for line in lined:
            # A draft's slot is the one after the prefix by its number in the tree; its position is its depth.
            drafts = [(request.length + depth, request.slots[request.length + j]) for depth, j in enumerate(line)]
            keys.append(prefix_keys(request) + drafts)
            positions.append(request.length + len(line) - 1)
    return Batch(init(engine, runner, batch), keys, positions)


def _lines(parents: list[int]) -> list[list[int]]:
    """For each node the path from the root to it, itself included."""
    lines: list[list[int]] = []
    for i, parent in enumerate(parents):
        lines.append([*(lines[parent] if parent >= 0 else []), i])
    return lines


def _ancestors(first_child: list[int], sibling: list[int]) -> list[list[int]]:
    """Each node's path from the root, out of the first-child and next-sibling links that acceptance walks."""
    parents = [-1] * len(first_child)
    for node, child in enumerate(first_child):
        while child >= 0:
            parents[child] = node
            child = sibling[child]
    return _lines(parents)


def draft(engine: Engine, runner: Any) -> Batch:
    """The draft-decode batch with all its write slots, laid out by SGLang. Rows are those of step 0; see `draft_keys`."""
    s = engine.setup
    spec = EagleDraftInput(topk_p=torch.ones(len(engine.requests), s.topk), topk_index=torch.zeros(len(engine.requests), s.topk))
    batch = schedule(engine, ForwardMode.DECODE, [r.length for r in engine.requests], spec_info=spec)
    forward, _, _ = prepare_for_draft(spec, engine.req_to_token_pool, batch, None, runner, s.topk, s.steps)
    keys, positions = draft_keys(engine, 0)
    return Batch(forward, keys, positions)


def branch_slots(engine: Engine, request: Request, branch: int) -> list[int]:
    """Where a branch's tokens go: side by side, or above page size 1 in pages of the branch's own behind the tail's offset."""
    s, n = engine.setup, request.length
    start = n + branch * s.steps
    if s.page_size > 1 and s.topk > 1:
        tail = n % s.page_size
        pages = -(-(tail + s.steps) // s.page_size)
        start = n - tail + branch * pages * s.page_size + tail
    return request.slots[start : start + s.steps]


def draft_room(setup: Any, length: int) -> int:
    """How many tokens past `length` the branches need."""
    if setup.page_size == 1 or setup.topk == 1:
        return max(setup.topk * setup.steps, setup.draft_tokens)
    tail = length % setup.page_size
    return -(-(tail + setup.steps) // setup.page_size) * setup.topk * setup.page_size - tail


def draft_keys(engine: Engine, step: int) -> tuple[list[list[Key]], list[int]]:
    """What the rows of a step see, and where they stand: the prefix once, and the branch's tokens up to their own."""
    keys, positions = [], []
    for request in engine.requests:
        for branch in range(engine.setup.topk):
            own = list(enumerate(branch_slots(engine, request, branch), start=request.length))
            keys.append(prefix_keys(request) + own[: step + 1])
            positions.append(request.length + step)
    return keys, positions
