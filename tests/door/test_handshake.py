"""The launcher's judgement of its schedulers' records, without a server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_specverify import __version__
from sglang_specverify.door import handshake
from sglang_specverify.door import scheduler as in_scheduler
from sglang_specverify.door.request import Request, expected_parts
from sglang_specverify.errors import SpecverifyError
from tests.door.resolve import CHAIN, NGRAM, PLUGIN, TREE, arguments, resolve

ALL = frozenset({"target", "draft decode", "draft extend"})


def record(rank: int = 0, parts: frozenset[str] = ALL, version: str = __version__) -> dict[str, Any]:
    return {"version": version, "rank": {"tp_rank": rank}, "parts": {part: "SpecverifyFlashAttentionBackend" for part in parts}}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_complete_records_pass(ranks: int) -> None:
    handshake.check_records([record(rank) for rank in range(ranks)], schedulers=ranks, parts=lambda _: ALL)


def test_more_than_was_asked_for_passes() -> None:
    handshake.check_records([record()], schedulers=1, parts=lambda _: frozenset({"target"}))


@pytest.mark.parametrize(("came", "ranks"), [(0, 1), (1, 2), (0, 4), (7, 8), (2, 1)])
def test_a_missing_record(came: int, ranks: int) -> None:
    with pytest.raises(SpecverifyError, match=f"{ranks - came} of {ranks} scheduler processes did not report"):
        handshake.check_records([record(rank) for rank in range(came)], schedulers=ranks, parts=lambda _: ALL)


@pytest.mark.parametrize("part", sorted(ALL))
def test_a_missing_part_names_rank_and_part(part: str) -> None:
    records = [record(0), record(3, ALL - {part})]
    with pytest.raises(SpecverifyError, match=f"'tp_rank': 3.*without the plugin's {part} backend") as raised:
        handshake.check_records(records, schedulers=2, parts=lambda _: ALL)
    assert "specverify doctor" in raised.value.remedy


def test_no_part_at_all() -> None:
    with pytest.raises(SpecverifyError, match=r"draft decode and draft extend and target backend \(it has none"):
        handshake.check_records([record(parts=frozenset())], schedulers=1, parts=lambda _: ALL)


def test_two_versions() -> None:
    with pytest.raises(SpecverifyError, match=f"specverify 9.9, the launcher {__version__}"):
        handshake.check_records([record(), record(1, version="9.9")], schedulers=2, parts=lambda _: ALL)


@pytest.mark.usefixtures("door")
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (PLUGIN, {"target"}),
        (f"{PLUGIN} {NGRAM}", {"target"}),
        (f"{PLUGIN} {CHAIN}", ALL),
        (f"{PLUGIN} {TREE}", ALL),
        (f"{PLUGIN} {TREE} --speculative-draft-attention-backend triton", {"target"}),
        (f"--attention-backend triton --speculative-draft-attention-backend specverify {TREE}", ALL - {"target"}),
        (f"--attention-backend triton {TREE}", set()),
        (f"--prefill-attention-backend specverify --decode-attention-backend triton {TREE}", {"target", "draft extend"}),
        (
            "--prefill-attention-backend triton --decode-attention-backend specverify "
            f"--speculative-attention-mode decode {TREE}",
            ALL,
        ),
    ],
)
def test_expected_parts(line: str, parts: set[str], models: dict[str, Path]) -> None:
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", line))
    assert expected_parts(Request.of(raw), view) == parts


@pytest.mark.usefixtures("door")
def test_the_last_pipeline_stage_alone_hosts_the_draft(models: dict[str, Path]) -> None:
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    two = SimpleNamespace(speculative_algorithm="STANDALONE", speculative_num_steps=3, enable_multi_layer_eagle=False, pp_size=2)
    request = Request.of(raw)
    assert view.pp_size == 1
    assert [expected_parts(request, two, stage) for stage in (0, 1)] == [{"target"}, ALL]

    def stage(rank: int, parts: frozenset[str]) -> dict[str, Any]:
        return {**record(parts=parts), "rank": {"pp_rank": rank}}

    def needed(rank: dict[str, Any]) -> frozenset[str]:
        return expected_parts(request, two, rank["pp_rank"])

    target = frozenset({"target"})
    handshake.check_records([stage(0, target), stage(1, ALL)], schedulers=2, parts=needed)
    with pytest.raises(SpecverifyError, match="'pp_rank': 1"):
        handshake.check_records([stage(0, target), stage(1, target)], schedulers=2, parts=needed)


def test_a_scheduler_that_joins_later_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake._DIRECTORY_VARIABLE, str(tmp_path / "gone"))
    handshake.write_record(record())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def launcher(door: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """SGLang's launcher, its schedulers replaced by a function that runs when they would be ready."""
    from sglang.srt.entrypoints.engine import Engine

    stopped: list[int] = []
    monkeypatch.setattr(handshake, "_stop_children", lambda: stopped.append(1))
    monkeypatch.delenv(handshake._DIRECTORY_VARIABLE, raising=False)

    def start(raw: Any, schedulers: Callable[[], None], infos: list[dict[str, Any]]) -> Any:
        result = SimpleNamespace(wait_for_ready=schedulers, scheduler_infos=infos, stopped=stopped)
        stock = classmethod(lambda cls, server_args: (result, ["process"]))
        Engine._launch_scheduler_processes = stock
        handshake.watch_launcher()
        handshake.watch_launcher()
        given, processes = Engine._launch_scheduler_processes(raw)
        assert given is result and processes == ["process"]
        return result

    return start


_seen: list[Path] = []


def _leave(*records: dict[str, Any]) -> None:
    _seen.append(Path(os.environ[handshake._DIRECTORY_VARIABLE]))
    for number, entry in enumerate(records):
        (_seen[-1] / f"{number}.json").write_text(json.dumps(entry))


def test_a_healthy_start(launcher: Callable[..., Any], models: dict[str, Path]) -> None:
    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    infos: list[dict[str, Any]] = [{"max_total_num_tokens": 1}, {}]
    result = launcher(raw, lambda: _leave(record(0), record(1)), infos)
    result.wait_for_ready()
    assert result.stopped == []
    # Server info shows the first, also where SGLang passes on only the keys that it knows.
    assert infos[0]["specverify"] == {**record(0), "ranks": [{"tp_rank": 0}, {"tp_rank": 1}]}
    assert not _seen[-1].exists()
    assert handshake._DIRECTORY_VARIABLE not in os.environ, "a scheduler that starts later finds no directory"


def test_under_a_data_parallel_controller_its_schedulers_are_counted(
    launcher: Callable[..., Any], models: dict[str, Path]
) -> None:
    from sglang.srt.managers.data_parallel_controller import SCHEDULER_PIDS_ARG

    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    result = launcher(raw, lambda: _leave(record(0)), [{SCHEDULER_PIDS_ARG: [11, 12]}])
    with pytest.raises(SpecverifyError, match="1 of 2 scheduler processes"):
        result.wait_for_ready()
    assert result.stopped == [1]
    assert not _seen[-1].exists()
    assert handshake._DIRECTORY_VARIABLE not in os.environ, "a scheduler that starts later finds no directory"


@pytest.mark.parametrize("came", [[], [record(0, frozenset({"target"}))]], ids=["lost", "incomplete"])
def test_a_bad_start_stops_the_schedulers(
    came: list[dict[str, Any]], launcher: Callable[..., Any], models: dict[str, Path]
) -> None:
    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    result = launcher(raw, lambda: _leave(*came), [{}])
    with pytest.raises(SpecverifyError):
        result.wait_for_ready()
    assert result.stopped == [1]


def test_another_server_of_the_same_process_is_not_judged(launcher: Callable[..., Any], models: dict[str, Path]) -> None:
    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"--attention-backend triton {TREE}"))
    result = launcher(raw, lambda: None, [{}])
    result.wait_for_ready()
    assert handshake._DIRECTORY_VARIABLE not in os.environ


def test_a_scheduler_leaves_its_record_once_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(handshake._DIRECTORY_VARIABLE, raising=False)
    handshake.write_record(record())
    monkeypatch.setenv(handshake._DIRECTORY_VARIABLE, str(tmp_path))
    handshake.write_record(record())
    assert [json.loads(path.read_text()) for path in tmp_path.iterdir()] == [record()]


def test_nothing_built_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that built none of the plugin's backends must not vouch for itself."""
    monkeypatch.setenv(handshake._DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(in_scheduler, "_built", {})
    get_init_info = in_scheduler._with_record(lambda scheduler: {"status": "ready"})
    assert get_init_info(None) == {"status": "ready"}
    assert list(tmp_path.iterdir()) == []
