"""Servers through the plugin under a mixed load, for minutes: no wrong token, no leak, no growth.

    python -m tests.gpu.endurance --minutes 5 --out benchmarks/results/serving-endurance-<machine>.json
    python -m tests.gpu.endurance --dry-run --out dry.json      without a GPU: one tiny server, 20 seconds

Two servers with draft trees, on single slots and on pages of 64, with CUDA graphs and the overlap schedule where there is a GPU.
The requests: prompts from one token to thousands, many of them again and again, some beginning alike; greedy; whole, with few
tokens, with a stop token, streamed, aborted, and with a client that leaves in the middle; 1 to 32 at once. Every answer is
compared with that of a server without speculation. At the end SGLang's own check of its pools must have run and found nothing,
all tokens must be free or in the prefix cache, all free after it is emptied, and the device's memory must not have grown after
the first minute.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import serving_judge, serving_prompts
from benchmarks.serving_farm import Answer, Probed
from benchmarks.serving_judge import Tally
from benchmarks.serving_rows import TREE_MODES, Row, Size
from tests.gpu.servers_load import Load
from tests.gpu.servers_run import ServersRun, command_line, setting

#: Bytes that the allocator's hold may grow by after the first minute: a batch that did not come before may need one more block.
MOST_GROWTH = 64 * 2**20
#: Bytes by which what is in use while idle may differ between the beginning and the end.
MOST_KEPT = 8 * 2**20
#: Seconds that a server may take to come to rest, and to start.
REST, START = 20.0, 240.0

PLAIN = Row("plain", "plain")
#: One tree kernel by the rule, and the one that follows FlashAttention's prefix pass.
_TILE = {"SGLANG_SPECVERIFY_TREE_KERNEL": "tile"}
TREES = (
    Row("tree-page1", "plugin", served=TREE_MODES),
    Row("tree-page64", "plugin", page_size=64, flags=_TILE, served=TREE_MODES),
)


class Endurance(ServersRun):
    """One run: everything that its threads share."""

    def __init__(self, args: argparse.Namespace, root: Path, *, has_gpu: bool) -> None:
        size = Size(True, 16384, 131072, 32) if has_gpu else Size(False, 512, 4096, 4)
        prompts = serving_prompts.pool(60, 6000, seed=1) if has_gpu else serving_prompts.pool(6, 100, seed=1)
        self.seconds = 60 * args.minutes if has_gpu else 20.0
        self.new_tokens = 48 if has_gpu else 12
        super().__init__(args, root, "tests.gpu.endurance", size, prompts, **{"new tokens": self.new_tokens})
        self._wanted: list[Answer] = []
        self._ready = threading.Event()

    def baseline(self) -> None:
        """SGLang's own answers without speculation, with their margins."""
        try:
            with self.open(PLAIN) as probed:
                self.say("the server without speculation answers")
                wanted = probed.generate_all(self.prompts, self.new_tokens, 8, margins=True)
            distinct = len({token for answer in wanted for token in answer.tokens})
            self._wanted = wanted
            baseline = {"tokens": sum(len(answer.tokens) for answer in wanted), "distinct tokens": distinct}
            self.say(f"{len(wanted)} right answers, {distinct} distinct tokens", baseline=baseline)
        finally:
            self._ready.set()

    def endure(self, row: Row) -> None:
        """Start a server, load it, look at what is left."""

        def loading(probed: Probed, given: dict[str, Any]) -> None:
            self._ready.wait(START)
            if not self._wanted:
                raise RuntimeError("there are no right answers to compare with")
            self._load(probed, row, given)

        self.serve(row, loading)

    def _load(self, probed: Probed, row: Row, given: dict[str, Any]) -> None:
        problems: list[str] = given["problems"]
        probed.generate_all(self.prompts[: self.size.requests], 4, self.size.requests)
        at_start = self._idle(probed)
        noise = serving_judge.noise_of("bf16", self.size.dtype, 0.0)
        load = Load(probed, self.prompts, self._wanted, noise, self.size.requests, seed=11 + row.page_size)
        load.go(self.seconds)
        tally = load.tally
        given |= {"noise": noise, "requests": tally.runs, "tokens": asdict(tally), "kinds": dict(sorted(load.kinds.items()))}
        given |= {"failed": load.failed, "samples": load.samples}
        given["growth after the first minute"] = load.growth(min(60.0, self.seconds / 2))
        problems += serving_judge.tally_problems(tally) + [f"failed: {one}" for one in load.failed[:3]]
        counts = f"{tally.compared} tokens equal, {tally.undecided} undecided, {tally.wrong} wrong"
        self.say(f"{row.name}: {tally.runs} requests, {len(load.failed)} failed, {counts}", given)
        at_end = self._idle(probed)
        probed.flush()
        time.sleep(1.0)
        flushed = self._idle(probed)
        again = probed.generate(self.prompts[0], self.new_tokens)
        alive = Tally().add(again.tokens, self._wanted[0], noise, length=self.new_tokens, what="after the load")
        kernels = serving_judge.kernels_of((probed.info()["specverify"] or {}).get("routes", []))
        paths = serving_judge.paths_summary(probed.paths())
        given |= {"idle at start": at_start, "idle at end": at_end, "flushed": flushed, "answers afterwards": alive}
        given |= {
            "kernels": kernels,
            "paths": paths,
            "logged batches": probed.graph_steps(),
            "troubles in the log": probed.troubles(),
        }
        problems += ["wrong tokens after the load"] if alive == "wrong" else []
        problems += serving_judge.kernel_problems(row, kernels) + serving_judge.path_problems(row, paths)
        problems += rest_problems(at_end, flushed) + [f"log: {line}" for line in given["troubles in the log"]]
        problems += memory_problems(at_start, flushed, given["growth after the first minute"])
        if not set(load.kinds) >= {"whole", "aborted", "disconnected", "stop token"}:
            problems.append(f"not every kind of request came: {sorted(load.kinds)}")

    def _idle(self, probed: Probed) -> dict[str, Any]:
        """What the probe sees once nothing is running, or after a while in any case."""
        end = time.monotonic() + REST
        while True:
            found = probed.ask()
            resting = not found.get("used beyond it") and found.get("free request rows") == found.get("request rows")
            if resting or time.monotonic() > end:
                # A process' number says nothing to a reader.
                return {name: value for name, value in found.items() if name != "pid"}
            time.sleep(0.5)


def rest_problems(at_end: dict[str, Any], flushed: dict[str, Any]) -> list[str]:
    """What an idle server still holds."""
    problems = []
    if at_end["used beyond it"] or at_end["free request rows"] != at_end["request rows"]:
        problems.append(
            f"idle, and {at_end['used beyond it']} tokens and some of {at_end['request rows']} rows are in use: {at_end}"
        )
    if flushed["available"] != flushed["capacity"]:
        problems.append(f"{flushed['capacity'] - flushed['available']} tokens are not free after the cache was emptied")
    if not at_end["strict idle check"] or not at_end["counts"].get("pool checks"):
        problems.append("SGLang's check of its idle pools did not run")
    return problems


def memory_problems(at_start: dict[str, Any], flushed: dict[str, Any], growth: int | None) -> list[str]:
    """Whether the process holds more of the device than it did."""
    problems = [f"the memory held grew by {growth} bytes"] if growth is not None and growth > MOST_GROWTH else []
    kept = flushed.get("torch allocated", 0) - at_start.get("torch allocated", 0)
    return problems + ([f"{kept} bytes more are in use than at the start"] if kept > MOST_KEPT else [])


def main() -> int:
    args = command_line(__doc__, minutes=5.0, what="of load, after the servers have started").parse_args()
    with setting(args) as (root, has_gpu):
        run = Endurance(args, root, has_gpu=has_gpu)
        tiny = Row("tree-page64", "plugin", page_size=64, base="triton", graphs=False, served=TREE_MODES)
        trees = TREES if has_gpu else (tiny,)
        jobs = [run.baseline, *(partial(run.endure, row) for row in trees)]
        failed = run.go(jobs, ("target", "mirror"), run.seconds + START + 60)
        servers = run.results["servers"]
        problems = failed + [problem for given in servers.values() for problem in given["problems"]]
        run.say("; ".join(problems) or "all ok", problems=problems)
    return int(bool(problems) or len(servers) != len(trees))


if __name__ == "__main__":
    raise SystemExit(main())
