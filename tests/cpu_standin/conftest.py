"""Load the stand-in under a name of its own, so that `sgl_kernel` means what it means elsewhere in the process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "cpu" / "sgl_kernel"


def load(name: str) -> ModuleType:
    """Execute the package anew as module `name`, its submodules under it."""
    spec = importlib.util.spec_from_file_location(name, SOURCE / "__init__.py", submodule_search_locations=[str(SOURCE)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        forget(name)
        raise
    return module


def forget(name: str) -> None:
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[known]


@pytest.fixture(scope="package")
def kernels() -> Iterator[ModuleType]:
    """The stand-in with its submodule `speculative`."""
    try:
        module = load("specverify_cpu_standin")
    except ImportError as error:
        pytest.skip(f"refused, as it should be on this machine: {error}")
    importlib.import_module("specverify_cpu_standin.speculative")
    yield module
    forget("specverify_cpu_standin")
