"""A process that stands in for one of a soak, runs no kernel, and fails as one may."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from tests.interpreter.soak_outcomes import Outcome
from tests.interpreter.soak_workers import BROKEN, DONE

#: Numbers of the cases in which it dies, or says that its device has failed.
DIES, BREAKS = 7, 20


def work(connection: Connection, seed: int, families: int) -> None:
    try:
        while chunk := connection.recv():
            for number in chunk:
                if number == DIES:
                    os._exit(3)
                error = "its device failed" if number == BREAKS else None
                connection.send(Outcome(number, "fused", "chain", "", "", 0, 0.5, error, 0.0))
                if error is not None:
                    connection.send(BROKEN)
                    return
            connection.send(DONE)
    except EOFError:
        return
