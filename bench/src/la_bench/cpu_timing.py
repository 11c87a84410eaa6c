"""Timing on a CPU: interleaved walks over all batches, each call on another layer's pool than the last one."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from la_bench.tensors import WorkloadTensors
from la_bench.timing import Call, CopyProbe, Effort, Tick, Timing


def time_on_cpu(
    tensors: WorkloadTensors, calls: Mapping[str, Call], copy: CopyProbe, effort: Effort, tick: Tick
) -> Timing:
    """Samples of every variant, taken round by round: in each round every variant walks once, and one copy is made.

    A variant that raises leaves the rounds; its exception is kept.
    """
    timing = Timing.empty(calls)
    lap, stride, position = tensors.lap, len(tensors.batches), 0

    def walk(name: str) -> float:
        nonlocal position
        call, part = calls[name], lap[position : position + stride]
        position = (position + stride) % len(lap)
        start = perf_counter()
        for batch, layer in part:
            call(batch, layer)
        return perf_counter() - start

    def try_walk(name: str) -> float | None:
        try:
            return walk(name)
        except Exception as reason:
            timing.errors[name] = reason
            return None

    def time_copy() -> float:
        start = perf_counter()
        copy.run()
        return perf_counter() - start

    warm_up = sum(try_walk(name) or 0.0 for name in calls) + time_copy()
    rounds = effort.rounds(warm_up)
    for number in range(rounds):
        for name in calls:
            seconds = None if name in timing.errors else try_walk(name)
            if seconds is not None:
                timing.seconds[name].append(seconds / stride)
        timing.copy_seconds.append(time_copy())
        tick((number + 1) / rounds)
    return timing
