"""Random calls of the Triton kernels against the FP64 reference, each element within its bound.

    python -m tests.interpreter.soak --cases 10000 --minutes 8 --out soak.json

A case belongs to one of a number of families, which fix what a kernel is compiled for (types, heads, head dims, page size,
kind of mask, options), so that few kernels serve many cases; lengths, widths, values, strides of the caches and windows are
random in each. Case n of seed s is the same on every machine of the same kind. Exits with 1 if a case was outside its bound.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.interpreter.environment import prepare

#: Elements of K and V that a case may hold, mostly and at times, by device.
SIZES = {"cuda": (1 << 21, 1 << 25), "cpu": (1 << 15, 1 << 16)}

#: One case in so many is of the larger size.
LARGE = 40

#: Arguments of a call that are not None where they are left out.
_DEFAULTS: dict[str, Any] = {
    "page_size": 1, "window": -1, "softcap": 0.0, "k_scale": 1.0, "v_scale": 1.0, "deterministic": False, "return_lse": True,
    "mask_layout": "qlen_only",
}  # fmt: skip

OPERATIONS = ("fused", "fused_split", "deterministic", "planned", "merge")


def family(number: int, seed: int, device: str) -> dict[str, Any]:
    """What kernels are compiled for."""
    chance = random.Random(f"{seed} family {number}")
    half = chance.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    kind = ("qlen_only", "full_mask", "chain", "branches")[number % 4]
    dims = [(128, 128), (128, 128), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256)]
    dim, v_dim = chance.choice(dims if device == "cuda" else [(64, 64), (24, 16), (80, 80)])
    kv_heads = chance.choice([1, 2, 8] if device == "cuda" else [1, 2])
    scales = chance.choice([(1.0, 1.0), (0.5, 2.0), ("scalar", "scalar"), ("heads", "heads")])
    made = {
        "kind": kind, "kv_heads": kv_heads, "q_heads": kv_heads * chance.choice([1, 2, 3, 4, 5, 7, 8, 16]), "head_dim": dim,
        "v_head_dim": v_dim, "page_size": chance.choice([1, 1, 1, 16, 64, 128]), "q_dtype": half,
        "cache_dtype": chance.choice([half, half, half, torch.float8_e4m3fn, torch.float8_e5m2]), "k_scale": scales[0],
        "v_scale": scales[1], "softcap": chance.choice([0.0, 0.0, 0.0, 30.0]), "sinks": chance.random() < 0.3,
        "windowed": chance.random() < 0.3, "slot_map": chance.random() < 0.2, "ragged": chance.random() < 0.25,
        "strided": chance.random() < 0.5, "mask_dtype": chance.choice([torch.bool, torch.uint8]),
    }  # fmt: skip
    if number % 8 in (4, 5, 6):
        # What the specialised kernel takes: without these, few families were for it.
        dim = chance.choice([128, 64] if device == "cuda" else [64])
        scales = chance.choice([(1.0, 1.0), (0.5, 2.0)])
        made |= {
            "head_dim": dim, "v_head_dim": dim, "cache_dtype": half, "k_scale": scales[0], "v_scale": scales[1], "softcap": 0.0,
            "windowed": False, "slot_map": False, "ragged": False, "strided": False,
        }  # fmt: skip
    return made


def case(number: int, seed: int, families: int, device: str) -> tuple[str, Any, dict[str, Any]]:
    """Operation, configuration and arguments (on the CPU) of one case."""
    from tests.interpreter.strategies import draft_call, verify_call
    from tests.kernels.cases import Config

    chance = random.Random(f"{seed} case {number}")
    fixed = family(chance.randrange(families), seed, device)
    windowed, ragged = fixed.pop("windowed"), fixed.pop("ragged") and fixed["kind"] in ("chain", "full_mask")
    budget = SIZES[device][chance.randrange(LARGE) == 0] // (fixed["kv_heads"] * (fixed["head_dim"] + fixed["v_head_dim"]))
    topk, step = chance.choice([1, 4, 8, 16]), chance.randrange(6)
    w = chance.choice([1, 2, 4, 5, 8, 16, 32, 60, 64, 128, 256] if device == "cuda" else [1, 3, 8])
    w = topk * (step + 1) if fixed["kind"] == "branches" else min(w, max(1, budget // 4))
    batch = max(1, min(chance.choice([1, 1, 2, 3, 4, 8, 16, 32]), budget // (2 * w)))
    most = max(0, budget // batch - w)
    # Log-uniform, so that short and long prefixes stand beside each other, and some empty.
    lens = tuple(0 if chance.random() < 0.05 else int((most + 1) ** chance.random()) - 1 for _ in range(batch))
    widths: Any = tuple(chance.randint(0, w) for _ in lens) if ragged else w
    c = Config(
        seed=chance.randrange(1 << 30), prefix_lens=lens, widths=widths, sm_scale=chance.choice([None, None, 0.02, 0.5]),
        window=chance.choice([0, 5, 100, 1023, 4096]) if windowed else -1, pad_rows=chance.choice([0, 0, 3]), **fixed,
    )  # fmt: skip
    if c.kind == "branches":
        return chance.choice(OPERATIONS[:3]), c, draft_call(c, topk, step, step + 2)
    return chance.choice(OPERATIONS), c, verify_call(c)


def sharpened(operation: str, arguments: dict[str, Any], device: str) -> str:
    """ "specialized" in place of "fused" where that kernel takes the call."""
    from sglang_specverify.kernels.arguments import VerifyArguments, check_verify
    from sglang_specverify.kernels.launch import arch_of
    from sglang_specverify.kernels.specialized import refusal

    if operation != "fused" or device != "cuda" or "draft_slots" in arguments:
        return operation
    names = VerifyArguments.__dataclass_fields__
    # Those that a call leaves out are all None, False or without meaning here.
    a = VerifyArguments(**{name: arguments.get(name, _DEFAULTS.get(name)) for name in names})
    return operation if refusal(a, check_verify(a), arch_of(torch.device(device))) else "specialized"


def run_case(operation: str, c: Any, arguments: dict[str, Any], device: str) -> float:
    """The largest error of the case over its bound; raises `AssertionError` where it is above 1."""
    from sglang_specverify.kernels import tree_suffix_merge
    from tests.interpreter.bounds import compare, expect_merged
    from tests.interpreter.calls import check, prefix_state, suffix_arguments, to_device
    from tests.interpreter.plans import plan_for

    a = to_device(arguments, device)
    where = {"strided": c.strided, "lse_layout": "heads" if c.seed % 2 else "rows"}
    if operation == "merge":
        before = prefix_state(a, c.q_dtype)
        out, lse = before[0].clone(), before[1].clone()
        first = ("q", "k_cache", "v_cache", "table", "row_ids", "prefix_lens")
        rest = {name: value for name, value in a.items() if name not in first}
        tree_suffix_merge(*(a[name] for name in first), out, lse, **rest)
        return compare(a, out, lse, expected=expect_merged(a, suffix_arguments(a), *before))
    if operation == "deterministic":
        return check({**a, "deterministic": True}, **where, variant="auto", splits=16)
    if operation == "planned":
        plan = plan_for(a)
        return check(a, **where, variant="auto", plan=plan, splits=300)
    return check(a, **where, variant=operation, splits=300)


def soak(
    cases: int, minutes: float, seed: int, families: int, device: str, *, first: int = 0, show: bool = False
) -> dict[str, Any]:
    """Run cases until they or the minutes are used up."""
    began = time.monotonic()
    count: Counter[str] = Counter()
    worst: dict[str, float] = {}
    failures: list[dict[str, Any]] = []
    keys = 0
    for number in range(first, first + cases):
        if time.monotonic() - began > 60 * minutes:
            break
        operation, c, arguments = case(number, seed, families, device)
        operation = sharpened(operation, arguments, device)
        types = f"q {str(c.q_dtype)[6:]}, cache {str(c.cache_dtype)[6:]}"
        try:
            ratio = run_case(operation, c, arguments, device)
        except Exception as error:  # a refusal is a failure here as well: every case should be served
            failures.append({"case": number, "operation": operation, "config": repr(c), "error": str(error)[:500]})
            if show:
                print(f"case {number}: {error}", file=sys.stderr, flush=True)
            ratio = 0.0
        for name in (operation, c.kind, types):
            count[name] += 1
            worst[name] = max(worst.get(name, 0.0), ratio)
        count["all"] += 1
        keys += sum(c.prefix_lens)
        if show and count["all"] % 500 == 0:
            print(f"{count['all']} cases, {len(failures)} failures, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "seed": seed, "families": families, "asked": cases, "cases": count["all"], "outside_their_bound": len(failures),
        "prefix_tokens": keys, "seconds": round(time.monotonic() - began, 1), "counts": dict(count),
        "largest_error_over_bound": {name: round(value, 4) for name, value in worst.items()}, "failures": failures[:50],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = prepare()
    from benchmarks import record

    result = soak(options.cases, options.minutes, options.seed, options.families, device, first=options.first, show=True)
    result["device"] = device
    command = "python -m tests.interpreter.soak"
    command += f" --cases {options.cases} --minutes {options.minutes:g} --seed {options.seed} --families {options.families}"
    if options.out is not None:
        record.write(options.out, {"command": command, **result})
    print(f"{result['cases']} cases in {result['seconds']} s, {result['outside_their_bound']} outside their bound")
    print("largest error over its bound:", result["largest_error_over_bound"])
    return 1 if result["outside_their_bound"] or not result["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
