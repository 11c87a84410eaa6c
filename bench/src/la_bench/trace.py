"""A simulated continuous-batching engine: which slots the running batch names, step by step.

Requests arrive at random, take a free slot, gain one token a step, finish, and hand the slot on. Freed slots queue
up behind the other free ones, as in SGLang's pools, so a long-running engine's offsets are neither sorted nor
contiguous, and a slot changes its owner again and again.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

CAPTURED_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 513, 8))
"""Batch sizes an engine captures CUDA graphs for; a batch is padded to the next one."""

PADDING = -1
"""The offset of a padding row."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is.

    Attributes
    ----------
    live
        Requests that run at the same time, on average.
    slots
        Slots of the pool; a request that finds none free waits.
    mean_tokens
        Tokens that a request generates, on average; lengths are log-normal.
    sigma
        Standard deviation of the logarithm of the length.
    """

    live: int
    slots: int
    mean_tokens: int = 128
    sigma: float = 0.8

    def __post_init__(self) -> None:
        if not 1 <= self.live <= self.slots <= CAPTURED_SIZES[-1]:
            raise ValueError(f"a load needs 1 <= live <= slots <= {CAPTURED_SIZES[-1]}, got {self}")


@dataclass
class Request:
    """One request that holds a slot."""

    number: int
    slot: int
    tokens_left: int
    tokens: int = 0


@dataclass(frozen=True)
class Step:
    """One decode step of the engine.

    Attributes
    ----------
    requests
        Number of the request in each live row.
    slots
        Slot of each live row.
    tokens
        Tokens that each live row has generated, this step's included.
    """

    requests: tuple[int, ...]
    slots: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """`s_offsets` of the step: the slots, padded to the next captured size."""
        return self.slots + (PADDING,) * (captured_size(len(self.slots)) - len(self.slots))


def captured_size(rows: int) -> int:
    """The smallest captured batch size that holds `rows` rows."""
    for size in CAPTURED_SIZES:
        if size >= rows:
            return size
    raise ValueError(f"no captured batch size holds {rows} rows, the largest is {CAPTURED_SIZES[-1]}")


def simulate(load: Load, seed: int) -> Iterator[Step]:
    """The steps of an endless run, from an idle engine on; the same load and seed give the same steps."""
    rng = random.Random(seed)
    free = deque(range(load.slots))
    waiting: deque[Request] = deque()
    running: list[Request] = []
    arrivals_per_step = load.live / load.mean_tokens
    # The mean of a log-normal variable is exp(mu + sigma**2 / 2).
    mu = math.log(load.mean_tokens) - load.sigma**2 / 2
    next_arrival = rng.expovariate(arrivals_per_step)
    step = number = 0
    while True:
        while next_arrival <= step:
            length = max(1, round(rng.lognormvariate(mu, load.sigma)))
            waiting.append(Request(number, slot=PADDING, tokens_left=length))
            number += 1
            next_arrival += rng.expovariate(arrivals_per_step)
        while waiting and free:
            request = waiting.popleft()
            request.slot = free.popleft()
            running.append(request)
        for request in running:
            request.tokens += 1
            request.tokens_left -= 1
        yield Step(tuple(r.number for r in running), tuple(r.slot for r in running), tuple(r.tokens for r in running))
        free.extend(r.slot for r in running if r.tokens_left == 0)
        running = [r for r in running if r.tokens_left > 0]
        step += 1


APART = 4
"""Mean request lengths between two sampled steps: few requests live that long, so their slots have new owners."""


def sample_steps(load: Load, count: int, seed: int) -> tuple[Step, ...]:
    """`count` steps with at least one live row, `APART * mean_tokens` steps from the start and from each other."""
    steps: list[Step] = []
    due = APART * load.mean_tokens
    for number, step in enumerate(simulate(load, seed)):
        if number >= due and step.slots:
            steps.append(step)
            due = number + APART * load.mean_tokens
            if len(steps) == count:
                break
    return tuple(steps)
