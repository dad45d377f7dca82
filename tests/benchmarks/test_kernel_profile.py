"""What a profile is read to say, and that a call which fails is a row."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import docs, inputs, kernel_profile, kernel_profile_child
from benchmarks import kernel_profile_counters as counting
from benchmarks.arms import Arm
from benchmarks.kernel_profile import WAYS, Children
from benchmarks.kernel_profile_calls import MISSED, TINY, Call, parse
from sglang_specverify.errors import ArgumentError, SpecverifyError
from tests.benchmarks.kernel_profiles import CEILINGS, CHECKED, LAUNCH, PARTS, raw, stand_ins


def test_a_launch_is_read_in_seconds_bytes_and_percent() -> None:
    found = counting.summarize(counting.read(raw(LAUNCH)))
    assert (found["us"], found["kernels"]) == (16.82, [{"name": "kernel_0(T1, T2)", "us": 16.82}])
    values = found["counters"]
    assert values["DRAM bytes read"] == 33620480 and values["shared memory, bytes"] == 99328 and values["programs"] == 136
    # Shares are of the whole duration where there are such, and never instructions counted as cycles of a pipe.
    assert values["tensor pipe, %"] == 6.9 and values["issue slots, %"] == 9.8
    assert counting.dram_tb_per_s(values) == pytest.approx(33640960 / 16.82e-6 / 1e12)
    # Of 10 warps; one issues, and those of the cycles without an issue are counted in the others already.
    assert found["stalls"] == {"long_scoreboard": 0.5, "barrier": 0.15, "wait": 0.125, "short_scoreboard": 0.075}


def test_every_alternative_is_taken_where_the_others_are_missing() -> None:
    for key, counter in counting.COUNTERS.items():
        unit = {"seconds": "us", "bytes": "Kbyte", "plain": "%"}[counter.kind]
        for name, factor in counter.metrics:
            found, origin = counting.counters(counting.Kernel("k", {name: (2.0, unit)}))
            scale = {"seconds": 1e-6, "bytes": 1e3, "plain": 1.0}[counter.kind]
            assert found[key] == pytest.approx(2.0 * scale * factor) and origin[key] == name
            assert {other for other, value in found.items() if value is not None} <= {key, "L2 bytes"}
    sectors = counting.Kernel("k", {"lts__t_sectors.sum": (10.0, "sector")})
    assert counting.counters(sectors)[0]["L2 bytes"] == 320.0


def test_an_unknown_unit_is_no_number() -> None:
    found, _ = counting.counters(counting.Kernel("k", {"dram__bytes_read.sum": (2.0, "sector")}))
    assert found["DRAM bytes read"] is None
    with pytest.raises(ValueError, match="no duration"):
        counting.summarize(counting.read(raw(LAUNCH | {"gpu__time_duration.sum": ("fortnight", "1")})))


def test_stalls_come_from_samples_where_there_are_no_averages() -> None:
    samples = {"smsp__pcsamp_warps_issue_stalled_barrier": 3.0, "smsp__pcsamp_warps_issue_stalled_selected": 1.0}
    samples["smsp__pcsamp_warps_issue_stalled_barrier_not_issued"] = 50.0
    assert counting.stalls(counting.Kernel("k", {name: (n, "") for name, n in samples.items()})) == {"barrier": 0.75}
    assert counting.stalls(counting.Kernel("k", {})) == {}


def test_several_launches_are_one_call_and_the_longest_is_counted() -> None:
    found = counting.summarize(counting.read(raw(PARTS, LAUNCH)))
    assert found["us"] == pytest.approx(19.0) and [kernel["us"] for kernel in found["kernels"]] == [2.18, 16.82]
    assert found["counters"]["registers"] == 168


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n==PROF== x", "ERR_NVGPUCTRPERM - no permission"),
        ("Traceback\nRuntimeError: CUDA error\n\n", "RuntimeError: CUDA error"),
        ("", "it printed nothing"),
    ],
)
def test_output_without_a_launch_has_a_reason(output: str, reason: str) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        counting.summarize(counting.read(output))
    assert counting.why_nothing(output) == reason


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "latency; busiest is DRAM, 50 %"),
        ({"tensor pipe, %": 71.0}, "no unit alone; busiest is tensor pipe, 71 %"),
        ({"L2, %": 88.0}, "L2, 88 %"),
        ({"DRAM bytes written": None}, "latency; busiest is L2, 38 %"),
    ],
)
def test_what_holds_a_kernel_is_its_busiest_unit_if_it_is_busy(changes: dict[str, float | None], verdict: str) -> None:
    row = {"counters": counting.counters(counting.read(raw(LAUNCH))[0])[0] | changes}
    assert counting.held_by(row, CEILINGS) == verdict


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Children]:
    return stand_ins(tmp_path, monkeypatch)


def profiled(children: Children, tmp_path: Path) -> dict[str, Any]:
    ceilings, out = tmp_path / "ceilings.json", tmp_path / "out.json"
    ceilings.write_text(json.dumps({"ceilings": CEILINGS}))
    ncu = shutil.which("ncu")
    assert ncu is not None
    kernel_profile.profile(TINY, ncu, children, ceilings, 120.0, 30.0, out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_profile_is_written_with_its_roofline(tools: Callable[..., Children], tmp_path: Path) -> None:
    found = profiled(tools('echo "$@" > {raw}.arguments; cat {raw}'), tmp_path)
    assert found["ncu"]["version"] == "Version 2025.3.1.0" and found["hardware"] and found["versions"]["torch"]
    first, second = found["rows"]
    assert first["way"] == next(iter(WAYS))
    assert first["floor_us"] == 8.5 and first["floor"] == "bytes" and first["us"] == 16.82 and second["us"] == 16.82
    arguments = (tmp_path / "raw.csv.arguments").read_text()
    for options in ("--clock-control none", "--section WarpStateStats", "--profile-from-start off", "--page raw"):
        assert options in arguments
    job = json.loads((tmp_path / "children" / "ncu.job").read_text())
    assert job == {"do": "profile", "of": "dense", "point": TINY[1].point.as_dict(), "arm": "fused"}
    line = next(line for line in counting.table(found) if TINY[0].point.name in line)
    launch = "136 × 128, 0.52 waves, 168 registers, 97 KiB"
    assert f" | 8.5 | 16.8 | 1.98 | 2.00 | 3.00 | 33 | 7 | 10 | {launch} | 6 | latency; " in line
    assert "| long_scoreboard 50 %, barrier 15 %, wait 12 %, short_scoreboard 8 % |" in line


@pytest.mark.parametrize(
    ("ncu", "checked", "reason"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no'; exit 1", CHECKED, "no kernel was profiled: ERR_NVGPUCTRPERM - no"),
        ("cat {raw}", {"variant": "fused", "why": "wrong: relative error 0.4"}, "wrong: relative error 0.4"),
    ],
)
def test_a_call_that_fails_is_a_row_with_its_reason(
    tools: Callable[..., Children], tmp_path: Path, ncu: str, checked: dict[str, Any], reason: str
) -> None:
    found = profiled(tools(ncu, checked), tmp_path)
    assert [row["why"] for row in found["rows"]] == [reason, reason]
    assert f"Not profiled: {TINY[0].point.name}, selected: {reason}." in counting.table(found)


def test_a_profile_that_hangs_is_ended_with_what_it_started(tools: Callable[..., Children], tmp_path: Path) -> None:
    children = tools("sleep 60 & echo $! > {raw}.pid; wait")
    row = kernel_profile.under_ncu(str(tmp_path / "bin" / "ncu"), list(WAYS), TINY[0], CHECKED, children, 2.0)
    assert row == {"why": "no profile in 2 s"}
    state = Path("/proc") / (tmp_path / "raw.csv.pid").read_text().strip() / "stat"

    def is_running() -> bool:
        """A signal takes a moment, and nobody may have waited for what it ended."""
        try:
            return state.read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 20
    while is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running()


def test_a_version_that_profiles_nothing_between_start_and_stop_is_asked_otherwise(
    tools: Callable[..., Children], tmp_path: Path
) -> None:
    children = tools('echo >> {raw}.runs; case "$*" in *--section*) echo "==ERROR== unknown section"; exit 1;; esac; cat {raw}')
    rows = profiled(children, tmp_path)["rows"]
    assert [row["way"] for row in rows] == [list(WAYS)[1]] * 2
    assert (tmp_path / "raw.csv.runs").read_text() == "\n" * 3, "the second call has to begin with what served the first"


def test_what_there_is_no_time_for_is_not_run(
    tools: Callable[..., Children], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_profile, "_TOO_SHORT", 1e9)
    found = profiled(tools("cat {raw}"), tmp_path)
    assert found["rows"] == [] and found["not run"] == [call.name for call in TINY]
    assert counting.table(found)[-1] == f"Not run: {'; '.join(found['not run'])}."


def test_bad_options_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = f"{MISSED[0].point.name} = fused_split"
    assert parse(named) == Call(MISSED[0].point, "fused_split")
    assert parse(MISSED[0].point.name) == MISSED[0]
    for text in ("chain bs 1", f"{MISSED[0].point.name} = fa9"):
        with pytest.raises(ArgumentError, match="--call"):
            parse(text)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecverifyError, match="no ncu in PATH"):
        kernel_profile.main(["--out", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def right(made: inputs.Inputs) -> Callable[[int], torch.Tensor]:
    """Plain PyTorch, over all that a row of a chain sees."""
    point = made.point

    def call(layer: int) -> torch.Tensor:
        seen = made.slots[0, : point.length + point.width]
        group = point.q_heads // point.kv_heads
        k, v = (cache[layer, seen].float().repeat_interleave(group, 1) for cache in (made.k, made.v))
        scores = torch.einsum("ihd,jhd->hij", made.q.float(), k) * made.sm_scale
        later = torch.arange(len(seen)) > point.length + torch.arange(point.width)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v).to(made.q.dtype)

    return call


def test_a_child_checks_a_call_before_it_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Arm("wrong", "ours", lambda made: lambda layer: 1.1 * right(made)(layer))
    trees = Arm("trees", "ours", right, ("tree",))
    arms = {arm.name: arm for arm in (Arm("right", "ours", right), wrong, trees)}
    monkeypatch.setattr(kernel_profile_child, "ARMS", arms)
    rows = {name: kernel_profile_child.run(TINY[0].job("check", name), torch.device("cpu")) for name in arms}
    good, bad, other = (rows[name] or {} for name in arms)
    assert good["error"] < 0.01 and "why" not in good and good["bytes"] > 0
    assert bad["why"].startswith("wrong: relative error 0.1")
    assert other["why"] == "ValueError: trees is no arm for a chain"


def test_only_one_call_is_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: done.append(name))
    kernel_profile_child.profiled(lambda layer: done.append("call"), torch.device("cuda"))
    assert done == ["call", "call", "start", "call", "stop"]


def test_the_page_has_a_place_for_it() -> None:
    for page, file in (("kernels", "kernel-profile"), ("sparse-mla", "kernel-profile-sparse")):
        assert f"<!-- made from {file}-h200.json: kernel profile -->" in (docs.ROOT / f"docs/{page}.md").read_text()
