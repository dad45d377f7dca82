"""The parts of a divided prefix combined by a second launch: what the last program would give, nothing else written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import prepare_step
from sglang_specverify.kernels.launch import LaunchConfig, has_dependent_launch
from sglang_specverify.kernels.plan import Plan
from tests.kernels.cases import Config

from .bounds import compare, expect
from .calls import call, check, launches, names, to_device
from .plans import attends, block_n, divided, even, layers_of, plan_for
from .strategies import draft_call, verify_call

Result = tuple[torch.Tensor, torch.Tensor]

LENS = (70, 20)
BASE = Config(
    prefix_lens=LENS, widths=2, kind="chain", q_heads=2, kv_heads=1, head_dim=16, v_head_dim=16, page_size=1,
    sinks=True, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
)  # fmt: skip

#: Pairs of what an output, a row or a factor may be; every kind of mask once.
CASES: dict[str, tuple[Config, dict[str, Any], dict[str, Any]]] = {
    "chain, wide values": (BASE.but(v_head_dim=192), {"v_scale": 0.3}, {"strided": True, "lse_layout": "heads"}),
    "tree, window": (BASE.but(kind="qlen_only", window=17, v_head_dim=24), {}, {"lse_layout": "column"}),
    "ragged": (BASE.but(kind="full_mask", widths=(1, 3), sinks=False), {}, {"out_dtype": torch.float32}),
    "branches, two tiles": (
        BASE.but(kind="branches", q_heads=4),
        {"k_scale": torch.tensor([-0.5]), "v_scale": torch.tensor([2.0])},
        {"strided": True},
    ),
    "a scale a head": (BASE.but(q_heads=4, kv_heads=2), {"v_scale": torch.tensor([0.5, -3.0])}, {}),
}


def by(plan: Plan, combine: str) -> LaunchConfig:
    return replace(plan.shape.config, combine=combine)


def build(c: Config, device: str, **extra: Any) -> dict[str, Any]:
    a = draft_call(c, 5, 1, 2) if c.kind == "branches" else verify_call(c)
    return to_device(a | extra, device)


def poisoned(plan: Plan) -> torch.Tensor:
    return torch.full((plan.shape.workspace_bytes(plan.batch),), 0xFF, dtype=torch.uint8, device=plan.buffer.device)


def check_both(a: dict[str, Any], last: Result, launch: Result, *, splits: int) -> None:
    """By whom ever the parts are combined, each result is within the bounds; in the interpreter they have the same bits.

    Both add the same products in the same order. Compiled they are two kernels, though, and in each the compiler chooses which
    products and sums it contracts to an FMA, which rounds once in place of twice: there the bits may differ.
    """
    expected = expect(a, splits=splits)
    for out, lse in (last, launch):
        compare(a, out, lse, expected=expected)
    if a["q"].device.type == "cpu":
        assert torch.equal(last[0], launch[0]) and torch.equal(last[1], launch[1])


@pytest.mark.parametrize("name", CASES)
def test_as_the_last_program_does(device: str, name: str) -> None:
    """See `check_both`; scratch that nobody wrote holds NaN, and the whole prefix's request is left alone."""
    c, extra, where = CASES[name]
    a = build(c, device, **extra)
    parts = [even(70, 5, block_n(a)), [0]]
    plans = {way: divided(a, parts, combine=way) for way in ("last", "launch")}
    got = {}
    with launches() as seen:
        for way, plan in plans.items():
            got[way] = call(a, variant="fused_split", plan=plan, workspace=poisoned(plan))
    assert names(seen) == ["verify_attention_kernel"] * 2 + ["combine_parts_kernel"]
    check_both(a, got["last"], got["launch"], splits=5)
    plan, before = plans["launch"], plans["launch"].buffer.clone()
    check(a, **where, variant="fused_split", plan=plan, workspace=poisoned(plan), splits=5)
    assert torch.equal(plan.buffer, before), "a plan serves every layer of a step"


def test_more_parts_than_are_read_at_once(device: str) -> None:
    """16 at once: one more, and twice as many and one, some of them empty; in another order of arrival."""
    lens = (270, 70)
    a = build(BASE.but(prefix_lens=lens, widths=1, q_heads=1), device)
    parts = [even(n, count, block_n(a)) for n, count in zip(lens, (17, 33), strict=True)]
    plan = divided(a, parts, combine="last")
    want = call(a, variant="fused_split", plan=plan, workspace=poisoned(plan))
    turned = divided(a, parts, order=list(reversed(range(50))), combine="launch")
    got = call(a, variant="fused_split", plan=turned, workspace=poisoned(turned))
    check_both(a, want, got, splits=33)


def test_what_is_left_out_shows(device: str) -> None:
    """A plan that claims a part fewer gives another result: equality above is none of things that do not matter."""
    a = build(BASE, device)
    plan = divided(a, [even(70, 5, block_n(a)), [0]], combine="launch")
    right = call(a, variant="fused_split", plan=plan)[0].clone()
    plan.buffer[plan.counters_at + 1] -= 1
    wrong = call(a, variant="fused_split", plan=plan)[0]
    own = slice(0, 2)
    assert not torch.equal(right[own], wrong[own]) and torch.equal(right[2:], wrong[2:])


def test_rows_that_see_nothing(device: str) -> None:
    """0 and -inf, whatever the sink."""
    a = build(BASE.but(kind="qlen_only", window=0), device)
    a["mask"] = torch.zeros_like(a["mask"])
    a["positions"] = a["positions"] + 1000
    plan = divided(a, [even(n, 3, block_n(a)) for n in LENS], combine="launch")
    out, lse = call(a, variant="fused_split", plan=plan, workspace=poisoned(plan))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_says_where_the_parts_are(device: str, deterministic: bool) -> None:
    """Made on the device, by itself and beside a table's copy: first partial and number of parts of each request."""
    lens = torch.tensor([3000, 0, 1500, 100], dtype=torch.int32, device=device)
    a = build(BASE.but(prefix_lens=(1,) * 4), device) | {"deterministic": deterministic}
    layers = layers_of(a) | {"divide": True, "programs": 12}
    shipped = plan_for(a | {"prefix_lens": lens}, divide=True, programs=12)
    config = by(shipped, "launch")
    pool = torch.zeros(4, 3008, dtype=torch.int32, device=device)
    rows = torch.arange(4, dtype=torch.int32, device=device)
    copy = torch.empty(4, 3008, dtype=torch.int32, device=device)
    made = [
        plan_for(a | {"prefix_lens": lens}, divide=True, programs=12, config=config),
        prepare_step(pool, rows, lens, table=copy, config=config, **{k: v for k, v in layers.items() if k != "page_size"}),
    ]
    items = shipped.buffer[: shipped.capacity * 8].view(-1, 8)
    want = []
    for request in range(4):
        own = items[items[:, 0] == request]
        assert len(set(own[:, 5].tolist())) == 1 and len(own) == own[0, 4]
        want += [int(own[0, 5]), int(own[0, 4])]
    assert want[1] > 1 and want[3] == 1
    for plan in made:
        assert plan.combined_by_launch and plan.buffer[plan.counters_at : plan.items_at].tolist() == want
        assert plan.buffer[plan.items_at] == shipped.buffer[shipped.items_at]
        assert plan.shape.workspace_bytes(4) == shipped.shape.workspace_bytes(4)


def test_an_undivided_plan_has_one_launch(device: str) -> None:
    """A call without a plan has those of its table; the number of launches hangs on no length."""
    a = build(BASE.but(prefix_lens=(2, 0)), device)
    plan = plan_for(a, divide=True)
    for divide, count in ((True, 2), (False, 1)):
        with launches() as seen:
            plan = plan_for(a, divide=divide, config=by(plan, "launch"))
            call(a, variant="fused_split" if divide else "fused", plan=plan)
        assert len(seen) == 1 + count
    assert not plan.combined_by_launch
    with launches() as seen:
        call(a, variant="fused_split")
    assert names(seen) == ["plan_kernel", *attends(plan_for(a, divide=True))]


def test_the_table_says_who_combines(device: str, tables: str) -> None:
    """A launch by that of SM90, for few rows of 16 bits; the last program by every other and where there is none."""
    assert plan_for(build(BASE, device), divide=True).shape.config.combine == ("launch" if tables == "sm_90" else "last")


def test_who_combines_is_checked() -> None:
    with pytest.raises(ArgumentError, match="combine: got 'first'; allowed: last, launch"):
        LaunchConfig(16, 16, 4, 1, combine="first")


def test_early_launches_are_hopper_s_and_later() -> None:
    early = {arch: has_dependent_launch(arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_107", "gfx942", "none")}
    assert [arch for arch, has in early.items() if has] == ["sm_90", "sm_100", "sm_107"]


def test_a_request_alone_has_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In deterministic mode, its parts combined by a launch; and the last program's are as `check_both` has it."""
    monkeypatch.setattr("sglang_specverify.kernels.plan.DETERMINISTIC_CHUNK", 128)
    a = build(BASE.but(prefix_lens=(130, 300), widths=1), device) | {"deterministic": True, "variant": "fused_split"}
    second = {name: a[name][1:] for name in ("q", "row_ids", "prefix_lens")}
    results = []
    for part, combine in (({}, "last"), ({}, "launch"), (second, "launch")):
        one = a | part
        plan = plan_for(one, divide=True, config=by(plan_for(one, divide=True), combine))
        assert (plan.buffer[:8].tolist()[4]) == (3 if part else 2)
        results.append(call(one, plan=plan, workspace=poisoned(plan)))
    last, beside, alone = results
    check_both(a, last, beside, splits=3)
    assert torch.equal(alone[0][-1], beside[0][-1]) and torch.equal(alone[1][-1], beside[1][-1])
