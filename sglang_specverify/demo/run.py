"""The demonstration: one server with speculation through the plugin, one of SGLang's own without, the same requests to both."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_specverify import hardware as machine
from sglang_specverify.demo import models, processes
from sglang_specverify.demo.server import Server
from sglang_specverify.errors import ArgumentError
from sglang_specverify.hardware import Hardware

NEW_TOKENS = 32
ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NGRAM")
_DRAFTS = {"STANDALONE": "mirror", "EAGLE": "eagle", "EAGLE3": "eagle3"}

_GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
#: 4 to 156 tokens. Their answers hold no choice narrower than 0.09 in logits, several times what bfloat16 rounding moves.
_GENERATE = (
    "hello",
    "a quick test of the lazy dog",
    "Once upon a time there was a fox. ",
    "The fox jumps over the dog. The dog does not mind. " * 6,
)
_CHAT = ("What hears the fox?", "Write a short story about a dog and a fox.")


@dataclass(frozen=True)
class Options:
    """What the speculating server does. `draft_tokens` None means the default for `topk`: 8 for a tree, steps + 1 for a chain."""

    algorithm: str = "STANDALONE"
    topk: int = 4
    steps: int = 3
    draft_tokens: int | None = None
    port: int | None = None
    keep: bool = False

    def server_arguments(self, models_at: Path) -> list[str]:
        """SGLang's arguments for speculation; the draft among them.

        Raises:
            ArgumentError: an unknown algorithm, or a tree with more tokens than its drafts can fill.
        """
        if self.algorithm not in ALGORITHMS:
            raise ArgumentError("--algorithm", repr(self.algorithm), ", ".join(ALGORITHMS))
        given = ["--speculative-algorithm", self.algorithm]
        if self.algorithm == "NGRAM":
            return [*given, "--speculative-num-draft-tokens", str(self.draft_tokens or 8)]
        chain = self.steps + 1
        most = chain if self.topk == 1 else 1 + self.topk + (self.steps - 1) * self.topk**2
        tokens = self.draft_tokens or min(chain if self.topk == 1 else 8, most)
        if not (tokens == chain if self.topk == 1 else 2 <= tokens <= most):
            allowed = f"{chain} for a chain of {self.steps} steps" if self.topk == 1 else f"2 to {most} for this tree"
            raise ArgumentError("--draft-tokens", tokens, allowed)
        return [
            *given,
            *("--speculative-draft-model-path", str(models_at / self.draft)),
            *("--speculative-eagle-topk", str(self.topk), "--speculative-num-steps", str(self.steps)),
            *("--speculative-num-draft-tokens", str(tokens)),
        ]

    @property
    def draft(self) -> str:
        """The kind of model that drafts. A chain of second-best tokens would never be accepted: there the target drafts."""
        return "copy" if self.topk == 1 and self.algorithm == "STANDALONE" else _DRAFTS.get(self.algorithm, "")


@dataclass(frozen=True)
class Answer:
    """One request's answer. `tokens` are ids from /generate and single characters of the text from the chat."""

    request: str
    tokens: tuple[Any, ...]
    count: int
    accept_length: float | None


def run(options: Options, console: Console | None = None) -> bool:
    """Run it and print the outcome; whether all answers were equal. Everything started and written is gone afterwards.

    Raises:
        SpecverifyError: options that do not fit, a port in use, a server that does not start or answer.
    """
    console = console or Console(width=None, soft_wrap=False)
    hardware = machine.detect()
    with processes.stopping_on_signals(), _directory(options.keep, console) as directory:
        speculation = options.server_arguments(directory)
        base = _base_arguments(directory, hardware)
        hint = None if options.keep else "read its whole log: run this again with --keep"
        stock = Server(
            base,
            stock=True,
            hardware=hardware,
            name="server without speculation",
            log=directory / "stock.log",
            log_hint=hint,
        )
        with contextlib.ExitStack() as started:
            plugin = Server(
                [*base, *speculation],
                hardware=hardware,
                name="server with specverify",
                log=directory / "specverify.log",
                log_hint=hint,
                port=options.port,
            )
            for kind in ("target", options.draft):
                if kind:
                    models.build(kind, directory / kind, "bfloat16" if hardware.has_gpu else "float32")
            for server in (stock, plugin):
                started.callback(server.stop)
                server.start()
            _wait((stock, plugin), console)
            wanted, seconds_stock = _ask(stock, console)
            got, seconds_plugin = _ask(plugin, console)
            state = plugin.get("/server_info")["internal_states"][0].get("specverify") or {}
    equal = _show_answers(wanted, got, console)
    total = sum(answer.count for answer in got)
    console.print(
        f"tokens/s, {len(got)} requests at once: {sum(a.count for a in wanted) / seconds_stock:.0f} without speculation, "
        f"{total / seconds_plugin:.0f} with specverify"
        f" (no measure of speed: {'kernels compile at first use' if hardware.has_gpu else 'reference arithmetic on a CPU'})"
    )
    _show_routes(state, console)
    verdict = "[green]all tokens equal[/green]" if equal else "[red]tokens differ[/red]"
    console.print(f"{verdict}: {options.algorithm}, {_shape(options)}")
    return equal


def _shape(options: Options) -> str:
    if options.algorithm == "NGRAM":
        return "trees from an n-gram store"
    return f"chains of {options.steps} drafts" if options.topk == 1 else f"trees with topk {options.topk}, {options.steps} steps"


@contextlib.contextmanager
def _directory(keep: bool, console: Console) -> Iterator[Path]:
    """A directory for models and logs, removed at the end unless it is to be kept."""
    directory = Path(tempfile.mkdtemp(prefix="specverify-demo-"))
    try:
        yield directory
    finally:
        if keep:
            console.print(f"models and logs are in {directory}", soft_wrap=True)
        else:
            with processes.deaf():
                shutil.rmtree(directory, ignore_errors=True)


def _base_arguments(directory: Path, hardware: Hardware) -> list[str]:
    """What both servers share. Without a GPU `specverify serve` adds the rest."""
    base = ["--model-path", str(directory / "target"), "--log-level", "info"]
    if hardware.has_gpu:  # two servers share one GPU, and need little of it
        base += ["--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--cuda-graph-max-bs-decode", "8"]
        # Both only take time to start: kernels compiled at first use, and graphs for prompts of every length.
        base += ["--sampling-backend", "pytorch", "--disable-prefill-cuda-graph"]
    return base


def _wait(servers: Sequence[Server], console: Console) -> None:
    """Wait for all of them, showing how long it has been and what each said last."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[said]}[/dim]"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {server: progress.add_task(server.name, total=1, said="") for server in servers}
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                ready = server.poll()
                room = max(20, console.width - 50)
                progress.update(tasks[server], said=_plain(server.last_line())[:room], completed=int(ready))
                if ready:
                    waiting.remove(server)
                    progress.console.print(f"{server.name} answers after {time.monotonic() - server.started_at:.0f} s")
            time.sleep(0.3)


def _plain(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")


def _ask(server: Server, console: Console) -> tuple[list[Answer], float]:
    """All requests at once; the answers in order, and the seconds it took."""
    asks = [lambda text=text, i=i: _generate(server, i, text) for i, text in enumerate(_GENERATE)]
    asks += [lambda text=text, i=i: _chat(server, i, text) for i, text in enumerate(_CHAT)]
    columns = (SpinnerColumn(), TextColumn("asking the {task.description}"), BarColumn(20), TimeElapsedColumn())
    pool = ThreadPoolExecutor(len(asks))
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(server.name, total=len(asks))
            began = time.monotonic()
            futures = [pool.submit(ask) for ask in asks]
            for future in futures:
                future.add_done_callback(lambda _: progress.advance(task))
            answers = [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt nobody waits for the other answers
    return answers, time.monotonic() - began


def _generate(server: Server, index: int, text: str) -> Answer:
    answer = server.generate({"text": text, "sampling_params": _GREEDY})
    meta = answer["meta_info"]
    name = f"/generate {index + 1}: {meta['prompt_tokens']} tokens"
    return Answer(name, tuple(answer["output_ids"]), meta["completion_tokens"], meta.get("spec_accept_length"))


def _chat(server: Server, index: int, text: str) -> Answer:
    answer = server.chat(
        {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
        }
    )
    usage = answer["usage"]
    name = f"/v1/chat/completions {index + 1}: {usage['prompt_tokens']} tokens"
    return Answer(name, tuple(answer["choices"][0]["message"]["content"]), usage["completion_tokens"], None)


def _show_answers(wanted: Sequence[Answer], got: Sequence[Answer], console: Console) -> bool:
    """Print the comparison; whether all are equal."""
    table = Table(
        "request", "new tokens", "equal", "distinct", "accept length", title="specverify against no speculation, greedy"
    )
    equal = True
    for want, have in zip(wanted, got, strict=True):
        place = first_difference(want.tokens, have.tokens)
        equal &= place is None
        unit = "" if want.request.startswith("/generate") else " characters"
        table.add_row(
            want.request,
            str(have.count),
            "yes" if place is None else f"[red]no, from {place}[/red]",
            f"{len(set(have.tokens))}{unit}",
            "" if have.accept_length is None else f"{have.accept_length:.2f}",
        )
    console.print(table)
    return equal


def first_difference(wanted: Sequence[Any], got: Sequence[Any]) -> int | None:
    """The first place where two sequences differ, or the length of the shorter; None when they are equal."""
    for place, (want, have) in enumerate(zip(wanted, got, strict=False)):
        if want != have:
            return place
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def _show_routes(state: dict[str, Any], console: Console) -> None:
    """Print what ran: equal rows of different parts as one, and none that never ran."""
    calls: Counter[tuple[str, ...]] = Counter()
    for row in state.get("routes", []):
        calls[tuple(str(row[name]) for name in ("mode", "layer", "kernel", "reason"))] += row["calls"]
    table = Table(
        "mode", "layer", "kernel", "calls", "reason", title=f"routes on {state.get('hardware')}, base {state.get('base')}"
    )
    for (mode, layer, kernel, reason), count in calls.items():
        if count:
            table.add_row(mode, layer, kernel, str(count), reason)
    console.print(table)
