"""`backend_parity` and `sglang_kit` run: on a machine without a GPU, tiny and in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def run(module: str, case: str) -> str:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, "--case", case]
    done = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["fa3 tree, tile", "fa3 chain", "triton draft"])
def test_a_case(name: str) -> None:
    pytest.importorskip("sglang")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("SGLang's own packages are here: run python -m tests.gpu.backend_parity itself")
    out = run("tests.gpu.backend_parity", name)
    rows = [line for line in out.splitlines() if line.startswith(name)]
    assert rows and all(row.endswith("  ok") for row in rows)
    assert {"fa3 tree, tile": "prefix_tile", "fa3 chain": "stock", "triton draft": "fused"}[name] in rows[0]


def test_a_case_of_the_kit() -> None:
    pytest.importorskip("sglang")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("SGLang's own packages are here: run python -m tests.gpu.sglang_kit itself")
    out = run("tests.gpu.sglang_kit", "fa3 tree, page 16")
    assert [line.split()[-3:] for line in out.splitlines() if line.startswith("fa3 tree, page 16")] == [
        ["eager", "prefix_tile", "ok"],
        ["graph", "prefix_tile", "ok"],
    ]
