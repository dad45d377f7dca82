"""What was measured, kept so that an interrupted run goes on, and the table that follows from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import SIZES, Entry, Table
from sglang_specverify.tuning.buckets import Bucket

#: How much faster than every launch without spilled registers one with them must be to be taken.
SPILL_WIN = 0.97

#: Fields of a launch that are always told, by shorter names.
_SHORT = {"num_warps": "warps", "num_stages": "stages", "ctas_per_sm": "ctas"}


@dataclass(frozen=True)
class Measured:
    """One launch on the calls of a bucket: microseconds of each, or why it was not timed."""

    microseconds: tuple[float, ...] = ()
    problem: str = ""


@dataclass
class State:
    """Measurements in a file, one JSON object a line, before them a header: what they belong to.

    A line that a killed run left unfinished counts as absent: a header is written anew below it, a measurement is made again.

    Attributes:
        belongs: architecture, versions and kernel source: measurements of others are not mixed in.
        has_header: whether the file says so already.
    """

    path: Path
    belongs: Mapping[str, str]
    measured: dict[str, Measured]
    has_header: bool = False

    @classmethod
    def load(cls, path: Path, belongs: Mapping[str, str]) -> State:
        """The measurements of an earlier run; none where there is no file.

        Raises:
            SpecverifyError: the file belongs to something else, or does not say to what.
        """
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        read = [entry for entry in map(_object, lines) if entry is not None]
        if read and "key" in read[0]:
            raise SpecverifyError(
                f"{path} does not say what its measurements ({len(read)}) belong to: no line before them is whole",
                f"if they were made here and with these kernels, make this its first line: {json.dumps(dict(belongs))}; "
                "if not, delete the file, or choose another --out",
            )
        if read and read[0] != dict(belongs):
            differing = [name for name in belongs if read[0].get(name) != belongs[name]]
            raise SpecverifyError(
                f"{path} holds measurements of another {' and '.join(differing) or 'run'}",
                "delete it to start again, or choose another --out",
            )
        found = {}
        for entry in read[1:]:
            if isinstance(entry.get("key"), str) and isinstance(entry.get("microseconds"), list):
                found[entry["key"]] = Measured(tuple(entry["microseconds"]), str(entry.get("problem", "")))
        return cls(path, belongs, found, bool(read))

    def add(self, key: str, measured: Measured) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("a", encoding="utf-8") as file:
            if before and not before.endswith(b"\n"):
                file.write("\n")
            if not (before and self.has_header):
                file.write(json.dumps(dict(self.belongs)) + "\n")
            file.write(json.dumps({"key": key, **asdict(measured)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.has_header = True
        self.measured[key] = measured


def key_of(bucket: Bucket, config: LaunchConfig) -> str:
    """What a measurement is kept under: every field, default or not, so that launches which differ never share one."""
    return f"{bucket.name}: {json.dumps(asdict(config))}"


def text_of(config: LaunchConfig) -> str:
    """For people: the fields that every launch has, then whatever else is not as usual."""
    text = f"{config.block_m}x{config.block_n}"
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "amd":
            text += "".join(f" {name}={option}" for name, option in value)
        elif field.name not in ("block_m", "block_n") and (field.name in _SHORT or value != field.default):
            text += f" {_SHORT.get(field.name, field.name)}={value}"
    return text


def score(measured: Measured, best: Sequence[float]) -> float:
    """Geometric mean of the times relative to those of `best`, call by call; infinite where it was not timed."""
    if measured.problem or len(measured.microseconds) != len(best):
        return math.inf
    return math.exp(sum(math.log(us / least) for us, least in zip(measured.microseconds, best, strict=True)) / len(best))


def ranked(measured: Mapping[LaunchConfig, Measured]) -> list[tuple[LaunchConfig, float]]:
    """Every launch that was timed and its score, best first; of equals the one that was tried first."""
    timed = [m.microseconds for m in measured.values() if not m.problem]
    if not timed:
        return []
    best = [min(column) for column in zip(*timed, strict=True)]
    scores = [(config, score(m, best)) for config, m in measured.items() if not m.problem]
    return sorted(scores, key=lambda pair: pair[1])


def entry_of(bucket: Bucket, measured: Mapping[LaunchConfig, Measured], spills: Callable[[LaunchConfig], int]) -> Entry | None:
    """The entry that a bucket's measurements say; None where nothing ran.

    Args:
        spills: bytes that a launch spills. Asked from the fastest on, until one spills none.
    """
    order = ranked(measured)
    if not order:
        return None
    spilled = []
    clean = None
    for config, how_slow in order:
        bytes_ = spills(config)
        if bytes_ == 0:
            clean = (config, how_slow)
            break
        spilled.append((config, how_slow, bytes_))
    if clean is None or (spilled and spilled[0][1] < SPILL_WIN * clean[1]):
        config, how_slow, bytes_ = spilled[0]
        than = "no launch without spills ran"
        if clean is not None:
            than = f"{clean[1] / how_slow:.2f} times as fast as {text_of(clean[0])}, the best without spills"
        return Entry(bucket.when, config, True, bytes_, than)
    return Entry(bucket.when, clean[0], True)


def table_of(arch: str, triton: str, note: str, tuned: Mapping[str, Sequence[Entry]], before: Table | None) -> Table:
    """The tuned entries, then those of the table before that can still win; a kernel that is not tuned keeps its own."""
    kernels = {} if before is None else {kernel: old for kernel, old in before.kernels.items() if kernel not in tuned}
    for kernel, entries in tuned.items():
        rest = () if before is None else before.kernels.get(kernel, ())
        kernels[kernel] = (*entries, *(old for old in rest if not any(_covers(entry, old) for entry in entries)))
    return Table(arch, triton, note, kernels)


def timings_of(bucket: Bucket, measured: Mapping[LaunchConfig, Measured]) -> list[dict[str, Any]]:
    """Every measurement of a bucket, best first, those that failed last."""
    order = [config for config, _ in ranked(measured)]
    order += [config for config in measured if config not in order]
    calls = [f"{call.kind} bs {call.batch} L {call.prefix} W {call.queries}" for call in bucket.calls]
    return [
        {"bucket": bucket.name, "launch": text_of(config), "calls": calls, "us": list(measured[config].microseconds)}
        | ({"problem": measured[config].problem} if measured[config].problem else {})
        for config in order
    ]


def _covers(entry: Entry, other: Entry) -> bool:
    """Whether `entry` holds for every call that `other` holds for."""
    has = dict(other.when)
    return all(name in has and _within(name, has[name], allowed) for name, allowed in entry.when)


def _within(name: str, inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    if name not in SIZES:
        return set(inner) <= set(outer)
    return bool(outer[0] <= inner[0] and (outer[1] is None or (inner[1] is not None and inner[1] <= outer[1])))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line.decode("utf-8"))
    except ValueError:  # UnicodeDecodeError is one
        return None
    return entry if isinstance(entry, dict) else None
