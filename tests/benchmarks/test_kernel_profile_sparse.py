"""Profiles of sparse MLA's calls, and of calls that are several launches."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernel_profile, kernel_profile_child, kernel_profile_sparse
from benchmarks import kernel_profile_counters as counting
from benchmarks.arms import Unavailable
from benchmarks.kernel_profile import CEILINGS, KERNELS, WAYS
from benchmarks.kernel_profile_calls import LISTS, MISSED_SPARSE, TINY_SPARSE, Call, parse
from benchmarks.points import Work
from benchmarks.sparse_mla_arms import Output
from benchmarks.sparse_mla_points import Point
from benchmarks.sparse_mla_pool import PAGE_ROWS, Inputs
from sglang_specverify.errors import ArgumentError
from tests.benchmarks import kernel_profiles
from tests.benchmarks.kernel_profiles import CHECKED, LAUNCH, PARTS, raw

CPU = torch.device("cpu")


def test_sparse_calls_are_named_like_others() -> None:
    names = [call.name for calls in LISTS.values() for some in calls for call in some]
    assert len(set(names)) == len(names)
    for call in (*MISSED_SPARSE, *TINY_SPARSE):
        assert parse(f"{call.point.name} = {call.arm}") == call
    assert parse("B 128 K 512 H 64 Sq 1") == MISSED_SPARSE[1] and MISSED_SPARSE[1].missed == "20 µs"
    assert parse("B 64 K 128 H 128 Sq 4 = rows apart") == Call(Point(64, 128, 128, 4), "rows apart")
    # Each has arms of its own.
    for text in (
        "B 128 K 512 H 64 Sq 1 = fused",
        "B 128 K 512 H 64 Sq 1 = selected",
        "chain bs 1 W 4 L 8192 (32/8/128) = flashmla",
    ):
        with pytest.raises(ArgumentError, match="--call"):
            parse(text)


def test_a_dry_run_of_sparse_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_profiles.stand_ins(tmp_path, monkeypatch)('cat "$(dirname {raw})/two.csv"', CHECKED | {"variant": "specverify"})
    (tmp_path / "two.csv").write_text(raw(PARTS, LAUNCH))
    jobs: list[dict[str, Any]] = []
    start = kernel_profile.Children.start
    monkeypatch.setattr(
        kernel_profile.Children, "start", lambda self, name, job, tool=(): jobs.append(job) or start(self, name, job, tool)
    )
    out = tmp_path / "out.json"
    kernel_profile.main(["--only", "sparse", "--device", "cpu", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [(job["do"], job["of"], job["arm"]) for job in jobs] == [
        (do, "sparse", "specverify") for do in ("check", "profile") for _ in "ab"
    ]
    assert [row["name"] for row in found["rows"]] == [call.point.name for call in TINY_SPARSE]
    assert found["ceilings"]["from"] == CEILINGS["sparse"].name
    row = found["rows"][0]
    assert (row["us"], row["counters"]["registers"]) == (19.0, 168) and [one["us"] for one in row["kernels"]] == [2.18, 16.82]
    assert row["floor_us"] == round(34e6 / found["ceilings"]["copy_tb_per_s"] / 1e6, 3) and row["floor"] == "bytes"
    line = next(line for line in counting.table(found) if TINY_SPARSE[0].point.name in line)
    assert "| specverify: kernel_0 2.2 + kernel_1 16.8 | " in line and " | 19.0 | " in line


@pytest.mark.parametrize(("of", "device", "repairs"), [("sparse", "cpu", 1), ("sparse", "cuda", 0), ("dense", "cpu", 0)])
def test_the_interpreter_is_repaired_before_a_sparse_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, device: str, repairs: int
) -> None:
    done: list[str] = []
    monkeypatch.setattr("tests.interpreter.repair.apply", lambda: done.append("repaired"))
    monkeypatch.setattr(kernel_profile_child, "run", lambda job, where: done.append(job["do"]))
    (tmp_path / "job.json").write_text(json.dumps({"do": "check", "of": of}))
    monkeypatch.setattr("sys.argv", ["child", str(tmp_path / "job.json"), str(tmp_path / "report.json"), device])
    kernel_profile_child.main()
    assert done == [*["repaired"] * repairs, "check"]


def test_a_floor_is_the_longer_of_bytes_and_flops() -> None:
    ceilings = {"copy_tb_per_s": 4.0, "matmul_tflops": 800.0}
    for row, floor in (({"bytes": 8e6, "flops": 8e8}, (2.0, "bytes")), ({"bytes": 8e6, "flops": 8e9}, (10.0, "FLOPs"))):
        assert tuple(kernel_profile.floor_of(row, ceilings).values()) == floor
    # B 128, K 512 at 778 TFLOP/s: 13.8 us of FLOPs, 10.6 us of bytes.
    point = Point(128, 512)
    assert point.work == Work(point.bytes, point.flops)
    results = json.loads(CEILINGS["sparse"].read_text())
    found = kernel_profile.floor_of({"bytes": point.bytes, "flops": point.flops}, results["ceilings"])
    assert found == {"floor_us": pytest.approx(13.8, rel=0.03), "floor": "FLOPs"}


def test_a_sparse_call_is_checked_before_it_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = kernel_profile_sparse.ARMS
    right = arms["pytorch"]

    def larger(made: Inputs) -> Any:
        call = right.build(made)
        return lambda layer: Output(1.1 * call(layer).out)

    def nothing(made: Inputs) -> Any:
        raise Unavailable("no wheel")

    others = {"larger": replace(right, name="larger", build=larger), "nothing": replace(right, name="nothing", build=nothing)}
    monkeypatch.setattr(kernel_profile_sparse, "ARMS", arms | others)
    call = TINY_SPARSE[1]
    rows = [kernel_profile_child.run(call.job("check", name), CPU) or {} for name in ("pytorch", "larger", "nothing")]
    assert rows[0].pop("error") < 5e-3
    assert rows[0] == {"variant": "pytorch", "bytes": call.point.work.bytes, "flops": call.point.work.flops}  # type: ignore[union-attr]
    assert rows[1]["why"].startswith("wrong: layer 0") and rows[2]["why"] == "no wheel"
    done: list[int] = []
    counted = replace(right, build=lambda made: done.append)
    monkeypatch.setattr(kernel_profile_sparse, "ARMS", {"pytorch": counted})
    assert kernel_profile_child.run(call.job("profile", "pytorch"), CPU) is None and done == [0, 0]


@pytest.mark.parametrize("point", [Point(3, 48, 8, 2, 32), Point(2, 48, 8, 2, 32, shared=True), Point(2, 0, 8)])
def test_pools_have_two_layers_and_no_more_rows(point: Point) -> None:
    made = kernel_profile_sparse.make(point.as_dict(), CPU)
    assert made.layers >= 2 and made.windows.shape[1:] == (point.batch, point.window + point.queries - 1)
    for cache, rows in ((made.pool.swa, point.window_rows), (made.pool.main, point.lists * point.topk)):
        assert 2 * rows <= len(cache) * PAGE_ROWS <= 2 * rows + PAGE_ROWS


def test_the_second_way_counts_every_launch_of_a_call() -> None:
    first, second = (" ".join(way) for way in WAYS.values())
    # Collectively, the third launch is the first of the second call where a call is two.
    assert "--filter-mode per-launch-config --launch-skip 2 --launch-count 1" in second and "--launch" not in first
    # A page has one line of units for all its launches.
    assert "--print-units base" in first and "--print-units base" in second
    own = {
        "verify_attention_kernel": "fused_kernel", "specialized_kernel": "specialized_kernel",
        "combine_parts_kernel": "combine_parts_kernel", "hopper_kernel": "sparse_mla.hopper_kernel",
        "decode_kernel": "sparse_mla.decode_kernel", "combine_kernel": "sparse_mla.combine_kernel",
    }  # fmt: skip
    for name, module in own.items():
        assert name in KERNELS and hasattr(importlib.import_module(f"sglang_specverify.kernels.{module}"), name)
    wanted = re.search(r"regex:(\S+)", second)
    assert wanted is not None
    for name in (
        "legacy::sm90::decode::sparse::flash_fwd_splitkv_mla_fp8_sparse_kernel<K>",
        "smxx::flash_fwd_mla_combine_kernel<512>",
    ):
        assert re.search(wanted[1], name)
    # What only inputs and the first call launch.
    for name in (
        "quantize_fp4_kernel",
        "quantize_mxfp8_kernel",
        "get_mla_metadata_kernel",
        "plan_kernel",
        "vectorized_elementwise_kernel",
    ):
        assert not re.search(wanted[1], name)


def test_kernels_are_named_without_what_they_are_made_of() -> None:
    names = {
        "hopper_kernel": "hopper_kernel",
        "kernel_0(T1, T2)": "kernel_0",
        "void legacy::sm90::decode::flash_fwd_kernel<legacy::Traits<bf16, 512>, (int)3>(T1)": "flash_fwd_kernel",
        "void at::(anonymous namespace)::fill<float>(float*)": "fill",
        "?": "?",
    }
    assert {name: counting._bare(name) for name in names} == names


def test_launches_without_some_metrics_are_summed_all_the_same() -> None:
    """Three launches, the longest in the middle, and a value that one of them does not have."""
    short = {"gpu__time_duration.sum": ("ns", "1,000"), "launch__registers_per_thread": ("register/thread", "32")}
    found = counting.summarize(counting.read(raw(PARTS, LAUNCH, short)))
    assert found["us"] == 20.0 and [(one["name"], one["us"]) for one in found["kernels"]] == [
        ("kernel_0(T1, T2)", 2.18), ("kernel_1(T1, T2)", 16.82), ("kernel_2(T1, T2)", 1.0),
    ]  # fmt: skip
    assert found["counters"]["registers"] == 168 and found["counters"]["DRAM bytes read"] == 33620480
    assert len(counting.read("\"a program's line\n" + raw(LAUNCH, PARTS))) == 2
    # A page for each, as well as one for all.
    assert counting.summarize(counting.read(raw(PARTS) + "==PROF== more\n" + raw(LAUNCH)))["us"] == 19.0
    # A launch that is cut off, or whose time is not there, is no launch that took none.
    with pytest.raises(ValueError, match="not whole"):
        counting.read(raw(LAUNCH, PARTS)[:-30])
    with pytest.raises(ValueError, match="no duration"):
        counting.summarize(counting.read(raw(LAUNCH, {"launch__registers_per_thread": ("register/thread", "32")})))
