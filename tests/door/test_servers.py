"""The handshake between real processes, for every layout of ranks that runs on a CPU: see layouts.py."""

from __future__ import annotations

import subprocess
from concurrent.futures import Future
from typing import Any

import pytest

from sglang_specverify import __version__
from tests.door.layouts import LAYOUTS, Healthy
from tests.door.processes import READY, Ended, outliving

pytestmark = pytest.mark.server


def test_a_process_that_outlives_its_server_is_found() -> None:
    """The negative control for every `left == []` here."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & exit 0"], start_new_session=True)
    process.wait()
    left = outliving(process.pid, 0.0)
    assert len(left) == 1
    left[0].kill()
    assert outliving(process.pid, 10.0) == []


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_server_that_lost_the_plugin_stops(case: str, started: dict[str, Future[Any]]) -> None:
    ended: Ended = started[case].result()
    lines = ended.text.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("specverify: error: ")]
    assert len(errors) == 1, ended.text[-3000:]
    assert LAYOUTS[case].says in lines[errors[0]]
    assert lines[errors[0] + 1].startswith("  remedy: ")
    assert ended.code == 1
    assert ended.left == []
    assert "SpecverifyError" not in ended.text, "a traceback of ours"
    assert READY not in ended.text and "Uvicorn running" not in ended.text


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_saboteur_did_what_it_says(case: str, started: dict[str, Future[Any]]) -> None:
    """Without this a server that stopped for another reason would look like a handshake."""
    ended: Ended = started[case].result()
    traceback = "Traceback" in ended.text
    assert traceback == (LAYOUTS[case].sabotage == "raise"), "only SGLang's own report of the plugin that raised"
    serving = ended.text.count(f"specverify {__version__} serves on base triton")
    assert serving == {"part": 1, "raise": 0}.get(LAYOUTS[case].sabotage, 1)


def test_every_rank_of_a_healthy_server_reports(started: dict[str, Future[Any]]) -> None:
    healthy: Healthy = started["healthy"].result()
    records = [state["specverify"] for state in healthy.info["internal_states"]]
    assert sorted(record["rank"]["dp_rank"] for record in records) == [0, 1]
    assert sorted(rank["dp_rank"] for rank in healthy.info["specverify"]["ranks"]) == [0, 1]
    for record in (healthy.info["specverify"], *records):
        assert (record["version"], record["base"], record["hardware"]) == (__version__, "triton", "no GPU")
        assert {"target", "draft decode", "draft extend"} <= record["parts"].keys()
        modes = {row["mode"] for row in record["routes"] if row["kernel"] == "reference"}
        assert {"target_verify", "draft_decode", "draft_extend"} <= modes


def test_one_log_line_of_each_scheduler_says_it_all(started: dict[str, Future[Any]]) -> None:
    text = started["healthy"].result().text
    lines = [line for line in text.splitlines() if " serves on base " in line]
    assert len(lines) == 2
    for line in lines:
        assert f"specverify {__version__} serves on base triton, no GPU" in line
        assert "'target': 'SpecverifyTritonBackend'" in line
        assert "target_verify: reference" in line and "draft_decode: reference" in line
    assert "specverify resolves to triton: no GPU" in text
