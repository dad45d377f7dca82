"""What of a call's launches is captured and timed: all that a layer launches, and nothing that a step prepares once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_specverify.kernels.aot_cases import Case
from sglang_specverify.kernels.aot_specialized import SpecializedCase
from sglang_specverify.kernels.launch import Launch, LaunchConfig
from sglang_specverify.kernels.run import own_plan
from sglang_specverify.tuning import run, timing
from sglang_specverify.tuning.buckets import Call
from sglang_specverify.tuning.inputs import make

PLAN, COMBINE = "plan_kernel", "combine_parts_kernel"


def fused(operation: str, kind: str, combine: str) -> list[Launch]:
    call = Call(operation, kind, 1, 4, 1, 16, 16, 40)  # type: ignore[arg-type]
    return make(call, "cpu", "sm_90").launches(LaunchConfig(16, 32, 4, 2, combine=combine), "sm_90")


def specialized(divide: bool, kind: str, combine: str) -> list[Launch]:
    case = SpecializedCase(Case("sm_90", "fused", kind, (64, 64), "bf16", 64, 4, "plain"), divide=divide)  # type: ignore[arg-type]
    config = replace(case.configured()[0], combine=combine)
    a, problem = case.call.arguments()
    _, before = own_plan(a, problem, config, divide=divide, programs=132, kernel="specialized")
    return [*before, *case.launches(config)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Launch]], tuple[list[str], list[str]]]:
    """Names of the kernels that run before the capture, and in it; on a GPU that is not there, where nothing runs."""
    before: list[str] = []
    captured: list[str] = []
    into = [before]

    @contextlib.contextmanager
    def graph(_: object, stream: object) -> Iterator[None]:
        into[0] = captured
        yield
        into[0] = before

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 0.25)
    gpu = SimpleNamespace(
        synchronize=lambda: None,
        Stream=lambda: None,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        graph=graph,
        Event=lambda enable_timing: event,
    )
    empty = torch.empty(1)
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=gpu, uint8=torch.uint8, empty=lambda *_, **__: empty))
    monkeypatch.setattr(Launch, "run", lambda launch: into[0].append(launch.kernel.__name__))

    def of(launches: list[Launch]) -> tuple[list[str], list[str]]:
        assert timing.microseconds(launches, rounds=1) == 250.0
        return before, captured

    return of


FUSED, SPECIALIZED = "verify_attention_kernel", "specialized_kernel"
CASES: dict[str, tuple[Callable[[], list[Launch]], list[str], list[str]]] = {
    "fused": (lambda: fused("fused", "chain", "launch"), [], [FUSED]),
    "fused, tree": (lambda: fused("fused", "qlen_only", "launch"), [PLAN], [FUSED]),
    "tree tile": (lambda: fused("tree_suffix", "qlen_only", "last"), [PLAN], [FUSED]),
    "fused, divided, last": (lambda: fused("fused_split", "chain", "last"), [PLAN], [FUSED]),
    "fused, divided, launch": (lambda: fused("fused_split", "qlen_only", "launch"), [PLAN], [FUSED, COMBINE]),
    "specialized": (lambda: specialized(False, "qlen_only", "launch"), [PLAN], [SPECIALIZED]),
    "specialized, divided, last": (lambda: specialized(True, "qlen_only", "last"), [PLAN], [SPECIALIZED]),
    "specialized, divided, launch": (lambda: specialized(True, "chain", "launch"), [PLAN], [SPECIALIZED, COMBINE]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_layer_launches_is_timed_and_a_plan_is_not(
    case: str, timed: Callable[[list[Launch]], tuple[list[str], list[str]]]
) -> None:
    launches, plan, layer = CASES[case]
    assert timed(launches()) == (plan + layer, layer)


def test_measurements_belong_to_every_kernel_that_is_tuned() -> None:
    launched = {launch.kernel for case in CASES if not case.startswith("specialized") for launch in CASES[case][0]()}
    assert launched == set(run.kernels())
