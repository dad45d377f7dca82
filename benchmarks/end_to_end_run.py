"""One call of `benchmarks.end_to_end`: what it shall do, how much time is left, and what it has found so far."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import end_to_end_plan as plan
from benchmarks import record, shapes
from benchmarks.engines import Engine, Setup
from benchmarks.turns import Turns
from sglang_specverify.errors import SpecverifyError

HOW = {
    "weights": "made up (--load-format dummy); speed depends on shapes only",
    "accept_length": "simulated: every verify step of every arm yields 3 tokens (SGLANG_SIMULATE_ACC_LEN)",
    "timing": "tokens of all answers over the longest request latency by the server's clock; a batch is one message",
    "prefix": "prompts come from the prefix cache, which the warm-up round filled: what is timed is decoding",
    "order": "the arms of a cell in turn, each repetition starting with another one; one warm-up round of the same cell before",
    "others": "engines of other calls may stand idle on the device beside the two that are measured, where `turns` is set",
    "device": "medians of clock and power over each round, as nvidia-smi reads them; idle ends of a round are in it",
    "ms_per_step": "request latency over verify steps: drafting, and extending by the last prompt token, included",
}


class Clock:
    """How much of the time is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def has(self, seconds: float) -> bool:
        return self.left() >= seconds


@dataclass
class Run:
    """State of the call. Saving asks the driver for its version, so it is done once for a cell."""

    shape: shapes.Shape
    arms: Sequence[str]
    repetitions: int
    clock: Clock
    start_limit: float
    out: Path
    root: Path
    settings: dict[str, Any]
    logs: Path | None = None
    context_length: int | None = None
    turns: Turns = field(default_factory=lambda: Turns(None))
    accept_length: float = 3.0
    cells: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    earlier: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        results = {"kind": "end to end", "how": HOW, "settings": self.settings, "earlier": self.earlier}
        record.write(self.out, {**results, "engines": self.engines, "cells": self.cells})

    def say(self, text: str) -> None:
        print(f"[{max(self.clock.left(), 0):5.0f} s left] {text}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.cells = plan.merged(self.cells, row)
        self.save()

    def open_cells(self, chosen: plan.Scenario, stock: str, wanted: Sequence[plan.Cell]) -> list[plan.Cell]:
        done = {(plan.key(row), row["output"]) for row in self.cells if plan.is_done(row)}
        return [cell for cell in wanted if (plan.key(self.row(chosen, stock, cell)), cell.output) not in done]

    def row(self, chosen: plan.Scenario, stock: str, cell: plan.Cell) -> dict[str, Any]:
        speculation = chosen.speculation and asdict(chosen.speculation)
        what = {"shape": self.shape.name, "scenario": chosen.name, "stock": stock, **asdict(cell)}
        return {**what, "speculation": speculation, "page_size": chosen.page_size, "under_pressure": chosen.under_pressure}

    def engine(self, chosen: plan.Scenario, arm: str, wanted: Sequence[plan.Cell]) -> Engine:
        """An engine that serves all wanted cells, measured already or not: a resumed run has the same engines.

        As many requests as the scenario's servers take, whatever the cells need: the plugin's routes depend on it.
        """
        model, draft = self.shape.write(self.root)
        most = chosen.most_requests or max(*plan.CONCURRENCIES, *(cell.concurrency for cell in wanted))
        setup = Setup(
            arm=arm,
            model=model,
            draft=draft if chosen.speculation else None,
            speculation=chosen.speculation,
            pool_tokens=plan.pool_tokens(chosen, wanted),
            page_size=chosen.page_size,
            graph_sizes=tuple(sorted({*(cell.concurrency for cell in wanted), *((8, 16, 24) if chosen.under_pressure else ())})),
            max_requests=most,
            context_length=self.context_length,
            accept_length=self.accept_length,
            # Let every request in, so that the pool runs out while they decode.
            extra=("--schedule-conservativeness", "0.05") if chosen.under_pressure else (),
        )
        log = None if self.logs is None else self.logs / f"{chosen.name}-{arm}.log"
        return Engine(setup, log)

    def note(self, chosen: plan.Scenario, stock: str, engine: Engine, found: dict[str, Any]) -> None:
        """Remember what one engine was, and what it said or why it failed; the next `save` writes it."""
        who = {"shape": self.shape.name, "scenario": chosen.name, "stock": stock, "arm": engine.setup.arm}
        # As a file has it: tuples are lists there.
        self._remember(json.loads(json.dumps({**who, "setup": engine.setup.as_dict(), **found})))

    def _remember(self, engine: dict[str, Any]) -> None:
        """In place of what is known of the same engine; one of another size is another."""
        self.engines = [*(row for row in self.engines if plan.engine_key(row) != plan.engine_key(engine)), engine]

    def load(self, file: Path) -> None:
        """Take over what an earlier call found, over what was taken over before."""
        before = json.loads(file.read_text())
        if before["settings"]["shape"] != self.shape.name:
            raise SpecverifyError(f"{file} is of shape {before['settings']['shape']}", "write each shape to a file of its own")
        done = {plan.key(row) for row in self.cells if plan.is_done(row)}
        for row in before["cells"]:
            # What failed later takes nothing back that was measured.
            if plan.is_done(row) or plan.key(row) not in done:
                self.cells = plan.merged(self.cells, row)
        for engine in before["engines"]:
            self._remember(engine)
        kept = ("date", "command", "versions", "hardware", "settings")
        self.earlier += [row for row in (*before["earlier"], {name: before[name] for name in kept}) if row not in self.earlier]
