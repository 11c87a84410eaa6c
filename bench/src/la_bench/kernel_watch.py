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

MODULES = ("kernel_launch", "decode_launch", "compiled_kernel_cache")
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
    """Watches the calls that a variant makes for one subject.

    Only what is made inside of its calls counts: a backend has one counter for all of its variants.
    """

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter
        self._kernels = 0
        self._origins: Counter[str] = Counter()
        self._making: list[float] = []
        self._later: list[float] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """Time a call, and see whether kernels were made in it. A call that raises does not count."""
        kernels, origins = self._counter.made(), self._origins_now()
        wait_for_gpu()
        start = perf_counter()
        yield
        wait_for_gpu()
        seconds = perf_counter() - start
        made = self._counter.made() - kernels
        self._kernels += made
        self._origins += self._origins_now() - origins
        (self._making if made else self._later).append(seconds)

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
        return KernelsMade(self._kernels, seconds, None if self._counter.origins is None else dict(self._origins))

    def _origins_now(self) -> Counter[str]:
        return Counter() if self._counter.origins is None else Counter(self._counter.origins())
