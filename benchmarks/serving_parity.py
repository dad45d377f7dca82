"""Serve on this machine's hardware through the plugin's own kernels, and compare greedy tokens and accept lengths.

    python -m benchmarks.serving_parity --minutes 9 --out benchmarks/results/serving-parity-<machine>.json
    python -m benchmarks.serving_parity --dry-run --out dry.json     without a GPU: two rows, tiny
    python -m benchmarks.serving_parity --only cover --out ...       or: extra, or a part of a row's name

Each row is a whole server that speculates with STANDALONE: see `serving_rows.py`. It is asked one request at a time and then
sixteen at once, twice. Its tokens are compared with those of a server without speculation, its accept length with that of
SGLang's own speculating backend, and what ran in it with what had to. One row is then broken on purpose, and must differ. Several
servers run beside each other, so nothing here is a time. A row is written as soon as the servers that it is compared with have
answered; rows that the end of the time cut off are listed as not run.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import record, serving_farm, serving_judge, serving_models, serving_rows
from benchmarks.serving_farm import Answer, Probed
from benchmarks.serving_judge import Tally
from benchmarks.serving_models import Shape
from benchmarks.serving_probe import FAULTS
from benchmarks.serving_prompts import parity_prompts
from benchmarks.serving_rows import Row, Size
from sglang_specverify.demo.processes import stopping_on_signals
from sglang_specverify.hardware import detect

#: Requests that are asked one at a time.
ALONE = 3


@dataclass
class Outcome:
    """What one server said. `runs` are (what, index of the prompt, answer)."""

    row: Row
    runs: list[tuple[str, int, Answer]] = field(default_factory=list)
    broken: dict[str, list[Answer]] = field(default_factory=dict)
    mended: list[Answer] = field(default_factory=list)
    prefill_margins: list[list[float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    cut_off: bool = False  # by the end of the time, which stops every server

    @property
    def whole(self) -> list[Answer]:
        """The first answers to all prompts, in order."""
        return [answer for what, _, answer in self.runs if what in ("plain", "at once")]


class Run:
    """All rows of one run, some at once. `out` is written after each."""

    def __init__(
        self, rows: list[Row], shape: Shape, size: Size, root: Path, out: Path, minutes: float, logs: Path | None
    ) -> None:
        self.rows, self.shape, self.size, self.root, self.out, self.logs = rows, shape, size, root, out, logs
        self.end = time.monotonic() + 60 * minutes
        self.prompts = parity_prompts(48, longest=600) if size.has_gpu else parity_prompts(3, longest=9)
        self.new_tokens = 48 if size.has_gpu else 7
        self.outcomes: dict[str, Outcome] = {}
        self._alive: set[Probed] = set()
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def go(self, at_once: int) -> bool:
        """Run all rows; whether every one was judged and passed."""
        for kind in ("target", "mirror", "copy"):  # before several threads want them
            serving_models.build(kind, self.root, self.size.dtype, self.shape)
        pool = ThreadPoolExecutor(at_once)
        pending: set[Future[Outcome]] = {pool.submit(self._one, row) for row in self.rows}
        try:
            while pending and time.monotonic() < self.end:
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(future.result())
        finally:
            for future in pending:
                future.cancel()
            with self._lock:
                alive = list(self._alive)
            for probed in alive:  # their threads end with an error, which is kept
                probed.server.stop()
            pool.shutdown(wait=True)
            for future in pending:
                if not future.cancelled():
                    self._take(future.result())
        self.write()
        results = self._results()
        typer.echo(f"not run: {', '.join(self._not_run(results)) or 'none'}")
        return not self._not_run(results) and all(not result["problems"] for result in results)

    def _take(self, outcome: Outcome) -> None:
        if outcome.cut_off:  # `write` lists it
            outcome.error = "not run: the time was over"
        else:
            self.outcomes[outcome.row.name] = outcome
        result = {one["row"]["name"]: one for one in self._results()}.get(outcome.row.name)
        said = outcome.error or ("answered" if result is None else serving_judge.verdict(result))
        typer.echo(f"{time.monotonic() - self._begin:5.0f} s  {outcome.row.name:28} {said}")
        self.write()

    def write(self) -> None:
        results = self._results()
        record.write(
            self.out,
            {
                "passed": sum(not result["problems"] for result in results),
                "judged": len(results),
                "shape": asdict(self.shape),
                "size": asdict(self.size),
                "prompt tokens": [len(prompt) for prompt in self.prompts],
                "new tokens": self.new_tokens,
                "references": [self._reference(o) for o in self.outcomes.values() if o.row.kind != "plugin"],
                "rows": results,
                "not run": self._not_run(results),
            },
        )

    def _not_run(self, results: list[dict[str, Any]]) -> list[str]:
        """Rows without a result: those that are judged by it, and their references that did not answer."""
        have = {result["row"]["name"] for result in results}
        have |= {name for name, outcome in self.outcomes.items() if outcome.row.kind != "plugin"}
        return [row.name for row in self.rows if row.name not in have]

    def _one(self, row: Row) -> Outcome:
        """Start a row's server, ask it everything, stop it. Never raises: one failure must not lose the rest."""
        outcome = Outcome(row)
        probed: Probed | None = None
        try:
            if time.monotonic() > self.end:
                raise TimeoutError("the time was over")
            probed = Probed(row, self.root, self.shape, self.size)
            with self._lock:
                self._alive.add(probed)
            begin = time.monotonic()
            with probed:
                outcome.facts["seconds to start"] = round(time.monotonic() - begin, 1)
                try:
                    self._ask(probed, outcome)
                finally:
                    outcome.facts["troubles in the log"] = probed.troubles()
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"[:2000]
        finally:
            with self._lock:
                self._alive -= {probed}
            if probed is not None:
                probed.keep_log(self.logs)
        failed = outcome.error or not {"prefill", "faults"}.isdisjoint(outcome.facts)
        outcome.cut_off = bool(failed) and time.monotonic() >= self.end
        return outcome

    def _ask(self, probed: Probed, outcome: Outcome) -> None:
        row, new, some = outcome.row, self.new_tokens, self.prompts[: self.size.requests]
        begin = time.monotonic()
        if row.kind == "plain":
            answers = probed.generate_all(self.prompts, new, 8, margins=True)
            outcome.runs = [("plain", index, answer) for index, answer in enumerate(answers)]
            try:
                with ThreadPoolExecutor(8) as pool:
                    tokens = [answer.tokens for answer in answers]
                    outcome.prefill_margins = list(pool.map(probed.prefill_margins, self.prompts, tokens))
            except Exception as error:  # without, the noise is what is known beforehand
                outcome.facts["prefill"] = f"{type(error).__name__}: {error}"[:500]
        else:
            ours = row.kind == "plugin"
            for index in range(-ALONE, 0) if ours else ():
                outcome.runs.append(("alone", index % len(self.prompts), probed.generate(self.prompts[index], new)))
            for what in ("at once", "from the prefix cache") if ours else ("at once",):
                together = probed.generate_all(self.prompts, new, self.size.requests)
                outcome.runs += [(what, index, answer) for index, answer in enumerate(together)]
            time.sleep(0.5)  # the last steps' paths are on their way to the file
            seen = {name: value for name, value in probed.ask().items() if name != "pid"}
            outcome.facts |= {"paths": serving_judge.paths_summary(probed.paths()), "probe": seen}
        outcome.facts |= {"info": probed.info(), "logged batches": probed.graph_steps(), "server": self._short(probed.arguments)}
        if row.faults:
            try:
                for fault in FAULTS:
                    probed.inject(fault)
                    outcome.broken[fault] = probed.generate_all(some, new, self.size.requests)
                probed.inject("")
                outcome.mended = probed.generate_all(some, new, self.size.requests)
            except Exception as error:  # the row's own answers are not lost with it
                outcome.facts["faults"] = f"{type(error).__name__}: {error}"[:500]
        outcome.facts["seconds to ask"] = round(time.monotonic() - begin, 1)

    def _short(self, arguments: list[str]) -> list[str]:
        return [Path(text).name if text.startswith(str(self.root)) else text for text in arguments]

    def _reference(self, outcome: Outcome) -> dict[str, Any]:
        given = {"row": asdict(outcome.row), "error": outcome.error, **outcome.facts}
        if outcome.row.kind == "plain" and outcome.prefill_margins:
            given["largest difference of margins, decode against prefill"] = self._measured(outcome)
            given["noise"] = self._noise(outcome)
            given["distinct tokens"] = len({token for answer in outcome.whole for token in answer.tokens})
        plain = self.outcomes.get(outcome.row.baseline)
        if outcome.row.kind == "stock" and not outcome.error and plain is not None and not plain.error:
            # SGLang's own speculation beside it: what it gets wrong by this noise is no mistake of the plugin's.
            given["tokens"] = asdict(self._tally(outcome.runs, plain))
            given["accept length"] = serving_judge.accept_length(outcome.whole)
        return given

    def _tally(self, runs: list[tuple[str, int, Answer]], plain: Outcome) -> Tally:
        tally, noise = Tally(), self._noise(plain)
        for what, index, answer in runs:
            tally.add(answer.tokens, plain.whole[index], noise, length=self.new_tokens, what=f"{what}, prompt {index}")
        return tally

    def _measured(self, plain: Outcome) -> float:
        if not plain.prefill_margins:
            return 0.0
        return serving_judge.largest_difference([answer.margins for answer in plain.whole], plain.prefill_margins)

    def _noise(self, plain: Outcome) -> float:
        return serving_judge.noise_of(plain.row.cache, self.size.dtype, self._measured(plain))

    def _results(self) -> list[dict[str, Any]]:
        """Every row of the plugin that has an outcome and whose references have."""
        results = []
        for outcome in list(self.outcomes.values()):
            plain, stock = self.outcomes.get(outcome.row.baseline), self.outcomes.get(outcome.row.stock)
            if outcome.row.kind == "plugin" and (outcome.error or (plain is not None and stock is not None)):
                try:
                    results.append(self._judge(outcome, plain, stock))
                except Exception as error:  # what a server says in another form than expected must not cost the other rows
                    problem = f"not judged: {type(error).__name__}: {error}"
                    results.append({"row": asdict(outcome.row), "problems": [problem], **outcome.facts})
        return results

    def _judge(self, outcome: Outcome, plain: Outcome | None, stock: Outcome | None) -> dict[str, Any]:
        given: dict[str, Any] = {"row": asdict(outcome.row), "problems": [outcome.error] if outcome.error else []}
        problems: list[str] = given["problems"]
        given |= outcome.facts
        problems += [f"log: {line}" for line in outcome.facts.get("troubles in the log", [])]
        if outcome.error:
            return given
        if plain is None or plain.error:
            problems.append(f"no tokens to compare with: {outcome.row.baseline} failed")
            return given
        row, tally = outcome.row, self._tally(outcome.runs, plain)
        has_stock = stock is not None and not stock.error
        lengths = serving_judge.accept_lengths(outcome.whole, stock.whole if stock is not None and has_stock else [])
        kernels = serving_judge.kernels_of((outcome.facts["info"]["specverify"] or {}).get("routes", []))
        given |= {"noise": self._noise(plain), "tokens": asdict(tally), "accept length": lengths, "kernels": kernels}
        given |= {"distinct tokens": len({token for answer in outcome.whole for token in answer.tokens}), "faults": {}}
        problems += serving_judge.tally_problems(tally)
        accept = serving_judge.accept_problem(lengths) if has_stock else f"no accept length to compare: {row.stock} failed"
        # Triton's interpreter computes SGLang's own kernels wrongly for several requests.
        problems += [accept] if accept and self.size.has_gpu else []
        problems += serving_judge.kernel_problems(row, kernels)
        problems += serving_judge.path_problems(row, outcome.facts["paths"])
        if given["distinct tokens"] < serving_judge.LEAST_DISTINCT:
            problems.append(f"{given['distinct tokens']} distinct tokens")
        if self.size.has_gpu and bool(outcome.facts["logged batches"]["graph"]) != row.graphs:
            problems.append(f"CUDA graphs: {outcome.facts['logged batches']}")
        if "faults" in outcome.facts:
            problems.append(f"injecting faults: {outcome.facts['faults']}")
        for fault, answers in [*outcome.broken.items(), ("", outcome.mended)]:
            if answers:
                broken = self._tally([(fault, index, answer) for index, answer in enumerate(answers)], plain)
                given["faults"][fault or "none again"] = {"wrong": broken.wrong, "of": broken.runs}
                if bool(broken.wrong) != bool(fault):
                    problems.append(f"fault {fault!r}: {broken.wrong} of {broken.runs} wrong")
        return given


def main(
    out: Annotated[Path, typer.Option(help="Result file to write.")],
    only: Annotated[
        str, typer.Option(help="cover, extra, tensor-parallel (two GPUs), or a part of a row's name; all but those when empty.")
    ] = "",
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes, and keep what there is.")] = 9.0,
    at_once: Annotated[int, typer.Option(help="Servers at once; each holds some 3 GB of the device and 6 GB of memory.")] = 9,
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Two tiny rows without a GPU.")] = False,
) -> None:
    """Run the servers, compare, write; exits with 1 if a row failed or was not run."""
    serving_farm.require_plugin()
    has_gpu = detect().has_gpu and not dry_run
    rows: tuple[Row, ...] = serving_rows.COVER + serving_rows.EXTRA if has_gpu else serving_rows.DRY
    named = {"cover": serving_rows.COVER, "extra": serving_rows.EXTRA, "tensor-parallel": serving_rows.TENSOR_PARALLEL}
    rows = named[only] if only in named else tuple(row for row in rows if only in row.name)
    size = Size(has_gpu=True, context=16384, tokens=65536, requests=16) if has_gpu else Size(False, 512, 4096, 4)
    shape = serving_models.REAL if has_gpu else serving_models.TINY
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="specverify-") as folder:
        run = Run(serving_rows.with_references(rows), shape, size, Path(folder), out, minutes, logs)
        passed = run.go(at_once if has_gpu else 1)
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    typer.run(main)
