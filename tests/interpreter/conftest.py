"""Fixtures of the tests that run the Triton kernels: compiled where there is a GPU, else in Triton's interpreter.

This folder needs a process of its own, because the interpreter and the compiler exclude each other in one process and the
rest of the tests must not see the interpreter: `pytest tests/interpreter`. A run of more than this folder leaves it out
and says so. The interpreter has no launch table of its own; `pytest tests/interpreter --tables sm_90` reads SM90's there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
_STATE: dict[str, str] = {}


def _is_alone(config: pytest.Config) -> bool:
    paths = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return all(path.resolve().is_relative_to(_HERE) for path in paths)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tables", metavar="ARCH", help="launch table that Triton's interpreter reads, as sm_90; none by default")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Runs before each module of this folder is imported."""
    if collection_path.suffix != ".py":
        return None
    if not _is_alone(config):
        text = "tests/interpreter needs a process of its own and was left out: run `pytest tests/interpreter`"
        warnings.warn(pytest.PytestWarning(text), stacklevel=1)
        return True
    if not _STATE:
        _prepare(config.getoption("--tables", None))
    return None


def _prepare(tables: str | None) -> None:
    from hypothesis import HealthCheck, settings

    from tests.interpreter.environment import prepare

    try:
        _STATE["device"] = prepare()
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from None
    if tables is not None:
        _check_tables(tables)
    settings.register_profile(
        "kernels",
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=60 if _STATE["device"] == "cuda" else 30,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kernels")


def _check_tables(arch: str) -> None:
    from sglang_specverify.kernels.tables import shipped

    if _STATE["device"] == "cuda":
        raise pytest.UsageError("--tables is for Triton's interpreter: a GPU reads its own table; set TRITON_INTERPRET=1")
    if arch not in shipped():
        raise pytest.UsageError(f"--tables: got {arch!r}; allowed: {', '.join(shipped())}")


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" or "cpu"; on the latter the interpreter runs."""
    return _STATE["device"]


@pytest.fixture(scope="session", autouse=True)
def tables(device: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The architecture whose launch table is read: that of the GPU, or `--tables` in the interpreter, else "none".

    Every launch asks `run.lookup`, so that alone is told of another one. The launches stay those of "none" in all else: no
    dependent launch, and not the kernel with specialised warps, which the interpreter does not run.
    """
    import torch

    from sglang_specverify.kernels import run
    from sglang_specverify.kernels.launch import arch_of

    here, asked, lookup = arch_of(torch.device(device)), request.config.getoption("--tables", None), run.lookup
    with pytest.MonkeyPatch.context() as patch:
        if asked:
            patch.setattr(run, "lookup", lambda arch, *args: lookup(asked if arch == here else arch, *args))
        yield asked or here


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
