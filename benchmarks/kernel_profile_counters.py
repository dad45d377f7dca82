"""What Nsight Compute says of a kernel: its raw page read, and a table of what holds each call.

Names of metrics differ between versions of `ncu` and between GPUs, so every counter has alternatives, and one that no alternative
gives is None. The names are those of GH100.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["seconds", "bytes", "plain"]
#: What a value in a unit is multiplied with to be in seconds or bytes; `ncu` writes a thousand bytes as Kbyte.
UNITS: dict[Kind, dict[str, float]] = {
    "seconds": {
        **{"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
        **{"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0},
    },
    "bytes": {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
}
#: A sector of the L2 cache.
_SECTOR = 32.0


@dataclass(frozen=True)
class Counter:
    """One quantity of a kernel.

    Attributes:
        metrics: the same quantity by other names, the first that is there counts; a value is multiplied with the number beside.
        kind: what its unit measures; "plain" where the number is taken as it is.
    """

    metrics: tuple[tuple[str, float], ...]
    kind: Kind = "plain"


def _named(*names: str, kind: Kind = "plain") -> Counter:
    return Counter(tuple((name, 1.0) for name in names), kind)


#: Shares are of the whole device and the whole duration, unless a version has only those of active cycles: `from` tells.
COUNTERS: dict[str, Counter] = {
    "seconds": _named("gpu__time_duration.sum", "gpu__time_duration.avg", kind="seconds"),
    "DRAM bytes read": _named("dram__bytes_read.sum", "dram__bytes_op_read.sum", kind="bytes"),
    "DRAM bytes written": _named("dram__bytes_write.sum", "dram__bytes_op_write.sum", kind="bytes"),
    "L2 bytes": Counter((("lts__t_bytes.sum", 1.0),), "bytes"),
    "L2 sectors": _named("lts__t_sectors.sum"),
    "L2 hits, %": _named("lts__t_sector_hit_rate.pct"),
    "L2, %": _named("lts__throughput.avg.pct_of_peak_sustained_elapsed"),
    "L1 and shared memory, %": _named("l1tex__throughput.avg.pct_of_peak_sustained_active"),
    "tensor pipe, %": _named(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "issue slots, %": Counter(
        (
            ("sm__issue_active.avg.pct_of_peak_sustained_elapsed", 1.0),
            ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
            ("smsp__issue_active.avg.per_cycle_active", 100.0),
            ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1.0),
        )
    ),
    "multiprocessors active, cycles": _named("sm__cycles_active.avg"),
    "cycles": _named("gpc__cycles_elapsed.max", "sm__cycles_elapsed.max"),
    "registers": _named("launch__registers_per_thread"),
    "shared memory, bytes": _named("launch__shared_mem_per_block", "launch__shared_mem_per_block_dynamic", kind="bytes"),
    "programs": _named("launch__grid_size"),
    "threads": _named("launch__block_size"),
    "waves": _named("launch__waves_per_multiprocessor"),
    "warps resident, %": _named("sm__warps_active.avg.pct_of_peak_sustained_active"),
    "warps that fit, %": _named("sm__maximum_warps_per_active_cycle_pct"),
    "warps eligible": _named("smsp__warps_eligible.avg.per_cycle_active"),
}
#: Warps that wait for each reason, of all that are resident; their sum is what an issued instruction costs in warps and cycles.
_STALLS = (
    re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+)_per_issue_active\.ratio"),
    re.compile(r"smsp__pcsamp_warps_issue_stalled_(?P<reason>\w+?)(\.sum)?"),
)
MOST_STALLS = 4


@dataclass(frozen=True)
class Kernel:
    """One profiled launch: its name, and value and unit of every metric."""

    name: str
    values: Mapping[str, tuple[float, str]]


def read(output: str) -> list[Kernel]:
    """The launches in what `ncu --csv --page raw` printed, between its own messages and the program's.

    Raises:
        ValueError: a launch's line is not whole, so that it would be missing from the sum.
    """
    found: list[Kernel] = []
    header: list[str] = []
    units: list[str] = []
    lines = [line for line in output.splitlines() if line.startswith('"')]
    # What a program printed before may have quotes of its own.
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    for row in csv.reader(lines[begin:]):
        if row[0] == "ID":
            header, units = row, []
        elif not units:
            units = row
        elif row[0].isdecimal():
            if not len(row) == len(units) == len(header):
                raise ValueError("a launch's line is not whole")
            cells = {name: (text, unit) for name, text, unit in zip(header, row, units, strict=True)}
            values = {name: (number, unit) for name, (text, unit) in cells.items() if (number := _number(text)) is not None}
            found.append(Kernel(cells.get("Kernel Name", ("?", ""))[0], values))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def why_nothing(output: str) -> str:
    """The tool's own error where it printed one, else the last that anything said."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    return (errors[0] if errors else lines[-1] if lines else "it printed nothing")[:300]


def counters(kernel: Kernel) -> tuple[dict[str, float | None], dict[str, str]]:
    """Every counter, in seconds, bytes, percent or as it is, and the metric that each is from."""
    found: dict[str, float | None] = {}
    origin: dict[str, str] = {}
    for key, counter in COUNTERS.items():
        found[key] = None
        for name, factor in counter.metrics:
            value, unit = kernel.values.get(name, (None, ""))
            scale = 1.0 if counter.kind == "plain" else UNITS[counter.kind].get(unit.split("/")[0])
            if value is not None and scale is not None:
                found[key], origin[key] = value * scale * factor, name
                break
    if found["L2 bytes"] is None and (sectors := found["L2 sectors"]) is not None:
        found["L2 bytes"], origin["L2 bytes"] = sectors * _SECTOR, origin["L2 sectors"]
    return found, origin


def stalls(kernel: Kernel) -> dict[str, float]:
    """Of the warps that are resident on average, the share that waits for each of the most frequent reasons, largest first.

    A warp that issues is among all warps and is no reason.
    """
    for pattern in _STALLS:
        each = {
            match["reason"]: value
            for name, (value, _) in kernel.values.items()
            if (match := pattern.fullmatch(name)) and not match["reason"].endswith("_not_issued")
        }
        total = sum(each.values())
        if total > 0:
            waits = sorted(((value, reason) for reason, value in each.items() if reason != "selected"), reverse=True)
            return {reason: round(value / total, 4) for value, reason in waits[:MOST_STALLS] if value > 0}
    return {}


def summarize(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """What a row says of one call: microseconds of all its launches, each with its name, and the counters of the longest.

    Raises:
        ValueError: there is no launch, or one whose duration is not there.
    """
    if not kernels:
        raise ValueError("no kernel was profiled")
    read_ = [counters(kernel) for kernel in kernels]
    seconds = [found["seconds"] for found, _ in read_]
    times = [1e6 * each for each in seconds if each is not None]
    if len(times) != len(kernels):
        raise ValueError("a kernel has no duration")
    longest = times.index(max(times))
    found, origin = read_[longest]
    return {
        "us": round(sum(times), 3),
        "kernels": [{"name": kernel.name[:160], "us": round(us, 3)} for kernel, us in zip(kernels, times, strict=True)],
        "counters": found,
        "from": origin,
        "stalls": stalls(kernels[longest]),
    }


#: From here on a unit is what holds a kernel; below the second number none of them does, and its time is latency.
FULL, BUSY = 80.0, 60.0


def shares(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Percent of what each unit can do, of the longest kernel: DRAM of a copy's bandwidth, the others of their own peak."""
    found = row["counters"]
    each = {name: found[f"{name}, %"] for name in ("L2", "L1 and shared memory", "tensor pipe", "issue slots")}
    rate = dram_tb_per_s(found)
    each["DRAM"] = None if rate is None else 100.0 * rate / ceilings["copy_tb_per_s"]
    return {name: share for name, share in each.items() if share is not None}


def dram_tb_per_s(found: Mapping[str, float | None]) -> float | None:
    """Bytes that moved between DRAM and the L2 cache, both ways, over the duration."""
    read_, written = found["DRAM bytes read"], found["DRAM bytes written"]
    return None if read_ is None or written is None else _rate(read_ + written, found["seconds"])


def _rate(moved: float | None, seconds: float | None) -> float | None:
    """TB/s."""
    return None if moved is None or not seconds else moved / seconds / 1e12


def held_by(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> str:
    """The busiest unit, and whether it is what holds the kernel."""
    busiest = sorted(shares(row, ceilings).items(), key=lambda item: -item[1])
    if not busiest:
        return "no unit was counted"
    name, share = busiest[0]
    if share >= FULL:
        return f"{name}, {share:.0f} %"
    return f"{'latency' if share < BUSY else 'no unit alone'}; busiest is {name}, {share:.0f} %"


def table(results: Mapping[str, Any]) -> list[str]:
    """A line for each call beside its roofline, then why others have none."""
    heads = (
        "call", "missed", "runs", "floor, µs", "by ncu, µs", "over floor", "DRAM, TB/s", "L2, TB/s", "L2 hits, %", "tensor, %",
        "issue, %", "launch", "warps, %", "held by", "warps wait for",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    ceilings = results["ceilings"]
    for row in results["rows"]:
        if "why" not in row:
            lines.append("| " + " | ".join(_cells(row, ceilings)) + " |")
    reasons = [f"{row['name']}, {row['arm']}: {' '.join(row['why'].split())}" for row in results["rows"] if "why" in row]
    lines += [line for reason in reasons for line in ("", f"Not profiled: {reason}.")]
    return [*lines, "", f"Not run: {'; '.join(results['not run'])}."] if results["not run"] else lines


def _cells(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> Iterable[str]:
    found = row["counters"]
    shared = found["shared memory, bytes"]
    launch = [
        f"{_text(found['programs'])} × {_text(found['threads'])}",
        f"{_text(found['waves'], 2)} waves",
        f"{_text(found['registers'])} registers",
        f"{_text(None if shared is None else shared / 1024)} KiB",
    ]
    waits = ", ".join(f"{reason} {100 * share:.0f} %" for reason, share in row["stalls"].items())
    return (
        row["name"],
        row["missed"],
        _ran(row),
        _text(row["floor_us"], 1 if row["floor_us"] >= 1 else 2),
        _text(row["us"], 1),
        _text(row["us"] / row["floor_us"], 2),
        _text(dram_tb_per_s(found), 2),
        _text(_rate(found["L2 bytes"], found["seconds"]), 2),
        _text(found["L2 hits, %"]),
        _text(found["tensor pipe, %"]),
        _text(found["issue slots, %"]),
        ", ".join(launch),
        _text(found["warps resident, %"]),
        held_by(row, ceilings),
        waits or "?",
    )


def _ran(row: Mapping[str, Any]) -> str:
    """The variant, and where a call is several launches what each of them took."""
    launches = row["kernels"]
    if len(launches) == 1:
        return str(row["variant"])
    each = [f"{_bare(launch['name'])} {launch['us']:.1f}" for launch in launches]
    return f"{row['variant']}: {' + '.join(each)}"


def _bare(name: str) -> str:
    """A kernel's name without its namespaces, its template's and its own arguments."""
    found = re.search(r"\w+(?=[<(]|$)", name)
    return found[0] if found else name


def _text(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
