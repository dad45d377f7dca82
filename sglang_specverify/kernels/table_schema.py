"""What a table of launch configurations holds, `configs/kernels/<arch>.json`: its types, checks and text.

    {"schema": 1, "arch": "sm_90", "triton": "3.8.0", "note": "...",
     "kernels": {"fused": [{"when": {"rows": [1, 16], "cache_bits": [16]},
                            "launch": {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "ctas_per_sm": 2},
                            "measured": false, "spill_bytes": 0}],
                 "tree_suffix": []}}

The first entry whose every condition holds wins, and a condition that is not named holds always. A condition on a size
is [least, most] with both ends in it, where most may be null; on anything else it is the list of values that it allows.
`specverify tune` writes such a file, with its timings beside the kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.launch import AMD_OPTIONS, COMBINATIONS, LaunchConfig

SCHEMA = 1

#: Kernels that have launch configurations.
Kernel = Literal["fused", "tree_suffix", "specialized"]
KERNELS: tuple[str, ...] = get_args(Kernel)
#: Those that a table may leave out: they are written for one architecture.
OPTIONAL_KERNELS = ("specialized",)

#: A condition [least, most] on these facts; most null for no limit.
SIZES = ("rows", "head_dim", "v_head_dim", "page_size", "total_rows")

#: A condition on these facts lists values, of these.
VALUES: dict[str, tuple[object, ...]] = {
    "cache_bits": (8, 16, 32),
    "q_bits": (16, 32),
    "split": (False, True),
    "kind": ("chain", "qlen_only", "full_mask", "branches"),
}

_POWERS = (1, 2, 4, 8, 16)
#: Sizes of a block: from 16, the least that a matrix instruction takes.
BLOCKS = (16, 32, 64, 128)
#: What each number of a launch may be.
_LAUNCH: dict[str, tuple[int, ...]] = {
    "block_m": BLOCKS,
    "block_n": BLOCKS,
    "num_warps": _POWERS,
    "num_stages": (1, 2, 3, 4, 5, 6),
    "ctas_per_sm": tuple(range(1, 33)),
}
#: Numbers that may be left out, and then are what `LaunchConfig` says.
_OPTIONAL: dict[str, tuple[int, ...]] = {
    "peel": (0, 1),
    # Of NVIDIA's compiler; 0 leaves it to the compiler.
    "max_registers": (0, *range(64, 256, 8)),
}
#: Kernels that divide prefixes, for which any of the words below may stand; for the others the first of each alone.
_DIVIDING = ("fused", "specialized")
#: Words that may be left out.
_WORDS: dict[str, tuple[str, ...]] = {"combine": COMBINATIONS}
_AMD: dict[str, tuple[int, ...]] = {
    # 0 leaves the occupancy to the compiler.
    "waves_per_eu": tuple(range(9)),
    "matrix_instr_nonkdim": (0, 16, 32),
    "kpack": (1, 2),
}
assert set(_AMD) == set(AMD_OPTIONS)
_DEFAULTS = LaunchConfig(16, 16, 1, 1)


@dataclass(frozen=True)
class TableFacts:
    """What a lookup knows of a call.

    Attributes:
        rows: packed query rows of a KV head in one request: W times the query heads of a KV head.
        head_dim, v_head_dim: elements of a key and of a value.
        cache_bits, q_bits: of one element.
        split: whether the prefix is split over programs.
        page_size: tokens a table entry stands for.
        kind: which drafts a row sees.
    """

    rows: int
    head_dim: int
    v_head_dim: int
    cache_bits: int
    q_bits: int
    split: bool
    page_size: int
    kind: Literal["chain", "qlen_only", "full_mask", "branches"]
    #: Packed rows of all KV heads and requests: how full the device is. 0 in deterministic calls, which must not depend on it.
    total_rows: int = 0


@dataclass(frozen=True)
class Entry:
    """One line of a table.

    Attributes:
        when: conditions, by the names of `TableFacts`.
        launch: what holds then.
        measured: whether it was the fastest of its candidates on the hardware that the table is for.
        spill_bytes: spilled bytes a thread that are accepted, because it was faster than any launch without.
        spill_reason: the measurement that says so.
    """

    when: tuple[tuple[str, tuple[Any, ...]], ...]
    launch: LaunchConfig
    measured: bool = False
    spill_bytes: int = 0
    spill_reason: str = ""

    def holds(self, facts: TableFacts) -> bool:
        return all(_holds(name, allowed, getattr(facts, name)) for name, allowed in self.when)


@dataclass(frozen=True)
class Table:
    """The launch configurations of one architecture.

    Attributes:
        triton: the version that they were made with.
        note: how they came to be.
    """

    arch: str
    triton: str
    note: str
    kernels: Mapping[str, tuple[Entry, ...]]


def parse(text: str, file: str, arch: str | None = None) -> Table:
    """A table from its JSON text.

    Args:
        file: what errors call it.
        arch: what it must be for; any where None.

    Raises:
        SpecverifyError: names file, entry, field, what came and what is allowed.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise SpecverifyError(f"{file} is not JSON: {error}", "restore the file") from None
    fields = ("schema", "arch", "triton", "note", "kernels")
    raw = _object(file, raw, fields, optional=("timings",))
    if raw["schema"] != SCHEMA:
        raise _bad(file, "schema", raw["schema"], str(SCHEMA))
    for name in ("arch", "triton", "note"):
        if not isinstance(raw[name], str) or not raw[name]:
            raise _bad(file, name, raw[name], "text")
    if arch is not None and raw["arch"] != arch:
        raise _bad(file, "arch", raw["arch"], repr(arch))
    required = tuple(kernel for kernel in KERNELS if kernel not in OPTIONAL_KERNELS)
    kernels = _object(f"{file}, kernels", raw["kernels"], required, OPTIONAL_KERNELS)
    parsed = {}
    for kernel, entries in kernels.items():
        if not isinstance(entries, list):
            raise _bad(file, kernel, entries, "a list of entries")
        parsed[kernel] = tuple(
            _entry(f"{file}, {kernel} entry {n}", entry, raw["arch"], kernel) for n, entry in enumerate(entries)
        )
    return Table(raw["arch"], raw["triton"], raw["note"], parsed)


def render(table: Table, timings: list[dict[str, Any]] | None = None) -> str:
    """The JSON text of a table, one entry a line; what `parse` reads. `timings` is kept as it is and read by nothing."""
    head = {"schema": SCHEMA, "arch": table.arch, "triton": table.triton, "note": table.note}
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in head.items()]
    blocks = [
        f"    {json.dumps(kernel)}: " + _lines([_as_json(entry) for entry in entries], 4)
        for kernel, entries in table.kernels.items()
    ]
    end = "" if timings is None else ',\n  "timings": ' + _lines(timings, 2)
    return "{\n" + "\n".join(lines) + '\n  "kernels": {\n' + ",\n".join(blocks) + "\n  }" + end + "\n}\n"


def _lines(values: list[dict[str, Any]], indent: int) -> str:
    if not values:
        return "[]"
    return "[\n" + ",\n".join(" " * (indent + 2) + json.dumps(value) for value in values) + "\n" + " " * indent + "]"


def _as_json(entry: Entry) -> dict[str, Any]:
    launch: dict[str, Any] = {name: getattr(entry.launch, name) for name in _LAUNCH}
    left_out = (*_OPTIONAL, *_WORDS)
    launch |= {name: getattr(entry.launch, name) for name in left_out if getattr(entry.launch, name) != getattr(_DEFAULTS, name)}
    if entry.launch.amd:
        launch["amd"] = dict(entry.launch.amd)
    out = {"when": {name: list(allowed) for name, allowed in entry.when}, "launch": launch, "measured": entry.measured}
    reason = {"spill_reason": entry.spill_reason} if entry.spill_bytes else {}
    return out | {"spill_bytes": entry.spill_bytes} | reason


def _holds(name: str, allowed: tuple[Any, ...], value: Any) -> bool:
    if name in SIZES:
        least, most = allowed
        return bool(least <= value and (most is None or value <= most))
    return value in allowed


def _bad(where: str, field: str, came: object, allowed: str) -> SpecverifyError:
    return SpecverifyError(f"{where}: {field} is {came!r}; allowed: {allowed}", "correct the file, or install the plugin again")


def _object(where: str, value: object, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecverifyError(f"{where}: got {value!r}; allowed: an object", "correct the file, or install the plugin again")
    for name in value:
        if name not in (*required, *optional):
            raise _bad(where, str(name), value[name], f"no such field; fields: {', '.join((*required, *optional))}")
    for name in required:
        if name not in value:
            raise _bad(where, name, None, f"a value; fields: {', '.join(required)}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _entry(where: str, value: object, arch: str, kernel: str) -> Entry:
    raw = _object(where, value, ("when", "launch", "measured", "spill_bytes"), ("spill_reason",))
    when = _object(f"{where}, when", raw["when"], (), (*SIZES, *VALUES))
    conditions = tuple((name, _condition(where, name, allowed)) for name, allowed in when.items())
    launch = _object(f"{where}, launch", raw["launch"], tuple(_LAUNCH), ("amd", *_OPTIONAL, *_WORDS))
    amd = _object(f"{where}, launch.amd", launch.get("amd", {}), (), AMD_OPTIONS)
    if amd and not arch.startswith("gfx"):
        raise _bad(where, "launch.amd", amd, f"no options of AMD's compiler in a table for {arch}")
    for prefix, values, ranges in (("launch", launch, _LAUNCH | _OPTIONAL), ("launch.amd", amd, _AMD)):
        for name, number in values.items():
            if name != "amd" and name not in _WORDS and (not _is_int(number) or number not in ranges[name]):
                raise _bad(where, f"{prefix}.{name}", number, ", ".join(map(str, ranges[name])))
    for name, words in _WORDS.items():
        if launch.get(name, words[0]) not in (words if kernel in _DIVIDING else words[:1]):
            allowed = ", ".join(map(repr, words)) + ("" if kernel in _DIVIDING else f"; for {kernel} the first only")
            raise _bad(where, f"launch.{name}", launch[name], allowed)
    if not isinstance(raw["measured"], bool):
        raise _bad(where, "measured", raw["measured"], "true or false")
    spill, reason = raw["spill_bytes"], raw.get("spill_reason", "")
    if not _is_int(spill) or spill < 0:
        raise _bad(where, "spill_bytes", spill, "0 or more")
    if not isinstance(reason, str) or bool(spill) != bool(reason):
        raise _bad(where, "spill_reason", reason, "the measurement that justifies spills, and only with spill_bytes above 0")
    if launch.get("max_registers") and arch.startswith("gfx"):
        raise _bad(
            where, "launch.max_registers", launch["max_registers"], f"no options of NVIDIA's compiler in a table for {arch}"
        )
    given = {name: launch[name] for name in (*_LAUNCH, *_OPTIONAL, *_WORDS) if name in launch}
    return Entry(conditions, LaunchConfig(**given, amd=tuple(amd.items())), raw["measured"], spill, reason)


def _condition(where: str, name: str, allowed: object) -> tuple[Any, ...]:
    if name in SIZES:
        pair = isinstance(allowed, list) and len(allowed) == 2 and _is_int(allowed[0])
        if not pair or not isinstance(allowed, list) or not (allowed[1] is None or _is_int(allowed[1])):
            raise _bad(where, f"when.{name}", allowed, "[least, most], whole numbers, most may be null")
        if allowed[0] < 1 or (allowed[1] is not None and allowed[1] < allowed[0]):
            raise _bad(where, f"when.{name}", allowed, "1 <= least <= most")
        return tuple(allowed)
    # By type too: True is 1 to `in`.
    known = [(type(value), value) for value in VALUES[name]]
    if not isinstance(allowed, list) or not allowed or any((type(value), value) not in known for value in allowed):
        raise _bad(where, f"when.{name}", allowed, f"a list of {', '.join(json.dumps(value) for value in VALUES[name])}")
    return tuple(allowed)
