"""Whether a server with `--enable-deterministic-inference` answers a request alone as in any batch: every bit of it.

    python -m tests.gpu.deterministic_server --minutes 8 --out benchmarks/results/deterministic-server-<machine>.json
    python -m tests.gpu.deterministic_server --dry-run --out dry.json      without a GPU: tiny, tokens alone are compared

A chain drafted by STANDALONE, verified by the plugin over triton. Prompts of one token to many thousand are sent one by one, and
then in batches of other sizes, orders and mates: as one request of many prompts, all at once, and one after another while others
run. The prefix cache is emptied before each. Beside it, and judged by nothing: the plugin without that option, where requests may
differ, and SGLang's own Triton backend with it. Exits with 1 if a token or a log-probability of the first server is not equal
(==), if a kernel of the plugin did not serve it, or if what was to be compared did not run.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import serving_judge, serving_prompts
from benchmarks.serving_farm import Probed
from benchmarks.serving_rows import CHAIN_MODES, Row, Size
from tests.gpu.servers_run import ServersRun, command_line, setting

OPTION = "--enable-deterministic-inference"
_OVER_TRITON = {"SGLANG_SPECVERIFY_BASE": "triton"}
JUDGED = "plugin, deterministic"
ROWS = (
    Row(JUDGED, "plugin", shape="chain", base="triton", flags=_OVER_TRITON, served=CHAIN_MODES, options=(OPTION,)),
    Row("plugin, without the option", "plugin", shape="chain", base="triton", flags=_OVER_TRITON, served=CHAIN_MODES),
    Row("triton, deterministic", "stock", shape="chain", base="triton", options=(OPTION,)),
)
#: Around the kernel's and SGLang's tiles and parts, and far beyond them; chunks of prefill end in them too.
LENGTHS = (1, 7, 63, 64, 65, 255, 257, 511, 513, 1023, 2047, 2048, 2049, 4095, 4097, 5000, 6143, 8191, 9001, 12289, 16385, 20000)
DRY_LENGTHS = (1, 9, 33)
#: Requests that SGLang must have run at once for a batch to have been one.
LEAST_AT_ONCE = 4
_RUNNING = re.compile(r"#running-req: (\d+)")


@dataclass(frozen=True)
class Reply:
    """Output tokens and their log-probabilities, as they were sent."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Reply:
        rows = answer["meta_info"]["output_token_logprobs"]
        tokens = tuple(answer["output_ids"])
        if tuple(row[1] for row in rows) != tokens:
            raise ValueError(f"log-probabilities of other tokens: {rows[:3]} for {tokens[:3]}")
        return cls(tokens, tuple(row[0] for row in rows))


@dataclass(frozen=True)
class Batch:
    """Prompts by their number, in the order in which they are sent. `how`: "one request", "at once" or "one after another"."""

    how: str
    members: tuple[int, ...]
    flush: bool = True


def batches(prompts: int, at_once: int, count: int, seed: int = 5) -> list[Batch]:
    """All prompts in both orders and in each way, and random parts of them."""
    source, everyone = random.Random(seed), tuple(range(prompts))
    found = [Batch("at once", everyone), Batch("one request", everyone[::-1]), Batch("one after another", everyone)]
    for number in range(count):
        some = source.sample(everyone, source.randint(2, min(at_once, prompts)))
        # A prompt may be there twice: both must be what it is alone.
        twice = some + source.sample(some, 1)
        found.append(Batch(("one request", "at once", "one after another")[number % 3], tuple(twice)))
    return [*found[:count], Batch("at once", everyone, flush=False)]


def difference(got: Reply, alone: Reply, *, tokens_only: bool = False) -> dict[str, Any] | None:
    """The first place at which two answers are not the same, or None."""
    if len(got.tokens) != len(alone.tokens):
        return {"what": "length", "at": min(len(got.tokens), len(alone.tokens))}
    for at, pair in enumerate(zip(got.tokens, alone.tokens, got.logprobs, alone.logprobs, strict=True)):
        if pair[0] != pair[1]:
            return {"what": "token", "at": at}
        if pair[2] != pair[3] and not tokens_only:
            return {"what": "log-probability", "at": at, "batch": pair[2], "alone": pair[3]}
    return None


def send(probed: Probed, prompts: list[list[int]], batch: Batch, settings: dict[str, Any], at_once: int) -> list[Reply]:
    """The answers to a batch, in its order."""

    def payload(ids: Any) -> dict[str, Any]:
        return {"input_ids": ids, "sampling_params": settings, "return_logprob": True}

    if batch.flush:
        probed.flush()
    ids = [prompts[member] for member in batch.members]
    if batch.how == "one request":
        return [Reply.of(one) for one in probed.server.generate(payload(ids), 300.0)]
    delays = random.Random(len(ids))

    def one(place: int) -> Reply:
        if batch.how == "one after another":
            time.sleep(0.03 * place * delays.random())
        return Reply.of(probed.server.generate(payload(ids[place]), 300.0))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, range(len(ids))))


def compare(
    send_: Callable[[Batch], list[Reply]], todo: Iterable[Batch], alone: list[Reply], *, tokens_only: bool = False
) -> dict[str, Any]:
    """Send the batches; how many answers were compared, and which differ from what was answered alone."""
    found: dict[str, Any] = {"batches": 0, "compared": 0, "kept prefix cache": {"compared": 0, "differing": 0}, "differences": []}
    different: set[int] = set()
    for batch in todo:
        replies = send_(batch)
        found["batches"] += 1
        for member, reply in zip(batch.members, replies, strict=True):
            wrong = difference(reply, alone[member], tokens_only=tokens_only)
            if not batch.flush:  # parts of a prompt come from the cache: SGLang's own promise
                found["kept prefix cache"]["compared"] += 1
                found["kept prefix cache"]["differing"] += wrong is not None
                continue
            found["compared"] += 1
            if wrong is not None:
                different.add(member)
                found["differences"].append({"prompt": member, "how": batch.how, **wrong})
    # That one is prefill's, and SGLang's own.
    first = sum(one["at"] == 0 for one in found["differences"])
    counts = {"differing requests": len(different), "of": len(alone), "differences in the first token": first}
    return {**found, **counts, "differences": found["differences"][:12]}


class Run(ServersRun):
    """One run: what its servers share."""

    def __init__(self, args: argparse.Namespace, root: Path, *, has_gpu: bool) -> None:
        size = Size(True, 24576, 196608, 16) if has_gpu else Size(False, 512, 4096, 4)
        prompts = serving_prompts.draw(list(LENGTHS if has_gpu else DRY_LENGTHS), seed=3)
        self.new_tokens = 32 if has_gpu else 6
        super().__init__(args, root, "tests.gpu.deterministic_server", size, prompts, **{"new tokens": self.new_tokens})
        # In the interpreter, since the reference on a CPU divides nothing.
        interpreted = replace(ROWS[0], flags=_OVER_TRITON | {"SGLANG_SPECVERIFY_KERNELS": "triton"})
        self.rows = ROWS if has_gpu else (interpreted,)

    def ask(self, row: Row) -> None:
        """Start a server, ask it everything."""
        self.serve(row, lambda probed, given: self._ask(probed, row, given))

    def _ask(self, probed: Probed, row: Row, given: dict[str, Any]) -> None:
        self._compare(probed, row, given, "greedy", {"temperature": 0}, self.args.batches if self.has_gpu else 3)
        given |= self._facts(probed, row)
        given["problems"] += problems_of(row, given, has_gpu=self.has_gpu) if row.name == JUDGED else []
        if self.has_gpu:
            try:
                self._compare(probed, row, given, "sampled with a seed", {"temperature": 0.8, "sampling_seed": 11}, 6)
            except Exception as error:  # SGLang's sampling is not what is judged
                given["sampled with a seed"] = {"error": f"{type(error).__name__}: {error}"[:500]}

    def _compare(self, probed: Probed, row: Row, given: dict[str, Any], kind: str, sampling: dict[str, Any], count: int) -> None:
        at_once, tokens_only = self.size.requests, not self.has_gpu
        settings = {**sampling, "max_new_tokens": self.new_tokens, "ignore_eos": True}

        def sending(batch: Batch) -> list[Reply]:
            return send(probed, self.prompts, batch, settings, at_once)

        alone = [sending(Batch("at once", (member,)))[0] for member in range(len(self.prompts))]
        self.say(f"{row.name}: {kind}, {len(alone)} requests alone")
        again = [
            difference(sending(Batch("at once", (member,)))[0], alone[member], tokens_only=tokens_only)
            for member in range(0, len(alone), 3)
        ]
        found = compare(sending, batches(len(alone), at_once, count), alone, tokens_only=tokens_only)
        for one in found["differences"]:
            one["prompt tokens"] = len(self.prompts[one["prompt"]])
        distinct = len({token for reply in alone for token in reply.tokens})
        given[kind] = {
            **found,
            "differing alone, asked twice": sum(one is not None for one in again),
            "distinct tokens": distinct,
        }
        self.say(
            f"{row.name}: {kind}: {found['differing requests']} of {found['of']} differ in {found['batches']} batches", given
        )

    def _facts(self, probed: Probed, row: Row) -> dict[str, Any]:
        """What ran, and what SGLang made of the option."""
        time.sleep(0.5)
        info = probed.server.get("/server_info", timeout=30.0)
        routes = (info["internal_states"][0].get("specverify") or {}).get("routes", [])
        names = ("attention_backend", "sampling_backend", "disable_radix_cache", "chunked_prefill_size", "page_size",
                 "enable_deterministic_inference", "disable_overlap_schedule")  # fmt: skip
        counts = probed.ask()["counts"]
        return {
            "server": {name: info.get(name) for name in names},
            "kernels": serving_judge.kernels_of(routes),
            "reasons": sorted({f"{one['mode']}: {one['kernel']}: {one['reason']}" for one in routes if one["calls"]}),
            "variants": {name: count for name, count in counts.items() if name.startswith(("variant", "deterministic"))},
            "paths": serving_judge.paths_summary(probed.paths()),
            "logged batches": probed.graph_steps(),
            "most requests at once": max(map(int, _RUNNING.findall(probed.server.log_text())), default=0),
            "troubles in the log": probed.troubles(),
            "arguments": [Path(text).name if text.startswith(str(self.root)) else text for text in probed.arguments],
        }


def problems_of(row: Row, given: dict[str, Any], *, has_gpu: bool) -> list[str]:
    """What is wrong with the server that is judged: a difference, or a comparison that says nothing."""
    greedy, problems = given["greedy"], []
    if greedy["differing requests"]:
        problems.append(f"{greedy['differing requests']} of {greedy['of']} requests differ from what they are alone")
    if greedy["differing alone, asked twice"]:
        problems.append(f"{greedy['differing alone, asked twice']} requests differ alone, asked twice")
    if not greedy["compared"]:
        problems.append("nothing was compared")
    if greedy["distinct tokens"] < serving_judge.LEAST_DISTINCT:
        problems.append(f"{greedy['distinct tokens']} distinct tokens")
    problems += serving_judge.kernel_problems(row, given["kernels"]) + serving_judge.path_problems(row, given["paths"])
    problems += [f"log: {line}" for line in given["troubles in the log"]]
    if not given["server"]["enable_deterministic_inference"]:
        problems.append("the server does not say that it is deterministic")
    deterministic = {name: n for name, n in given["variants"].items() if name.startswith("deterministic") and n}
    if sum(deterministic.values()) != sum(n for name, n in given["variants"].items() if name.startswith("variant")):
        problems.append(f"not every call was deterministic: {given['variants']}")
    if has_gpu:
        if "deterministic fused_split" not in deterministic:
            problems.append(f"no prefix was divided: {given['variants']}")
        if not given["logged batches"]["graph"]:
            problems.append(f"CUDA graphs: {given['logged batches']}")
        if given["most requests at once"] < LEAST_AT_ONCE:
            problems.append(f"at most {given['most requests at once']} requests ran at once")
    return problems


def main() -> int:
    parser = command_line(__doc__, minutes=8.0, what="stop all servers after so many, and keep what there is")
    parser.add_argument("--batches", type=int, default=20, help="of greedy requests")
    args = parser.parse_args()
    with setting(args) as (root, has_gpu):
        run = Run(args, root, has_gpu=has_gpu)
        failed = run.go([partial(run.ask, row) for row in run.rows], ("target", "copy"), 60 * args.minutes)
        problems = failed + run.results["servers"][JUDGED]["problems"]
        run.say("; ".join(problems) or "all ok", problems=problems)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
