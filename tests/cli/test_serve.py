"""`specverify serve`: what is filled in, what is left alone, what is refused, in which order."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from sglang_specverify import upstream
from sglang_specverify.cli import serve as module
from sglang_specverify.cli.serve import command
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import NO_GPU, Hardware, from_name
from tests.cli.conftest import Run

GPU = from_name("H200")
BACKEND = ["--attention-backend", "specverify"]
CPU = [
    *("--device", "cpu"),
    "--disable-cuda-graph",
    *("--dtype", "float32"),
    *("--max-total-tokens", "4096"),
    *("--mem-fraction-static", "0.5"),
    "--sleep-on-idle",
]
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}


def filled(line: str, hardware: Hardware = NO_GPU, environ: dict[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """What `command` adds: it must start with this Python and pass the line on as it is."""
    arguments = line.split()
    argv, extra = command(arguments, hardware, environ or {})
    start = [sys.executable, "-m", "sglang.launch_server", *arguments]
    assert argv[: len(start)] == start
    return argv[len(start) :], extra


def test_on_a_gpu_only_the_backend() -> None:
    assert filled("--model-path M", GPU) == (BACKEND, {})


def test_without_a_gpu() -> None:
    assert filled("--model-path M") == ([*BACKEND, *CPU], CPU_ENVIRONMENT)


def test_a_cpu_server_on_a_gpu_machine() -> None:
    added, extra = filled("--model-path M --device cpu", GPU)
    assert added == [*BACKEND, *CPU[2:]]
    assert extra == CPU_ENVIRONMENT


def test_a_device_that_is_not_there_is_left_to_sglang() -> None:
    assert filled("--model-path M --device cuda") == (BACKEND, {})


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("--device=cpu", ["--device", "cpu"]),
        ("--disable-cuda-graph", ["--disable-cuda-graph"]),
        ("--cuda-graph-backend-decode disabled", ["--disable-cuda-graph"]),
        ("--dtype bfloat16", ["--dtype", "float32"]),
        ("--max-total-tokens=99", ["--max-total-tokens", "4096"]),
        ("--mem-fraction-static 0.2", ["--mem-fraction-static", "0.5"]),
        ("--sleep-on-idle", ["--sleep-on-idle"]),
        ("--attention-backend specverify", BACKEND),
        ("--attention-backend=specverify", BACKEND),
        ("--speculative-draft-attention-backend specverify --attention-backend triton", BACKEND),
        ("--prefill-attention-backend specverify --decode-attention-backend specverify", BACKEND),
        # Cut short, as SGLang's parser takes them.
        ("--attention-backen specverify", BACKEND),
        ("--attention-b=specverify", BACKEND),
        ("--dev=cpu", ["--device", "cpu"]),
        ("--dt bfloat16", ["--dtype", "float32"]),
        ("--cuda-graph-backend-d disabled", ["--disable-cuda-graph"]),
        ("--cuda-graph-c={}", ["--disable-cuda-graph"]),
        ("--max-t 99", ["--max-total-tokens", "4096"]),
        ("--mem=0.2", ["--mem-fraction-static", "0.5"]),
        ("--sleep-on", ["--sleep-on-idle"]),
    ],
)
def test_what_the_user_settled_is_not_filled_in(line: str, missing: list[str]) -> None:
    added, _ = filled(f"--model-path M {line}")
    expected = [*BACKEND, *CPU]
    place = next(i for i in range(len(expected)) if expected[i : i + len(missing)] == missing)
    del expected[place : place + len(missing)]
    assert added == expected


def test_an_option_that_begins_alike_settles_nothing() -> None:
    assert "--dtype" in filled("--model-path M --dtype-of-something x")[0]


@pytest.mark.parametrize("name", list(CPU_ENVIRONMENT))
def test_what_the_environment_says_already_is_not_set(name: str) -> None:
    _, extra = filled("--model-path M", environ={name: "0"})
    assert extra == {key: value for key, value in CPU_ENVIRONMENT.items() if key != name}


def test_whoever_asks_to_compile_gets_it() -> None:
    _, asked = filled("--model-path M --enable-torch-compile")
    _, others = filled("--model-path M --enable-torch-compile-debug-mode")
    assert others == CPU_ENVIRONMENT
    assert asked == {key: value for key, value in CPU_ENVIRONMENT.items() if key != "TORCH_COMPILE_DISABLE"}


@pytest.mark.parametrize(("backend", "remedy"), [("fa3", "SGLANG_SPECVERIFY_BASE=fa3"), ("flashinfer", "leave it out, or")])
def test_another_backend_is_refused(backend: str, remedy: str) -> None:
    with pytest.raises(SpecverifyError, match=f"--attention-backend {backend} conflicts") as caught:
        command(["--model-path", "M", "--attention-backend", backend], GPU)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("option", ["--attention-backen", "--attention-b"])
@pytest.mark.parametrize("written", ["{} triton", "{}=triton"])
def test_another_backend_is_refused_however_it_is_written(option: str, written: str) -> None:
    with pytest.raises(SpecverifyError, match="--attention-backend triton conflicts"):
        command(["--model-path", "M", *written.format(option).split()], GPU)


@pytest.mark.parametrize("line", ["--use-ray", "--us", "--grpc-mode", "--smg-grpc-mode"])
def test_a_server_whose_schedulers_would_not_load_the_plugin_is_refused(line: str) -> None:
    with pytest.raises(SpecverifyError, match=r"load no plugin|whether they hold the plugin"):
        command(["--model-path", "M", line], GPU)


@pytest.mark.parametrize(
    "line",
    [
        # The one filled in does not reach verify, because the prefill backend verifies.
        "--speculative-algorithm EAGLE --prefill-attention-backend triton",
        "--speculative-algorithm EAGLE --decode-attention-backend specverify",
        "--speculative-algorithm EAGLE --speculative-attention-mode decode --decode-attention-backend triton",
    ],
)
def test_a_line_that_verify_would_not_reach_is_refused(line: str) -> None:
    with pytest.raises(SpecverifyError, match="verify would not reach the plugin"):
        command(["--model-path", "M", *line.split()], GPU)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have replaced this process."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(module, "detect", lambda: NO_GPU)
    return calls


def test_becomes_the_server(run: Run, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = ["--model-path", "M", "--port", "1234", "--some-switch", "--list", "a", "b", "-x", "rest"]
    outcome = run("serve", *given)
    assert outcome.code == 0
    ((program, argv, environ),) = started
    assert program == argv[0] == sys.executable
    assert argv[1 : len(given) + 3] == ["-m", "sglang.launch_server", *given]
    assert argv[len(given) + 3 :] == [*BACKEND, *CPU]
    assert environ == {**os.environ, **CPU_ENVIRONMENT}
    # Each thing that was filled in is shown, and nothing else.
    assert outcome.err.strip() == (
        "specverify: filled in SGLANG_USE_CPU_ENGINE=1, TORCH_COMPILE_DISABLE=1, --attention-backend specverify, --device cpu, "
        "--disable-cuda-graph, --dtype float32, --max-total-tokens 4096, --mem-fraction-static 0.5, --sleep-on-idle"
    )


def test_dry_run_prints_a_line_for_a_shell(run: Run, started: list[tuple[Any, ...]]) -> None:
    outcome = run("serve", "--dry-run", "--model-path", "my model")
    assert (outcome.code, started) == (0, [])
    variables = "SGLANG_USE_CPU_ENGINE=1 TRITON_INTERPRET=1 TORCH_COMPILE_DISABLE=1"
    assert outcome.out.startswith(f"{variables} {sys.executable} -m sglang.launch_server --model-path")
    assert "'my model'" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        ((), {}, "no model was named"),
        (("--model-path", "M", "--attention-backend", "fa3"), {}, "conflicts"),
        (("--model-path", "M"), {"SGLANG_SPECVERIFY_TREE": "maybe"}, "SGLANG_SPECVERIFY_TREE='maybe' is not a boolean"),
        (("--model-path", "M"), {"SGLANG_PLUGINS": "other"}, "leaves the plugin specverify out"),
        (("--model-path", "M", "--page-size"), {}, "--page-size came without a value"),
    ],
    ids=str,
)
def test_nothing_is_started_after_bad_input(
    run: Run,
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    environ: dict[str, str],
    says: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    outcome = run("serve", *arguments)
    assert outcome.code == 2
    assert says in outcome.err
    assert started == []


@pytest.mark.parametrize("version", ["0.5.21", None])
def test_the_version_is_checked_first(
    run: Run, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(upstream, "installed_version", lambda: version)
    outcome = run("serve", "--attention-backend", "fa3")
    assert outcome.code == 2
    assert "0.5.22 and 0.5.23" in outcome.err
    assert started == []


def test_a_plugin_that_is_switched_off_is_said(run: Run, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_DISABLE", "1")
    outcome = run("serve", "--model-path", "M")
    assert "SGLANG_SPECVERIFY_DISABLE=1: SGLang's own code will serve" in outcome.err
    assert len(started) == 1
