"""Scenarios, cells, statistics and resuming, without a server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end, shapes
from benchmarks import end_to_end_plan as plan
from benchmarks.end_to_end_run import Clock, Run
from benchmarks.engines import OURS, Engine, Round, Setup, Speculation, faults, read_round
from sglang_specverify.errors import ArgumentError, SpecverifyError


def a_round(seconds: float, *, requests: int = 2, tokens: int = 96, steps: int = 32) -> Round:
    slowest = (seconds,) * requests
    return Round(slowest, seconds + 0.01, (tokens,) * requests, (steps,) * requests, (120,) * requests, 0)


def test_the_goals_have_54_configurations() -> None:
    found = [(chosen.name, cell.input, cell.concurrency) for chosen, cell in plan.grid()]
    assert len(found) == len(set(found)) == 54
    assert {chosen.topk for chosen, _ in plan.grid()} == {4, 8, 16}
    assert ("128x16", 128, 32) in found


@pytest.mark.parametrize(("width", "topk", "steps"), [(64, 4, 8), (128, 4, 9), (128, 8, 8), (128, 16, 8), (8, 2, 7), (64, 2, 17)])
def test_a_tree_has_enough_nodes(width: int, topk: int, steps: int) -> None:
    """Counted by hand: topk nodes in the first step, topk squared in each later one."""
    assert plan.legal_steps(width, topk) == steps
    assert topk + (steps - 1) * topk**2 >= width - 1 or steps == width - 1
    if steps > plan.STEPS:
        assert topk + (steps - 2) * topk**2 < width - 1


def test_scenarios_by_name() -> None:
    assert plan.scenario("128x4").speculation == Speculation(topk=4, steps=9, width=128)
    assert plan.scenario("chain").speculation == Speculation(topk=1, steps=3, width=4)
    assert plan.scenario("off").speculation is None
    few = plan.scenario("chain-few")
    assert few.speculation == plan.scenario("chain").speculation
    assert [cell.concurrency for cell in end_to_end.cells_of(few, [128], plan.CONCURRENCIES, dry_run=False)] == [8, 1]
    with pytest.raises(ArgumentError, match="at most 8"):
        end_to_end.cells_of(few, [128], [32], dry_run=False)
    pressed = plan.scenario("pressure")
    assert pressed.page_size == 64 and pressed.under_pressure
    for name in ("128", "64x1", "1x8", "tree", "64x8x2", "-64x8"):
        with pytest.raises(ArgumentError, match="scenario"):
            plan.scenario(name)


def test_the_largest_cell_comes_first_and_its_prompts_hold_all_others() -> None:
    found = plan.cells(plan.INPUTS, plan.CONCURRENCIES)
    assert (found[0].input, found[0].concurrency) == (8192, 32) and len(found) == 9
    largest = plan.prompts(found[0], 32000)
    assert len({tuple(prompt[:128]) for prompt in largest}) == 32
    for cell in found:
        assert plan.prompts(cell, 32000) == [prompt[: cell.input] for prompt in largest[: cell.concurrency]]
    assert all(0 <= token < 32000 for token in largest[3])


def test_single_cells_in_place_of_a_grid() -> None:
    places = plan.places(["8192x8", "128x32"])
    found = plan.at(plan.cells([length for length, _ in places], [count for _, count in places]), places)
    assert [(cell.input, cell.concurrency) for cell in found] == [(8192, 8), (128, 32)]
    assert plan.at(CELLS, []) == CELLS
    with pytest.raises(ArgumentError, match="128x32"):
        plan.at([plan.pressure_cell()], [(8192, 8)])
    for name in ("8192", "8192x0", "x8", "128x16=3"):
        with pytest.raises(ArgumentError, match="8192x8"):
            plan.places([name])


def test_answers_of_another_length_in_one_cell() -> None:
    found = plan.with_answers(plan.cells([128, 2048], [1, 32]), ["128x32=192"])
    assert [(cell.input, cell.concurrency, cell.output) for cell in found] == [
        (2048, 32, 48), (2048, 1, 192), (128, 32, 192), (128, 1, 192),
    ]  # fmt: skip
    usual, longer = (plan.cell_seconds(cell, 3, first=False, plain=False) for cell in (found[0], found[2]))
    assert longer == 4 * usual
    assert plan.cell_seconds(plan.cells([128], [32], plain=True)[0], 3, first=False, plain=True) == usual
    for text in ("64x32=192", "128x32=0", "128x32", "x=1"):
        with pytest.raises(ArgumentError, match="2048x32"):
            plan.with_answers(found, [text])


def test_a_pool_holds_its_requests_unless_it_shall_not() -> None:
    chosen, cell = plan.scenario("128x16"), plan.Cell(2048, 32, 48)
    assert plan.pool_tokens(chosen, [cell, plan.Cell(128, 32, 48)]) >= 32 * (2048 + 48 + 2 * 128)
    pressed, small = plan.scenario("pressure"), plan.pressure_cell()
    # SGLang reserves two pages for each of 8 branches, twice.
    needed = small.concurrency * (small.input + small.output + 2 * 8 * 128)
    assert plan.pool_tokens(pressed, [small]) < 0.9 * needed <= plan.pool_tokens(replace(pressed, pool_share=1.0), [small])
    assert plan.pool_tokens(pressed, [small]) % 64 == 0


def test_arms_alternate_and_take_turns_to_begin() -> None:
    assert [plan.order(["fa3", OURS], number) for number in range(3)] == [["fa3", OURS], [OURS, "fa3"], ["fa3", OURS]]
    assert {plan.order(["a", "b", "c"], number)[0] for number in range(3)} == {"a", "b", "c"}


def test_statistics_of_an_arm() -> None:
    found = plan.summary([a_round(2.0), a_round(1.6), a_round(1.0)])
    assert found["each_tokens_per_s"] == [96.0, 120.0, 192.0]
    assert found["tokens_per_s"] == 120.0
    assert found["spread"] == pytest.approx((192 - 96) / 120)
    assert found["ms_per_step"] == pytest.approx(1600 / 32)
    assert found["accept_length"] == 3.0
    assert found["latency_p50_s"] == 1.6
    # Six latencies 1, 1, 1.6, 1.6, 2, 2: place 4.75 lies between two equal ones.
    assert found["latency_p95_s"] == 2.0
    assert found["in_lockstep"]


def test_quantiles_lie_between_values() -> None:
    assert plan.quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert plan.quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert plan.quantile([7.0], 0.95) == 7.0


def test_requests_out_of_step_are_told() -> None:
    uneven = Round((1.0, 1.1), 1.2, (96, 96), (32, 33), (0, 0), 0)
    assert not plan.summary([a_round(1.0), uneven])["in_lockstep"]


def meta(**changes: Any) -> dict[str, Any]:
    return {"meta_info": {"e2e_latency": 1.5, "completion_tokens": 12, "spec_verify_ct": 4, "cached_tokens": 38, **changes}}


def test_reading_answers() -> None:
    found = read_round([meta(), meta(e2e_latency=2.0, num_retractions=2)], 2.1, 12)
    assert (found.seconds, found.tokens_per_s, found.retracted) == (2.0, 12.0, 2)
    assert (found.ms_per_step, found.accept_length) == (500.0, 3.0)
    with pytest.raises(SpecverifyError, match="11 tokens and not 12"):
        read_round([meta(), meta(completion_tokens=11)], 2.1, 12)


def test_without_speculation_there_are_no_steps() -> None:
    answer = meta()
    del answer["meta_info"]["spec_verify_ct"]
    found = read_round([answer], 1.6, 12)
    assert found.ms_per_step is None and found.accept_length is None
    assert plan.summary([found])["ms_per_step"] is None


SETUP = Setup(OURS, Path("m"), Path("d"), Speculation(4, 8, 64), pool_tokens=1000)


def stats(*rows: tuple[str, str, int], pool: int = 1000) -> dict[str, Any]:
    routes = [{"mode": mode, "kernel": kernel, "calls": calls, "reason": "because"} for mode, kernel, calls in rows]
    return {"pool_tokens": pool, "specverify": {"routes": routes}}


@pytest.mark.parametrize(
    ("setup", "found", "said"),
    [
        (SETUP, stats(("target_verify", "fused", 36), ("target_verify", "stock", 0)), None),
        (SETUP, stats(("target_verify", "stock", 36)), "no verify ran on a kernel of the plugin"),
        (SETUP, stats(("target_verify", "fused", 36), ("target_verify", "stock", 1)), "SGLang's own kernel: because"),
        (SETUP, stats(("draft_decode", "fused", 36)), "no verify ran"),
        (SETUP, stats(("target_verify", "fused", 36), pool=600), "the pool holds 600 tokens"),
        (SETUP, {"pool_tokens": 1000, "specverify": None}, "the plugin is not in its engine"),
        (replace(SETUP, arm="fa3"), {"pool_tokens": 1000, "specverify": None}, None),
        (replace(SETUP, arm="fa3"), stats(), "the plugin is in a stock engine"),
        (replace(SETUP, speculation=Speculation(1, 3, 4)), stats(("target_verify", "stock", 36)), None),
        (replace(SETUP, speculation=None), stats(("decode", "stock", 36)), None),
    ],
)
def test_what_does_not_count(setup: Setup, found: dict[str, Any], said: str | None) -> None:
    texts = faults(setup, found)
    assert (texts == []) if said is None else any(said in text for text in texts)


def test_engines_of_two_arms_differ_in_the_backend_alone() -> None:
    ours, fa3 = SETUP.arguments(gpu=True), replace(SETUP, arm="fa3").arguments(gpu=True)
    at = fa3.index("--attention-backend")
    assert fa3[at + 1] == "fa3" and fa3[:at] + fa3[at + 2 :] == ours
    at = ours.index("--cuda-graph-bs-decode")
    assert ours[at + 1 : at + 4] == ["1", "8", "32"]
    assert "--cuda-graph-bs-decode" not in SETUP.arguments(gpu=False)
    assert replace(SETUP, arm="fa3").variables()["SGLANG_SPECVERIFY_DISABLE"] == "1"
    assert "SGLANG_SPECVERIFY_DISABLE" not in SETUP.variables()
    assert SETUP.variables()["SGLANG_SIMULATE_ACC_LEN"] == "3"
    assert "SGLANG_SIMULATE_ACC_LEN" not in replace(SETUP, speculation=None).variables()


def test_shapes_are_written(tmp_path: Path) -> None:
    for name, shape in shapes.SHAPES.items():
        target, draft = shape.write(tmp_path)
        config, head = (json.loads((place / "config.json").read_text()) for place in (target, draft))
        assert head["hidden_size"] == config["hidden_size"] and head["num_hidden_layers"] == 1, name
        assert shape.prompt_vocabulary <= config["vocab_size"]
    assert shapes.get("qwen3-8b").kv_bytes == 147456
    assert shapes.get("gpt-oss-20b").target["layer_types"].count("sliding_attention") == 12
    with pytest.raises(ArgumentError, match="qwen3-8b"):
        shapes.get("qwen4")


class FakeEngine:
    """Answers with rounds of given seconds; written down is which arm was asked, in order."""

    def __init__(self, arm: str, seconds: float, asked: list[str], *, fails_at: int | None = None) -> None:
        self.setup, self._seconds, self._asked, self._fails_at = replace(SETUP, arm=arm), seconds, asked, fails_at
        self.alive, self.start_seconds = True, 1.0

    def generate(self, prompts: list[list[int]], new_tokens: int, seconds: float) -> Round:
        assert seconds > 0
        self._asked.append(self.setup.arm)
        if self._asked.count(self.setup.arm) == self._fails_at:
            raise SpecverifyError("the engine did not answer", "read its log")
        return a_round(self._seconds, requests=len(prompts), tokens=new_tokens, steps=new_tokens // 3)

    def stats(self, seconds: float) -> dict[str, Any]:
        found = stats(("target_verify", "fused", 36))
        return found if self.setup.arm == OURS else {**found, "specverify": None}


CELLS = plan.cells([8, 128], [2])
CHOSEN = plan.scenario("64x4")


def a_run(out: Path, seconds: float = 3600.0) -> Run:
    settings = {"shape": "tiny", "start_guess": 5.0, "dry_run": False}
    return Run(shapes.get("tiny"), ["fa3"], 3, Clock(seconds), 10.0, out, out.parent, settings)


def phase(run: Run, fails_at: int | None = None, *, survives: bool = True) -> list[str]:
    asked: list[str] = []
    engines: dict[str, Any] = {"fa3": FakeEngine("fa3", 1.2, asked), OURS: FakeEngine(OURS, 1.0, asked, fails_at=fails_at)}
    engines[OURS].alive = survives
    end_to_end.serve_phase(run, CHOSEN, "fa3", engines, run.open_cells(CHOSEN, "fa3", CELLS))
    return asked


def test_an_engine_is_frozen_once_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own attempt is lost where it comes before the server listens, in one arm or the other."""
    asked: list[str] = []
    answers = iter([False, False, True])
    engine = Engine(SETUP)
    monkeypatch.setattr(engine.server, "poll", lambda: next(answers))
    monkeypatch.setattr(engine.server, "started_at", time.monotonic())
    monkeypatch.setattr(engine.server, "post", lambda path, timeout: asked.append(path))
    engine.ready(60.0)
    assert asked == ["/freeze_gc"]


def test_an_engine_that_cannot_freeze_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows say that every engine was frozen, because no other is measured."""

    def refuse(path: str, timeout: float) -> None:
        raise SpecverifyError(f"{path} was refused", "read its log")

    engine = Engine(SETUP)
    monkeypatch.setattr(engine.server, "poll", lambda: True)
    monkeypatch.setattr(engine.server, "started_at", time.monotonic())
    monkeypatch.setattr(engine.server, "post", refuse)
    with pytest.raises(SpecverifyError, match="/freeze_gc was refused"):
        engine.ready(60.0)


def test_a_phase_measures_all_cells_and_writes_them(tmp_path: Path) -> None:
    run = a_run(tmp_path / "out.json")
    asked = phase(run)
    # A cell: one warm-up round, then three that take turns to begin.
    assert asked == ["fa3", OURS, "fa3", OURS, OURS, "fa3", "fa3", OURS] * 2
    written = json.loads(run.out.read_text())
    assert [cell["input"] for cell in written["cells"]] == [128, 8]
    assert all(plan.counts(cell) for cell in written["cells"])
    assert written["cells"][0]["collector"] == {"fa3": "frozen", OURS: "frozen"} and plan.is_even(written["cells"][0])
    assert {row["arm"]: row["specverify"] is None for row in written["engines"]} == {"fa3": True, OURS: False}
    assert run.open_cells(CHOSEN, "fa3", CELLS) == []
    assert run.open_cells(CHOSEN, "triton", CELLS) == CELLS


def test_a_failed_cell_is_measured_again_and_others_are_not(tmp_path: Path) -> None:
    run = a_run(tmp_path / "out.json")
    phase(run, fails_at=3)
    first, second = json.loads(run.out.read_text())["cells"]
    assert "did not answer" in first["error"] and "arms" in second
    again = a_run(tmp_path / "again.json")
    again.load(run.out)
    assert again.open_cells(CHOSEN, "fa3", CELLS) == CELLS[:1]
    phase(again)
    assert all(plan.counts(cell) for cell in again.cells) and len(again.cells) == 2
    assert len(again.earlier) == 1 and again.earlier[0]["settings"] == run.settings


def test_an_engine_that_died_is_asked_no_more(tmp_path: Path) -> None:
    run = a_run(tmp_path / "out.json")
    assert phase(run, fails_at=1, survives=False) == ["fa3", OURS]
    assert len(run.cells) == 1 and run.open_cells(CHOSEN, "fa3", CELLS) == CELLS


def test_a_call_that_hangs_is_broken_off() -> None:
    with pytest.raises(SystemExit, match="out of time"), end_to_end.broken_off_after(0.05):
        time.sleep(60)
    with end_to_end.broken_off_after(60):
        pass


def test_nothing_is_begun_that_would_not_end_in_time(tmp_path: Path) -> None:
    run = a_run(tmp_path / "out.json", seconds=15.0)
    assert phase(run) == [] and run.cells == []
    end_to_end.serve_scenario(run, CHOSEN, CELLS)  # starts no engine either, or this would take a minute
    assert run.engines == []


def test_a_result_of_another_shape_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "out.json")
    run.settings["shape"] = "qwen3-8b"
    run.save()
    with pytest.raises(SpecverifyError, match="qwen3-8b"):
        a_run(tmp_path / "again.json").load(run.out)


def test_an_engine_that_cannot_start_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, stopped = [], []
    refused = SpecverifyError("no such backend", "take another")

    class Dead(Engine):
        def __init__(self, setup: Setup) -> None:
            self.setup = setup
            self.server: Any = type("Server", (), {"name": setup.arm})()

        def start(self) -> Dead:
            started.append(self.setup.arm)
            return self

        def ready(self, seconds: float) -> Engine:
            raise refused

        def stop(self) -> None:
            stopped.append(self.setup.arm)

    run = a_run(tmp_path / "out.json")
    monkeypatch.setattr(Run, "engine", lambda self, chosen, arm, wanted: Dead(replace(SETUP, arm=arm)))
    end_to_end.serve_scenario(run, CHOSEN, CELLS)
    assert started == ["fa3", OURS] and set(stopped) == {"fa3", OURS}
    assert [row["error"].splitlines()[0] for row in json.loads(run.out.read_text())["engines"]] == ["no such backend"] * 2


def test_a_cell_with_other_answers_is_measured_anew(tmp_path: Path) -> None:
    run, cell = a_run(tmp_path / "e2e.json"), CELLS[0]
    run.add({**run.row(CHOSEN, "fa3", cell), "arms": {}})
    assert run.open_cells(CHOSEN, "fa3", CELLS) == CELLS[1:]
    longer = replace(cell, output=2 * cell.output)
    assert run.open_cells(CHOSEN, "fa3", [longer, *CELLS[1:]]) == [longer, *CELLS[1:]]
    run.add({**run.row(CHOSEN, "fa3", longer), "arms": {}})
    assert [row["output"] for row in run.cells] == [longer.output]


def test_files_of_several_calls_are_put_together(tmp_path: Path) -> None:
    """Of two rows of one cell the later file's stays, as of two notes on one engine."""
    first, second = a_run(tmp_path / "first.json"), a_run(tmp_path / "second.json")
    for run, cells in ((first, CELLS), (second, CELLS[:1])):
        for cell in cells:
            run.add({**run.row(CHOSEN, "fa3", cell), "arms": {}, "from": run.out.name})
        who = {"shape": "tiny", "scenario": "64x4", "stock": "fa3", "arm": "fa3"}
        size = {"pool_tokens": 8, "max_requests": 32, "graph_sizes": [2]}
        larger = size | {"pool_tokens": 9 + len(cells)}
        run.engines = [{**who, "setup": setup, "from": run.out.name} for setup in (size, larger)]
        run.settings["inputs"] = [cell.input for cell in cells]
        run.save()
    whole = a_run(tmp_path / "whole.json")
    for run in (first, second):
        whole.load(run.out)
    assert {row["input"]: row["from"] for row in whole.cells} == {128: "second.json", 8: "first.json"}
    assert {row["setup"]["pool_tokens"]: row["from"] for row in whole.engines} == {
        8: "second.json", 11: "first.json", 10: "second.json",
    }, "engines of other sizes are others"  # fmt: skip
    assert [row["settings"]["inputs"] for row in whole.earlier] == [[128, 8], [128]]
    failed = a_run(tmp_path / "failed.json")
    failed.add({**failed.row(CHOSEN, "fa3", CELLS[0]), "error": "no answer"})
    whole.load(failed.out)
    assert not any("error" in row for row in whole.cells), "what failed later takes nothing back"
