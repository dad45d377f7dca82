"""Hardware facts and routing can be asked where neither torch nor SGLang is."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["sglang"] = sys.modules["triton"] = None
import sglang_specverify.hardware, sglang_specverify.upstream, sglang_specverify.flags
import sglang_specverify.routing.model, sglang_specverify.routing.server
import sglang_specverify.cli.describe, sglang_specverify.cli.doctor, sglang_specverify.cli.env
import sglang_specverify.cli.explain, sglang_specverify.cli.serve, sglang_specverify.cli.checkpoint
print("pure")
"""


def test_imports_neither_torch_nor_sglang() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("pure", "", 0)
