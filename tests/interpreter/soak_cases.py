"""The random cases of the soak: what kernels are compiled for, by family, and what varies within one.

A kernel is compiled anew for each type, for each launch configuration, and for whether a stride is a multiple of 16. A family
fixes them, the strides of tables and results among them, so that some hundred kernels serve any number of cases.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn.functional import pad

#: Elements of K and V that a case may hold, mostly and at times, by device.
SIZES = {"cuda": (1 << 21, 1 << 25), "cpu": (1 << 15, 1 << 16)}

#: One case in so many is of the larger size.
LARGE = 40

#: Draft tokens of a request, by device; a family has some of them.
WIDTHS = {"cuda": (1, 2, 4, 5, 8, 16, 32, 60, 64, 128, 256), "cpu": (1, 3, 8)}

#: Requests, and branches of a draft, by device; a family has two numbers of branches.
BATCHES = {"cuda": (1, 1, 2, 3, 4, 8, 16, 32), "cpu": (1, 1, 2, 3)}
TOPKS = {"cuda": (1, 4, 8, 16), "cpu": (1, 4)}

#: Steps that the draft slots have room for, more than a case takes.
_STEPS = 8

OPERATIONS = ("fused", "fused_split", "deterministic", "planned", "merge")


def family_of(number: int, seed: int, families: int) -> int:
    """The family of a case, by which processes share cases out: those of a family need the same kernels."""
    return random.Random(f"{seed} case {number}").randrange(families)


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
    # An odd seed stands for other integer types and another layout of the LSE.
    made |= {"odd": chance.randrange(2), "widths": chance.sample(WIDTHS[device], 3), "topks": chance.sample(TOPKS[device], 2)}
    return made | {"table_rest": chance.choice([0, 5]), "row_rest": chance.choice([12, 4, 7])}


def case(number: int, seed: int, families: int, device: str) -> tuple[str, Any, dict[str, Any]]:
    """Operation, configuration and arguments (on the CPU) of one case."""
    from tests.interpreter.strategies import draft_call, verify_call
    from tests.kernels.cases import Config

    chance = random.Random(f"{seed} case {number}")
    fixed = family(chance.randrange(families), seed, device)
    odd, table_rest, row_rest = fixed.pop("odd"), fixed.pop("table_rest"), fixed.pop("row_rest")
    windowed, ragged = fixed.pop("windowed"), fixed.pop("ragged") and fixed["kind"] in ("chain", "full_mask")
    budget = SIZES[device][chance.randrange(LARGE) == 0] // (fixed["kv_heads"] * (fixed["head_dim"] + fixed["v_head_dim"]))
    topk, step, w = chance.choice(fixed.pop("topks")), chance.randrange(6), chance.choice(fixed.pop("widths"))
    w = topk * (step + 1) if fixed["kind"] == "branches" else min(w, max(1, budget // 4))
    batch = max(1, min(chance.choice(BATCHES[device]), budget // (2 * w)))
    most = max(0, budget // batch - w)
    # Log-uniform, so that short and long prefixes stand beside each other, and some empty.
    lens = tuple(0 if chance.random() < 0.05 else int((most + 1) ** chance.random()) - 1 for _ in range(batch))
    widths: Any = tuple(chance.randint(0, w) for _ in lens) if ragged else w
    rows = sum(widths) if ragged else batch * (topk if fixed["kind"] == "branches" else w)
    c = Config(
        seed=2 * chance.randrange(1 << 29) + odd, prefix_lens=lens, widths=widths,
        sm_scale=chance.choice([None, None, 0.02, 0.5]), window=chance.choice([0, 5, 100, 1023, 4096]) if windowed else -1,
        # The LSE of odd seeds has the rows last.
        pad_rows=(row_rest - rows) % 16 if odd else chance.choice([0, 0, 3]), **fixed,
    )  # fmt: skip
    if c.kind == "branches":
        operation, a = chance.choice(OPERATIONS[:3]), draft_call(c, topk, step, _STEPS)
    else:
        operation, a = chance.choice(OPERATIONS), verify_call(c)
    if c.ragged:
        a["num_draft_tokens"] = w
    extra = (table_rest - a["table"].shape[1]) % 16
    a["table"] = pad(a["table"], (0, extra), value=-1)
    return operation, c, a
