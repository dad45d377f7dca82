"""Stock arms: what is refused before anything compiles, and FlashInfer's call against what it documents."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import end_to_end_plan as plan
from benchmarks import gate, inputs, measure, shapes, sparse_mla_arms, stock_flashinfer, stock_warm
from benchmarks.arms import Arm, Unavailable
from benchmarks.engines import Setup, Speculation
from benchmarks.points import FAMILIES, Point
from benchmarks.stock_triton import STOCK

CPU = torch.device("cpu")
TREE = Point("tree", 2, 6, 40, q_heads=4, kv_heads=2, head_dim=64)


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` for graphs, in PyTorch: it reads its buffers and nothing else."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_cuda_graph: bool, backend: str, **buffers: Any) -> None:
        assert (workspace.dtype, layout, use_cuda_graph, backend) == (torch.uint8, "NHD", True, "fa2")
        self.buffers = buffers

    def plan(self, rows: Any, keys: Any, indices: Any, last: Any, *sizes: int, **options: Any) -> None:
        assert sizes == (4, 2, 64, 1) and options["q_data_type"] == torch.float16
        self.scale, mask = options["sm_scale"], options["custom_mask"]
        packed, starts = [], [0]
        for row, key in zip(rows.diff().tolist(), keys.diff().tolist(), strict=True):
            part, mask = mask[: row * key], mask[row * key :]
            bits = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(-1, 8)
            packed.append((bits.int() << torch.arange(8)).sum(1))
            starts.append(starts[-1] + len(packed[-1]))
        assert len(mask) == 0
        given = {
            "qo_indptr_buf": rows, "paged_kv_indptr_buf": keys, "paged_kv_indices_buf": indices,
            "paged_kv_last_page_len_buf": last, "custom_mask_buf": torch.cat(packed).to(torch.uint8),
            "mask_indptr_buf": torch.tensor(starts).int(),
        }  # fmt: skip
        assert given.keys() == self.buffers.keys()
        for name, value in given.items():
            assert (self.buffers[name].shape, self.buffers[name].dtype) == (value.shape, value.dtype), name
            self.buffers[name].copy_(value)

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        held = self.buffers
        assert held["paged_kv_last_page_len_buf"].eq(1).all()
        rows, keys, bits = (held[f"{name}_buf"].tolist() for name in ("qo_indptr", "paged_kv_indptr", "mask_indptr"))
        for number in range(len(rows) - 1):
            mine = q[rows[number] : rows[number + 1]].float()
            slots = held["paged_kv_indices_buf"][keys[number] : keys[number + 1]].long()
            k, v = (each[slots, 0].float().repeat_interleave(q.shape[1] // each.shape[2], 1) for each in cache)
            mask = (held["custom_mask_buf"][bits[number] : bits[number + 1], None] >> torch.arange(8)) & 1
            mask = mask.flatten()[: len(mine) * len(slots)].view(len(mine), len(slots)).bool()
            scores = torch.einsum("ihd,jhd->hij", mine, k) * (self.scale * k_scale)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            out[rows[number] : rows[number + 1]] = torch.einsum("hij,jhd->ihd", weights, v) * v_scale


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(stock_flashinfer, "WORKSPACE_BYTES", 16)


@pytest.mark.parametrize(
    "point",
    [
        TREE,
        replace(TREE, kind="chain", width=4, page_size=16),
        replace(TREE, cache="e4m3"),
        replace(TREE, length=140, mixed=True),
    ],
    ids=lambda point: point.name,
)
def test_flashinfer_is_given_masks_slots_and_scales(documented: None, point: Point) -> None:
    made = inputs.make(point, CPU)
    calls: dict[str, Any] = {}
    assert "why" not in measure.check(stock_flashinfer.FLASHINFER, made, gate.samples(made), calls)
    assert list(calls) == ["flashinfer"]


def test_a_hidden_draft_would_show(documented: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_flashinfer, "full_mask", lambda made: torch.ones(2 * 6 * 46, dtype=torch.bool))
    made = inputs.make(TREE, CPU)
    assert "wrong" in measure.check(stock_flashinfer.FLASHINFER, made, gate.samples(made), {})["why"]


@pytest.mark.parametrize(
    ("arm", "change", "why"),
    [
        ("flashinfer", {"sinks": True}, "no sinks"),
        ("flashinfer", {"window": 8}, "windows"),
        ("fa4", {"cache": "e4m3"}, "SM100"),
        ("fa4", {"kind": "chain", "width": 4, "cache": "e4m3"}, "SM100"),
        ("fa4", {"kind": "draft", "width": 2, "cache": "e4m3"}, "SM100"),
    ],
)
def test_what_no_backend_serves_is_refused_before_it_compiles(
    monkeypatch: pytest.MonkeyPatch, arm: str, change: dict[str, Any], why: str
) -> None:
    found = next(each for each in STOCK if each.name == arm)
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setattr(sys.modules["sgl_kernel"], "merge_state_v2", None, raising=False)
    with pytest.raises(Unavailable, match=why):
        found.build(inputs.make(replace(TREE, **change), CPU))


def test_masks_beyond_what_flashinfer_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_flashinfer, "MOST_MASK_ENTRIES", 2 * 6 * 46 - 1)
    with pytest.raises(Unavailable, match="int32: 552"):
        stock_flashinfer.flashinfer(inputs.make(TREE, CPU))


def test_seconds_of_a_first_call_are_kept_where_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(made: inputs.Inputs) -> Any:
        raise Unavailable("never")

    made = inputs.make(TREE, CPU)
    arm = Arm("refuses", "stock", refuse)
    assert measure.check(arm, made, [], {}) == {"group": "stock", "why": "never"}
    monkeypatch.setattr(measure, "SLOW_TO_PREPARE", 0.0)
    assert measure.check(arm, made, [], {})["prepare_s"] >= 0


def test_what_takes_long_to_fail_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(made: inputs.Inputs) -> Any:
        tried.append(made.point)
        raise torch.OutOfMemoryError("GPU") if made.point.width == 4 else RuntimeError("no such instruction")

    monkeypatch.setattr(measure, "_FAILED", {})
    made, other = inputs.make(TREE, CPU), inputs.make(replace(TREE, width=5), CPU)
    arm = Arm("fails", "stock", fail)
    for point in (made, other):
        assert measure.check(arm, point, [], {})["why"] == "RuntimeError: no such instruction"
    monkeypatch.setattr(measure, "SLOW_TO_FAIL", 0.0)
    measure.check(arm, inputs.make(replace(TREE, width=4), CPU), [], {})
    measure.check(arm, made, [], {})
    assert measure.check(arm, other, [], {})["why"] == f"as at {TREE.name}: RuntimeError: no such instruction"
    measure.check(arm, inputs.make(replace(TREE, head_dim=32), CPU), [], {})
    assert [point.head_dim for point in tried] == [64, 64, 64, 64, 32]


def test_every_family_that_compiles_apart_is_compiled_ahead() -> None:
    families = dict(stock_warm.work())
    assert set(families) == {"plain", *FAMILIES} - {"page 64", "mixed lengths"}
    assert {point.kind for point in families["plain"]} == {"tree", "chain"}
    assert all(point.cache == "e4m3" for point in families["fp8 cache"])
    assert set(stock_warm.DENSE) <= {arm.name for arm in STOCK}
    assert set(stock_warm.SPARSE) <= {arm.name for arm in sparse_mla_arms.ARMS}


def test_sparse_calls_are_compiled_for_every_kind_of_row_count() -> None:
    points = list(stock_warm.sparse_work())
    # Triton compiles for one, for multiples of 16, and for what is neither.
    kinds = {(point.heads, point.topk, 1 if point.rows == 1 else "16s" if point.rows % 16 == 0 else "any") for point in points}
    assert kinds == {(*call, rows) for call in ((64, 512), (64, 0), (128, 512)) for rows in (1, "16s", "any")}
    assert [function.__name__ for function, _ in stock_warm.jobs(["fa4", "sglang triton"])][:10] == ["warm_sparse"] * 10


@pytest.mark.parametrize(
    ("shape", "scenario", "served"),
    [
        ("qwen3-8b", "128x16", {"fa3", "fa4", "triton", "flashinfer"}),
        ("qwen3-8b", "pressure", {"fa3", "triton", "flashinfer"}),
        ("qwen3-d256", "chain", {"fa3", "fa4", "triton", "flashinfer"}),
        ("gpt-oss-20b", "64x4", {"fa3", "fa4", "triton"}),
        ("gpt-oss-20b", "off", {"fa3", "fa4", "triton"}),
        ("gpt-oss-20b", "pressure", {"triton"}),
    ],
)
def test_which_stock_backend_serves_what(shape: str, scenario: str, served: set[str]) -> None:
    arms = ("fa3", "fa4", "triton", "flashinfer")
    assert {arm for arm in arms if plan.refusal(shapes.get(shape), plan.scenario(scenario), arm) is None} == served


def test_a_flashinfer_engine_has_one_kernel_for_prompts_and_verify() -> None:
    setup = Setup("flashinfer", Path("m"), Path("d"), Speculation(4, 8, 64), pool_tokens=1000)
    assert setup.variables()["SGLANG_FLASHINFER_USE_PAGED"] == "1"
    assert "SGLANG_FLASHINFER_USE_PAGED" not in replace(setup, arm="fa3").variables()
