"""The sweep under the memory checkers of compute-sanitizer, as a result file.

    python -m tests.interpreter.sanitizers --minutes 8 --out sanitizers.json

First the sweep runs without one, a process for each operation, which compiles what it needs; then under each checker, the
specialised kernel by itself, since a checker may not get through its waiting warps. Each run has a share of the time that is
left, prints its calls as they end, and is written to the file when it has ended. Exits with 1 if a checker or the sweep reported
an error; a checker that is missing, or that refuses the device, is recorded as not run, with the reason. Reports of hand-overs
between groups of warps are counted apart (`ordered`) with `--handovers`, a result of `tests.interpreter.handovers` on the same
machine; without it they are errors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import hazards, ordered

#: The operations of the sweep, as its calls' names begin or hold them.
OPERATIONS = (
    "fused,", "fused_split,", "specialized,", "specialized_split,", "deterministic,", "prepare_step,", "tree_suffix_merge,",
    "gather_suffix_merge,", "snapshot_table,", "merge_states,",
    "specialized_sparse,", "sparse_decode,", "sparse_quantize,",
)  # fmt: skip

#: Checker, its options, which calls of the sweep, and its share of what is left of the time.
RUNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], float], ...] = (
    ("none", (), ("--cases", "1"), 0.35),
    ("racecheck", hazards.OPTIONS, ("--cases", "1", "--skip", "specialized"), 0.5),
    ("memcheck", (), ("--cases", "1", "--skip", "specialized"), 0.35),
    ("initcheck", (), ("--cases", "1", "--skip", "specialized"), 0.35),
    ("memcheck", (), ("--cases", "1", "--only", "specialized"), 0.35),
    ("racecheck", hazards.OPTIONS, ("--cases", "1", "--only", "specialized_sparse"), 0.4),
    ("racecheck", hazards.OPTIONS, ("--cases", "1", "--only", "specialized", "--skip", "specialized_sparse"), 0.5),
    ("initcheck", (), ("--cases", "1", "--only", "specialized"), 1.0),
)

#: Hazards of a run that are printed as they come, of thousands.
SHOWN = 20

#: What a checker says where it cannot work at all.
_REFUSED = re.compile(
    r"^=+ .*(Device not supported|Unable to|not supported on this|before first instrumented|No attachable process)"
)

#: A report: "========= Invalid __global__ read of size 4 bytes". Others are indented, or name the program and the summary.
_REPORT = re.compile(
    r"^=========\s(?=\S)(?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|Target application)(.*)$"
)
_SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+)")
#: Errors of a call on the host, which a program may expect and handle: no kernel's.
_HOST = "Program hit "

_CALL = re.compile(r"^(ok   |WRONG) ")


def find() -> str | None:
    """compute-sanitizer: on the path, or where CUDA is installed."""
    newest = sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *newest) if home]
    places = [shutil.which("compute-sanitizer")]
    places += [str(home / folder / "compute-sanitizer") for home in homes for folder in ("bin", "compute-sanitizer")]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def version_of(tool: str) -> str:
    """What it says of itself."""
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return next((line.strip() for line in said.splitlines() if "ersion" in line), said.strip()[:200])


def read(output: str) -> dict[str, Any]:
    """Calls of the sweep, and the reports of a checker by their kind, numbers and addresses left out.

    Hazards of racecheck are told apart by kernel, accesses and place; those that `hazards` excuses are no reports.
    """
    kinds: Counter[str] = Counter()
    calls, summary = 0, None
    wrong: list[str] = []
    for line in output.splitlines():
        if match := _CALL.match(line):
            calls += 1
            wrong += [line[:300]] if match[1] == "WRONG" else []
        elif match := _SUMMARY.match(line):
            summary = int(match[1])
        elif not hazards.is_hazard(line) and (match := _REPORT.match(line)):
            kinds[re.sub(r"0x[0-9a-fA-F]+|\d+", "#", match[1]).strip()[:160]] += 1
    host = {kind: count for kind, count in kinds.items() if kind.startswith(_HOST)}
    reports = {kind: count for kind, count in kinds.items() if kind not in host}
    races, unseen = hazards.read(output)
    reports |= {_name(race): race["count"] for race in races if not race["excused"]}
    if unseen:
        reports["hazards that the tool counted and did not print"] = unseen
    return {
        "calls": calls, "wrong": wrong, "reports": reports, "host_calls": host, "summary_errors": summary, "hazards": races,
    }  # fmt: skip


def _name(race: dict[str, Any]) -> str:
    return f"{race['kernel']}: {race['kind']}, {race['accesses']}; {race['at']}"


def command_of(tool: str | None, checker: str, options: tuple[str, ...], sweep: tuple[str, ...]) -> list[str]:
    """What is run: the sweep, under a checker."""
    limit = () if "--print-limit" in options else ("--print-limit", "200")
    under = [] if checker == "none" else [str(tool), "--tool", checker, *limit, *options]
    return [*under, sys.executable, "-m", "tests.interpreter.sweep", *sweep]


def run(command: list[str], seconds: float) -> tuple[str, int | None]:
    """Output and exit code of a command, None where it was stopped when its time was up; its calls are printed as they end."""
    # Without PyTorch's cache of memory each tensor is an allocation, past whose end a checker sees.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True, env=env
    )
    lines: list[str] = []
    shown = 0
    out_of_time = threading.Event()

    def stop() -> None:
        # A checker has started the program: both are in one session.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(1.0, seconds), lambda: (out_of_time.set(), stop()))
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            shown += hazards.is_hazard(line)
            if _CALL.match(line) or _SUMMARY.match(line) or (_REPORT.match(line) and shown <= SHOWN):
                print("   ", line.rstrip()[:160], flush=True)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            stop()
            process.wait()
    return "".join(lines), None if out_of_time.is_set() else process.returncode


def run_alone(sweep: tuple[str, ...], seconds: float) -> tuple[str, int | None]:
    """The sweep without a checker, a process for each operation at once."""
    commands = [command_of(None, "none", (), (*sweep, "--only", operation)) for operation in OPERATIONS]
    with ThreadPoolExecutor(len(commands)) as pool:
        ended = list(pool.map(lambda command: run(command, seconds), commands))
    codes = [code for _, code in ended]
    return "".join(output for output, _ in ended), None if None in codes else max(code for code in codes if code is not None)


def outcome(checker: str, output: str, code: int | None, seconds: float) -> dict[str, Any]:
    """What a run found: "finished", "ended early", "time is up", or "not run" with the reason."""
    found = read(output)
    if checker != "none":
        refused = next((line for line in output.splitlines() if _REFUSED.search(line)), None)
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
        none_right = found["calls"] == len(found["wrong"])
        if none_right and (refused is not None or not found["calls"] + len(found["reports"])):
            return {"state": "not run", "reason": (refused or f"no call ended; exit code {code}; last line: {last}")[:300]}
    whole = checker == "none" or found["summary_errors"] is not None
    state = "time is up" if code is None else "finished" if whole else "ended early"
    return {"state": state, "seconds": round(seconds, 1), "exit_code": code, **found}


def check(minutes: float, tool: str | None, save: Any) -> list[dict[str, Any]]:
    """All runs within the time; `save` is called with the results after each."""
    end = time.monotonic() + 60 * minutes
    results: list[dict[str, Any]] = []
    for checker, options, sweep, share in RUNS:
        what = {"checker": checker, "sweep": " ".join(sweep) or "all"}
        began = time.monotonic()
        if checker != "none" and tool is None:
            results.append({**what, "state": "not run", "reason": "compute-sanitizer is not installed"})
        elif end - began < 1:
            results.append({**what, "state": "not run", "reason": "no time was left"})
        else:
            print(f"{checker}: {what['sweep']}, {(end - began) * share:.0f} s at most", flush=True)
            try:
                seconds = (end - began) * share
                if checker == "none":
                    output, code = run_alone(sweep, seconds)
                else:
                    output, code = run(command_of(tool, checker, options, sweep), seconds)
                results.append({**what, **outcome(checker, output, code, time.monotonic() - began)})
            except OSError as error:
                results.append({**what, "state": "not run", "reason": str(error)})
        print({name: value for name, value in results[-1].items() if value}, flush=True)
        save(results)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--handovers", type=Path, help="a result of tests.interpreter.handovers on this machine")
    options = parser.parse_args()
    from benchmarks import record

    tool = find()
    version = None if tool is None else version_of(tool)
    command = f"python -m tests.interpreter.sanitizers --minutes {options.minutes:g}"
    found = None if options.handovers is None else json.loads(options.handovers.read_text())
    if found is not None:
        command += f" --handovers {options.handovers.name}"
    known = ordered.controls(found, {**record.environment(), "compute_sanitizer": version})
    if found is not None and not known:
        print(f"{options.handovers.name} says nothing of this machine: hand-overs are errors", flush=True)

    def save(results: list[dict[str, Any]]) -> None:
        if options.out is not None:
            about = {"command": command, "compute_sanitizer": version, "controls": sorted(known)}
            record.write(options.out, {**about, "runs": ordered.sort(results, known)})

    results = ordered.sort(check(options.minutes, tool, save), known)
    for one in results:
        print(one["checker"], one["sweep"], one.get("classes", one["state"]))
    return 1 if any(one.get("classes", {}).get("errors") for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
