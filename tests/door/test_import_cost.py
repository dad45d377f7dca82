"""What the plugin costs a process that SGLang loads it into: time beyond SGLang's own imports, and no heavy module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: Milliseconds of processor time, once the plugin's files are compiled.
BUDGET_MS = 50.0
_HEAVY = ("triton", "sgl_kernel", "torch", "flash_attn", "aiter", "sglang_specverify.kernels", "sglang_specverify.backends")

_MEASURE = """
import gc, importlib, json, sys, time
importlib.import_module(sys.argv[1])
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[2], False
before, times = set(sys.modules), []
gc.collect()
for _ in range(6):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_specverify"]:
        del sys.modules[name]
    start = time.process_time()
    from sglang_specverify.plugin import register
    register()
    times.append(1e3 * (time.process_time() - start))
print(json.dumps({"times": times, "new": sorted(set(sys.modules) - before)}))
"""


@pytest.fixture(scope="module", params=["sglang.srt.server_args", "sglang.srt.managers.scheduler"], ids=["launcher", "scheduler"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Five times to import and register, and what the first one imported, in a process like the named one.

    The plugin's compiled files are kept, as in an installed package; the first time, which writes them, does not count.
    """
    compiled = str(tmp_path_factory.mktemp("compiled"))
    command = [sys.executable, "-W", "ignore", "-c", _MEASURE, request.param, compiled]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[object]] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def test_time(measured: dict[str, list[object]]) -> None:
    times = measured["times"][1:]
    assert len(times) == 5
    # The least: what else runs on the processor's other threads only adds.
    assert min(times) < BUDGET_MS, times  # type: ignore[type-var, operator]


def test_no_kernel_and_no_gpu_module(measured: dict[str, list[object]]) -> None:
    new = [str(name) for name in measured["new"]]
    assert "sglang_specverify.plugin" in new and "sglang_specverify.door.resolution" in new
    assert [name for name in new if any(name == heavy or name.startswith(f"{heavy}.") for heavy in _HEAVY)] == []


def test_of_sglang_only_what_it_imports_itself(measured: dict[str, list[object]]) -> None:
    """The modules that a launcher or a scheduler imports anyway, a little later."""
    allowed = (
        "sglang.srt.arg_groups.kv_cache_hook",
        "sglang.srt.arg_groups.resolution_hooks",
        "sglang.srt.layers.attention.attention_registry",
        "sglang.srt.layers.attention.qsa",
        "sglang.srt.mem_cache.draft_kv_budget",
        "sglang.srt.mem_cache.kv_cache_configurator",
        "sglang.srt.speculative.dflash_utils",
        "sglang.srt.speculative.draft_parallel",
        "sglang.srt.speculative.draft_utils",
    )
    others = [str(name) for name in measured["new"] if not str(name).startswith("sglang_specverify")]
    assert [name for name in others if not name.startswith(allowed)] == []
