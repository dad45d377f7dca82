"""What a soak finds out, case by case and in all. Imports nothing large: processes that run no kernel read it too."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

#: Failures that a result lists one by one.
LISTED = 50


@dataclass(frozen=True)
class Outcome:
    """What became of one case; `error` is None where every element was within its bound."""

    number: int
    operation: str
    kind: str
    types: str
    config: str
    prefix_tokens: int
    ratio: float
    error: str | None
    seconds: float


@dataclass
class Tally:
    """The outcomes so far, added up."""

    count: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[Outcome] = field(default_factory=list)
    prefix_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, one: Outcome) -> None:
        for name in (one.operation, one.kind, one.types):
            self.count[name] += 1
            self.worst[name] = max(self.worst.get(name, 0.0), one.ratio)
        self.count["all"] += 1
        self.prefix_tokens += one.prefix_tokens
        if one.error is not None:
            self.failures.append(one)

    def line(self) -> str:
        done = self.count["all"]
        return f"{self.seconds:.0f} s: {done} cases, {done / max(self.seconds, 1e-3):.1f} a second, {len(self.failures)} failures"

    def result(self, seed: int, families: int) -> dict[str, Any]:
        again = f"python -m tests.interpreter.soak --seed {seed} --families {families} --cases 1 --first"
        listed = [
            {"case": one.number, "operation": one.operation, "error": one.error, "config": one.config,
             "again": f"{again} {one.number}"}
            for one in sorted(self.failures, key=lambda one: one.number)[:LISTED]
        ]  # fmt: skip
        return {
            "cases": self.count["all"], "outside_their_bound": len(self.failures), "prefix_tokens": self.prefix_tokens,
            "seconds": round(self.seconds, 1), "cases_per_second": round(self.count["all"] / max(self.seconds, 1e-3), 2),
            "counts": dict(self.count), "failures": listed,
            "largest_error_over_bound": {name: round(value, 4) for name, value in self.worst.items()},
        }  # fmt: skip
