"""Timing on a GPU: replays of CUDA graphs that walk through cold slots, so that no host time is in the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from la_bench.errors import UsageError
from la_bench.tensors import WorkloadTensors
from la_bench.timing import Call, CopyProbe, Effort, Tick, Timing

WARM_UP_SECONDS = 0.3
"""Of copies before the first sample, for the card to reach its clocks."""


def require_cuda() -> None:
    """Refuse to measure a GPU that is not there."""
    if not torch.cuda.is_available():
        raise UsageError(
            "--device cuda needs a CUDA device and a torch built for it; torch.cuda.is_available() is False here. "
            "Pass --device cpu."
        )


def time_on_gpu(
    tensors: WorkloadTensors, calls: Mapping[str, Call], copy: CopyProbe, effort: Effort, tick: Tick
) -> Timing:
    """Samples of every variant, taken round by round: in each round every graph is replayed, and one copy is made.

    One graph holds a whole lap of one variant: more states than any L2 cache holds, each touched as rarely as in an
    engine. The copy is eager, since a captured one can become a slower memcpy node. A variant that
    raises, in its first call or while it is captured, is left out; its exception is kept.
    """
    require_cuda()
    timing = Timing.empty(calls)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        try:
            graphs[name] = _capture(tensors, call)
        except Exception as reason:
            timing.errors[name] = reason
    calls_per_graph = len(tensors.lap)

    spent = 0.0
    while spent < WARM_UP_SECONDS:
        spent += _seconds(copy.run)
    warm_up = sum(_seconds(graph.replay) for graph in graphs.values()) + _seconds(copy.run)
    rounds = effort.rounds(warm_up)
    for number in range(rounds):
        for name, graph in graphs.items():
            timing.seconds[name].append(_seconds(graph.replay) / calls_per_graph)
        timing.copy_seconds.append(_seconds(copy.run))
        tick((number + 1) / rounds)
    return timing


def _capture(tensors: WorkloadTensors, call: Call) -> torch.cuda.CUDAGraph:
    """A graph of one lap. Compilation happens in calls before, on the stream of the capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in tensors.batches:
            call(batch, tensors.layers[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for batch, layer in tensors.lap:
            call(batch, layer)
    return graph


def _seconds(work: Callable[[], None]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
