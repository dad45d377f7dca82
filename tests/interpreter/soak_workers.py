"""Processes that share out the cases of a soak: one failure, crash or hang costs its case and no other.

Cases go out a few at a time, all of one family, whose kernels the process then compiles or loads; families take turns, so that
all of them have had their turn when the time is up.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tests.interpreter.soak_outcomes import Outcome

#: Cases that a process is given at once.
CHUNK = 16

#: Seconds without an outcome after which a process counts as hanging: it may start, or compile a kernel.
PATIENCE = 150.0

#: Processes that may be replaced, in all: more than these are one fault of everything.
REPLACED = 24

#: What runs in a process: takes its end of the connection, the seed and the number of families.
Work = Callable[[Connection, int, int], None]

#: What a process says in place of an outcome: it has no more cases, or its device has failed.
DONE, BROKEN = "done", "broken"


def chunks_of(numbers: Sequence[int], seed: int, families: int) -> Iterator[list[int]]:
    """The cases, some of one family at a time, each family in its turn."""
    from tests.interpreter.soak_cases import family_of

    members: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        members[family_of(number, seed, families)].append(number)
    for start in range(0, max(map(len, members.values()), default=0), CHUNK):
        for one in members.values():
            if chunk := one[start : start + CHUNK]:
                yield chunk


def work(connection: Connection, seed: int, families: int) -> None:
    """A process: runs the cases that it is sent until there are no more or the other side is gone."""
    from tests.interpreter.environment import prepare

    device = prepare()
    from tests.interpreter.soak import outcome_of

    try:
        while chunk := connection.recv():
            for number in chunk:
                one = outcome_of(number, seed, families, device)
                connection.send(one)
                if one.error is not None and not _is_well(device):
                    connection.send(BROKEN)
                    return
            connection.send(DONE)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _is_well(device: str) -> bool:
    """Whether the device still answers: after an invalid access nothing in a process does."""
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@dataclass
class Worker:
    """One process, the cases that it has not answered yet, and when it was last heard of."""

    process: SpawnProcess
    connection: Connection
    left: deque[int]
    heard: float

    @classmethod
    def start(cls, target: Work, seed: int, families: int) -> Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, seed, families), daemon=True)
        process.start()
        # Or the end of the process would not be the end of the connection.
        theirs.close()
        return cls(process, ours, deque(), time.monotonic())

    def give(self, chunk: Sequence[int]) -> None:
        self.left, self.heard = deque(chunk), time.monotonic()
        with suppress(OSError):  # it has died, as the next look will tell
            self.connection.send(list(chunk))

    def stop(self) -> int | None:
        """End it, if it has not ended; its exit code."""
        self.connection.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


def shared(
    numbers: Sequence[int], seed: int, families: int, processes: int, deadline: float, target: Work = work
) -> Iterator[Outcome]:
    """The outcomes of the cases, as they come in, from so many processes. All have ended when the iterator has."""
    chunks = deque(chunks_of(numbers, seed, families))
    workers: list[Worker] = []
    replaced = 0
    try:
        for _ in range(min(processes, len(chunks))):
            workers.append(Worker.start(target, seed, families))
            workers[-1].give(chunks.popleft())
        while workers and time.monotonic() < deadline:
            ready = set(wait([one.connection for one in workers], timeout=1.0))
            for one in list(workers):
                said: object = None
                if one.connection in ready:
                    said = _heard(one)
                elif time.monotonic() - one.heard > PATIENCE:
                    said = f"no answer within {PATIENCE:.0f} s"
                if isinstance(said, Outcome):
                    yield said
                elif said == DONE:
                    if chunks:
                        one.give(chunks.popleft())
                    else:
                        workers.remove(one)
                        one.stop()
                elif isinstance(said, str):
                    workers.remove(one)
                    code = one.stop()
                    if said != BROKEN and one.left:
                        yield _lost(one.left.popleft(), f"{said}, exit code {code}")
                    if one.left:
                        chunks.appendleft(list(one.left))
                    if chunks and replaced < REPLACED:
                        replaced += 1
                        workers.append(Worker.start(target, seed, families))
                        workers[-1].give(chunks.popleft())
    finally:
        for one in workers:
            one.process.kill()
            one.stop()


def _heard(one: Worker) -> Outcome | str:
    """What a process says; that it has died if it has."""
    one.heard = time.monotonic()
    try:
        said: Outcome | str = one.connection.recv()
    except (EOFError, OSError):
        return "the process died"
    if isinstance(said, Outcome):
        one.left.remove(said.number)
    return said


def _lost(number: int, error: str) -> Outcome:
    return Outcome(number, "unknown", "unknown", "unknown", "", 0, 0.0, error, 0.0)
