"""A server with the probe in it: started, asked, looked into, and always stopped."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks import serving_models
from benchmarks.serving_models import Shape
from benchmarks.serving_rows import Row, Size, arguments
from sglang_specverify.demo.server import Server
from sglang_specverify.errors import SpecverifyError

REPOSITORY = Path(__file__).parents[1]
PLUGIN_GROUP = "sglang.srt.plugins"
#: What a healthy server never writes. SGLang's own checks of its pools say "leak", "double free" and "use-after-free".
TROUBLE = re.compile(r"Traceback|memory leak|leak detected|double free|use-after-free|\bERROR\b|CUDA error|hit an exception")
_ANSWER_LIMIT = 20.0
#: SGLang's own Triton kernels in the interpreter need tens of seconds for a step.
_REQUEST_LIMIT = 300.0
#: Below the ports that connections are given: a server binds its own half a minute after they were chosen, while others are busy.
_PORTS = range(10000, 22000)
_ports_given: set[int] = set()
_writing = threading.Lock()


def require_plugin() -> None:
    """Raises `SpecverifyError` where server processes would not find the plugin."""
    if "specverify" not in entry_points(group=PLUGIN_GROUP).names:
        raise SpecverifyError(
            "the plugin's entry point is not on the path", "install the package, or put its dist-info folder on PYTHONPATH"
        )


def reserve_port() -> int:
    """A port that nobody listens on, and that this process was not given before."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _ports_given:
            _ports_given.add(port)
            return port
    raise SpecverifyError("no free port was found", "stop other servers")


def write_probe(root: Path) -> Path:
    """A folder that, on PYTHONPATH, makes `benchmarks.serving_probe` a plugin of SGLang's."""
    folder = root / "probe"
    info = folder / "serving_probe-0.dist-info"
    with _writing:  # once: processes of other servers read it at any time
        if not info.exists():
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: serving_probe\nVersion: 0\n")
            (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\nserving_probe = benchmarks.serving_probe:register\n")
    return folder


@dataclass
class Answer:
    """One request's tokens, SGLang's account of it, and the margins between the two best where they were asked for."""

    tokens: list[int]
    meta: dict[str, Any]
    margins: list[float]


class Probed:
    """One row's server. `with Probed(...) as probed:` starts it, waits until it answers, and stops it."""

    def __init__(self, row: Row, root: Path, shape: Shape, size: Size) -> None:
        self.row, self.directory = row, root / row.name
        self.directory.mkdir()
        kinds = ("target",) if row.kind == "plain" else ("target", "mirror" if row.shape == "tree" else "copy")
        models = {kind: str(serving_models.build(kind, root, size.dtype, shape)) for kind in kinds}
        path = os.pathsep.join((str(write_probe(root)), str(REPOSITORY), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
        plugin = row.kind == "plugin"
        environment = {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "SERVING_PROBE": str(self.directory),
            "SERVING_PROBE_PLUGIN": "1" if plugin else "",
            "SERVING_PROBE_FAULTS": "1" if row.faults else "",
            "SERVING_PROBE_DETERMINISTIC": "1" if "--enable-deterministic-inference" in row.options else "",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
            **(row.flags if plugin else {}),
        }
        self.arguments = arguments(row, shape, models, size)
        self.server = Server(
            [*self.arguments, "--nccl-port", str(reserve_port())],
            stock=not plugin,
            environment=environment,
            log=self.directory / "server.log",
            port=reserve_port(),
            name=row.name,
        )

    def __enter__(self) -> Probed:
        self.server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)

    def generate(
        self, ids: list[int], new_tokens: int, *, margins: bool = False, timeout: float = _REQUEST_LIMIT, **sampling: Any
    ) -> Answer:
        """One greedy request."""
        settings = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling}
        payload: dict[str, Any] = {"input_ids": ids, "sampling_params": settings}
        if margins:
            payload |= {"return_logprob": True, "top_logprobs_num": 2}
        given = self.server.generate(payload, timeout)
        tops = given["meta_info"].get("output_top_logprobs", []) if margins else []
        return Answer(given["output_ids"], given["meta_info"], [best[0] - second[0] for best, second in tops])

    def generate_all(self, prompts: list[list[int]], new_tokens: int, at_once: int, **options: Any) -> list[Answer]:
        """All of them, so many in flight."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.generate(ids, new_tokens, **options), prompts))

    def prefill_margins(self, ids: list[int], answer: list[int]) -> list[float]:
        """The margins of `answer` once more, all computed in one pass over the prompt and the answer."""
        payload = {
            "input_ids": ids + answer,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": max(0, len(ids) - 1),
        }
        rows = self.server.generate(payload, _REQUEST_LIMIT)["meta_info"]["input_top_logprobs"][-len(answer) :]
        if len(rows) != len(answer):
            raise SpecverifyError(f"{len(rows)} margins came for {len(answer)} tokens", "ask for log-probabilities of the input")
        return [best[0] - second[0] for best, second in rows]

    def ask(self, question: str = "state") -> dict[str, Any]:
        """What the probe sees in the scheduler: "state", or "masks" beside it."""
        answer = self.directory / "answer.json"
        answer.unlink(missing_ok=True)
        (self.directory / "ask").write_text(question)
        end = time.monotonic() + _ANSWER_LIMIT
        while not answer.exists():
            if time.monotonic() > end:
                raise SpecverifyError(f"the probe in {self.row.name} does not answer", "read its log")
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(answer.read_text())
        if "error" in found:
            raise SpecverifyError(f"the probe in {self.row.name} failed: {found['error']}", "read its log")
        return found

    def paths(self) -> list[list[int]]:
        """Every accepted path so far: the ordinal of each accepted draft token among its siblings."""
        file = self.directory / "paths.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [path for line in lines for path in json.loads(line)]

    def inject(self, fault: str) -> None:
        """Break verify from the next step on; "" mends it. The cache holds what was computed before, so it is emptied."""
        (self.directory / "fault").write_text(fault)
        self.flush()

    def flush(self) -> None:
        """Empty the prefix cache, which SGLang refuses until its last step has ended."""
        for attempt in range(20):
            try:
                self.server.post("/flush_cache", timeout=30.0)
                return
            except SpecverifyError:
                if attempt == 19:
                    raise
                time.sleep(0.5)

    def info(self) -> dict[str, Any]:
        """What the server says of itself: the plugin's part of it, and the attention backend that was resolved."""
        given = self.server.get("/server_info", timeout=30.0)
        return {"attention_backend": given.get("attention_backend"), "specverify": given["internal_states"][0].get("specverify")}

    def graph_steps(self) -> dict[str, int]:
        """Logged decode batches that ran as a captured graph, and that did not."""
        text = self.server.log_text()
        return {"graph": text.count("cuda graph: True"), "eager": text.count("cuda graph: False")}

    def keep_log(self, folder: Path | None) -> None:
        """Copy the server's log to a folder that outlives it."""
        if folder is not None and self.server.log.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.server.log, folder / f"{self.row.name}.log")

    def troubles(self) -> list[str]:
        """Lines of the log that no healthy server writes."""
        return [line.strip()[:240] for line in self.server.log_text().splitlines() if TROUBLE.search(line)][:10]


def stop_all(servers: list[Probed]) -> None:
    """Stop them, those that are still starting too: whoever waits for one gets an error."""
    for probed in list(servers):
        probed.server.stop()


@contextmanager
def stopping(servers: list[Probed], pool: ThreadPoolExecutor) -> Iterator[None]:
    """Stop them where the block is left by an error or a signal: threads of `pool` that wait for their answers end then."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        stop_all(servers)
        raise


def device_memory(pid: int) -> int | None:
    """Bytes that the driver says a process holds on the device, or None where it does not tell (as in many containers)."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
        found = {int(pid): int(used) for pid, used in (line.split(",") for line in lines)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return found[pid] * 2**20 if pid in found else None
