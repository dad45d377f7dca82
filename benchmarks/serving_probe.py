"""A second SGLang plugin, for measurements only: it watches a scheduler from inside, and breaks verify on request.

It loads in every SGLang process through an entry point that `serving_farm.py` writes, and acts in the scheduler's alone.
`SERVING_PROBE` names its directory: `paths.jsonl` receives the accepted paths of each verify step; a file `ask` is answered
by `answer.json`; and `fault`, where it exists, names the fault of verify to inject from the next step on, eager servers only.
"""

from __future__ import annotations

import collections
import copy
import gc
import importlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

#: Faults of verify: greedy tokens must differ.
FAULTS = {
    "shifted mask": "each draft token sees its neighbours' ancestors",
    "stale slot": "the newest prefix token is read from another slot",
    "position off by one": "draft tokens are rotated to the position after their own",
    "length off by one": "verify does not see the newest prefix token",
}
#: How often the watching thread looks, in seconds.
_PERIOD = 0.1

_counts: collections.Counter[str] = collections.Counter()
#: SGLang's observer of its pools, once the scheduler has been idle.
_pools: list[Any] = []


def register() -> None:
    """SGLang calls this in each process; only the scheduler's has something to watch."""
    directory = os.environ.get("SERVING_PROBE")
    if not directory or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    paths = _Paths(Path(directory))
    _watch_idle_checks()
    if os.environ.get("SERVING_PROBE_PLUGIN"):
        _watch_variants()
    if os.environ.get("SERVING_PROBE_DETERMINISTIC") and not torch.cuda.is_available():
        _leave_operators()
    if os.environ.get("SERVING_PROBE_FAULTS"):
        _break_on_request(Path(directory))
    threading.Thread(target=_serve, args=(Path(directory), paths), daemon=True).start()


class _Paths:
    """Accepted paths, copied off the device behind the step: waiting for them would hide what overlaps with it.

    SGLang accepts outside its graphs, so servers with graphs are watched too; what would be recorded into one is counted.
    """

    def __init__(self, directory: Path) -> None:
        from sglang.srt.speculative import eagle_utils

        self._file = directory / "paths.jsonl"
        self._waiting: collections.deque[tuple[Any, list[torch.Tensor]]] = collections.deque()
        self._stock = eagle_utils.verify_tree_greedy_func
        eagle_utils.verify_tree_greedy_func = self._verify

    def _verify(self, *args: Any, **kwargs: Any) -> Any:
        result = self._stock(*args, **kwargs)
        watched = (result[1], kwargs["retrieve_next_token"], kwargs["retrieve_next_sibling"])
        if not result[1].is_cuda:
            self._waiting.append((None, [tensor.clone() for tensor in watched]))
        elif torch.cuda.is_current_stream_capturing():
            _counts["verify steps inside a graph, not watched"] += 1
        else:
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in watched]
            for target, source in zip(copies, watched, strict=True):
                target.copy_(source, non_blocking=True)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._waiting.append((done, copies))
        _counts["verify steps"] += 1
        return result

    def write(self) -> None:
        """Write those that have arrived."""
        # By name: type checks of this folder do not follow into that of the tests.
        accepted_ordinals = importlib.import_module("tests.parity.probe").accepted_ordinals
        lines = []
        while self._waiting and (self._waiting[0][0] is None or self._waiting[0][0].query()):
            _, (index, children, siblings) = self._waiting.popleft()
            rows = min(len(index), len(children))
            lines.append(json.dumps(accepted_ordinals(index[:rows], children[:rows], siblings[:rows])))
        if lines:
            with self._file.open("a") as file:
                file.write("\n".join(lines) + "\n")


def _watch_idle_checks() -> None:
    """Count how often SGLang compared its pools with what should be free: a check that is off finds no leak."""
    from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker as Checker

    stock = Checker._check_all_pools

    def check(self: Any, *args: Any, **kwargs: Any) -> Any:
        _counts["pool checks"] += 1
        _pools[:] = [self.pool_stats_observer]
        return stock(self, *args, **kwargs)

    Checker._check_all_pools = check


def _watch_variants() -> None:
    """Count which implementation of the kernels served, which routes do not say (under a graph: when it is captured)."""
    from sglang_specverify.kernels import run

    stock = run.choose

    def choose(a: Any, *args: Any, **kwargs: Any) -> Any:
        choice = stock(a, *args, **kwargs)
        _counts[f"variant {choice.name}: {type(a).__name__.removesuffix('Arguments').lower()}"] += 1
        _counts[f"deterministic {choice.name}"] += a.deterministic
        return choice

    run.choose = choose


def _leave_operators() -> None:
    """Without a GPU SGLang finds no device for its batch-invariant operators, and would not start in deterministic mode."""
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


def _break_on_request(directory: Path) -> None:
    """Break the step that verify reads; a captured graph reads another, so this is for servers without."""
    from sglang_specverify.backends import routed
    from sglang_specverify.routing.facts import Mode

    # Not by its type, whose methods may not be replaced.
    backend: Any = routed.RoutedBackend
    read, mask, metadata = backend._read_step, backend._mask, backend.init_forward_metadata

    def fault() -> str:
        path = directory / "fault"
        return path.read_text() if path.exists() else ""

    def shifted(bits: torch.Tensor, rows: int) -> torch.Tensor:
        width = round((bits.numel() // max(1, rows)) ** 0.5)
        return bits.reshape(rows, width, width).roll(1, -1).reshape(-1)

    def broken_read(self: Any, batch: Any, mode: Any) -> Any:
        wanted = fault() if mode is Mode.TARGET_VERIFY else ""
        if wanted == "length off by one":
            batch = copy.copy(batch)
            batch.seq_lens = (batch.seq_lens - 1).clamp(min=0)
        step = read(self, batch, mode)
        if wanted == "stale slot":
            table = step.full.table.clone()
            newest = (step.prefix_lens.to(torch.int64) - 1).clamp(min=0) // step.page_size
            table[torch.arange(step.rows, device=table.device), newest] = 0
            step = replace(step, full=replace(step.full, table=table))
        if wanted == "shifted mask" and step.mask is not None and step.plans is None:
            step = replace(step, mask=shifted(step.mask[: step.rows * (step.num_draft_tokens or 0) ** 2], step.rows))
        return step

    def broken_mask(self: Any, batch: Any, mode: Any, fixed: Any) -> Any:
        bits = mask(self, batch, mode, fixed)
        if bits is None or fault() != "shifted mask":
            return bits
        return shifted(bits, len(batch.req_pool_indices))

    def broken_metadata(self: Any, batch: Any) -> None:
        metadata(self, batch)
        step = self.step
        if step is not None and step.mode is Mode.TARGET_VERIFY and fault() == "position off by one":
            batch.positions[: step.rows * step.num_draft_tokens].view(step.rows, -1)[:, 1:] += 1

    backend._read_step, backend._mask, backend.init_forward_metadata = broken_read, broken_mask, broken_metadata


def _serve(directory: Path, paths: _Paths) -> None:
    """The watching thread: it only reads what the scheduler has, and answers one question."""
    ask = directory / "ask"
    while True:
        time.sleep(_PERIOD)
        try:
            paths.write()
            if not _pools or not ask.exists():
                continue  # not a scheduler after all, or one that is still starting
            wanted = ask.read_text()
            ask.unlink()
            answer = state(_pools[0])
            if wanted == "masks":
                answer["masks"] = masks()
        except Exception as error:  # the scheduler must not notice, and who asked must
            answer = {"error": f"{type(error).__name__}: {error}"}
        partial = directory / "answer.partial"
        partial.write_text(json.dumps(answer))
        partial.rename(directory / "answer.json")


def state(pools: Any) -> dict[str, Any]:
    """Tokens of the pools, request rows, memory of this process on the device, and what was counted."""
    from sglang.srt.environ import envs

    stats, rows = pools.get_pool_stats(), pools.req_to_token_pool
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "counts": dict(_counts),
        "strict idle check": bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get()),
        "capacity": pools.max_total_num_tokens,
        "available": stats.full_available_size,
        "in prefix cache": stats.full_evictable_size,
        "used beyond it": stats.full_num_used,
        "request rows": rows.size,
        "free request rows": len(rows.free_slots),
    }
    if torch.cuda.is_available():
        found |= {"torch allocated": torch.cuda.memory_allocated(), "torch reserved": torch.cuda.memory_reserved()}
    return found


def masks() -> list[dict[str, Any]]:
    """The buffers of tree masks that the attention backends of this process hold, each once."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    # SGLang hides what lived when it was ready from the collector, and so from this list.
    gc.unfreeze()
    found: dict[int, dict[str, Any]] = {}
    # By type: asking a weak proxy what it is fails where its object is gone.
    for backend in [one for one in gc.get_objects() if issubclass(type(one), AttentionBackend)]:
        held = {"verify_mask": getattr(getattr(backend, "verify_mask", None), "buffer", None)}
        held |= {
            name: value
            for name, value in vars(backend).items()
            if "mask" in name and "indptr" not in name and torch.is_tensor(value)
        }
        for name, buffer in held.items():
            if buffer is not None:
                one = {"backend": type(backend).__name__, "attribute": name, "bytes": buffer.numel() * buffer.element_size()}
                found.setdefault(buffer.data_ptr(), one)
    return list(found.values())
