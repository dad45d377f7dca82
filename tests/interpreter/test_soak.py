"""The soak and the sweep run, find nothing in right kernels, and find a fault that is put into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record
from sglang_specverify.kernels.launch import Launch

from . import soak, sweep

#: Cases of the test of the soak itself.
COUNT = {"cuda": 100, "cpu": 10}


def test_a_few_cases(device: str, tmp_path: Path) -> None:
    result = soak.soak(COUNT[device], 5, 1, 8, device)
    assert result["cases"] == COUNT[device] and result["outside_their_bound"] == 0, result["failures"]
    assert 0 < max(result["largest_error_over_bound"].values()) <= 1
    record.write(tmp_path / "soak.json", result)
    assert json.loads((tmp_path / "soak.json").read_text())["cases"] == COUNT[device]


def test_cases_are_the_same_every_time(device: str) -> None:
    first, second = (soak.case(5, 3, 8, device) for _ in range(2))
    assert first[:2] == second[:2]
    for name, value in first[2].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, second[2][name], rtol=0, atol=0, equal_nan=True)


def test_a_faulty_kernel_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch scales scores a little too much."""
    run = Launch.run

    def faulty(self: Launch) -> None:
        if "scale" in self.arguments:
            self.arguments["scale"] *= 1.05
        run(self)

    monkeypatch.setattr(Launch, "run", faulty)
    result = soak.soak(6, 5, 1, 8, device)
    assert result["outside_their_bound"] >= 2
    assert all("times its bound" in failure["error"] for failure in result["failures"])


def test_time_runs_out(device: str) -> None:
    assert soak.soak(10, 0.0, 1, 8, device)["cases"] <= 1


def test_sweep_covers_every_kernel_mask_and_cache(device: str) -> None:
    names: list[str] = [name for name, _ in sweep.calls(device)]
    assert len(names) == len(set(names))
    for part in (*sweep.KINDS, *(str(cache)[6:] for cache in sweep.CACHES), "tree_suffix_merge", "gather_suffix_merge",
                 "snapshot_table", "prepare_step", "merge_states", "deterministic"):  # fmt: skip
        assert any(part in name for name in names), part


def some_calls(device: str) -> list[Any]:
    """Every seventeenth call: of all kinds, few enough for the interpreter."""
    return [call for number, (_, call) in enumerate(sweep.calls(device)) if number % 17 == 0 or device == "cuda"]


def test_sweep_runs(device: str) -> None:
    for call in some_calls(device):
        call()
