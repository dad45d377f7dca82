"""The soak and the sweep run, find nothing in right kernels, and find a fault that is put into one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import record
from sglang_specverify.kernels import run
from sglang_specverify.kernels.launch import Launch
from sglang_specverify.kernels.variants import Choice
from tests.kernels.cases import Config

from . import soak, soak_cases, soak_faults, soak_workers, sweep
from .soak_outcomes import Outcome, Tally

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


def test_few_kernels_serve_many_cases(device: str) -> None:
    """Types, and whether a stride or an address is a multiple of 16, are the same for the cases of a family."""
    found: dict[int, set[tuple[object, ...]]] = {}
    for number in range(200):
        _, c, a = soak.case(number, 3, 8, device)
        tensors = {name: value for name, value in a.items() if isinstance(value, torch.Tensor) and name != "mask"}
        strides = tuple((name, value.dtype, *(n % 16 == 0 for n in value.stride()[:-1])) for name, value in tensors.items())
        aligned = (len(a["q"]) % 16 if c.seed % 2 else None, a["topk"] == 1 if "topk" in a else a.get("num_draft_tokens"))
        found.setdefault(soak_cases.family_of(number, 3, 8), set()).add((*strides, *aligned))
    assert len(found) == 8 and max(map(len, found.values())) <= 3


def test_cases_are_shared_out(device: str) -> None:
    """To another process, in chunks of one family: the same outcomes as in this one."""
    ways = [soak.soak(6, 5, 6, 2, device, processes=processes) for processes in (0, 1)]
    assert [way["cases"] for way in ways] == [6, 6] and not ways[0]["failures"] + ways[1]["failures"]
    for name in ("counts", "prefix_tokens", "largest_error_over_bound"):
        assert ways[0][name] == ways[1][name]
    chunks = list(soak_workers.chunks_of(range(200), 1, 8))
    assert sorted(number for chunk in chunks for number in chunk) == list(range(200))
    families = [{soak_cases.family_of(number, 1, 8) for number in chunk} for chunk in chunks]
    assert all(len(one) == 1 for one in families) and len(set.union(*families[:8])) == 8


def test_a_process_that_dies_costs_one_case() -> None:
    """It dies in one case, and loses its device in another: both are failures, and all others have their outcomes."""
    deadline = time.monotonic() + 60
    outcomes = {one.number: one for one in soak_workers.shared(range(40), 0, 2, 2, deadline, soak_faults.work)}
    assert sorted(outcomes) == list(range(40))
    wrong = {number: one.error for number, one in outcomes.items() if one.error}
    assert wrong == {soak_faults.DIES: "the process died, exit code 3", soak_faults.BREAKS: "its device failed"}


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
    assert all(failure["again"].endswith(f"--first {failure['case']}") for failure in result["failures"])


def test_time_runs_out(device: str) -> None:
    result = soak.soak(10, 0.0, 1, 8, device)
    assert result["cases"] <= 1
    assert result["finished"] is False and result["stopped"] == "time"


def test_finished_means_all_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(number: int, *_: object) -> Outcome:
        return Outcome(number, "fused", "chain", "", "", 0, 0.5, None, 0.0)

    monkeypatch.setattr(soak, "outcome_of", outcome)
    result = soak.soak(3, 5, 1, 8, "cpu")
    assert result["cases"] == 3 and result["finished"] is True and "stopped" not in result
    tally = Tally()
    tally.add(outcome(0))
    assert soak.ended(tally, 2, time.monotonic() + 60) == {"finished": False, "stopped": "too many processes died"}


@pytest.mark.parametrize("variant", ["fused", "specialized_split"])
def test_a_plan_counts_for_the_variant_that_served(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """What a plan is asked for does not tell which kernel takes the call."""
    monkeypatch.setattr(soak, "case", lambda *_: ("planned", Config(prefix_lens=(3,)), {}))
    monkeypatch.setattr(soak, "sharpened", lambda *_, **__: "planned_specialized")
    monkeypatch.setattr(run, "choose", lambda *_: Choice(variant, ""))

    def run_case(*_: object) -> float:
        run.choose({}, {}, "reference")
        run.choose({}, {}, "auto", object())
        return 0.5

    stock = run.choose
    monkeypatch.setattr(soak, "run_case", run_case)
    assert soak.outcome_of(0, 1, 8, "cpu").operation == f"planned_{variant}"
    assert run.choose is stock
    # A case that failed before was served by none.
    monkeypatch.setattr(soak, "run_case", lambda *_: 1 / 0)
    failed = soak.outcome_of(0, 1, 8, "cpu")
    assert failed.operation == "planned" and failed.error == "ZeroDivisionError: division by zero"


def test_sweep_covers_every_kernel_mask_and_cache(device: str) -> None:
    every = list(sweep.calls(device))
    names = [one.name for one in every]
    assert len(names) == len(set(names))
    for part in (*sweep.KINDS, *(str(cache)[6:] for cache in sweep.CACHES), "tree_suffix_merge", "gather_suffix_merge",
                 "snapshot_table", "prepare_step", "merge_states", "deterministic"):  # fmt: skip
        assert any(part in name for name in names), part
    pairs = {(one.operation, one.kind) for one in every}
    chosen = sweep.some(every, 1)
    assert {(one.operation, one.kind) for one in chosen} == pairs and len(chosen) == len(pairs)
    assert {one.cache for one in chosen} == {one.cache for one in every}
    assert sorted(one.name for one in sweep.some(every, 1000)) == sorted(names)


def test_sweep_runs(device: str) -> None:
    """Every seventeenth call: of all kinds, few enough for the interpreter."""
    for number, one in enumerate(sweep.calls(device)):
        if number % 17 == 0 or device == "cuda":
            one.run()


def test_sweep_finds_a_fault(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is written that belongs to nobody."""
    run = Launch.run

    def faulty(self: Launch) -> None:
        run(self)
        if "out" in self.arguments:
            self.arguments["out"][-1] = 1.0

    one = next(call for call in sweep.calls(device) if call.operation == "fused")
    monkeypatch.setattr(Launch, "run", faulty)
    with pytest.raises(AssertionError, match="no request has a row"):
        one.run()
