"""What runs of several servers share: the command line, results written as they come, and servers that stop in every case."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record, serving_farm, serving_models
from benchmarks.serving_farm import Probed
from benchmarks.serving_models import REAL, TINY
from benchmarks.serving_rows import Row, Size
from sglang_specverify.demo.processes import stopping_on_signals
from sglang_specverify.hardware import detect


def command_line(doc: str | None, *, minutes: float, what: str) -> argparse.ArgumentParser:
    """The options of every such script; `what` says of what the minutes are."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=minutes, help=what)
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    parser.add_argument("--logs", type=Path, default=None, help="keep the servers' logs in this folder")
    parser.add_argument("--dry-run", action="store_true", help="one tiny server without a GPU")
    return parser


@contextmanager
def setting(args: argparse.Namespace) -> Iterator[tuple[Path, bool]]:
    """A folder for models that is gone afterwards, and whether the run is to use a GPU."""
    serving_farm.require_plugin()
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="specverify-") as folder:
        yield Path(folder), detect().has_gpu and not args.dry_run


class ServersRun:
    """One run of a script: everything that its threads share.

    Args:
        module: the script, for the command in the result file.
        size: of every server.
        facts: more for the result file.
    """

    def __init__(
        self, args: argparse.Namespace, root: Path, module: str, size: Size, prompts: list[list[int]], **facts: Any
    ) -> None:
        self.args, self.root, self.size, self.prompts = args, root, size, prompts
        self.has_gpu, self.shape = size.has_gpu, REAL if size.has_gpu else TINY
        self.results: dict[str, Any] = {
            "command": f"python -m {module} --minutes {args.minutes:g}" + " --dry-run" * args.dry_run,
            "size": asdict(size), "shape": asdict(self.shape), "prompt tokens": [len(ids) for ids in prompts], **facts,
            "servers": {},
        }  # fmt: skip
        self.alive: list[Probed] = []
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def say(self, text: str, given: dict[str, Any] | None = None, **facts: Any) -> None:
        """Print a line and write what there is; `given` is what is known of a server by now, `facts` of the run."""
        with self._lock:
            print(f"{time.monotonic() - self._begin:5.0f} s  {text}", flush=True)
            if given is not None:  # a copy, as its thread goes on
                self.results["servers"][given["row"]["name"]] = dict(given)
            self.results |= facts
            record.write(self.args.out, self.results)

    def open(self, row: Row) -> Probed:
        """A server that is stopped with the others; to be entered."""
        probed = Probed(row, self.root, self.shape, self.size)
        self.alive.append(probed)
        return probed

    def serve(self, row: Row, asking: Callable[[Probed, dict[str, Any]], None]) -> None:
        """Start a server and ask it. Never raises: what other servers say must not be lost."""
        given: dict[str, Any] = {"row": asdict(row), "problems": []}
        probed: Probed | None = None
        try:
            probed = self.open(row)
            with probed:
                self.say(f"{row.name}: answers", given)
                asking(probed, given)
        except Exception as error:
            given["problems"].append(f"{type(error).__name__}: {error}"[:2000])
            given["last words"] = "" if probed is None else probed.server.last_words(20)
        self.say(f"{row.name}: {'FAIL ' + '; '.join(given['problems']) if given['problems'] else 'ok'}", given)

    def go(self, jobs: Sequence[Callable[[], None]], kinds: Sequence[str], seconds: float) -> list[str]:
        """Run all jobs beside each other, with models of these kinds there; what went wrong in them. After `seconds` all
        servers are stopped, whatever they do."""
        for kind in kinds:  # before several threads want them
            serving_models.build(kind, self.root, self.size.dtype, self.shape)
        limit = threading.Timer(seconds, serving_farm.stop_all, [self.alive])
        limit.start()
        try:
            with ThreadPoolExecutor(len(jobs)) as pool, serving_farm.stopping(self.alive, pool):
                running = [pool.submit(job) for job in jobs]
                return [str(error) for each in running if (error := each.exception())]
        finally:
            limit.cancel()
            serving_farm.stop_all(self.alive)
            for probed in self.alive:
                probed.keep_log(self.args.logs)
