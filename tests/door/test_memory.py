"""The KV pool is sized with the plugin's buffers in mind: by the right parts, and in no other server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_specverify.backends import reserve
from sglang_specverify.backends.reserve import Built
from sglang_specverify.door.memory import keep_reserve
from tests.door.resolve import CHAIN, NGRAM, PLUGIN, TREE, arguments, resolve

#: In the order in which they are counted.
PARTS = ("draft decode", "draft extend", "target")
BUDGET, RESERVE = 10**9, 10**6


@pytest.fixture
def asked(door: None, monkeypatch: pytest.MonkeyPatch) -> list[list[Built]]:
    """What a reserve was worked out for."""
    found: list[list[Built]] = []
    monkeypatch.setattr(reserve, "reserve_of", lambda configurator, built: found.append(list(built)) or RESERVE)
    return found


def budget_of(raw: Any, *, budget: int = BUDGET, cap: int | None = None, **more: Any) -> int:
    """What is left of the budget when it reaches SGLang."""
    seen: list[int] = []
    sized = keep_reserve(lambda self, budget_bytes, *, cap_tokens=None: seen.append(budget_bytes))
    facts = {"post_capture_kv_active": False, "is_draft_worker": False, **more}
    sized(SimpleNamespace(server_args=raw, **facts), budget, cap_tokens=cap)
    return seen[0]


LINES = {
    "tree": (f"{PLUGIN} {TREE}", {"target": "fa3", "draft decode": "fa3", "draft extend": "fa3"}),
    "chain": (f"{PLUGIN} {CHAIN}", {"target": "fa3", "draft decode": "fa3", "draft extend": "fa3"}),
    "NGRAM": (f"{PLUGIN} {NGRAM}", {"target": "fa3"}),
    "target alone": (f"{PLUGIN} {TREE} --speculative-draft-attention-backend triton", {"target": "fa3"}),
    "draft alone": (
        f"--attention-backend triton --speculative-draft-attention-backend specverify {TREE}",
        {"draft decode": "fa3", "draft extend": "fa3"},
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_the_parts_of_a_server(case: str, models: dict[str, Path], asked: list[list[Built]], log: list[str]) -> None:
    line, parts = LINES[case]
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", line))
    assert budget_of(raw) == BUDGET - RESERVE
    parts = parts if case != "draft alone" else dict.fromkeys(parts, view.speculative_draft_attention_backend)
    assert asked == [[Built(part, base) for part, base in sorted(parts.items(), key=lambda one: PARTS.index(one[0]))]]
    assert any("1.0 MB" in text and "kept from the KV pool" in text for text in log)


#: A draft of its own layers, which SGLang takes for one of EAGLE.
EAGLE = (
    "--speculative-algorithm EAGLE --speculative-draft-model-path {qwen3} --speculative-num-steps 3 --speculative-eagle-topk 1"
)


def test_parts_of_an_adaptive_server(models: dict[str, Path], asked: list[list[Built]], tmp_path: Path) -> None:
    """All of them for each number of steps that may be chosen; a draft of one step has no backend of many."""
    config = tmp_path / "steps.json"
    config.write_text('{"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0, 1]}}')
    line = f"{PLUGIN} {EAGLE} --speculative-num-draft-tokens 4 --speculative-adaptive --speculative-adaptive-config {config}"
    for start in (1, 3):
        raw, view = resolve("SM90", arguments("SM90", models, "qwen3", line.replace("num-steps 3", f"num-steps {start}")))
        assert view.speculative_adaptive and view.speculative_num_steps == start
        assert budget_of(raw) == BUDGET - RESERVE
    few = [Built(part, "fa3", steps) for steps in (0, 1) for part in ("draft extend", "target")]
    assert asked == [[*few, *(Built(part, "fa3", 3) for part in PARTS)]] * 2


def test_parts_of_multi_layer_eagle(models: dict[str, Path], asked: list[list[Built]]) -> None:
    """A draft extend for each step, which is a layer of its own."""
    line = f"{PLUGIN} {EAGLE} --speculative-num-draft-tokens 4 --enable-multi-layer-eagle"
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", line))
    assert view.enable_multi_layer_eagle
    assert budget_of(raw) == BUDGET - RESERVE
    assert asked == [[Built("draft extend", "fa3", copies=3), Built("target", "fa3")]]


@pytest.mark.parametrize("line", [f"--attention-backend fa3 {TREE}", PLUGIN], ids=["another backend", "no speculation"])
def test_other_servers_keep_their_budget(line: str, models: dict[str, Path], asked: list[list[Built]]) -> None:
    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", line))
    assert budget_of(raw) == BUDGET
    assert asked == []


def test_budgets_that_are_left_alone(models: dict[str, Path], asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that SGLang measured with the plugin's buffers in place, and those of a plugin that is switched off."""
    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    assert budget_of(raw, cap=4096) == BUDGET
    assert budget_of(raw, post_capture_kv_active=True) == BUDGET
    assert budget_of(raw, is_draft_worker=True) == BUDGET
    assert asked == []
    assert budget_of(raw, budget=RESERVE // 2) == 0, "SGLang's own message says that nothing is left"
    monkeypatch.setenv("SGLANG_SPECVERIFY_DISABLE", "1")
    assert budget_of(raw) == BUDGET
