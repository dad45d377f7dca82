"""Each kernel with each kind of mask and type of cache once, small, with its result checked: for memory checkers.

    compute-sanitizer --tool memcheck python -m tests.interpreter.sweep --minutes 3
    compute-sanitizer --tool racecheck python -m tests.interpreter.sweep --cases 1 --skip specialized

Prints for each call the kernels that it launched, which reports of a checker are held to, and a line of its own, and exits with
1 if one was wrong. `--only WORD` takes the calls whose name has the word, `--skip WORD` those that do not, and `--cases N` so
many of each kernel and kind of mask. What is expected is computed and compared on the CPU: a checker slows down every kernel of
a reference on the device. Compiled kernels are kept: run it once without a checker.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.interpreter.environment import prepare
from tests.interpreter.launched import noting

CACHES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = ("chain", "qlen_only", "full_mask", "ragged", "branches")


@dataclass(frozen=True)
class Call:
    """One call; `run` raises `AssertionError` for a wrong result."""

    operation: str
    kind: str
    cache: str
    label: str
    run: Callable[[], object]

    @property
    def name(self) -> str:
        return f"{self.operation}, {self.kind}, {self.cache}, {self.label}"


def calls(device: str) -> Iterator[Call]:
    """All of them. Nothing is on the device before one runs."""
    from tests.interpreter import sweep_sparse_mla
    from tests.interpreter.strategies import draft_call, verify_call
    from tests.kernels.cases import Config

    for cache in CACHES:
        for kind in KINDS:
            c = Config(
                seed=7, prefix_lens=(300, 17, 0), widths=(5, 0, 3) if kind == "ragged" else 5, q_heads=6, kv_heads=2, head_dim=80,
                kind="full_mask" if kind == "ragged" else kind, v_head_dim=64, page_size=16, window=200, softcap=30.0, sinks=True,
                q_dtype=torch.float16 if cache == torch.float16 else torch.bfloat16, cache_dtype=cache, k_scale="heads",
                v_scale="scalar", strided=True, slot_map=True, pad_rows=2,
            )  # fmt: skip
            plain = c.but(
                window=-1, softcap=0.0, sinks=False, page_size=1, slot_map=False, strided=False, head_dim=64, k_scale=1.0,
                v_scale=1.0,
            )  # fmt: skip
            for label, one in (("with everything", c), ("plain", plain)):
                a = draft_call(one, 4, 1, 3) if kind == "branches" else verify_call(one)
                for operation, run in _operations(a, device, kind, label):
                    yield Call(operation, kind, str(cache)[6:], label, run)
    yield from itertools.starmap(Call, sweep_sparse_mla.calls(device))


def some(every: list[Call], cases: int) -> list[Call]:
    """So many calls of each kernel and kind of mask, each pair beginning at another cache."""
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in every:
        groups[call.operation, call.kind].append(call)
    return [
        call
        for turn, members in enumerate(groups.values())
        for call in itertools.islice(
            itertools.cycle(members), turn % len(members), turn % len(members) + min(cases, len(members))
        )
    ]


def _operations(a: dict[str, Any], device: str, kind: str, label: str) -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.interpreter.soak import sharpened

    yield "fused", lambda: _check(a, device, variant="fused", strided=True, lse_layout="heads")
    yield "fused_split", lambda: _check(a, device, variant="fused_split", splits=8)
    if sharpened("fused", a, device) == "specialized":
        yield "specialized", lambda: _check(a, device, variant="specialized", lse_layout="heads")
        yield "specialized_split", lambda: _check(a, device, variant="specialized_split", splits=8)
    yield "deterministic", lambda: _check({**a, "deterministic": True}, device, variant="fused_split", splits=16)
    if label == "plain":
        yield "prepare_step", lambda: _step(a, device)
    if kind != "branches":
        yield "tree_suffix_merge", lambda: _tree_suffix(a, device)
    if kind in ("qlen_only", "full_mask") and label == "plain":
        yield "compact, gather_suffix_merge", lambda: _gather_suffix(a, device)
    if kind == "chain" and label == "plain":
        yield "snapshot_table", lambda: _snapshot(device)
        yield "merge_states", lambda: _merge_states(a, device)


def _check(
    a: dict[str, Any], device: str, *, strided: bool = False, lse_layout: str = "rows", splits: int = 1, **extra: Any
) -> None:
    """As `calls.check` does, with nothing but the call itself on the device."""
    from tests.interpreter.bounds import compare, expect
    from tests.interpreter.calls import call, guarded, guarded_lse, own_rows, to_device

    (rows, heads, _), dim = a["q"].shape, a["v_cache"].shape[2]
    out = guarded(rows, heads, dim, a["q"].dtype, "cpu", strided=strided)
    lse = guarded_lse(rows, heads, "cpu", layout=lse_layout)
    there = to_device({"out": out.view, "lse": lse.view}, device)
    call(to_device(a, device), **extra, **there)
    for here, value in ((out, there["out"]), (lse, there["lse"])):
        # All of the buffer, of which a kernel was given a part.
        here.base.copy_(value.as_strided(here.base.shape, here.base.stride(), 0))
    compare(a, out.view, lse.view, expected=expect(a, splits=splits))
    assert out.untouched(own_rows(a)) and lse.untouched(own_rows(a)), "written where no request has a row"


def _tree_suffix(a: dict[str, Any], device: str) -> None:
    from sglang_specverify.kernels import tree_suffix_merge
    from tests.interpreter.bounds import compare, expect_merged
    from tests.interpreter.calls import prefix_state, suffix_arguments, to_device

    before = prefix_state(a, a["q"].dtype)
    out, lse = (state.to(device, copy=True) for state in before)
    first = ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")
    there = to_device(a, device)
    tree_suffix_merge(*(there[name] for name in first), out, lse, **{name: there[name] for name in a if name not in first})
    compare(a, out.cpu(), lse.cpu(), expected=expect_merged(a, suffix_arguments(a), *before))


def _gather_suffix(a: dict[str, Any], device: str) -> None:
    """The visible drafts compacted and gathered: the same result as the tile under the mask."""
    from sglang_specverify.kernels import compact_visible_slots, gather_suffix_merge
    from tests.interpreter.bounds import compare, expect_merged
    from tests.interpreter.calls import prefix_state, suffix_arguments, to_device

    w, rows, there = a["num_draft_tokens"], a["num_draft_tokens"] * len(a["prefix_lens"]), to_device(a, device)
    slots = torch.full((rows, w), -7, dtype=torch.int32, device=device)
    lens = torch.full((rows,), -7, dtype=torch.int32, device=device)
    options = {name: there.get(name) for name in ("mask_layout", "mask_offsets", "page_size", "slot_map")}
    compact_visible_slots(
        there["mask"], there["table"], there["row_ids"], there["prefix_lens"], num_draft_tokens=w, out_slots=slots,
        out_lens=lens, **options,
    )  # fmt: skip
    before = prefix_state(a, a["q"].dtype)
    out, lse = (state.to(device, copy=True) for state in before)
    scales = {name: there[name] for name in ("k_scale", "v_scale", "sm_scale", "softcap", "sinks")}
    gather_suffix_merge(there["q"], there["k_cache"], there["v_cache"], slots, lens, out, lse, **scales)
    compare(a, out.cpu(), lse.cpu(), expected=expect_merged(a, suffix_arguments(a), *before))


def _snapshot(device: str) -> None:
    from sglang_specverify.kernels import snapshot_table

    page = 16
    lens, rows = torch.tensor([33, 0, 16], device=device), torch.tensor([2, 0, 1], device=device)
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4)
    slots = (pages[:, :, None] * page + torch.arange(page)).flatten(1).int().to(device)
    out = torch.full((4, 5), -7, dtype=torch.int32, device=device)
    snapshot_table(slots, rows, lens, page_size=page, out=out)
    want = torch.full((4, 5), -7, dtype=torch.int32)
    want[0, :3], want[2, :1] = pages[2, :3].int(), pages[1, :1].int()
    assert torch.equal(out.cpu(), want), f"got {out.tolist()}, want {want.tolist()}"


def _step(a: dict[str, Any], device: str) -> None:
    """The call's table taken for the engine's; the call itself with the copy and the plan of a step, divided and not."""
    from sglang_specverify.kernels import prepare_step
    from tests.interpreter.calls import to_device
    from tests.interpreter.plans import layers_of

    there = to_device(a, device)
    table = torch.full(a["table"].shape, -1, dtype=torch.int32, device=device)
    w = 0 if "draft_slots" in a else a["num_draft_tokens"]
    plan = prepare_step(
        there["table"], there["row_ids"], there["prefix_lens"], table=table, extra=w,
        **layers_of(there) | {"divide": True, "programs": 64},
    )  # fmt: skip
    own = {**a, "table": table.cpu(), "row_ids": torch.arange(len(a["row_ids"]), dtype=torch.int32)}
    _check(own, device, variant="auto", plan=plan, splits=8)
    _check(own, device, variant="auto", plan=plan.undivided())


def _merge_states(a: dict[str, Any], device: str) -> None:
    """Both states as represented: nothing but FP32 and the rounding of the result to its type is left to err."""
    from sglang_specverify.kernels import merge_states, merge_states_reference
    from tests.interpreter.calls import own_rows, prefix_state

    states = [*prefix_state(a, a["q"].dtype), *prefix_state({**a, "q": -a["q"]}, a["q"].dtype)]
    out, lse = (result.cpu() for result in merge_states(*(state.to(device) for state in states)))
    want, want_lse = merge_states_reference(*(state.double() for state in states))
    real = own_rows(a)
    torch.testing.assert_close(out[real].double(), want[real], rtol=2.0**-8, atol=1e-5)
    torch.testing.assert_close(lse[real].double(), want_lse[real], rtol=1e-6, atol=1e-5)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--skip")
    parser.add_argument("--cases", type=int, help="of each kernel and kind of mask; all where left out")
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    device, began = prepare(), time.monotonic()
    every = list(calls(device))
    if options.cases is not None:
        every = some(every, options.cases)
    chosen = [one for one in every if options.only in one.name and (not options.skip or options.skip not in one.name)]
    wrong = done = 0
    for one in chosen:
        if time.monotonic() - began > 60 * options.minutes:
            print(f"time is up: {len(chosen) - done} calls not run", flush=True)
            break
        done += 1
        at = time.monotonic()
        with noting() as launched:
            try:
                one.run()
                outcome = f"ok    {one.name} ({time.monotonic() - at:.1f} s)"
            except Exception as error:
                wrong += 1
                outcome = f"WRONG {one.name}: {error}"
        print(*sorted(launched), outcome, sep="\n", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{done} calls of {len(chosen)}, {wrong} wrong")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
