"""What the timers of every device share: their result, their rounds, and the copy that is timed beside the calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

Bound = Callable[[], object]
"""Makes one call; its arguments are bound to it."""


@dataclass(frozen=True)
class Lap:
    """The calls of one variant, in order and round and round.

    Attributes
    ----------
    calls
        The calls.
    distinct
        The first calls, which among them compile and allocate whatever the others need.
    inside
        Makes the context that all calls run in.
    per_call
        Units that one call stands for, where a time is that of a unit: layers of a call, or a part of a step.
    renew
        Called before each sample and not timed: draws what a real load would bring anew.
    """

    calls: Sequence[Bound]
    distinct: int
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    per_call: float = 1.0
    renew: Bound | None = None

    def per_unit(self, seconds: float, calls: int) -> float:
        """Seconds of one unit, from those of so many calls."""
        return seconds / (calls * self.per_call)


Tick = Callable[[float], None]
"""Told how much of the work is done, from 0 to 1."""


def part_of(tick: Tick, number: int, parts: int) -> Tick:
    """A tick for part `number` of several equal ones."""
    return lambda done: tick((number + done) / parts)


def wait_for_gpu() -> None:
    """Until all that was launched has run; nothing in a process that uses no GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


COPY_BYTES = {"cpu": 128 << 20, "cuda": 4 << 30}
"""Size of the tensor that is copied: far beyond any cache, and on a GPU large enough for start and end not to count
(between other work, an H200 copies 1 GiB at 3.8 TB/s and 4 GiB at 4.1 TB/s; alone, both at 4.1 to 4.2)."""


@dataclass(frozen=True)
class Effort:
    """How long to measure one workload.

    Attributes
    ----------
    seconds
        Time to spend on the rounds of all variants together, if it takes between `min_rounds` and `max_rounds`.
    """

    seconds: float
    min_rounds: int
    max_rounds: int

    def rounds(self, seconds_per_round: float) -> int:
        """Rounds that fit."""
        fit = int(self.seconds / max(seconds_per_round, 1e-9))
        return max(self.min_rounds, min(self.max_rounds, fit))


FULL = {
    "cpu": Effort(seconds=2.0, min_rounds=7, max_rounds=60),
    "cuda": Effort(seconds=3.0, min_rounds=7, max_rounds=60),
}
"""On a CPU there are fewer variants, and a run of all workloads must stay under two minutes on a busy small machine."""

QUICK = Effort(seconds=0.5, min_rounds=5, max_rounds=20)


@dataclass
class Timing:
    """Samples of one workload.

    Attributes
    ----------
    seconds
        For each variant, time per call: one sample is one walk over all batches, divided by their number.
    copy_seconds
        Time of a large copy, one sample per round.
    errors
        For each variant that raised, the exception.
    """

    seconds: dict[str, list[float]]
    copy_seconds: list[float] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)

    @classmethod
    def empty(cls, names: Iterable[str]) -> Timing:
        """No samples yet."""
        return cls({name: [] for name in names})

    def medians(self) -> dict[str, float]:
        """Seconds per call of every variant that has samples and did not raise."""
        return {
            name: statistics.median(samples)
            for name, samples in self.seconds.items()
            if samples and name not in self.errors
        }


class CopyProbe:
    """A large device copy: its speed is the ceiling that everything else is compared with."""

    def __init__(self, device: torch.device) -> None:
        size = COPY_BYTES[device.type]
        if device.type == "cuda":
            size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
        self._source = torch.zeros(size, dtype=torch.uint8, device=device)
        self._target = torch.ones_like(self._source)
        self.bytes = 2 * self._source.nbytes

    def run(self) -> None:
        """Copy once, eagerly."""
        self._target.copy_(self._source)


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def spread(samples: list[float]) -> Spread:
    """Of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return Spread(statistics.median(samples), p20, p80)
