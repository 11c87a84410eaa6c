"""Timing on a CPU: interleaved walks over all batches, each call on another layer's pool than the last one."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from la_bench.timing import CopyProbe, Effort, Lap, Tick, Timing


def time_on_cpu(laps: Mapping[str, Lap], stride: int, copy: CopyProbe, effort: Effort, tick: Tick) -> Timing:
    """Samples of every variant, taken round by round: in each round every variant makes `stride` calls of its lap, and
    one copy is made.

    A variant that raises leaves the rounds; its exception is kept.
    """
    timing = Timing.empty(laps)
    position = 0

    def walk(name: str) -> float:
        nonlocal position
        lap = laps[name]
        part = lap.calls[position : position + stride]
        position = (position + stride) % len(lap.calls)
        if lap.renew is not None:
            lap.renew()
        with lap.inside():
            start = perf_counter()
            for call in part:
                call()
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

    warm_up = sum(try_walk(name) or 0.0 for name in laps) + time_copy()
    rounds = effort.rounds(warm_up)
    for number in range(rounds):
        for name in laps:
            seconds = None if name in timing.errors else try_walk(name)
            if seconds is not None:
                timing.seconds[name].append(laps[name].per_unit(seconds, stride))
        timing.copy_seconds.append(time_copy())
        tick((number + 1) / rounds)
    return timing
