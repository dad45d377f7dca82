"""Calls of sparse MLA decode as tests make them: guarded outputs, graphs replayed with other inputs, gates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.sparse_mla import decode
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.kernels.sparse_mla.hopper import ARCH
from sglang_specverify.kernels.sparse_mla.splits import deepseek_v41_decode_workspace_size
from tests.gpu.sparse_mla_problems import Problem, build, oracle

#: Query types by the name that rows have; on Hopper the first goes to the kernel with specialised warps, the second to Triton's.
QUERIES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}

#: Elements before and behind every buffer, and what they hold.
_MARGIN = 256
_GUARD = 0x5A
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Guarded:
    """A tensor inside a larger one, whose other bytes nobody may write; `padded` is its shape with gaps between rows."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, padded: tuple[int, ...] | None = None) -> None:
        size, word = math.prod(padded or shape), _INTS[dtype.itemsize]
        self._base = torch.empty(size + 2 * _MARGIN, dtype=word, device=device)
        inner = self._base[_MARGIN : _MARGIN + size].view(padded or shape)[tuple(slice(n) for n in shape)]
        outside = torch.ones(self._base.shape, dtype=torch.bool, device=device)
        outside[_MARGIN : _MARGIN + size].view(padded or shape)[tuple(slice(n) for n in shape)] = False
        self._inner, self._outside = inner, outside
        self.view = self._base[_MARGIN : _MARGIN + size].view(dtype).view(padded or shape)[tuple(slice(n) for n in shape)]
        self.poison()

    def poison(self) -> None:
        """All bits 1 inside, which is NaN in every type; guards outside."""
        self._base.view(torch.uint8).fill_(_GUARD)
        self._inner.fill_(-1 if self._inner.dtype != torch.uint8 else 0xFF)

    def touched(self) -> int:
        """Elements of the guards that were written."""
        guard = sum(_GUARD << (8 * byte) for byte in range(self._base.element_size()))
        return int(((self._base != guard) & self._outside).sum())


class Bound:
    """A call with buffers of its own: outputs, and a workspace that is as large as it must be and no larger."""

    def __init__(self, call: dict[str, Any], *, workspace: Guarded | None = None, strided: bool = False) -> None:
        self.call = call
        batch, queries, heads, dim = call["q"].shape
        device = str(call["q"].device)
        gaps = ((batch, queries, heads + 1, dim + 16), (batch, queries, heads + 3)) if strided else (None, None)
        self.out = Guarded((batch, queries, heads, dim), torch.bfloat16, device, gaps[0])
        self.lse = Guarded((batch, queries, heads), torch.float32, device, gaps[1])
        self.workspace = workspace or Guarded((workspace_of(call),), torch.uint8, device)

    def run(self) -> None:
        own = {"out": self.out.view, "lse": self.lse.view, "workspace": self.workspace.view}
        decode.deepseek_v41_decode(**self.call, **own)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of out and lse."""
        return self.out.view.clone(), self.lse.view.clone()

    def poison(self) -> None:
        for buffer in (self.out, self.lse, self.workspace):
            buffer.poison()

    def touched(self) -> list[str]:
        buffers = {"out": self.out, "lse": self.lse, "workspace": self.workspace}
        return [f"{count} elements beside {name} were written" for name, one in buffers.items() if (count := one.touched())]


def workspace_of(call: dict[str, Any]) -> int:
    """Bytes, as the caller of the kernel learns them."""
    batch, queries, heads, _ = call["q"].shape
    topk = call["main_indices"].shape[2] if "main_indices" in call else 0
    window = call["swa_indices"].shape[2]
    return deepseek_v41_decode_workspace_size(batch, topk, queries=queries, heads=heads, window=window)


def load(static: dict[str, Any], fresh: dict[str, Any]) -> None:
    """What a graph reads becomes `fresh`, a call of the same sizes."""
    assert static.keys() == fresh.keys()
    for name, value in static.items():
        if isinstance(value, torch.Tensor):
            value.copy_(fresh[name])
        else:
            assert value == fresh[name], name


class Checker:
    """One row of a result: makes calls of one query type, judges them, and counts.

    Attributes:
        checks: results that were compared with the oracle.
        problems: what was wrong.
        kernels: launches by the kernel's name, those of a graph at its capture.
    """

    def __init__(self, device: str, query: str) -> None:
        self.device, self.query = device, query
        self.checks = 0
        self.problems: list[str] = []
        self.kernels: Counter[str] = Counter()

    def size(self, p: Problem) -> Problem:
        """`p`, or what the interpreter serves in a second."""
        return p if self.device != "cpu" else tiny(p)

    def many(self, count: int) -> int:
        return count if self.device != "cpu" else min(count, 2)

    def make(self, p: Problem, **changes: Any) -> dict[str, Any]:
        call = build(self.size(p), self.device) | changes
        return {**call, "q": call["q"].to(QUERIES[self.query])}

    def graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` as a captured graph; without a GPU it is called each time."""
        if self.device == "cpu":
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # what is compiled must not be captured
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return graph.replay

    def check(self, where: str, bound: Bound, run: Callable[[], None] | None = None) -> None:
        """Run twice and compare: with the oracle, with what must not be written, and the two with each other."""
        expected = oracle(bound.call)
        first = None
        for _ in range(2):
            bound.poison()
            (run or bound.run)()
            found = rejections(bound.out.view, bound.lse.view, expected) + bound.touched()
            if first is not None and not all(map(torch.equal, first, bound.results())):
                found.append("a second run differs from the first")
            self.note(where, found)
            first = bound.results()

    def note(self, where: str, found: list[str]) -> None:
        """Count one comparison."""
        self.checks += 1
        self.problems += [f"{where}: {text}"[:400] for text in found]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the kernels that calls within launch."""
        stock = decode.decode_launches

        def counting(*arguments: Any) -> Any:
            launches = stock(*arguments)
            self.kernels.update(launch.kernel.fn.__name__ for launch in launches)
            return launches

        with mock.patch.object(decode, "decode_launches", counting):
            yield

    def missing_kernel(self) -> str | None:
        """The kernel that this query type must have come to on this device and did not."""
        hopper = self.device != "cpu" and arch_of(torch.device(self.device)) == ARCH and self.query == "bf16"
        wanted = "hopper_kernel" if hopper else "decode_kernel"
        return None if set(self.kernels) - {"combine_kernel"} == {wanted} else f"{wanted}: launched were {dict(self.kernels)}"


def tiny(p: Problem) -> Problem:
    """The same kind of call in small."""
    queries = min(p.queries, 3)
    window = min(p.window, 20 + queries)
    return replace(p, batch=min(p.batch, 2), queries=queries, heads=min(p.heads, 16), window=window, topk=min(p.topk, 18))
