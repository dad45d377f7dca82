"""A plugin of the tests that breaks this plugin on its way into SGLang's processes. Put this folder first on PYTHONPATH.

`SPECVERIFY_SABOTAGE` says how:
    lose:N   the N-th scheduler that a process starts inherits a `SGLANG_PLUGINS` without specverify
    part     the patches of SGLang's draft factories do nothing, in every scheduler
    raise    installing the patches raises, in every scheduler; SGLang logs that and goes on
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from multiprocessing.process import BaseProcess
from typing import Any


def register() -> None:
    how, _, which = os.environ.get("SPECVERIFY_SABOTAGE", "").partition(":")
    if how == "lose":
        _lose(int(which))
    elif "sglang.srt.managers.scheduler" in sys.modules:
        from sglang_specverify.door import scheduler

        if how == "part":
            scheduler._draft_factory = lambda base, build: lambda stock: lambda factory: stock(factory)
        elif how == "raise":
            scheduler.install = _raise


def _raise() -> None:
    raise RuntimeError("sabotage")


def _lose(which: int) -> None:
    start, lock, schedulers = BaseProcess.start, threading.Lock(), itertools.count()

    def losing(process: Any) -> None:
        # Data-parallel attention starts its schedulers early, through a function whose name begins like the usual one.
        is_scheduler = getattr(process._target, "__name__", "").startswith("run_scheduler_process")
        with lock:
            if not is_scheduler or next(schedulers) != which:
                start(process)
                return
            os.environ["SGLANG_PLUGINS"] = "specverify_saboteur"
            try:
                start(process)
            finally:
                del os.environ["SGLANG_PLUGINS"]

    BaseProcess.start = losing  # type: ignore[assignment, method-assign]
