"""`backend_parity` runs: on a machine without a GPU, tiny and in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["fa3 tree, tile", "fa3 chain", "triton draft"])
def test_a_case(name: str) -> None:
    pytest.importorskip("sglang")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("SGLang's own packages are here: run python -m tests.gpu.backend_parity itself")
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gpu.backend_parity", "--case", name]
    done = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(name)]
    assert rows and all(row.endswith("  ok") for row in rows)
    assert {"fa3 tree, tile": "prefix_tile", "fa3 chain": "stock", "triton draft": "fused"}[name] in rows[0]
