"""Parts of the kernel with specialised warps combined by a second launch: within the bounds, and nothing else is written."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from sglang_specverify.hardware import from_name
from sglang_specverify.kernels import run
from sglang_specverify.kernels.arguments import VerifyArguments, check_verify
from sglang_specverify.kernels.plan import Plan
from sglang_specverify.kernels.specialized import ARCH, HEAD_DIMS
from tests.kernels.cases import Config

from . import specialized_calls
from .bounds import compare
from .calls import names
from .gluon_cpu import Program
from .plans import divided, items, plan_for
from .specialized_calls import BASE, DEFAULTS, build, check, launches_of

pytestmark = pytest.mark.usefixtures("specialized")

#: Few rows: a program of the second launch has one, and the interpreter takes its time for each.
SMALL = BASE.but(prefix_lens=(300, 0, 130), widths=3, q_heads=2)
STARTS = [[0, 128, 256], [0], [0, 128]]

#: Pairs of what a row, a factor or an output may be.
CASES: dict[str, tuple[Config, dict[str, Any]]] = {
    "tree, sinks": (SMALL.but(sinks=True, v_scale=-0.5), {"strided": True, "lse_layout": "heads"}),
    "chain, wide": (SMALL.but(kind="chain", head_dim=128, v_head_dim=128, q_dtype=torch.float16, cache_dtype=torch.float16), {}),
    "groups, no lse": (SMALL.but(kind="full_mask", q_heads=5, kv_heads=1, widths=2), {"lse_layout": None}),
}


def by_launch(a: dict[str, Any], starts: list[list[int]] = STARTS) -> Plan:
    return divided(a, starts, kernel="specialized", combine="launch")


class Counting(Program):
    """Programs must not count."""

    def atomic_add(self, pointer: Any, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{pointer.buffer.name} is counted in")


@pytest.mark.parametrize("name", CASES)
def test_within_the_bounds(device: str, name: str) -> None:
    """Scratch that nobody wrote holds NaN, requests of one part are left alone, and nobody counts."""
    c, where = CASES[name]
    a = build(c, device)
    plan = by_launch(a)
    before = plan.buffer.clone()
    check(a, programs=5, seed=1, split=plan, parts=3, program=Counting, **where)
    assert torch.equal(plan.buffer, before), "a plan serves every layer of a step"


def test_rows_of_two_tiles(device: str) -> None:
    """They lie where the second launch looks for them, which the interpreter would take too long to run for each of 130."""
    a = build(BASE.but(prefix_lens=(130,), widths=65, q_heads=2, kv_heads=1, pad_rows=0), device)
    plan = by_launch(a, [[0, 64]])
    if device == "cuda":
        check(a, split=plan, parts=2)
        return
    out, lse = torch.empty_like(a["q"]), torch.empty(65, 2)
    first, second = launches_of(a, out, lse, split=plan)
    specialized_calls.run([first])
    # As its address says for one head: part, then packed row, in whole tiles.
    rows, tiles = second.constants["BLOCK_M"], second.arguments["tiles"]
    assert (rows, tiles) == (128, 2)
    lses = second.arguments["partial_lse"][: 2 * tiles * rows].view(2, tiles * rows)[:, :130].double()
    outs = second.arguments["partial_out"][: 2 * tiles * rows * 64].view(2, tiles * rows, 64)[:, :130].double()
    weights = torch.softmax(lses * math.log(2.0), 0)
    out.copy_((weights[:, :, None] * outs).sum(0).view(65, 2, 64))
    lse.copy_(torch.logsumexp(lses * math.log(2.0), 0).view(65, 2))
    compare(a, out, lse, splits=2)


def test_what_is_left_out_shows(device: str) -> None:
    """A plan that claims a part fewer, or that a first part is elsewhere, changes that request's rows and no others."""
    a = build(SMALL, device)
    plan = by_launch(a)
    out, lse = torch.zeros_like(a["q"]), torch.zeros(a["q"].shape[:2], device=device)
    launches = launches_of(a, out, lse, split=plan)
    specialized_calls.run(launches)
    right = out[:9].view(3, -1).clone()
    for word, changed in ((1, [True, False, False]), (4, [False, False, True])):
        plan.buffer[plan.counters_at + word] -= 1
        specialized_calls.run(launches[1:])
        assert (out[:9].view(3, -1) != right).any(1).tolist() == changed
        plan.buffer[plan.counters_at + word] += 1


def test_a_program_that_counts_is_seen(device: str, emulated: None) -> None:
    a = build(SMALL, device)
    counting = divided(a, STARTS, kernel="specialized", combine="last")
    with pytest.raises(AssertionError, match="plan is counted in"):
        check(a, split=counting, parts=3, program=Counting)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_public_call_s_launches(device: str, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """With a plan of the planner's own, for head dims of 128 by the table's own configuration, which asks for the second launch;
    how many there are hangs on no length, and an undivided one has no second.
    """
    a = build(SMALL.but(prefix_lens=(800, 40), kv_heads=1, q_heads=1, head_dim=dim, v_head_dim=dim), device)
    wanted = {field.name: a.get(field.name, DEFAULTS[field.name]) for field in fields(VerifyArguments)}
    out, lse = torch.full_like(a["q"], torch.nan), a["q"].new_full(a["q"].shape[:2], torch.nan, dtype=torch.float32)
    checked = VerifyArguments(**{**wanted, "out": out, "lse": lse})
    problem = check_verify(checked)
    shipped = plan_for(a, divide=True, kernel="specialized").shape.config
    assert shipped.combine == ("launch" if dim == 128 else "last")
    config = None if dim == 128 else replace(shipped, combine="launch")
    plan = plan_for(a, divide=True, kernel="specialized", config=config)
    parts = int(items(plan)[0, 4])
    assert parts > 1 and plan.buffer[plan.counters_at : plan.items_at].tolist() == [0, parts, parts, 1]
    if device == "cpu":
        monkeypatch.setattr(run, "detect", lambda: replace(from_name(ARCH), multiprocessors=3))
    launches = run.launches(checked, problem, out, lse, ARCH, "specialized_split", plan)
    assert names(launches) == ["specialized_kernel", "combine_parts_kernel"]
    specialized_calls.run(launches)
    compare(a, out, lse, splits=parts)
    whole = plan_for(a, divide=False, kernel="specialized", config=config)
    assert names(run.launches(checked, problem, out, lse, ARCH, "specialized", whole)) == ["specialized_kernel"]
