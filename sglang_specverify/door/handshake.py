"""The handshake: every scheduler process proves to the launcher that the plugin's parts took.

SGLang logs and swallows a plugin's failure, and a process that never loaded the plugin cannot notice its own
lack. So each scheduler writes a record, which also rides in its init info and so in `/server_info`; the
launcher counts the records once SGLang reports its schedulers ready, and stops the server where one is absent
or incomplete. The records are files in a directory of the launcher's, because SGLang's data-parallel
controller passes on only the init-info keys that it knows.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sglang_specverify import __version__
from sglang_specverify.door.request import Request, expected_parts
from sglang_specverify.errors import SpecverifyError

#: Where the launcher's child processes find its directory. Not a flag: only the launcher sets it.
_DIRECTORY_VARIABLE = "_SPECVERIFY_HANDSHAKE"
_REMEDY = "look for 'specverify' and 'plugin' in the log above; `specverify doctor` checks the installation"


def write_record(record: dict[str, Any]) -> None:
    """Leave this scheduler's record for the launcher. Without a launcher that waits for one, do nothing."""
    directory = os.environ.get(_DIRECTORY_VARIABLE)
    if not directory:
        return
    if not Path(directory).is_dir():
        return  # the launcher has judged already; this scheduler was added to a running server
    path = Path(directory) / f"{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.rename(path)


def check_records(
    records: Iterable[dict[str, Any]], *, schedulers: int, parts: Callable[[dict[str, Any]], frozenset[str]]
) -> None:
    """The launcher's judgement.

    Args:
        records: what the schedulers wrote.
        schedulers: how many scheduler processes SGLang started on this node.
        parts: what the process of a rank must have built from the plugin's classes.

    Raises:
        SpecverifyError: a record is absent, from another version, or lacks a part.
    """
    records = list(records)
    if len(records) != schedulers:
        raise SpecverifyError(
            f"{schedulers - len(records)} of {schedulers} scheduler processes did not report the plugin: "
            "they would serve SGLang's stock backend under its name",
            _REMEDY,
        )
    for record in records:
        rank = record.get("rank")
        if record.get("version") != __version__:
            raise SpecverifyError(
                f"rank {rank} runs specverify {record.get('version')}, the launcher {__version__}",
                "install one version in all environments that the server uses",
            )
        missing = parts(rank or {}) - set(record.get("parts", {}))
        if missing:
            raise SpecverifyError(
                f"rank {rank} serves without the plugin's {' and '.join(sorted(missing))} backend "
                f"(it has {record.get('parts') or 'none'})",
                _REMEDY,
            )


def watch_launcher() -> None:
    """Check the records when SGLang's launcher finds its schedulers ready. Idempotent."""
    from sglang.srt.entrypoints.engine import Engine

    if getattr(Engine._launch_scheduler_processes, "_specverify", False):
        return
    stock = Engine._launch_scheduler_processes.__func__

    def launch(cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        if not Request.of(server_args).any:
            return stock(cls, server_args, *args, **kwargs)
        directory = _new_directory()
        result, processes = stock(cls, server_args, *args, **kwargs)
        ready = result.wait_for_ready

        def wait_for_ready() -> None:
            ready()
            try:
                _check_directory(directory, server_args, result.scheduler_infos)
            except SpecverifyError:
                _stop_children()
                raise
            finally:
                os.environ.pop(_DIRECTORY_VARIABLE, None)
                shutil.rmtree(directory, ignore_errors=True)

        result.wait_for_ready = wait_for_ready
        return result, processes

    launch._specverify = True  # type: ignore[attr-defined]
    Engine._launch_scheduler_processes = classmethod(launch)


def _new_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="specverify-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[_DIRECTORY_VARIABLE] = str(directory)
    return directory


def _check_directory(directory: Path, server_args: Any, infos: list[dict[str, Any]]) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.managers.data_parallel_controller import SCHEDULER_PIDS_ARG

    # Under a data-parallel controller the one info is the controller's own, and names its schedulers.
    schedulers = sum(len(info.get(SCHEDULER_PIDS_ARG) or (None,)) for info in infos)
    records = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    request, view = Request.of(server_args), resolved_view(server_args)
    check_records(records, schedulers=schedulers, parts=lambda rank: expected_parts(request, view, rank.get("pp_rank") or 0))
    # SGLang shows the first info in /server_info.
    infos[0]["specverify"] = {**records[0], "ranks": [record["rank"] for record in records]}


def _stop_children() -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
