"""Time a layer's launches on a GPU: captured in a CUDA graph and replayed with cold caches, as a layer of a model finds them."""

from __future__ import annotations

import statistics

import torch

from sglang_specverify.kernels.launch import Launch

#: Written before each replay: more than the last-level cache of any GPU that is tuned (256 MB on CDNA3).
_FLUSH_BYTES = 512 << 20
_ROUNDS = 15


def of_a_layer(launches: list[Launch]) -> list[Launch]:
    """All but a plan's, which a step makes once for its layers: attention, and what combines the parts where a launch does."""
    # Triton is not imported with the module, so that a machine without it reads why it cannot tune.
    from sglang_specverify.kernels.plan_kernel import plan_kernel

    return [launch for launch in launches if launch.kernel is not plan_kernel]


def microseconds(launches: list[Launch], rounds: int = _ROUNDS) -> float:
    """The median time of those of a call's launches that `of_a_layer` names, together. All run once before it."""
    for launch in launches:
        launch.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in of_a_layer(launches):
            launch.run()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000.0)
    # The first two find a GPU that has been idle.
    return statistics.median(times[2:])
