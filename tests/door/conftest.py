"""The door registered afresh for each test, on machines that are not here, with everything put back afterwards."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.door.layouts import start_all
from tests.door.machines import write_models
from tests.door.processes import nobody_waits

_OURS = ("SGLANG_PLUGINS", "SGLANG_SPECVERIFY_")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> directory with a config.json."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demonstration's target and its mirror draft: real weights for real servers."""
    from sglang_specverify.demo.models import build

    directory = tmp_path_factory.mktemp("demo-models")
    return {kind: build(kind, directory / kind) for kind in ("target", "mirror")}


@pytest.fixture(scope="session")
def started(demo_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Case -> the end of its server, to come. Two at a time: almost all of a start is imports on one core."""
    pool = ThreadPoolExecutor(2)
    yield start_all(demo_models, tmp_path_factory.mktemp("servers"), pool)
    nobody_waits.set()
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", autouse=True)
def start_servers_early(request: pytest.FixtureRequest) -> None:
    """Where tests of this folder will ask real servers, let those start while the others run."""
    here = Path(__file__).parent
    if any(item.path.parent == here and item.get_closest_marker("server") for item in request.session.items):
        request.getfixturevalue("started")


@pytest.fixture
def clean_environment() -> Iterator[None]:
    """No flag of the plugin and no plugin filter; and what SGLang's resolution exports is forgotten afterwards."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_OURS):
            del os.environ[name]
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def unregistered(clean_environment: None) -> Iterator[None]:
    """A process in which the plugin has not been registered, and whose launcher is unwatched."""
    from sglang.srt.arg_groups import choices, resolution_hooks
    from sglang.srt.entrypoints.engine import Engine

    from sglang_specverify.plugin import register

    lists = (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES)
    saved = [list(names) for names in lists]
    hooks = {name: list(wrappers) for name, wrappers in resolution_hooks._HOOKS.items()}
    launch = Engine.__dict__["_launch_scheduler_processes"]
    done, excepthook = getattr(register, "_done", False), sys.excepthook
    resolution_hooks._HOOKS.clear()
    for names in lists:
        names[:] = [name for name in names if name != "specverify"]
    register._done = False  # type: ignore[attr-defined]
    yield
    register._done = done  # type: ignore[attr-defined]
    sys.excepthook = excepthook
    Engine._launch_scheduler_processes = launch
    for names, before in zip(lists, saved, strict=True):
        names[:] = before
    resolution_hooks._HOOKS.clear()
    resolution_hooks._HOOKS.update(hooks)


@pytest.fixture
def door(unregistered: None) -> None:
    """A process like SGLang's launcher: the plugin registered, no factory patched."""
    from sglang_specverify.door import resolution

    resolution.add_choice()
    resolution.register_hooks()


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What the plugin logs. SGLang's parser replaces the root logger's handlers, so pytest's own capture misses it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang_specverify")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
