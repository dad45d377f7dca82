"""Which calls are compiled in the tests: every pair of two properties occurs; `scripts/compile_all` does the full product."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from sglang_specverify.kernels.aot_cases import CACHES, DIMS, FEATURES, OPERATIONS, Case, serves
from sglang_specverify.kernels.targets import TARGETS

#: What a case is made of. `rows` reaches every range of rows that the tables name.
FACTORS: dict[str, tuple[Any, ...]] = {
    "arch": tuple(TARGETS),
    "operation": OPERATIONS,
    "dims": DIMS,
    "cache": CACHES,
    "rows": (16, 32, 64, 256),
    "feature": tuple(FEATURES),
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs() -> Iterator[Pair]:
    """Every two values of two factors that one call can have."""
    for a, b in combinations(FACTORS, 2):
        for x, y in product(FACTORS[a], FACTORS[b]):
            if _possible({a: x, b: y}):
                yield (a, x), (b, y)


def pairs_of(values: dict[str, Any]) -> set[Pair]:
    return {((a, values[a]), (b, values[b])) for a, b in combinations(FACTORS, 2)}


def cover() -> list[dict[str, Any]]:
    """Values of few cases that have every pair: each starts from a pair that none has yet, and takes the most others along."""
    missing = dict.fromkeys(pairs())
    chosen: list[dict[str, Any]] = []
    while missing:
        values: dict[str, Any] = dict(next(iter(missing)))
        for name in sorted(set(FACTORS) - set(values), key=list(FACTORS).index):
            turn = len(chosen) % len(FACTORS[name])
            options = [value for value in FACTORS[name][turn:] + FACTORS[name][:turn] if _possible({**values, name: value})]
            values[name] = max(options, key=lambda value: _gain({**values, name: value}, missing))
        for pair in pairs_of(values):
            missing.pop(pair, None)
        chosen.append(values)
    return chosen


def case_of(values: dict[str, Any], number: int) -> Case:
    """Groups that are and are not powers of two take turns."""
    operation, kind = values["operation"]
    group = (4, 8, 1, 5)[number % 4]
    return Case(values["arch"], operation, kind, values["dims"], values["cache"], values["rows"], group, values["feature"])


def _gain(values: dict[str, Any], missing: dict[Pair, None]) -> int:
    named = [name for name in FACTORS if name in values]
    return sum(((a, values[a]), (b, values[b])) in missing for a, b in combinations(named, 2))


def _possible(values: dict[str, Any]) -> bool:
    """A soft cap with a large pool is possible; ragged rows with a mask that needs a common W are not."""
    return "operation" not in values or "feature" not in values or serves(values["operation"][1], values["feature"])


CASES = tuple(case_of(values, number) for number, values in enumerate(cover()))
