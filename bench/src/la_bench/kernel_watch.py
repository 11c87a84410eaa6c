"""How many kernels a backend makes for its calls, and how long that takes: what first calls cost beyond later ones."""

from __future__ import annotations

import importlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from la_bench.rows import KernelsMade
from la_bench.timing import Lap, wait_for_gpu

MODULES = ("decode_launch", "compiled_kernel_cache")
"""Of a backend's package, where its `kernels_made` may be, and beside it `kernel_origins`."""


@dataclass(frozen=True)
class KernelCounter:
    """What a backend says about the kernels that this process has compiled or loaded: how many, and where from."""

    made: Callable[[], int]
    origins: Callable[[], Mapping[str, int]] | None


def kernel_counter(package: str) -> KernelCounter | None:
    """The counter of a backend's package; None for a package without one."""
    for name in MODULES:
        try:
            module = importlib.import_module(f"{package}.{name}")
        except ImportError:
            continue
        made = getattr(module, "kernels_made", None)
        if made is not None:
            return KernelCounter(made, getattr(module, "kernel_origins", None))
    return None


class KernelWatch:
    """Watches the calls that a backend makes for one subject."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter
        self._kernels_before = counter.made()
        self._origins_before = self._origins()
        self._making: list[float] = []
        self._later: list[float] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """Time a call, and see whether kernels were made in it. A call that raises does not count."""
        before = self._counter.made()
        wait_for_gpu()
        start = perf_counter()
        yield
        wait_for_gpu()
        seconds = perf_counter() - start
        (self._making if self._counter.made() > before else self._later).append(seconds)

    def make_all(self, lap: Lap) -> None:
        """Make every distinct call twice: the first one makes the kernels it needs, the second finds them there."""
        with lap.inside():
            for call in lap.calls[: lap.distinct]:
                for _ in range(2):
                    with self.call():
                        call()

    def kernels(self) -> KernelsMade | None:
        """What was made so far; None if no call has come to its end."""
        if not (self._making or self._later):
            return None
        later = statistics.median(self._later) if self._later else 0.0
        seconds = max(0.0, sum(self._making) - len(self._making) * later)
        origins = self._origins()
        new = None if origins is None else dict(origins - (self._origins_before or Counter()))
        return KernelsMade(self._counter.made() - self._kernels_before, seconds, new)

    def _origins(self) -> Counter[str] | None:
        return None if self._counter.origins is None else Counter(self._counter.origins())
