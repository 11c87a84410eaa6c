"""Timing on a GPU: replays of CUDA graphs that walk through cold slots, so that no host time is in the numbers; and
the host time of the same calls, apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from la_bench.errors import UsageError
from la_bench.timing import CopyProbe, Effort, Lap, Tick, Timing

WARM_UP_SECONDS = 0.3
"""Of copies before the first sample of a process, for the card to reach its clocks."""

SPIN_CYCLES = 600_000
"""About 0.3 ms of waiting before each sample: the whole sample is queued before its first kernel starts."""

HOST_CALLS = 40
"""Calls in one sample of host time: fewer than a stream queues."""

HOST_WARM_UP = 5
"""Calls before each sample of host time: what ran before must not decide how warm the CPU's caches are."""

HOST_SAMPLES = 7


def require_cuda(who: str = "--device cuda", instead: str = " Pass --device cpu.") -> None:
    """Refuse to measure a GPU that is not there."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"{who} needs a CUDA device and a torch built for it; torch.cuda.is_available() is False here.{instead}"
        )


class GraphTimer:
    """Captures laps into graphs and times their replays; remembers that the card is warm."""

    def __init__(self) -> None:
        require_cuda()
        self._warm = False

    def time(self, laps: Mapping[str, Lap], copy: CopyProbe, effort: Effort, tick: Tick) -> Timing:
        """Samples of every variant, taken round by round: in each round every graph is replayed, and one copy is made.

        One graph holds a whole lap of one variant: more states than any L2 cache holds, each touched as rarely as in
        an engine. The copy is eager, since a captured one can become a slower memcpy node. A variant that raises, in
        its first calls or while it is captured, is left out; its exception is kept.
        """
        timing = Timing.empty(laps)
        replays = self._capture_all(laps, timing.errors)
        self._warm_up(copy)
        first = sum(_seconds(replay) for replay in replays.values()) + _seconds(copy.run)
        rounds = effort.rounds(first)
        for number in range(rounds):
            for name, replay in replays.items():
                timing.seconds[name].append(_sample(laps[name], replay))
            timing.copy_seconds.append(_seconds(copy.run))
            tick((number + 1) / rounds)
        return timing

    def compare(self, laps: Mapping[str, Lap], rounds: int) -> Timing:
        """The same for a few rounds without a copy, to choose among variants."""
        timing = Timing.empty(laps)
        replays = self._capture_all(laps, timing.errors)
        for number in range(-1, rounds):
            for name, replay in replays.items():
                seconds = _sample(laps[name], replay)
                if number >= 0:
                    timing.seconds[name].append(seconds)
        return timing

    def host(self, laps: Mapping[str, Lap]) -> dict[str, list[float]]:
        """Seconds that Python is busy with a call, launches not waited for; variants take turns."""
        taken: dict[str, list[float]] = {name: [] for name in laps}
        for number in range(-1, HOST_SAMPLES):
            for name, samples in taken.items():
                seconds = _host_seconds(laps[name])
                if number >= 0:
                    samples.append(seconds)
        return taken

    def _capture_all(self, laps: Mapping[str, Lap], errors: dict[str, Exception]) -> dict[str, Callable[[], None]]:
        # Replays follow each other in one stream and nobody reads what they leave, so they share memory.
        pool: Any = torch.cuda.graph_pool_handle()
        replays: dict[str, Callable[[], None]] = {}
        for name, lap in laps.items():
            try:
                replays[name] = _capture(lap, pool).replay
            except Exception as reason:
                errors[name] = reason
        return replays

    def _warm_up(self, copy: CopyProbe) -> None:
        spent = 0.0
        while not self._warm and spent < WARM_UP_SECONDS:
            spent += _seconds(copy.run)
        self._warm = True


def _capture(lap: Lap, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of one lap. Compilation happens in calls before, on the stream of the capture.

    Without `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time: a grid captures
    thousands of graphs. The collector rests meanwhile, so that it frees nothing of the GPU during a capture.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with lap.inside(), torch.cuda.stream(stream):
        for call in lap.calls[: lap.distinct]:
            call()
        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=pool)
            _record(lap, graph)
        finally:
            if collecting:
                gc.enable()
    return graph


def _record(lap: Lap, graph: torch.cuda.CUDAGraph) -> None:
    try:
        for call in lap.calls:
            call()
    except BaseException:
        # The first exception says what happened; ending a spoilt capture raises another.
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


def _sample(lap: Lap, replay: Callable[[], None]) -> float:
    """Seconds of one unit of a lap."""
    if lap.renew is not None:
        lap.renew()
    return lap.per_unit(_seconds(replay), len(lap.calls))


def _seconds(work: Callable[[], None]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _host_seconds(lap: Lap) -> float:
    calls = [lap.calls[n % len(lap.calls)] for n in range(HOST_CALLS)]
    with lap.inside():
        for call in calls[:HOST_WARM_UP]:
            call()
        torch.cuda.synchronize()
        start = perf_counter()
        for call in calls:
            call()
        seconds = perf_counter() - start
        torch.cuda.synchronize()
    return lap.per_unit(seconds, HOST_CALLS)
