"""Signals for processes that a test starts to interrupt."""

from __future__ import annotations

import signal


def as_in_a_terminal() -> None:
    """Stop at what a user sends; for `preexec_fn`.

    What a runner ignores, under nohup or in the background, its children ignore too.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
