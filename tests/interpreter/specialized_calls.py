"""Calls of the kernel with specialised warps: compiled on a GPU, in the emulator of `gluon_cpu.py` on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from sglang_specverify.kernels import verify_attention
from sglang_specverify.kernels.arguments import VerifyArguments, check_verify
from sglang_specverify.kernels.combine_parts import combinations
from sglang_specverify.kernels.fused import split_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig, arch_of
from sglang_specverify.kernels.plan import Plan
from sglang_specverify.kernels.run import config_of, own_plan
from sglang_specverify.kernels.specialized import ARCH, refusal, specialized_launch
from sglang_specverify.kernels.specialized_kernel import specialized_kernel
from tests.kernels.cases import Config

from . import gluon_cpu
from .bounds import compare
from .calls import Guarded, call, guarded, guarded_lse, own_rows, to_device
from .strategies import verify_call

KINDS = ["chain", "qlen_only", "full_mask"]

BASE = Config(
    prefix_lens=(70, 0), widths=9, kind="qlen_only", q_heads=8, kv_heads=2, head_dim=64, v_head_dim=64, page_size=16,
    q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16, pad_rows=2,
)  # fmt: skip

#: Keys of a tile, and places in the rings of keys and values, that fit into shared memory; by head dim.
CONFIGS = {64: [(64, 2), (64, 4), (128, 2), (128, 3)], 128: [(64, 2), (64, 3), (128, 2)]}

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(verify_attention).parameters.items()}


def build(c: Config, device: str, *, strided: bool = False) -> dict[str, Any]:
    """A call that the kernel serves; `strided` with gaps of NaN after the rows of Q, K and V, which share a buffer."""
    a = verify_call(c)
    if strided:
        slots, heads, dim = a["k_cache"].shape
        both = torch.full((slots, heads + 1, 2 * dim + 32), torch.nan, dtype=c.cache_dtype)
        wide = torch.full((len(a["q"]) + 1, c.q_heads + 1, dim + 16), torch.nan, dtype=c.q_dtype)
        views = {"k_cache": both[:, 1:, 16 : dim + 16], "v_cache": both[:, 1:, dim + 16 : -16], "q": wide[1:, :-1, 16:]}
        for name, view in views.items():
            view.copy_(a[name])
        a |= views
    return to_device(a, device)


def launch_of(a: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None, *args: Any, **options: Any) -> Launch:
    """The kernel's own launch; arguments are those of `launches_of`."""
    return launches_of(a, out, lse, *args, **options)[0]


def launches_of(
    a: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None, config: tuple[int, int] | None = None, programs: int = 2,
    *, split: Plan | int | None = None,
) -> list[Launch]:  # fmt: skip
    """The kernel's launch, with the step's masks packed, and behind it the one that combines parts if its plan has such.

    Args:
        config: keys of a tile and stages, those of the table where None.
        split: the plan that divides its prefixes, or programs for which one is made; None divides nothing.
    """
    wanted = {field.name: a.get(field.name, DEFAULTS[field.name]) for field in fields(VerifyArguments)}
    call = VerifyArguments(**{**wanted, "out": out, "lse": lse})
    problem = check_verify(call)
    assert refusal(call, problem, ARCH) is None
    arch = arch_of(problem.device)
    chosen = config_of("specialized", ARCH, problem, a["k_cache"].dtype, a["q"].dtype, split=split is not None)
    if config is not None:
        chosen = LaunchConfig(128, config[0], 4, config[1], max_registers=128)
    if isinstance(split, Plan):
        plan: Plan | None = split
    elif split is not None:
        plan, before = own_plan(call, problem, chosen, divide=True, programs=split, kernel="specialized")
        before[0].run()
    else:
        fused = config_of("fused", arch, problem, a["k_cache"].dtype, a["q"].dtype)
        plan, before = own_plan(call, problem, fused, divide=False)
        for launch in before:
            launch.run()
    divided = None
    if split is not None:
        assert plan is not None
        # NaN in every part that nobody writes, and zeros in the counters.
        scratch = torch.full((plan.shape.workspace_bytes(plan.batch),), 255, dtype=torch.uint8, device=problem.device)
        divided = split_of(plan, scratch, problem.device)
    first = specialized_launch(call, problem, out, lse, chosen, programs=programs, plan=plan, split=divided)
    return [first, *combinations(call, problem, out, lse, ARCH, divided)]


def run(launches: list[Launch], *, seed: int = 0, program: type[gluon_cpu.Program] | None = None) -> None:
    """Run launches of a call: on a CPU the kernel in its emulator, and what combines its parts in Triton's interpreter."""
    for launch in launches:
        if launch.arguments["out"].device.type == "cuda":
            launch.run()
        elif launch.kernel is specialized_kernel:
            gluon_cpu.run(launch, seed=seed, program=program)
        else:
            # The interpreter knows no assembly; there the first launch has ended.
            replace(launch, constants={**launch.constants, "PDL": False}).run()


def check(
    a: dict[str, Any], *, config: tuple[int, int] | None = None, programs: int | None = None, strided: bool = False,
    lse_layout: str | None = "rows", seed: int = 0, program: type[gluon_cpu.Program] | None = None,
    alter: Callable[[dict[str, Any]], dict[str, Any]] | None = None, split: Plan | int | None = None, parts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Run a call into poisoned, guarded outputs and compare: the public one on a GPU, unless a launch of its own is asked for.

    Args:
        strided: gaps after the heads and rows of out.
        lse_layout: None for no LSE.
        alter: gives, from the arguments of the launch, some in their place.
        split: as in `launch_of`.
        parts: the most parts of a prefix, for the bounds.

    Raises:
        AssertionError: an element outside its bound, or a row or a byte written that belongs to nobody.
    """
    q, device = a["q"], a["q"].device.type
    rows, heads, dim = q.shape
    wide = guarded(rows, heads + strided, dim + 16 * strided, q.dtype, device, strided=False)
    out = Guarded(wide.base, wide.view[:, :heads, 16 * strided :])
    lse = guarded_lse(rows, heads, device, layout=lse_layout) if lse_layout else None
    if device == "cuda" and not (config or programs or alter or split):
        call(a, variant="specialized", out=out.view, lse=lse.view if lse else None)
    else:
        launches = launches_of(a, out.view, lse.view if lse else None, config, programs or 2, split=split)
        if alter is not None:
            launches[0] = replace(launches[0], arguments=launches[0].arguments | alter(launches[0].arguments))
        run(launches, seed=seed, program=program)
    compare(a, out.view, lse.view if lse else None, splits=parts)
    real = own_rows(a)
    assert out.untouched(real), "out was written where no request has a row"
    assert lse is None or lse.untouched(real), "lse was written where no request has a row"
    return out.view, lse.view if lse else None
