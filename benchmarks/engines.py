"""One SGLang engine as a child process, for benchmarks: what it is, how to start it, what it answers.

A server and not `sglang.Engine`, as the plugin must load through its entry point in the way it does for users. What is timed
is the server's own latency of each request (`e2e_latency`, from the parsed request to its last token), so HTTP and JSON
are not in it. A batch is one HTTP request, which SGLang hands to its scheduler as one message: all requests run in lockstep.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_specverify.demo.server import Server
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import detect

#: The arm that serves through the plugin; every other arm is the name of a backend of SGLang's.
OURS = "specverify"
#: Several engines share one device and none may size its pool by what it finds free, so the pool is given in tokens and this
#: bound lies far above it.
_MEMORY_SHARE = "0.95"
_INDUCTOR_CACHE = Path(tempfile.gettempdir()) / "specverify-benchmarks-inductor"


@dataclass(frozen=True)
class Speculation:
    """EAGLE3 with a tree of `width` draft tokens (the root among them), or a chain where topk is 1."""

    topk: int
    steps: int
    width: int

    def arguments(self, draft: Path) -> list[str]:
        return [
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", str(self.steps), "--speculative-eagle-topk", str(self.topk)),
            *("--speculative-num-draft-tokens", str(self.width)),
        ]


@dataclass(frozen=True)
class Setup:
    """What one engine is.

    Attributes:
        arm: `OURS`, or the backend of a stock engine.
        model, draft: directories with a config.json; no draft where there is no speculation.
        pool_tokens: tokens that the KV pool holds.
        graph_sizes: batch sizes for which decode graphs are captured; others run padded to the next one.
        max_requests: most requests that run at once.
        accept_length: tokens that every verify step yields, simulated: made-up weights accept nothing. The whole number k accepts
            exactly k in each step, the same in every arm.
        base: for `OURS`, the built-in backend underneath; chosen by the plugin when None.
        extra: more arguments for SGLang.
        environment: more environment variables.
    """

    arm: str
    model: Path
    draft: Path | None
    speculation: Speculation | None
    pool_tokens: int
    page_size: int = 1
    graph_sizes: tuple[int, ...] = (1, 8, 32)
    max_requests: int = 32
    context_length: int | None = None
    accept_length: float = 3.0
    base: str | None = None
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, *, gpu: bool) -> list[str]:
        """SGLang's command line, but for host and port. Without a GPU `Server` fills in what a CPU needs."""
        found = ["--model-path", str(self.model), "--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup"]
        found += ["--sampling-backend", "pytorch", "--log-level", "warning", "--random-seed", "1"]
        found += ["--max-total-tokens", str(self.pool_tokens), "--page-size", str(self.page_size)]
        found += ["--max-running-requests", str(self.max_requests)]
        if self.context_length is not None:
            found += ["--context-length", str(self.context_length)]
        if self.arm != OURS:
            found += ["--attention-backend", self.arm]
        if self.speculation is not None:
            if self.draft is None:
                raise SpecverifyError("speculation needs a draft", "give its directory")
            found += self.speculation.arguments(self.draft)
        if gpu:
            found += ["--mem-fraction-static", _MEMORY_SHARE, "--disable-prefill-cuda-graph", "--chunked-prefill-size", "8192"]
            found += ["--cuda-graph-bs-decode", *map(str, self.graph_sizes)]
        return [*found, *self.extra]

    def variables(self) -> dict[str, str]:
        """Environment of the engine beyond this process's own. Engines share caches of kernels: Triton's is inherited."""
        # PyTorch's would lie in the engine's temporary folder.
        found = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(_INDUCTOR_CACHE)}
        if self.speculation is not None:
            found["SGLANG_SIMULATE_ACC_LEN"] = f"{self.accept_length:g}"
        if self.arm == "flashinfer":
            # Prompts through the kernel that verifies, too: the one they have of their own takes minutes to build at first use.
            found["SGLANG_FLASHINFER_USE_PAGED"] = "1"
        if self.arm != OURS:
            found["SGLANG_SPECVERIFY_DISABLE"] = "1"
        elif self.base is not None:
            found["SGLANG_SPECVERIFY_BASE"] = self.base
        return {**found, **self.environment}

    def as_dict(self) -> dict[str, Any]:
        """For a result file: directories by their names."""
        return {**asdict(self), "model": self.model.name, "draft": self.draft and self.draft.name}


@dataclass(frozen=True)
class Round:
    """A batch of requests served together.

    Attributes:
        latencies: seconds from each request's arrival to its last token, by the server's clock.
        wall: seconds by the client's clock, HTTP and JSON included.
        completion: tokens of each answer.
        steps: verify steps of each request; empty without speculation.
        cached: prompt tokens of each request that the prefix cache held.
        retracted: how often requests were put back for lack of KV memory.
    """

    latencies: tuple[float, ...]
    wall: float
    completion: tuple[int, ...]
    steps: tuple[int, ...]
    cached: tuple[int, ...]
    retracted: int

    @property
    def seconds(self) -> float:
        return max(self.latencies)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.completion) / self.seconds

    @property
    def ms_per_step(self) -> float | None:
        """Of a verify step, drafting included and the one step that extends the prompt spread over them."""
        return self.seconds * 1e3 / max(self.steps) if self.steps else None

    @property
    def accept_length(self) -> float | None:
        return sum(self.completion) / sum(self.steps) if self.steps else None


def read_round(answers: Sequence[Mapping[str, Any]], wall: float, new_tokens: int) -> Round:
    """What `/generate` said.

    Raises:
        SpecverifyError: an answer that is not as long as asked for.
    """
    metas = [answer["meta_info"] for answer in answers]
    short = [meta["completion_tokens"] for meta in metas if meta["completion_tokens"] != new_tokens]
    if short:
        raise SpecverifyError(f"{len(short)} answers have {short[0]} tokens and not {new_tokens}", "read the server's log")
    return Round(
        latencies=tuple(float(meta["e2e_latency"]) for meta in metas),
        wall=wall,
        completion=tuple(int(meta["completion_tokens"]) for meta in metas),
        steps=tuple(int(meta["spec_verify_ct"]) for meta in metas if "spec_verify_ct" in meta),
        cached=tuple(int(meta.get("cached_tokens") or 0) for meta in metas),
        retracted=sum(int(meta.get("num_retractions") or 0) for meta in metas),
    )


class Engine:
    """A running `Setup`. `start` returns at once, so several engines can start side by side; `with` stops it in every case.

    Args:
        setup: what to run.
        log: a file for its output, kept where given.
    """

    def __init__(self, setup: Setup, log: Path | None = None) -> None:
        self.setup = setup
        self.start_seconds: float | None = None
        hardware = detect()
        self.server = Server(
            setup.arguments(gpu=hardware.has_gpu),
            environment=setup.variables(),
            log=log,
            stock=setup.arm != OURS,
            hardware=hardware,
            name=f"{setup.arm} engine",
        )

    def start(self) -> Engine:
        self.server.start()
        return self

    def ready(self, seconds: float) -> Engine:
        """Block until it answers, and freeze its garbage. `start_seconds` is when an answer was first seen: of two engines waited
        for in turn, an upper bound.

        Raises:
            SpecverifyError: it ended, does not answer `seconds` after its start, or cannot freeze.
        """
        while not self.server.poll():
            waited = time.monotonic() - self.server.started_at
            if waited > seconds:
                raise SpecverifyError(
                    f"the {self.server.name} does not answer after {waited:.0f} s:\n{self.server.last_words()}",
                    "allow more time, or leave the arm out",
                )
            time.sleep(0.3)
        self.start_seconds = time.monotonic() - self.server.started_at
        # SGLang asks itself for this at the end of its start, so that Python's collector leaves alone what is there for good, and
        # only logs where its own server does not listen yet. Without warm-up requests that is a race, which either arm may lose.
        self.server.post("/freeze_gc", timeout=60.0)
        return self

    @property
    def alive(self) -> bool:
        """Whether it still answers."""
        try:
            return self.server.poll()
        except SpecverifyError:
            return False

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, seconds: float = 600.0) -> Round:
        """Greedy answers of `new_tokens` tokens to all prompts at once.

        Raises:
            SpecverifyError: no answer within `seconds`, or one that is not as long as asked for.
        """
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        payload = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
        begin = time.perf_counter()
        answers = self.server.generate(payload, timeout=seconds)
        return read_round(answers, time.perf_counter() - begin, new_tokens)

    def info(self, seconds: float = 60.0) -> dict[str, Any]:
        """`/server_info`."""
        return dict(self.server.get("/server_info", timeout=seconds))

    def stats(self, seconds: float = 60.0) -> dict[str, Any]:
        """What ran, for a result file: backend, pool, and the plugin's record (None where it has no part in this engine)."""
        info = self.info(seconds)
        return {
            "backend": info.get("attention_backend"),
            "pool_tokens": info.get("max_total_num_tokens"),
            "start_s": None if self.start_seconds is None else round(self.start_seconds, 1),
            "specverify": info["internal_states"][0].get("specverify"),
        }

    def flush(self, seconds: float = 60.0) -> None:
        """Empty the prefix cache."""
        self.server.post("/flush_cache", timeout=seconds)

    def stop(self) -> None:
        self.server.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def faults(setup: Setup, stats: Mapping[str, Any]) -> list[str]:
    """Why a run of this engine does not count: the plugin where it must not be, or not where it must be; a pool cut short."""
    found = []
    ours = stats["specverify"]
    pool = stats["pool_tokens"]
    if pool is not None and pool < setup.pool_tokens - setup.page_size:
        found.append(f"the pool holds {pool} tokens and not {setup.pool_tokens}: too little memory was free")
    if setup.arm != OURS:
        return found + (["the plugin is in a stock engine"] if ours is not None else [])
    if ours is None:
        return [*found, "the plugin is not in its engine"]
    if setup.speculation is not None and setup.speculation.topk > 1:
        rows = [row for row in ours["routes"] if row["mode"] == "target_verify" and row["calls"] > 0]
        if not any(row["kernel"] != "stock" for row in rows):
            found.append("no verify ran on a kernel of the plugin")
        found += [f"verify ran on SGLang's own kernel: {row['reason']}" for row in rows if row["kernel"] == "stock"]
    return found
