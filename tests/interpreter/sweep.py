"""Each kernel with each kind of mask and type of cache once, small, with its result checked: for memory checkers.

    compute-sanitizer --tool memcheck python -m tests.interpreter.sweep

Prints a line for each call and exits with 1 if one was wrong. `--only WORD` takes the calls whose name has the word.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.interpreter.environment import prepare

CACHES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = ("chain", "qlen_only", "full_mask", "ragged", "branches")


def calls(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls, each of which raises `AssertionError` for a wrong result."""
    from tests.interpreter.calls import to_device
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
                window=-1,
                softcap=0.0,
                sinks=False,
                page_size=1,
                slot_map=False,
                strided=False,
                head_dim=64,
                k_scale=1.0,
                v_scale=1.0,
            )
            for label, one in (("with everything", c), ("plain", plain)):
                a = to_device(draft_call(one, 4, 1, 3) if kind == "branches" else verify_call(one), device)
                for name, call in _operations(a, kind, label):
                    yield f"{name}, {kind}, {str(cache)[6:]}, {label}", call


def _operations(a: dict[str, Any], kind: str, label: str) -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.interpreter.calls import check
    from tests.interpreter.soak import sharpened

    yield "fused", lambda: check(a, variant="fused", strided=True, lse_layout="heads")
    yield "fused_split", lambda: check(a, variant="fused_split", splits=8)
    if sharpened("fused", a, a["q"].device.type) == "specialized":
        yield "specialized", lambda: check(a, variant="specialized", lse_layout="heads")
    yield "deterministic", lambda: check({**a, "deterministic": True}, variant="fused_split", splits=16)
    if label == "plain":
        yield "prepare_step", lambda: _step(a)
    if kind != "branches":
        yield "tree_suffix_merge", lambda: _tree_suffix(a)
    if kind in ("qlen_only", "full_mask") and label == "plain":
        yield "compact, gather_suffix_merge", lambda: _gather_suffix(a)
    if kind == "chain" and label == "plain":
        yield "snapshot_table", lambda: _snapshot(a)
        yield "merge_states", lambda: _merge_states(a)


def _tree_suffix(a: dict[str, Any]) -> None:
    from sglang_specverify.kernels import tree_suffix_merge
    from tests.interpreter.bounds import compare, expect_merged
    from tests.interpreter.calls import prefix_state, suffix_arguments

    before = prefix_state(a, a["q"].dtype)
    out, lse = before[0].clone(), before[1].clone()
    first = ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")
    tree_suffix_merge(*(a[name] for name in first), out, lse, **{name: a[name] for name in a if name not in first})
    compare(a, out, lse, expected=expect_merged(a, suffix_arguments(a), *before))


def _gather_suffix(a: dict[str, Any]) -> None:
    """The visible drafts compacted and gathered: the same result as the tile under the mask."""
    from sglang_specverify.kernels import compact_visible_slots, gather_suffix_merge
    from tests.interpreter.bounds import compare, expect_merged
    from tests.interpreter.calls import prefix_state, suffix_arguments

    w, rows = a["num_draft_tokens"], a["num_draft_tokens"] * len(a["prefix_lens"])
    slots = torch.full((rows, w), -7, dtype=torch.int32, device=a["q"].device)
    lens = torch.full((rows,), -7, dtype=torch.int32, device=a["q"].device)
    options = {name: a.get(name) for name in ("mask_layout", "mask_offsets", "page_size", "slot_map")}
    compact_visible_slots(
        a["mask"], a["table"], a["row_ids"], a["prefix_lens"], num_draft_tokens=w, out_slots=slots, out_lens=lens, **options
    )
    before = prefix_state(a, a["q"].dtype)
    out, lse = before[0].clone(), before[1].clone()
    scales = {name: a[name] for name in ("k_scale", "v_scale", "sm_scale", "softcap", "sinks")}
    gather_suffix_merge(a["q"], a["k_cache"], a["v_cache"], slots, lens, out, lse, **scales)
    compare(a, out, lse, expected=expect_merged(a, suffix_arguments(a), *before))


def _snapshot(a: dict[str, Any]) -> None:
    from sglang_specverify.kernels import snapshot_table

    device, page = a["q"].device, 16
    lens = torch.tensor([33, 0, 16], device=device)
    rows = torch.tensor([2, 0, 1], device=device)
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).to(device)
    slots = (pages[:, :, None] * page + torch.arange(page, device=device)).flatten(1).int()
    out = torch.full((4, 5), -7, dtype=torch.int32, device=device)
    snapshot_table(slots, rows, lens, page_size=page, out=out)
    want = torch.full_like(out, -7)
    want[0, :3], want[2, :1] = pages[2, :3].int(), pages[1, :1].int()
    assert torch.equal(out, want), f"got {out.tolist()}, want {want.tolist()}"


def _step(a: dict[str, Any]) -> None:
    """The call's table taken for the engine's; the call itself with the copy and the plan of a step, divided and not."""
    from sglang_specverify.kernels import prepare_step
    from tests.interpreter.calls import check
    from tests.interpreter.plans import layers_of

    table = torch.full_like(a["table"], -1)
    row_ids = torch.arange(len(a["row_ids"]), dtype=torch.int32, device=table.device)
    w = 0 if "draft_slots" in a else a["num_draft_tokens"]
    plan = prepare_step(
        a["table"], a["row_ids"], a["prefix_lens"], table=table, extra=w, **layers_of(a) | {"divide": True, "programs": 64}
    )
    own = {**a, "table": table, "row_ids": row_ids}
    check(own, variant="auto", plan=plan, splits=8)
    check(own, variant="auto", plan=plan.undivided())


def _merge_states(a: dict[str, Any]) -> None:
    """Both states as represented: nothing but FP32 and the rounding of the result to its type is left to err."""
    from sglang_specverify.kernels import merge_states, merge_states_reference
    from tests.interpreter.calls import call, own_rows, prefix_state, suffix_arguments

    states = (*prefix_state(a, a["q"].dtype), *call(suffix_arguments(a)))
    out, lse = merge_states(*states)
    want, want_lse = merge_states_reference(*(state.double() for state in states))
    real = own_rows(a)
    torch.testing.assert_close(out[real].double(), want[real], rtol=2.0**-8, atol=1e-5)
    torch.testing.assert_close(lse[real].double(), want_lse[real], rtol=1e-6, atol=1e-5)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    device = prepare()
    wrong = total = 0
    for name, call in calls(device):
        if options.only not in name:
            continue
        total += 1
        try:
            call()
            print(f"ok    {name}", flush=True)
        except Exception as error:
            wrong += 1
            print(f"WRONG {name}: {error}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{total} calls, {wrong} wrong")
    return 1 if wrong or not total else 0


if __name__ == "__main__":
    sys.exit(main())
