"""The real servers of this folder: one broken one for each layout of ranks, and a healthy one.

All five layouts run on a CPU: one rank, tensor parallelism (gloo), pipeline parallelism, a data-parallel controller, and
data-parallel attention; two ranks each, which is what two cores carry. Expert and context parallelism start their
processes through the same paths and need kernels of a GPU. Ray, which would not load the plugin, is refused by
argument resolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.demo.server import Server
from tests.door.processes import SABOTEUR, environment, run_to_its_end, small_server


@dataclass(frozen=True)
class Layout:
    """A layout, how its plugin is broken, and what the launcher must say of it."""

    arguments: str
    sabotage: str
    says: str


_SPECULATION = (
    "--speculative-algorithm STANDALONE --speculative-draft-model-path {mirror} "
    "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
)
LAYOUTS = {
    "one rank, without its draft parts": Layout(
        _SPECULATION, "part", "serves without the plugin's draft decode and draft extend backend"
    ),
    "tensor parallel, rank 1 lost": Layout("--tp-size 2", "lose:1", "1 of 2 scheduler processes did not report the plugin"),
    "pipeline parallel, installing raises": Layout(
        "--pp-size 2", "raise", "2 of 2 scheduler processes did not report the plugin"
    ),
    "data parallel, one replica lost": Layout("--dp-size 2", "lose:1", "1 of 2 scheduler processes did not report the plugin"),
    "data-parallel attention, rank 0 lost": Layout(
        "--tp-size 2 --dp-size 2 --enable-dp-attention", "lose:0", "1 of 2 scheduler processes did not report the plugin"
    ),
}
HEALTHY = f"--dp-size 2 {_SPECULATION}"


@dataclass(frozen=True)
class Healthy:
    """What /server_info said, and the log."""

    info: dict[str, Any]
    text: str


def start_all(models: Mapping[str, Path], logs: Path, pool: ThreadPoolExecutor) -> dict[str, Future[Any]]:
    """Case -> `Ended`, or `Healthy` for "healthy", to come. What depends on this process is settled before it returns."""

    def line(arguments: str) -> list[str]:
        return small_server(models["target"], arguments.format(**models).split())

    futures: dict[str, Future[Any]] = {}
    for number, (case, layout) in enumerate(LAYOUTS.items()):
        variables = environment(SPECVERIFY_SABOTAGE=layout.sabotage)
        variables["PYTHONPATH"] = f"{SABOTEUR}:{variables.get('PYTHONPATH', '')}".rstrip(":")
        futures[case] = pool.submit(run_to_its_end, line(layout.arguments), logs / f"broken-{number}.log", variables)
    server = Server(line(HEALTHY), environment=environment(), log=logs / "healthy.log")
    futures["healthy"] = pool.submit(_ask, server)
    return futures


def _ask(server: Server) -> Healthy:
    with server:
        return Healthy(server.get("/server_info"), server.log_text())
