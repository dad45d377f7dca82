"""A whole tuning run with invented times: what is measured, what is not measured twice, and what is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.hardware import Hardware
from sglang_specverify.kernels import plan, tables
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, parse
from sglang_specverify.tuning import run
from sglang_specverify.tuning.buckets import Bucket, buckets
from sglang_specverify.tuning.results import Measured, State, ranked

BELONGS = {"hardware": "invented"}


def invented(counted: list[LaunchConfig]) -> Callable[[Bucket, LaunchConfig], Measured]:
    """Fastest with blocks of 64 keys, four warps and two stages; 128 keys do not fit."""

    def measure(bucket: Bucket, config: LaunchConfig) -> Measured:
        counted.append(config)
        if config.block_n == 128:
            return Measured((), "OutOfResources")
        us = 10.0 + abs(config.block_n - 64) + abs(config.num_warps - 4) + abs(config.num_stages - 2) + config.block_m / 1000
        return Measured(tuple(us * (n + 1) for n in range(len(bucket.calls))))

    return measure


def tuned(bucket: Bucket, state: State, counted: list[LaunchConfig]) -> dict[LaunchConfig, Measured]:
    return {step.config: step.measured for step in run.measure_bucket(bucket, "sm_90", state, invented(counted))}


def test_the_fastest_candidate_is_refined(tmp_path: Path) -> None:
    bucket = next(b for b in buckets() if b.name == "fused rows 17-32 dim 65-128 cache 16")
    counted: list[LaunchConfig] = []
    results = tuned(bucket, State.load(tmp_path / "state", BELONGS), counted)
    assert list(results) == counted
    assert counted[0] == run.now(bucket, "sm_90")[0]
    best = ranked(results)[0][0]
    # Two stages are no candidate there; only the refinement finds them.
    assert (best.block_n, best.num_warps, best.num_stages) == (64, 4, 2)


def test_what_served_before_is_timed_call_by_call(tmp_path: Path) -> None:
    """One launch served the first call and another the second: their times, each on its own call."""
    bucket = next(b for b in buckets() if b.name == "fused rows 33-64 dim 65-128 cache 16, divided")
    first, second = run.now(bucket, "sm_90")
    assert first != second
    results = tuned(bucket, State.load(tmp_path / "state", BELONGS), [])
    us = results[first].microseconds[0], results[second].microseconds[1]
    assert run.served(bucket, "sm_90", results) == Measured(us)
    failed = results | {second: Measured((), "OutOfResources")}
    assert run.served(bucket, "sm_90", failed).problem == "OutOfResources"
    del failed[second]
    assert run.served(bucket, "sm_90", failed).problem


def test_a_second_run_measures_nothing_again(tmp_path: Path) -> None:
    first: list[LaunchConfig] = []
    results = tuned(buckets()[0], State.load(tmp_path / "state", BELONGS), first)
    again: list[LaunchConfig] = []
    assert tuned(buckets()[0], State.load(tmp_path / "state", BELONGS), again) == results
    assert again == []


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def interrupted(bucket: Bucket, config: LaunchConfig) -> Measured:
        if len(first) == 3:
            raise KeyboardInterrupt
        return invented(first)(bucket, config)

    first: list[LaunchConfig] = []
    with pytest.raises(KeyboardInterrupt):
        list(run.measure_bucket(buckets()[0], "sm_90", State.load(tmp_path / "state", BELONGS), interrupted))
    rest: list[LaunchConfig] = []
    results = tuned(buckets()[0], State.load(tmp_path / "state", BELONGS), rest)
    assert len(first) == 3
    assert first + rest == list(results)


def test_what_earlier_runs_finished_is_kept_and_what_they_did_not_is_left_out(tmp_path: Path) -> None:
    state = State.load(tmp_path / "state", BELONGS)
    finished, started, asked = buckets()[:3]
    results = tuned(finished, state, [])
    state.add(run.key_of(started, run.now(started, "sm_90")[0]), Measured((1.0, 1.0)))
    tuned(asked, state, [])
    assert run.measured_before("sm_90", state, (asked,)) == {finished: results}


def test_the_file_is_a_table_with_timings(tmp_path: Path) -> None:
    bucket = buckets()[0]
    results = tuned(bucket, State.load(tmp_path / "state", BELONGS), [])
    text = run.text_of_table("sm_90", "3.8.0", "invented", {bucket: results}, lambda bucket, config: 0)
    table = parse(text, "tuned", "sm_90")
    assert table.kernels["fused"][0] == Entry(bucket.when, ranked(results)[0][0], True)
    shipped = tables.read("sm_90")
    assert shipped is not None
    assert set(table.kernels["fused"][1:]) <= set(shipped.kernels["fused"])
    assert text.count('"bucket"') == len(results)
    run.write(tmp_path / "new" / "sm_90.json", text)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sm_90.json"]


def test_measurements_of_other_kernels_or_another_division_are_not_mixed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, machine = run.Gpu("sm_90"), Hardware("nvidia", "sm_90", "H200", 1)
    before = gpu.belongs(machine)
    keys = [kernel.cache_key for kernel in run.kernels()]
    for number in range(len(keys)):
        changed = [SimpleNamespace(cache_key=key + "x" * (n == number)) for n, key in enumerate(keys)]
        with monkeypatch.context() as other:
            other.setattr(run, "kernels", lambda changed=changed: changed)
            after = gpu.belongs(machine)
        assert {name for name in before if after[name] != before[name]} == {"kernel source"}
    assert gpu.belongs(machine) == before
    monkeypatch.setitem(plan.MIN_CHUNKS, ("fused", "launch"), 64)
    assert gpu.belongs(machine)["kernel source"] != before["kernel source"]


def test_parts_can_be_chosen() -> None:
    assert {bucket.kernel for bucket in run.chosen("tree_suffix", None)} == {"tree_suffix"}
    assert [bucket.name for bucket in run.chosen(None, "fused rows 1-16 dim 65-128 cache 8, divided")] == [
        "fused rows 1-16 dim 65-128 cache 8, divided"
    ]
    with pytest.raises(
        SpecverifyError, match="nothing to tune with --kernel fused --only 'rows 7'; there are\n  fused rows 1-16"
    ):
        run.chosen("fused", "rows 7")


@pytest.mark.parametrize("taken", ["new.json", "new.partial.jsonl", "new.writing"])
def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).mkdir()
    with pytest.raises(
        ArgumentError, match=re.escape(f"--out: got {tmp_path / 'new.json'}, and {tmp_path / taken} is a directory")
    ):
        run.check_out(tmp_path / "new.json")


@pytest.mark.parametrize("out", [".", "", "..", "/"])
def test_paths_without_a_file_name_are_refused(out: str) -> None:
    with pytest.raises(ArgumentError, match="is a directory; allowed: the path of a file"):
        run.check_out(Path(out))


def test_a_directory_that_cannot_be_made_or_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=re.escape(f"{tmp_path / 'file'} is no directory")):
        run.check_out(tmp_path / "file" / "new" / "sm_90.json")
    run.check_out(tmp_path / "new" / "sm_90.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    state = run.state_path(tmp_path / "sm_90.json")
    state.touch()
    run.check_out(tmp_path / "sm_90.json")
    # Permissions do not bind every user who may run this.
    for denied, says in ((tmp_path, "cannot be written"), (state, "beside it cannot be read and written")):
        monkeypatch.setattr("os.access", lambda path, mode, denied=denied: path != denied)
        with pytest.raises(ArgumentError, match=re.escape(f"{denied} {says}")):
            run.check_out(tmp_path / "sm_90.json")


def test_another_vendor_is_refused() -> None:
    with pytest.raises(SpecverifyError, match="do not run on a third"):
        run.check_machine(Hardware("other", "unknown", "a third", 1))
