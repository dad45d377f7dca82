"""What sparse MLA decode must do right on a GPU, row by row: replays, lists, lengths, strides, pools past 2 GiB, controls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.kernels.sparse_mla.formats import FORMATS
from tests.gpu.sparse_mla_calls import Bound, Checker, Guarded, load, workspace_of
from tests.gpu.sparse_mla_problems import Problem, fill_rows, oracle, places

#: One query row over a window and selected rows; a chain whose rows share tiles.
PLAIN = Problem(8, 1, 64, 128, 512, seed=1)
CHAIN = Problem(3, 6, 16, 133, 96, shared=True, starts=True, seed=2)
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1

#: Lengths of the window's list and of the main list, for all rows of a call.
LENGTHS = {
    "all entries": (_INT_MAX, _INT_MAX), "one entry each": (1, 1), "main rows alone": (0, _INT_MAX),
    "window alone": (_INT_MAX, 0), "half": (64, 256), "a tile": (32, 32), "a tile and one": (33, 33), "below 0": (-1, _INT_MIN),
}  # fmt: skip


def lengths(c: Checker) -> None:
    """A graph replayed with other lengths, lists and rows: random ones, and those above."""
    for p in (PLAIN, CHAIN):
        static = Bound(c.make(p))
        graph = c.graph(static.run)
        for seed in range(c.many(8)):
            load(static.call, c.make(replace(p, seed=10 + seed)))
            c.check(f"Sq {p.queries}, seed {seed}", static, graph)
        for name, (window, main) in LENGTHS.items():
            load(static.call, c.make(p))
            # With a start, more than 2^31 in all: what a kernel adds must not overflow.
            static.call["swa_lens"].fill_(window)
            static.call["main_lens"].fill_(main)
            c.check(f"Sq {p.queries}, {name}", static, graph)


def indices(c: Checker) -> None:
    """A graph replayed with lists that hold -1, slots beyond the pool, and the pool's last."""
    for p in (PLAIN, CHAIN):
        static = Bound(c.make(replace(p, lens=False)))
        graph = c.graph(static.run)
        for missing in (0.0, 0.5, 0.9, 1.0):
            load(static.call, c.make(replace(p, lens=False, missing=missing, seed=20)))
            c.check(f"Sq {p.queries}, {missing:.0%} missing", static, graph)
        for pool, rows in (("swa", p.swa_page_rows), ("main", p.main_page_rows)):
            capacity = static.call[f"{pool}_cache"].shape[0] * rows
            for slot in (-1, _INT_MIN, capacity, _INT_MAX):
                load(static.call, c.make(replace(p, lens=False)))
                static.call[f"{pool}_indices"][:, :, ::3] = slot
                c.check(f"Sq {p.queries}, {slot} in {pool}", static, graph)
            load(static.call, c.make(replace(p, lens=False)))
            name = p.swa_format if pool == "swa" else "main_kv_fp4"
            last = torch.tensor([capacity - 1], device=c.device)
            fill_rows(static.call[f"{pool}_cache"], name, rows, "block_split", last, torch.Generator().manual_seed(3))
            static.call[f"{pool}_indices"][:, :, 1] = capacity - 1
            c.check(f"Sq {p.queries}, the last slot of {pool}", static, graph)


def empty_rows(c: Checker) -> None:
    """Requests without a key among others, in every place, and nothing but them: 0 and -inf, whatever the sinks."""
    for p in (PLAIN, replace(CHAIN, heads=8)):
        static = Bound(c.make(p))
        graph = c.graph(static.run)
        batch = static.call["q"].shape[0]
        for empty in ([0], [batch - 1], list(range(0, batch, 2)), list(range(batch))):
            load(static.call, c.make(p))
            for one in empty:
                static.call["swa_lens"][one], static.call["main_lens"][one] = 0, -3
            c.check(f"Sq {p.queries}, requests {empty}", static, graph)
            c.check(f"Sq {p.queries}, requests {empty}, eager", static)


def strides(c: Checker) -> None:
    """Pages further apart than they are long, of any number of rows, both layouts; strided queries, lists, lengths, outputs."""
    pages = ((64, 64, 48), (61, 256, 4096), (256, 128, 16), (128, 61, 1 << 16))
    for (swa, main, pad), layout in itertools.product(pages, ("block_split", "interleaved")):
        p = replace(PLAIN, batch=3, swa_page_rows=swa, main_page_rows=main, pad=pad, swa_layout=layout, main_layout=layout)
        call = c.make(p)
        for cache in (call["swa_cache"], call["main_cache"]):
            assert cache.stride(0) >= cache.shape[1] + pad, "the pages are not apart"
        c.check(f"pages of {swa} and {main} rows, {pad} bytes apart, {layout}", Bound(call))
    p = replace(PLAIN, batch=3, queries=2, swa_format="swa_fp8", swa_layout="interleaved")
    call = c.make(p)
    strided = {name: _spread(value) if name in ("q", "swa_indices", "main_indices") else value for name, value in call.items()}
    strided |= {name: _spread(call[name]) for name in ("swa_lens", "main_lens")}
    c.check("strided arguments", Bound(strided, strided=True))


def _spread(value: torch.Tensor) -> torch.Tensor:
    """The same values with gaps of 16 elements behind each row, NaN or far slots in them."""
    wide = torch.empty(*value.shape[:-1], value.shape[-1] + 16, dtype=value.dtype, device=value.device)
    wide.view(torch.uint8).fill_(0x7F)
    wide[..., : value.shape[-1]] = value
    return wide[..., : value.shape[-1]]


def no_main_rows(c: Checker) -> None:
    """K 0: no main cache, a list of no columns, and lengths of 0."""
    for p in (replace(PLAIN, topk=0), replace(CHAIN, topk=0), Problem(64, 1, 64, 128, 0, sink=False, seed=4)):
        static = Bound(c.make(p))
        graph = c.graph(static.run)
        for seed in range(c.many(4)):
            load(static.call, c.make(replace(p, seed=30 + seed)))
            c.check(f"Sq {p.queries}, no cache, seed {seed}", static, graph)
    call = c.make(PLAIN)
    none = {**call, "main_indices": call["main_indices"][:, :, :0]}
    c.check("no columns", Bound(none))
    call["main_lens"].zero_()
    c.check("lengths of 0", Bound(call))


def shapes(c: Checker) -> None:
    """Every number of heads and of query rows, lists of each row's own and shared ones, batches that divide keys and do not."""
    for heads in (8, 16, 32, 64, 128):
        for queries in (1, 3, 8):
            p = Problem(2, queries, heads, 127 + queries, 80, shared=queries > 1, starts=queries > 1, seed=heads + queries)
            c.check(f"H {heads}, Sq {queries}", Bound(c.make(p)))
    c.check("shared main lists", Bound(c.make(Problem(2, 4, 16, 131, 192, shared=True, starts=True, shared_main=True, seed=5))))
    c.check("lists of their own", Bound(c.make(Problem(2, 4, 16, 128, 192, seed=6))))
    for batch, topk in ((1, 2048), (33, 512), (150, 128)):
        c.check(f"B {batch}, K {topk}", Bound(c.make(Problem(batch, 1, 64, 128, topk, seed=batch))))


def smaller_replays(c: Checker) -> None:
    """A graph of many requests with few of them left: the others' rows are an engine's padding, a slot or none at all."""
    static = Bound(c.make(replace(PLAIN, batch=16)))
    graph = c.graph(static.run)
    batch = static.call["q"].shape[0]
    for left in (1, 3, 7, 15):
        load(static.call, c.make(replace(PLAIN, batch=16, seed=40 + left)))
        rest = slice(min(left, batch - 1), None)
        swa, main = static.call["swa_indices"], static.call["main_indices"]
        slot = swa[0, 0].sort().values[swa.shape[2] // 2].clone()
        swa[rest], main[rest] = -1, -1
        swa[rest, :, 0] = slot
        static.call["swa_lens"][rest], static.call["main_lens"][rest] = 1, 1
        c.check(f"{left} requests", static, graph)


def interleaved(c: Checker) -> None:
    """Graphs and eager calls of several sizes, back to back on one workspace: the bits of each are those that it gives alone."""
    problems = (PLAIN, CHAIN, replace(PLAIN, batch=1, topk=2048), replace(PLAIN, batch=40, topk=64), replace(PLAIN, topk=0))
    calls = [c.make(p) for p in problems]
    space = Guarded((max(map(workspace_of, calls)),), torch.uint8, c.device)
    eager, captured, together = ([Bound(call, workspace=space) for call in calls] for _ in range(3))

    def all_of_them() -> None:
        for bound in together:
            bound.run()

    # As layers follow each other in an engine's graph.
    runs = [*((bound.run, [bound]) for bound in eager), *((c.graph(bound.run), [bound]) for bound in captured)]
    runs.append((c.graph(all_of_them), together))
    alone = []
    for number, bound in enumerate(eager):
        c.check(f"call {number} alone", bound)
        alone.append(bound.results())
    source = random.Random(7)
    for turn in range(c.many(40)):
        for bound in (*eager, *captured, *together):
            bound.out.poison()
            bound.lse.poison()
        order = source.sample(range(len(runs)), len(runs))
        for number in order:  # no wait between them: what one reads of the workspace, the next may not have written
            runs[number][0]()
        wrong = [
            f"run {number} of {order}: call {call} differs from what it gives alone"
            for number in order
            for call, bound in enumerate(runs[number][1])
            if not all(map(torch.equal, bound.results(), alone[eager_of(number, call, len(calls))]))
        ]
        c.note(f"turn {turn}", wrong + [text for bound in (*eager, *captured, *together) for text in bound.touched()])


def eager_of(run: int, call: int, calls: int) -> int:
    """Which call it is: runs are the eager ones, their graphs, and one graph of them all."""
    return call if run == 2 * calls else run % calls


def beyond(c: Checker, pool_bytes: int = 9 << 29) -> None:
    """Slots all over pools of 4.5 GiB, most past 2 GiB and some past 4; what is not listed is NaN, also 2 GiB before it."""
    if c.device == "cpu":
        pool_bytes = 1 << 20
    small = c.make(replace(PLAIN, batch=4, missing=0.05))
    call = dict(small)
    for pool, name in (("swa", PLAIN.swa_format), ("main", "main_kv_fp4")):
        call[f"{pool}_cache"], call[f"{pool}_indices"] = _scattered(
            small[f"{pool}_cache"], small[f"{pool}_indices"], name, pool_bytes
        )
    bound = Bound(call)
    expected = oracle(small)
    for how, run in (("eager", bound.run), ("graph", c.graph(bound.run))):
        bound.poison()
        run()
        c.note(how, rejections(bound.out.view, bound.lse.view, expected) + bound.touched())


def _scattered(cache: torch.Tensor, lists: torch.Tensor, name: str, pool_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The listed rows of a small pool in a large one, each in a stretch of its own, and the lists of them there."""
    page_rows, kind = 64, FORMATS[name]
    stride = page_rows * kind.row_bytes + 16
    pages = -(-pool_bytes // stride)
    large = torch.full((pages, stride), 0xFF, dtype=torch.uint8, device=cache.device)[:, : page_rows * kind.row_bytes]
    capacity, old = pages * page_rows, lists.unique().long()
    old = old[(old >= 0) & (old < cache.shape[0] * page_rows)]
    stretch = capacity // len(old)
    new = torch.arange(len(old), device=cache.device) * stretch + torch.arange(len(old), device=cache.device) * 37 % stretch
    new[-1] = capacity - 1
    for source, target in zip(old.tolist(), new.tolist(), strict=True):  # row by row: addresses are computed on the host
        for a, b in zip(*(places(name, page_rows, "block_split", torch.tensor([s])) for s in (source, target)), strict=True):
            if a.numel():
                row = cache[source // page_rows, int(a[0, 0]) : int(a[0, -1]) + 1]
                large[target // page_rows, int(b[0, 0]) : int(b[0, -1]) + 1] = row
    at = torch.searchsorted(old, lists.long().clamp(0, int(old[-1])))
    listed = (lists >= 0) & (lists < cache.shape[0] * page_rows)
    return large, torch.where(listed, new[at], lists.long()).int()


#: A window and main rows without anything missing, small enough that one entry weighs.
_CONTROL = Problem(2, 1, 64, 40, 40, missing=0.0, lens=False, seed=8)


def _faults(call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls with one thing wrong."""

    def changed(name: str, place: tuple[int, ...], change: Callable[[int], int]) -> dict[str, Any]:
        value = call[name].clone()
        value[place] = change(int(value[place]))
        return {**call, name: value}

    def byte(pool: str, name: str, scale: bool) -> tuple[int, int]:
        slot = call[f"{pool}_indices"][0, 0, :1].long()
        at = places(name, 64, "block_split", slot.cpu())[int(scale)]
        return int(slot) // 64, int(at[0, 5])

    yield "a scale of a main row", changed("main_cache", byte("main", "main_kv_fp4", True), lambda b: b ^ 0x08)
    yield "a scale of a window row", changed("swa_cache", byte("swa", "swa_mxfp8", True), lambda b: b + 1)
    yield "a code of a main row", changed("main_cache", byte("main", "main_kv_fp4", False), lambda b: b ^ 0x60)
    yield "a stale entry", changed("main_indices", (1, 0, 3), lambda _: int(call["main_indices"][1, 0, 4]))
    yield "an entry that is missing", changed("swa_indices", (1, 0, 3), lambda _: -1)
    width, rows = call["swa_indices"].shape[2], call["q"].shape[:2]
    yield "a length", {**call, "swa_lens": torch.full(rows, width - 1, dtype=torch.int32, device=call["q"].device)}
    yield "no sink", {**call, "sink": None}
    yield "a scale of the scores", {**call, "bmm1_scale": 1.01 * 512**-0.5}


def controls(c: Checker) -> None:
    """Faults that the gates must see, and a write beside an output that the guards must."""
    call = c.make(_CONTROL)
    right = Bound(call)
    c.check("without a fault", right)
    expected = oracle(call)
    for name, faulty in _faults(call):
        bound = Bound(faulty)
        bound.run()
        c.note(name, [] if rejections(bound.out.view, bound.lse.view, expected) else ["was not seen"])
    for name, buffer in (("out", right.out), ("lse", right.lse), ("workspace", right.workspace)):
        right.poison()
        buffer.view.view(-1)[-1:].as_strided((2,), (1,))[1] = 1
        c.note(f"a write behind {name}", [] if right.touched() else ["was not seen"])


ROWS: dict[str, Callable[[Checker], None]] = {
    "replays, other lengths": lengths,
    "replays, -1 and slots beyond the pool": indices,
    "replays of fewer requests": smaller_replays,
    "graphs and eager calls in turn": interleaved,
    "rows without a key": empty_rows,
    "K 0": no_main_rows,
    "page strides and strided arguments": strides,
    "heads, query rows, batches": shapes,
    "slots past 2 GiB": beyond,
    "controls": controls,
}
