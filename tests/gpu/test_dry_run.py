"""`backend_parity` and `sglang_kit` run: on a machine without a GPU, tiny and in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


KERNELS = {"fa3 tree, tile": "prefix_tile", "fa3 chain": "stock", "triton draft": "fused"}


def run(module: str, *cases: str) -> str:
    """What `module` prints, all cases in one process: most of its time goes into imports."""
    pytest.importorskip("sglang")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip(f"SGLang's own packages are here: run python -m {module} itself")
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *(word for name in cases for word in ("--case", name))]
    done = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def parity() -> list[str]:
    return run("tests.gpu.backend_parity", *KERNELS).splitlines()


@pytest.mark.parametrize("name", KERNELS)
def test_a_case(parity: list[str], name: str) -> None:
    rows = [line for line in parity if line.startswith(name)]
    assert rows and all(row.endswith("  ok") for row in rows)
    assert KERNELS[name] in rows[0]


def test_a_case_of_the_kit() -> None:
    name = "fa3 tree, page 16"
    rows = [line.split()[-3:] for line in run("tests.gpu.sglang_kit", name).splitlines() if line.startswith(name)]
    assert rows == [["eager", "prefix_tile", "ok"], ["graph", "prefix_tile", "ok"]]
