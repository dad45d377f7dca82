"""Fixtures of the tests that drive SGLang's real backend classes, pools and batches in one process, on a CPU.

This folder needs a process of its own: Triton's interpreter and its compiler exclude each other in one process, and SGLang
decides when it is imported that it runs on a CPU. `pytest tests/backends` sets both before either is imported. A run of
more than this folder leaves it out and says so, because the rest must see neither.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.backends.engine import Engine, Setup

_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


def _is_alone(config: pytest.Config) -> bool:
    paths = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return all(path.resolve().is_relative_to(_HERE) for path in paths)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Runs before each module of this folder is imported."""
    if collection_path.suffix != ".py":
        return None
    if not _is_alone(config):
        text = "tests/backends needs a process of its own and was left out: run `pytest tests/backends`"
        warnings.warn(pytest.PytestWarning(text), stacklevel=1)
        return True
    _prepare()
    return None


def _prepare() -> None:
    ready = all(os.environ.get(name) == value for name, value in _ENVIRONMENT.items())
    if not ready and {"triton", "sglang"} & sys.modules.keys():
        raise pytest.UsageError(f"triton or sglang was imported before tests/backends could set {', '.join(_ENVIRONMENT)}")
    os.environ.update(_ENVIRONMENT)
    stand_in = str(_HERE.parents[1] / "cpu")
    if stand_in not in sys.path:
        sys.path.insert(0, stand_in)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tensors are small, and the machine may be shared."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def engine() -> Iterator[Callable[[Setup], Engine]]:
    """Makes engines, and takes each one's published configuration back in the end."""
    from tests.backends.engine import Engine

    made: list[Engine] = []

    def make(setup: Setup) -> Engine:
        made.append(Engine(setup))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.fixture
def triton_alone(no_flags: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels serve, in the interpreter; where the library would take its reference in their place is an error."""
    from sglang_specverify.kernels import run

    def reference(*_: object) -> None:
        raise AssertionError("the reference ran in place of a Triton kernel")

    monkeypatch.setenv("SGLANG_SPECVERIFY_KERNELS", "triton")
    for name in ("run_verify", "run_draft_decode"):
        monkeypatch.setattr(run, name, reference)


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag of the plugin from outside reaches a test."""
    for name in [name for name in os.environ if name.startswith("SGLANG_SPECVERIFY_")]:
        monkeypatch.delenv(name)
