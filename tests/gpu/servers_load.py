"""A mixed load on one server: what each request is, how it is sent, and whether its tokens were right."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from benchmarks.serving_farm import Answer, Probed, device_memory
from benchmarks.serving_judge import Tally

#: How often each kind of request comes.
KINDS = {"whole": 9, "short": 3, "stop token": 3, "streamed": 2, "aborted": 2, "disconnected": 2}
#: What the process holds on the device by the driver's account, where it gives one, and by its allocator's.
_HELD = ("device", "torch reserved")
#: Seconds between two changes of how many requests are in flight.
PHASE = 3.0


@dataclass(frozen=True)
class Job:
    """One request. `limit` is its `max_new_tokens`, `stop` a token that ends it, `leave` the chunks after which it is cut off."""

    number: int
    prompt: int
    kind: str
    limit: int
    stop: int | None = None
    leave: int = 0

    @property
    def name(self) -> str:
        return f"{self.number}: {self.kind}, prompt {self.prompt}"

    @property
    def rid(self) -> str:
        """SGLang's name of the request. It aborts every request whose name begins with the one given: none may begin another."""
        return f"job-{self.number}."


def draw_job(source: random.Random, number: int, wanted: list[Answer]) -> Job:
    """A random request for one of the prompts, whose right answers are `wanted`."""
    prompt = source.randrange(len(wanted))
    kind = source.choices(list(KINDS), list(KINDS.values()))[0]
    whole = len(wanted[prompt].tokens)
    if kind == "short":
        return Job(number, prompt, kind, limit=source.randint(1, min(8, whole)))
    if kind == "stop token":
        return Job(number, prompt, kind, limit=whole, stop=source.choice(wanted[prompt].tokens))
    if kind in ("aborted", "disconnected"):
        return Job(number, prompt, kind, limit=whole, leave=source.randint(1, 4))
    return Job(number, prompt, kind, limit=whole)


def length_of(job: Job, want: Answer) -> int | None:
    """How many tokens a right answer has; None for one that is cut off somewhere."""
    if job.kind in ("aborted", "disconnected"):
        return None
    if job.stop is not None:
        return min(job.limit, want.tokens.index(job.stop) + 1)
    return job.limit


def send(probed: Probed, job: Job, ids: list[int]) -> list[int]:
    """Send one request; its tokens, of a request that was cut off those that came."""
    # SGLang ignores every stop token together with the end of text, which these models never produce.
    stop: dict[str, Any] = {} if job.stop is None else {"stop_token_ids": [job.stop], "ignore_eos": False}
    if job.kind in ("whole", "short", "stop token"):
        return probed.generate(ids, job.limit, **stop).tokens
    settings = {"temperature": 0, "max_new_tokens": job.limit, "ignore_eos": True}
    payload = {"input_ids": ids, "rid": job.rid, "stream": True, "sampling_params": settings}
    tokens: list[int] = []
    chunks = 0
    with requests.Session() as session:
        session.trust_env = False  # a proxy in the environment must not see requests to this machine
        with session.post(f"{probed.server.url}/generate", json=payload, stream=True, timeout=120) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                # Each chunk repeats the tokens before it.
                tokens, chunks = json.loads(line[5:])["output_ids"], chunks + 1
                if chunks == job.leave and job.kind == "aborted":
                    probed.server.post("/abort_request", {"rid": job.rid}, timeout=30.0)
                if chunks == job.leave and job.kind == "disconnected":
                    break
    return tokens


@dataclass
class Load:
    """One server's load for a while. Requests are drawn by a seed; which are in flight together is up to the server."""

    probed: Probed
    prompts: list[list[int]]
    wanted: list[Answer]
    noise: float
    most: int
    seed: int
    tally: Tally = field(default_factory=Tally)
    kinds: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._flying = 0
        self._landed = threading.Condition(self._lock)
        self._begin = 0.0

    def go(self, seconds: float, *, look_every: float = 5.0, most_failed: int = 20) -> None:
        """Send requests for so many seconds, and wait for the last of them; stops early where too many fail."""
        source, number = random.Random(self.seed), 0
        self._begin = time.monotonic()
        end = self._begin + seconds
        at_once, changes, looks = 1, self._begin, self._begin
        with ThreadPoolExecutor(self.most) as pool:
            while (now := time.monotonic()) < end and len(self.failed) < most_failed:
                if now >= changes:
                    at_once, changes = source.randint(1, self.most), now + PHASE
                if now >= looks:
                    self._look(now, at_once)
                    looks = now + look_every
                with self._landed:
                    if self._flying >= at_once:
                        self._landed.wait(0.2)
                        continue
                    self._flying += 1
                pool.submit(self._one, draw_job(source, number, self.wanted))
                number += 1

    def _look(self, now: float, at_once: int) -> None:
        try:
            found = self.probed.ask()
        except Exception as error:
            self.failed.append(f"probe: {error}"[:300])
            return
        kept = (*_HELD, "torch allocated", "available", "in prefix cache", "used beyond it")
        found["device"] = device_memory(found["pid"])
        self.samples.append(
            {
                "seconds": round(now - self._begin, 1),
                "at once": at_once,
                **{k: found[k] for k in kept if found.get(k) is not None},
            }
        )

    def _one(self, job: Job) -> None:
        try:
            tokens = send(self.probed, job, self.prompts[job.prompt])
            with self._lock:
                want = self.wanted[job.prompt]
                self.kinds[job.kind] += 1
                outcome = self.tally.add(tokens, want, self.noise, length=length_of(job, want), what=job.name)
                self.kinds[f"{job.kind}, {outcome}"] += 1
        except Exception as error:
            with self._lock:
                self.failed.append(f"{job.name}: {type(error).__name__}: {error}"[:300])
        finally:
            with self._landed:
                self._flying -= 1
                self._landed.notify()

    def growth(self, after: float) -> int | None:
        """Bytes by which the memory that the process holds on the device grew from `after` seconds on; None without a GPU."""
        late = [sample for sample in self.samples if sample["seconds"] >= after]
        held = [[sample[name] for sample in late if name in sample] for name in _HELD]
        return max((max(one) - one[0] for one in held if one), default=None)
