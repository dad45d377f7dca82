"""What a trace says: shares, counts and the time in which anything ran."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import end_to_end_profile as profile
from sglang_specverify.errors import SpecverifyError

EVENTS = [
    {"cat": "kernel", "name": "nvjet_tst_128x256", "ts": 0.0, "dur": 1000.0},
    {"cat": "kernel", "name": "specialized_kernel", "ts": 500.0, "dur": 1000.0},
    {"cat": "kernel", "name": "specialized_kernel", "ts": 3000.0, "dur": 1000.0},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 3900.0, "dur": 300.0},
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
    {"cat": "kernel", "name": "no duration", "ts": 1.0},
]


def test_a_step_is_the_recorded_time_over_the_recorded_steps() -> None:
    found = profile.summarize(EVENTS, steps=2)
    assert found["span_ms"] == pytest.approx(2.1)
    assert found["busy_ms"] == pytest.approx((1.5 + 1.2) / 2)
    assert profile.groups(found["kernels"]) == pytest.approx({"attention": 1.0, "matrix products": 0.5, "copies": 0.15})
    assert [(kernel["name"], kernel["launches"]) for kernel in found["kernels"]] == [
        ("specialized_kernel", 1.0),
        ("nvjet_tst_128x256", 0.5),
        ("Memcpy DtoD", 0.5),
    ]


def test_a_trace_without_a_device_is_an_error() -> None:
    with pytest.raises(SpecverifyError, match="nothing of a device"):
        profile.summarize(EVENTS[4:], steps=1)


def test_a_trace_is_read_once_it_is_whole(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())
    (tmp_path / "a.trace.json.gz").write_bytes(whole[:-9])
    with pytest.raises(SpecverifyError, match="no trace"):
        profile.read_trace(tmp_path, "engine", seconds=0.1)
    (tmp_path / "a.trace.json.gz").write_bytes(whole)
    assert profile.read_trace(tmp_path, "engine") == EVENTS


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<…>>", "attention"),
        ("kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel_object", "other"),
        ("void sglang::fused_rope_kernel<true, 128l, true>", "other"),
        ("verify_attention_kernel", "attention"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "matrix products"),
    ],
)
def test_groups_go_by_what_a_kernel_is(name: str, group: str) -> None:
    assert profile.group_of(name) == group
