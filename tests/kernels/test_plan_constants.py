"""What is compiled into the programs that fill a plan, for calls of every entry in the table of SM90; nothing is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_specverify.kernels import plan as plan_module
from sglang_specverify.kernels import planning, run, specialized, step, tables
from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.plan import DETERMINISTIC_CHUNK, MIN_CHUNKS, Plan, plan_constants
from sglang_specverify.kernels.planning import Layers, plan_of
from sglang_specverify.kernels.variants import choose_variant

INT32 = torch.int32
KV_HEADS, MULTIPROCESSORS = 8, 132
#: Batches that leave the device half empty and that do not, up to the most rows that the table tells apart.
BATCHES = (1, 4, 32, 600)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    def programs(device: torch.device, config: LaunchConfig) -> int:
        return MULTIPROCESSORS * config.ctas_per_sm

    monkeypatch.setattr(planning, "uses_triton", lambda device: True)
    monkeypatch.setattr(planning, "arch_of", lambda device: "sm_90")
    for module in (planning, run):
        monkeypatch.setattr(module, "programs_of", programs)


def plan(
    kernel: str,
    rows: int,
    dim: int,
    bits: int,
    batch: int,
    *,
    divide: bool | None,
    deterministic: bool = False,
    longest: int = 0,
    window: int = -1,
) -> Plan:
    """A plan of chains, four query heads to a KV head."""
    cache = torch.bfloat16 if bits == 16 else torch.float8_e4m3fn
    return plan_of(torch.empty(batch, dtype=torch.int32, device="meta"), Layers(
        num_draft_tokens=rows // 4, q_heads=4 * KV_HEADS, kv_heads=KV_HEADS, head_dim=dim, v_head_dim=None, dtype=torch.bfloat16,
        cache_dtype=cache, page_size=1, window=window, branches=False, q_offsets=None, num_rows=None, mask=None,
        mask_layout="qlen_only", mask_offsets=None, deterministic=deterministic, divide=divide, programs=None, config=None,
        kernel=kernel, out=None, longest=longest,
    ))[0]  # fmt: skip


def plans(kernel: str, divide: bool | None) -> list[Plan]:
    dims, caches = (specialized.HEAD_DIMS, (16,)) if kernel == "specialized" else ((128, 256, 512), (8, 16))
    return [
        plan(kernel, rows, dim, bits, batch, divide=divide)
        for rows in (16, 32, 64, 256) for dim in dims for bits in caches for batch in BATCHES
    ]  # fmt: skip


@pytest.mark.parametrize("divide", [None, False, True])
@pytest.mark.parametrize("kernel", ["fused", "specialized"])
def test_the_shortest_part_is_that_of_who_reads_and_who_combines(kernel: str, divide: bool | None) -> None:
    made = plans(kernel, divide)
    assert {p.divides for p in made} == ({True, False} if divide is None else {divide})
    for p in made:
        constants, config = plan_constants(p, None), p.shape.config
        if p.divides:
            assert constants["MIN_CHUNK"] == MIN_CHUNKS[kernel, config.combine]
            assert constants["BY_LAUNCH"] == (config.combine == "launch")
            p = p.undivided()
            constants = plan_constants(p, None)
        assert p.kernel == kernel
        # The same for all: what divides nothing is compiled once.
        assert (constants["SPLIT"], constants["BY_LAUNCH"], constants["MIN_CHUNK"]) == (False, False, 1)


@pytest.mark.parametrize(
    ("changes", "divided"),
    [
        ({}, True),
        ({"longest": 4095}, False),  # where little can differ
        ({"longest": 0}, False),  # not known
        ({"batch": 34}, False),  # more than run at once
        ({"bits": 8}, False),  # the last program combines
        ({"dim": 64}, False),  # dividing costs more
        ({"rows": 128}, False),
        ({"window": 512}, False),  # all read as much
    ],
)
def test_a_batch_that_fills_the_device_once_is_divided_where_lengths_may_differ(changes: dict[str, Any], divided: bool) -> None:
    call = {"rows": 32, "dim": 128, "bits": 16, "batch": 33, "longest": 40960, **changes}
    assert plan("fused", divide=None, **call).divides == divided


@pytest.mark.parametrize(("batch", "name"), [(32, "fused_split"), (40, "fused")])
def test_a_call_without_a_plan_is_divided_alike(batch: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "uses_triton", lambda device: True)
    monkeypatch.setattr(run, "arch_of", lambda device: "sm_90")
    seen = []
    monkeypatch.setattr(run, "choose_variant", lambda variant, facts: seen.append(facts))
    call = Case("sm_90", "fused", "chain", (128, 128), "bf16", 32, batch=batch)
    run.choose(*call.arguments(), "auto")
    assert choose_variant("auto", replace(seen[0], device="cuda")).name == name
    assert plan("fused", 32, 128, 16, batch, divide=None, longest=seen[0].longest).divides == (name == "fused_split")


def test_a_step_knows_how_long_a_request_may_be_by_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def plan_of(lens: torch.Tensor, layers: Layers) -> None:
        raise Asked(layers.longest)

    monkeypatch.setattr(step, "plan_of", plan_of)
    lens = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Asked, match=r"^1600$"):
        step.prepare_step(
            lens[None], lens, lens, table=torch.zeros(1, 100, dtype=torch.int32), page_size=16, num_draft_tokens=2, q_heads=1,
            kv_heads=1, head_dim=64,
        )  # fmt: skip


def test_every_launch_that_the_table_knows_was_planned_for() -> None:
    table = tables.read("sm_90")
    assert table is not None
    for kernel in ("fused", "specialized"):
        known = {entry.launch for entry in table.kernels[kernel]}
        used = {p.shape.config for divide in (False, True) for p in plans(kernel, divide)}
        assert used >= known, kernel


def test_an_undivided_plan_needs_no_pair_that_nobody_divides_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel's configuration stands in an undivided plan of the specialised one: that pair need not mean anything."""
    undivided = plan("specialized", 256, 128, 16, 600, divide=False)
    divided = plan("specialized", 256, 128, 16, 1, divide=True)
    monkeypatch.setattr(plan_module, "MIN_CHUNKS", {})
    assert plan_constants(undivided, None)["MIN_CHUNK"] == 1
    with pytest.raises(KeyError):
        plan_constants(divided, None)


def test_a_deterministic_part_is_the_same_for_every_launch() -> None:
    p = plan("fused", 16, 128, 16, 4, divide=True, deterministic=True)
    assert p.divides
    assert plan_constants(p, None)["MIN_CHUNK"] == DETERMINISTIC_CHUNK


def test_a_plan_looks_at_no_value_off_the_cpu() -> None:
    """Meta tensors hold none: a check that looked would fail. A GPU would wait at the same place."""
    lens, offsets, starts = (torch.empty(n, dtype=t, device="meta") for n, t in ((2, INT32), (3, INT32), (3, torch.int64)))
    mask = torch.empty(99, dtype=torch.bool, device="meta")
    made, masks = plan_of(lens, Layers(
        num_draft_tokens=4, q_heads=8, kv_heads=8, head_dim=64, v_head_dim=None, dtype=torch.bfloat16, cache_dtype=None,
        page_size=1, window=-1, branches=False, q_offsets=offsets, num_rows=8, mask=mask,
        mask_layout="full_mask", mask_offsets=starts, deterministic=False, divide=True, programs=None, config=None,
        kernel="fused", out=None,
    ))  # fmt: skip
    assert made.tree is not None and made.tree.rows == 8 and masks is not None
