"""Engines over long contexts without an engine: prompts, what is made of two answers, order, verdicts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import long_context_engines as engines
from benchmarks import shapes
from benchmarks.end_to_end_plan import CHAIN
from benchmarks.engines import OURS, Round, Setup
from benchmarks.long_context_engines_plan import (
    ARMS,
    TAIL,
    Answers,
    Cell,
    between,
    model_of,
    phases,
    summary,
    unserved,
    verdicts,
)
from benchmarks.turns import NoTurn, Turns
from sglang_specverify.errors import SpecverifyError


def answer(seconds: float, tokens: int, requests: int = 1) -> Round:
    steps = (tokens // 3,) * requests
    return Round((seconds,) * requests, seconds, (tokens,) * requests, steps, (100,) * requests, 0)


def test_prompts_share_all_but_their_ends_also_between_cells() -> None:
    long, few = Cell(200, 1).prompts(1000), Cell(100, 4).prompts(1000)
    assert [len(prompt) for prompt in [*long, *few]] == [200, 100, 100, 100, 100]
    assert {tuple(prompt[:-TAIL]) for prompt in few} == {tuple(long[0][: 100 - TAIL])}
    assert len({tuple(prompt) for prompt in few}) == 4
    assert Cell(100, 4).prompts(1000) == few


def test_a_sample_is_what_the_longer_answer_needed_more() -> None:
    sample = between(answer(0.5, 12, 4), answer(0.9, 36, 4))
    assert sample.tokens_per_s == pytest.approx(240.0)
    found = summary([sample, between(answer(0.5, 12, 4), answer(1.3, 36, 4))], 24)
    assert found["tokens_per_s"] == pytest.approx(180.0) and found["accept_length"] == 3.0
    assert found["ms_per_step"] == pytest.approx(75.0) and found["spread"] == pytest.approx(120 / 180, abs=1e-4)
    with pytest.raises(SpecverifyError, match="8 more steps took -0"):
        between(answer(0.9, 12), answer(0.8, 36))


def test_answers_are_as_long_as_a_round_may_last() -> None:
    answers = Answers()
    for step, more in ((0.02, 150), (0.3, 24), (0.001, 240)):
        assert answers.more(between(answer(1.0, 12), answer(1.0 + 4 * step, 24))) == more


def test_the_slow_arm_has_a_phase_of_its_own() -> None:
    assert phases(list(ARMS), 3) == [["fa3", "specverify-fa3", "specverify-triton"], ["triton"]]
    assert phases(["triton", "fa3"], 3) == [["fa3", "triton"]]


def test_the_model_has_positions_for_its_contexts() -> None:
    shape = model_of("qwen3-8b")
    assert shape.target["max_position_embeddings"] == shape.draft["max_position_embeddings"] > 131072
    assert shape.target["num_hidden_layers"] == shapes.get("qwen3-8b").target["num_hidden_layers"] == 36


def test_a_slice_is_an_eighth_of_a_model_that_shards() -> None:
    """Published sizes of Llama 3 70B; hidden size and layers are whole on every device. Its draft is sliced as it is."""
    shape = shapes.get("llama3-70b-tp8")
    slice_ = shape.target
    whole = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}
    assert {name: 8 * slice_[name] for name in whole} == whole
    assert (slice_["hidden_size"], slice_["num_hidden_layers"]) == (8192, 80)
    assert {name: shape.draft[name] for name in whole} == {name: slice_[name] for name in whole}
    assert shape.draft["draft_vocab_size"] == slice_["vocab_size"]


def stats(kernel: str, calls: int = 5) -> dict[str, Any]:
    return {"specverify": {"routes": [{"mode": "target_verify", "kernel": kernel, "calls": calls, "reason": "a reason"}]}}


@pytest.mark.parametrize(
    ("base", "found", "faults"),
    [
        ("triton", stats("fused_split"), 0),
        ("triton", stats("stock"), 1),
        ("triton", stats("fused_split", 0), 1),
        ("fa3", stats("stock"), 0),
        ("triton", {"specverify": None}, 0),
    ],
    ids=["served", "stock", "never called", "left to FlashAttention", "told elsewhere"],
)
def test_over_triton_every_chain_must_be_the_plugins(base: str, found: dict[str, Any], faults: int) -> None:
    setup = Setup(OURS, Path("model"), Path("draft"), CHAIN, 1000, base=base)
    assert len(unserved(setup, found)) == faults


def test_verdicts_say_pass_within_the_spread_and_fail_beyond() -> None:
    def arm(speed: float) -> dict[str, Any]:
        return {"tokens_per_s": speed, "spread": 0.02, "ms_per_step": 1.0}

    arms = {"fa3": arm(100.0), "triton": arm(10.0), "specverify-triton": arm(49.0), "specverify-fa3": arm(99.0)}
    text = "\n".join(verdicts([{"name": "x", "length": 131072, "arms": arms | {"other": {"error": "gone"}}}]))
    assert "specverify-triton is 4.900 times stock triton, FAIL (aim 5" in text
    assert "specverify-fa3 is 9.900 times stock triton, pass" in text
    assert "specverify-triton is 0.490 times stock fa3, FAIL" in text and "specverify-fa3 is 0.990 times stock fa3, pass" in text
    (line, _) = verdicts([{"name": "x", "length": 32768, "arms": {k: arms[k] for k in ("fa3", "triton", "specverify-fa3")}}])
    assert line.endswith("times stock triton")


class FakeEngine:
    """Answers after 0.1 s and 20 ms a step; fails from call `fails_at` on."""

    def __init__(self, name: str, seen: list[str], fails_at: int = 1000) -> None:
        self.name, self.seen, self.fails_at, self.calls = name, seen, fails_at, 0
        self.setup = Setup(name, Path("model"), Path("draft"), CHAIN, 1000)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, seconds: float) -> Round:
        self.calls += 1
        self.seen.append(self.name)
        if self.calls >= self.fails_at:
            raise SpecverifyError("it does not answer", "read its log")
        return answer(0.1 + 0.02 * new_tokens / 3, new_tokens, len(prompts))


@pytest.fixture
def run(tmp_path: Path) -> engines.Run:
    cells = [Cell(100, 2), Cell(50, 1)]
    return engines.Run(shapes.get("tiny"), cells, 2, time.monotonic() + 60, 1.0, tmp_path / "out.json", tmp_path, {})


def test_arms_alternate_and_one_that_fails_leaves_the_others(run: engines.Run) -> None:
    seen: list[str] = []
    alike: dict[str, Any] = {name: FakeEngine(name, seen, at) for name, at in (("a", 1000), ("b", 1000), ("c", 6))}
    engines.measure(run, run.cells[0], alike)
    # Two probes of an arm, then rounds of two answers; the second round starts with another arm.
    assert seen == ["a"] * 4 + ["b"] * 4 + ["c"] * 4 + ["a", "a", "b", "b", "c", "c"] + ["b", "b", "a", "a"]
    arms = run.row(run.cells[0])["arms"]
    assert arms["a"]["tokens_per_s"] == arms["b"]["tokens_per_s"] == pytest.approx(2 * 3 / 0.02)
    assert "does not answer" in arms["c"]["error"]
    assert run.missing("a") == [run.cells[1]] and run.missing("c") == run.cells
    assert run.out.exists()


def test_what_is_measured_is_not_measured_again(run: engines.Run) -> None:
    seen: list[str] = []
    engines.measure(run, run.cells[0], {"a": FakeEngine("a", seen)})  # type: ignore[dict-item]
    again: list[str] = []
    both: dict[str, Any] = {name: FakeEngine(name, again) for name in ("a", "b")}
    engines.measure(run, run.cells[0], both)
    assert set(again) == {"b"} and set(run.row(run.cells[0])["arms"]) == {"a", "b"}


class Served(FakeEngine):
    """A fake engine from its start to its end; written down are those that were started and not stopped."""

    def __init__(self, name: str, running: list[str]) -> None:
        super().__init__(name, [])
        self.running, self.start_seconds = running, 1.0

    def start(self) -> Served:
        self.running.append(self.name)
        return self

    def ready(self, seconds: float) -> Served:
        return self

    def stats(self, seconds: float) -> dict[str, Any]:
        return {"pool_tokens": None, "specverify": None}

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self.name)


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_a_turn_that_does_not_come_leaves_its_cells_for_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls hold the device when the second of two phases starts its engine, or when it has started it."""
    taken: list[str] = []

    def late(name: str, turn: Callable[[Turns, float], contextlib.AbstractContextManager[None]]) -> Any:
        def taking(turns: Turns, seconds: float) -> contextlib.AbstractContextManager[None]:
            taken.append(name)
            if name == kind and taken.count(name) == 2:
                raise NoTurn("no turn on lock in 40 s", "let what holds it end")
            return turn(turns, seconds)

        return taking

    for name in ("shared", "alone"):
        monkeypatch.setattr(Turns, name, late(name, getattr(Turns, name)))
    running: list[str] = []
    monkeypatch.setattr(engines.Run, "engine", lambda self, name: Served(name, running))
    app = typer.Typer()
    app.command()(engines.main)
    out = tmp_path / "out.json"
    options = ["--dry-run", "--resident", "1", "--arm", "fa3", "--arm", "triton", "--minutes", "5", "--out", str(out)]
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1, result.output
    assert "triton: no turn on lock in 40 s" in result.output and "--resume goes on here" in result.output
    assert "0 engines failed, 1 arms have cells left" in result.output
    assert running == []
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 2 and all("tokens_per_s" in cell["arms"]["fa3"] and "triton" not in cell["arms"] for cell in cells)
    # The turn comes in another call, which measures what is left.
    again = CliRunner().invoke(app, [*options, "--resume", str(out)])
    assert again.exit_code == 0 and "0 arms have cells left" in again.output, again.output
    rest = json.loads(out.read_text())["cells"]
    assert [cell["arms"]["fa3"] for cell in rest] == [cell["arms"]["fa3"] for cell in cells]
    assert all("tokens_per_s" in cell["arms"]["triton"] for cell in rest)
