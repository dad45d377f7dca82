"""Measurements that outlive an interrupted run, and the entries that follow from them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.launch import COMBINATIONS, LaunchConfig
from sglang_specverify.kernels.table_schema import Entry, Table
from sglang_specverify.tuning.buckets import buckets
from sglang_specverify.tuning.results import Measured, State, entry_of, key_of, ranked, table_of, text_of, timings_of

A, B, C = (LaunchConfig(16, block_n, 4, 2) for block_n in (16, 32, 64))
BUCKET = buckets()[0]
BELONGS = {"hardware": "H200", "triton": "3.8.0", "kernel source": "abc"}


def test_measurements_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sm_90.partial.jsonl"
    state = State.load(path, BELONGS)
    assert state.measured == {}
    state.add(key_of(BUCKET, A), Measured((1.5, 2.5)))
    state.add(key_of(BUCKET, B), Measured((), "wrong output"))
    again = State.load(path, BELONGS)
    assert (
        again.measured
        == state.measured
        == {key_of(BUCKET, A): Measured((1.5, 2.5)), key_of(BUCKET, B): Measured((), "wrong output")}
    )


@pytest.mark.parametrize("name", [field.name for field in fields(LaunchConfig)])
def test_launches_that_differ_in_one_field_are_kept_and_shown_apart(name: str) -> None:
    """Every field that a launch has, those that it may get later too."""
    value = getattr(A, name)
    others: dict[str, Any] = {"combine": COMBINATIONS[-1], "amd": (("waves_per_eu", 2),)}
    other = replace(A, **{name: others[name] if name in others else value + 1})
    assert other != A
    assert key_of(BUCKET, other) != key_of(BUCKET, A)
    assert text_of(other) != text_of(A)


def test_launches_are_shown_with_what_is_not_as_usual() -> None:
    launch = LaunchConfig(16, 64, 4, 2, 1, (("waves_per_eu", 2),), peel=0, combine="launch")
    assert text_of(launch) == "16x64 warps=4 stages=2 ctas=1 waves_per_eu=2 peel=0 combine=launch"


def test_a_run_killed_while_it_wrote_loses_only_that(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    state = State.load(path, BELONGS)
    state.add("a", Measured((1.0,)))
    state.add("b", Measured((2.0,)))
    path.write_text(path.read_text()[:-9])
    again = State.load(path, BELONGS)
    assert again.measured == {"a": Measured((1.0,))}
    again.add("c", Measured((3.0,)))
    assert State.load(path, BELONGS).measured == {"a": Measured((1.0,)), "c": Measured((3.0,))}


def test_a_run_killed_at_any_byte_goes_on_with_what_was_whole(tmp_path: Path) -> None:
    """Wherever the file ends: in the header, in a measurement, or inside a character of several bytes."""
    path = tmp_path / "state.jsonl"
    belongs = BELONGS | {"hardware": "H200 à 2"}
    state = State.load(path, belongs)
    state.add("a", Measured((1.0,)))
    state.add("b", Measured((), "wrong output"))
    # As a file is that a person or another program wrote: characters as they are.
    lines = [json.dumps(json.loads(line), ensure_ascii=False).encode() for line in path.read_text().splitlines()]
    whole = b"".join(line + b"\n" for line in lines)
    assert len(whole) > len(whole.decode())
    ends = [len(b"\n".join(lines[:count])) for count in (1, 2, 3)]
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        resumed = State.load(path, belongs)
        # A line is whole without the end of the line, too.
        kept = {key: value for key, value, at in zip("ab", state.measured.values(), ends[1:], strict=True) if end >= at}
        assert resumed.measured == kept
        resumed.add("c", Measured((3.0,)))
        resumed.add("d", Measured((4.0,)))
        assert State.load(path, belongs).measured == kept | {"c": Measured((3.0,)), "d": Measured((4.0,))}
        # Whose measurements they are is known again, once.
        headers = [line for line in path.read_bytes().splitlines() if line.endswith(b"}") and b'"key"' not in line]
        assert [json.loads(line) for line in headers] == [belongs]
        with pytest.raises(SpecverifyError, match="holds measurements of another triton"):
            State.load(path, belongs | {"triton": "other"})


def test_a_file_that_is_removed_meanwhile_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    state = State.load(path, BELONGS)
    state.add("a", Measured((1.0,)))
    path.unlink()
    state.add("b", Measured((2.0,)))
    assert State.load(path, BELONGS).measured == {"b": Measured((2.0,))}


def test_measurements_that_belong_to_nobody_knows_what_are_kept_and_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    State.load(path, BELONGS).add("a", Measured((1.0,)))
    whole = path.read_bytes()
    header, _, rest = whole.partition(b"\n")
    path.write_bytes(header[:20] + b"\n" + rest)
    damaged = path.read_bytes()
    with pytest.raises(SpecverifyError, match=r"does not say what its measurements \(1\) belong to") as caught:
        State.load(path, BELONGS)
    assert path.read_bytes() == damaged
    # The remedy works.
    assert header.decode() in caught.value.remedy
    path.write_bytes(header + b"\n" + damaged)
    assert State.load(path, BELONGS).measured == {"a": Measured((1.0,))}


@pytest.mark.parametrize("name", list(BELONGS))
def test_measurements_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state.jsonl"
    State.load(path, BELONGS).add("a", Measured((1.0,)))
    with pytest.raises(SpecverifyError, match=re.escape(f"{path} holds measurements of another {name}\n  remedy: delete it")):
        State.load(path, BELONGS | {name: "other"})


def test_launches_are_ranked_by_how_slow_they_are_on_all_calls() -> None:
    """A and B each win one call; the call that is four times as fast for B counts more than the one twice as fast for A."""
    measured = {A: Measured((10.0, 40.0)), B: Measured((20.0, 10.0)), C: Measured((), "wrong output")}
    order = ranked(measured)
    assert [config for config, _ in order] == [B, A]
    assert [score for _, score in order] == pytest.approx([math.sqrt(2), 2.0])
    assert ranked({C: Measured((), "wrong output")}) == []
    # Of equals, the one tried first: what serves now.
    assert ranked({B: Measured((1.0,)), A: Measured((1.0,))})[0][0] == B


def test_the_fastest_that_does_not_spill_is_taken() -> None:
    measured = {A: Measured((10.0,)), B: Measured((9.9,)), C: Measured((12.0,))}
    assert entry_of(BUCKET, measured, lambda config: 0) == Entry(BUCKET.when, B, True)
    # One per cent is no reason to spill.
    assert entry_of(BUCKET, measured, lambda config: 8 * (config == B)) == Entry(BUCKET.when, A, True)
    assert entry_of(BUCKET, {A: Measured((), "wrong output")}, lambda config: 0) is None


def test_spills_that_win_are_recorded_with_their_bytes_and_their_reason() -> None:
    measured = {A: Measured((12.0,)), B: Measured((10.0,))}
    entry = entry_of(BUCKET, measured, lambda config: 48 * (config == B))
    assert entry is not None
    assert (entry.launch, entry.spill_bytes, entry.measured) == (B, 48, True)
    assert entry.spill_reason == "1.20 times as fast as 16x16 warps=4 stages=2 ctas=1, the best without spills"
    all_spill = entry_of(BUCKET, measured, lambda config: 8)
    assert all_spill == Entry(BUCKET.when, B, True, 8, "no launch without spills ran")


def test_spills_are_asked_for_no_further_than_needed() -> None:
    asked = []
    measured = {A: Measured((12.0,)), B: Measured((10.0,)), C: Measured((11.0,))}
    entry_of(BUCKET, measured, lambda config: asked.append(config) or 16 * (config == B))  # type: ignore[func-returns-value]
    assert asked == [B, C]


def test_tuned_entries_come_first_and_hide_those_that_can_win_no_more() -> None:
    def entry(**when: tuple[object, ...]) -> Entry:
        return Entry(tuple(when.items()), A)

    tuned = entry(rows=(1, 16), cache_bits=(8, 16))
    inside = entry(rows=(4, 16), cache_bits=(8,), split=(True,))
    beyond = entry(rows=(1, None), cache_bits=(8,))
    other = entry(rows=(1, 16))
    written = {"specialized": (beyond,)}
    before = Table("sm_90", "3.7.1", "before", {"fused": (inside, beyond, other), "tree_suffix": (inside,), **written})
    table = table_of("sm_90", "3.8.0", "now", {"fused": [tuned], "tree_suffix": []}, before)
    assert table == Table("sm_90", "3.8.0", "now", {"fused": (tuned, beyond, other), "tree_suffix": (inside,), **written})
    assert table_of("sm_90", "3.8.0", "now", {"fused": [tuned], "tree_suffix": []}, None).kernels["fused"] == (tuned,)


def test_all_timings_are_listed_the_failed_last() -> None:
    listed = timings_of(BUCKET, {C: Measured((), "wrong output"), A: Measured((2.0, 2.0)), B: Measured((1.0, 1.0))})
    assert [row["us"] for row in listed] == [[1.0, 1.0], [2.0, 2.0], []]
    assert listed[2]["problem"] == "wrong output"
    assert len(listed[0]["calls"]) == len(BUCKET.calls)
    json.dumps(listed)
