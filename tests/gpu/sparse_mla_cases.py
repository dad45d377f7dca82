"""Sparse MLA decode on a bare GPU host, replayed and eager, against the FP64 oracle. No pytest, no SGLang.

    python -m tests.gpu.sparse_mla_cases --seconds 300 --out benchmarks/results/sparse-mla-cases-<machine>.json
    python -m tests.gpu.sparse_mla_cases --only "K 0" --seconds 60
    python -m tests.gpu.sparse_mla_cases --dry --seconds 60       without a GPU: everything tiny, in Triton's interpreter

Every row of `sparse_mla_rows.py` with BF16 and with E4M3 queries: on Hopper the first go to its own kernel, the second to
Triton's, and a row that came to another one fails. Outputs and workspaces begin as NaN between guards; rows of a cache that are
not listed are NaN. Random calls run beside the rows until the time is up. All of it runs in several processes at once, so that
one that hangs or dies costs itself alone; results are printed and written as they come. Exits with 1 if anything was wrong or did
not run.

Under compute-sanitizer a small sweep of the same kernels runs with the others: `python -m tests.interpreter.sanitizers`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Processes for the rows of one query type, and for its random calls.
ROW_PROCESSES, SOAK_PROCESSES = 5, 2
#: Seconds from one line of the random calls to the next.
_EVERY = 10.0
#: Seconds that the children are given less than the whole run: what they compile last may take some.
_MARGIN = 15.0


def child(device: str, query: str, names: list[str], shard: tuple[int, int], seed: int, seconds: float) -> int:
    """Print a line of JSON for each row, or for the random calls so far. 1 if something was wrong."""
    began = time.monotonic()
    # Where the parent was killed and could not end it.
    limit = threading.Timer(seconds + 30, os._exit, [3])
    limit.daemon = True
    limit.start()
    if device == "cpu":
        from tests.interpreter.environment import prepare

        assert prepare() == "cpu"
    from tests.gpu.sparse_mla_calls import Checker
    from tests.gpu.sparse_mla_rows import ROWS
    from tests.gpu.sparse_mla_soak import soak

    wrong = False
    for name in names:
        c, at = Checker(device, query), time.monotonic()
        try:
            with c.watching():
                ROWS[name](c)
            if missing := c.missing_kernel():
                c.problems.append(missing)
            if not c.checks:
                c.problems.append("nothing was checked")
        except Exception as error:  # the other rows go on
            c.problems.append(f"{type(error).__name__}: {error}"[:600])
        wrong |= bool(c.problems)
        row = {"row": name, "query": query, "checks": c.checks, "kernels": dict(c.kernels), "problems": c.problems[:20]}
        _say({**row, "seconds": round(time.monotonic() - at, 1)})
    if not names:
        last, latest = began, dict[str, Any]()

        def each(found: dict[str, Any]) -> None:
            nonlocal last, latest
            latest = {"soak": shard[0], "query": query, **found}
            if time.monotonic() - last > _EVERY:
                last = time.monotonic()
                _say(latest)

        soak(device, query, seed, *shard, began + seconds, each)
        if latest:
            _say(latest)
        wrong = not latest or bool(latest["failures"])
    return int(wrong)


def _say(line: dict[str, Any]) -> None:
    print("RESULT", json.dumps(line), flush=True)


class Children:
    """Processes that print results; all are ended with this one, at the latest when the time is up."""

    def __init__(self, device: str, take: Any) -> None:
        self._device, self._take = device, take
        self._threads: list[threading.Thread] = []
        self.processes: list[tuple[str, subprocess.Popen[str]]] = []

    def start(self, query: str, rows: list[str], shard: tuple[int, int], seed: int, seconds: float) -> None:
        command = [sys.executable, "-m", "tests.gpu.sparse_mla_cases", "--child", json.dumps([query, rows, shard]),
                   "--seed", str(seed), "--seconds", str(seconds), *(["--dry"] if self._device == "cpu" else [])]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if self._device == "cpu" else {})
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            env=environment,
        )  # fmt: skip
        name = f"{query}, {', '.join(rows) or f'random calls {shard[0]}'}"
        self.processes.append((name, process))
        self._threads.append(threading.Thread(target=self._read, args=(name, process)))
        self._threads[-1].start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        other: list[str] = []
        for line in process.stdout:
            if line.startswith("RESULT "):
                self._take(json.loads(line[7:]))
            elif line.strip():
                other.append(line.rstrip())
        if process.wait() not in (0, 1) or (process.returncode == 1 and other):
            print(f"{name}: exit code {process.returncode}", *other[-12:], sep="\n   ", flush=True)

    def wait(self, deadline: float) -> list[str]:
        """The names of those that had not ended by then, or that died."""
        failed = []
        for name, process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                failed.append(f"{name}: not done in time")
            else:
                failed += [f"{name}: exit code {process.returncode}"] if process.returncode not in (0, 1) else []
        self.stop()
        return failed

    def stop(self) -> None:
        for _, process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for thread in self._threads:
            thread.join()


def shares(names: list[str], processes: int) -> list[list[str]]:
    """Rows for so many processes; those that take longest come first in the list of rows, and so are apart."""
    return [share for number in range(processes) if (share := names[number::processes])]


def summary(rows: list[dict[str, Any]], soaks: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """The random calls of all processes together, by query type."""
    found: dict[str, Any] = {}
    for (query, _), one in sorted(soaks.items()):
        total = found.setdefault(query, {"cases": 0, "checks": 0, "failures": 0, "problems": [], "kernels": Counter()})
        for name in ("cases", "checks", "failures"):
            total[name] += one[name]
        total["problems"] = (total["problems"] + one["problems"])[:20]
        total["kernels"].update(one["kernels"])
    return {"rows": sorted(rows, key=lambda row: (row["query"], row["row"])), "random": found}


def problems_of(result: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a result, also what is not in it."""
    found = [f"{row['query']}, {row['row']}: {text}" for row in result["rows"] for text in row["problems"]]
    found += [f"{query}, random calls: {text}" for query, one in result["random"].items() for text in one["problems"]]
    return found + [f"not run: {name}" for name in result["not run"]] + result["processes that failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the whole run")
    parser.add_argument("--only", default="", help="rows whose name has this in it, and no random calls")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls")
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cpu" if options.dry else "cuda"
    if options.child:
        query, rows, shard = json.loads(options.child)
        return child(device, query, rows, tuple(shard), options.seed, options.seconds)
    began = time.monotonic()
    import torch

    from benchmarks import record
    from sglang_specverify.demo.processes import stopping_on_signals
    from tests.gpu.sparse_mla_calls import QUERIES
    from tests.gpu.sparse_mla_rows import ROWS

    if device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --dry runs everything in Triton's interpreter, tiny")
        return 2
    command = f"python -m tests.gpu.sparse_mla_cases --seconds {options.seconds:g}" + " --dry" * options.dry
    rows, soaks, lock = list[dict[str, Any]](), dict[tuple[str, int], dict[str, Any]](), threading.Lock()
    names = [name for name in ROWS if options.only in name]
    processes = (ROW_PROCESSES, SOAK_PROCESSES) if device == "cuda" else (1, 1)
    failed: list[str] = []

    def result() -> dict[str, Any]:
        have = {(row["query"], row["row"]) for row in rows}
        missing = [f"{query}, {name}" for query in QUERIES for name in names if (query, name) not in have]
        if not options.only:
            missing += [f"{query}, random calls" for query in QUERIES if not any(key[0] == query for key in soaks)]
        return {"command": command, "device": device, **summary(rows, soaks), "not run": missing, "processes that failed": failed}

    def take(found: dict[str, Any]) -> None:
        with lock:
            at = f"{time.monotonic() - began:5.0f} s  {found['query']}"
            if "soak" in found:
                soaks[found["query"], found["soak"]] = found
                print(f"{at}, random calls {found['soak']}: {found['cases']} cases, {found['failures']} failed", flush=True)
            else:
                rows.append(found)
                print(f"{at}, {found['row']}: {'; '.join(found['problems'][:3]) or 'ok'}, {found['checks']} checks", flush=True)
            if options.out is not None:
                record.write(options.out, result())

    children = Children(device, take)
    try:
        with stopping_on_signals():
            for query in QUERIES:
                for share in shares(names, processes[0]):
                    children.start(query, share, (0, 1), 0, options.seconds)
            for query in QUERIES:
                for number in range(0 if options.only else processes[1]):
                    children.start(query, [], (number, processes[1]), options.seed, options.seconds - _MARGIN)
            failed += children.wait(began + options.seconds)
    finally:
        children.stop()
    if options.out is not None:
        record.write(options.out, result())
    wrong = problems_of(result())
    print(*(wrong or ["all right"]), f"{time.monotonic() - began:.0f} s", sep="\n", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
