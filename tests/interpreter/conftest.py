"""Fixtures of the tests that run the Triton kernels: compiled where there is a GPU, else in Triton's interpreter.

This folder needs a process of its own, because the interpreter and the compiler exclude each other in one process and the
rest of the tests must not see the interpreter: `pytest tests/interpreter`. A run of more than this folder leaves it out
and says so.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
_STATE: dict[str, str] = {}


def _is_alone(config: pytest.Config) -> bool:
    paths = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return all(path.resolve().is_relative_to(_HERE) for path in paths)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Runs before each module of this folder is imported."""
    if collection_path.suffix != ".py":
        return None
    if not _is_alone(config):
        text = "tests/interpreter needs a process of its own and was left out: run `pytest tests/interpreter`"
        warnings.warn(pytest.PytestWarning(text), stacklevel=1)
        return True
    if not _STATE:
        _prepare()
    return None


def _prepare() -> None:
    from hypothesis import HealthCheck, settings

    from tests.interpreter.environment import prepare

    try:
        _STATE["device"] = prepare()
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from None
    settings.register_profile(
        "kernels",
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=60 if _STATE["device"] == "cuda" else 30,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kernels")


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" or "cpu"; on the latter the interpreter runs."""
    return _STATE["device"]


@pytest.fixture
def specialized(device: str) -> None:
    """Where the kernel with specialised warps runs: on its hardware, or in its emulator."""
    if device == "cuda":
        import torch

        from sglang_specverify.kernels.launch import arch_of
        from sglang_specverify.kernels.specialized import ARCH

        if arch_of(torch.device(device)) != ARCH:
            pytest.skip(f"the kernel is written for {ARCH}")


@pytest.fixture
def emulated(device: str) -> None:
    """What only its emulator shows."""
    if device == "cuda":
        pytest.skip("shown by the emulator, which a GPU does without")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _STATE.get("device") != "cuda":
        for item in items:
            if item.get_closest_marker("cuda_graph"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA graphs"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_graph: captures a CUDA graph; skipped without a GPU")
