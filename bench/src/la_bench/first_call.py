"""What the first decode call of a fresh process costs beside a later one, imports not counted."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from la_bench.environment import Environment
from la_bench.errors import UsageError
from la_bench.report_blocks import Table
from la_bench.report_text import listing, number
from la_bench.timing import Spread, Tick, spread

SCHEMA = 1

MODES = INSTALLED, WARM, COLD = "installed", "warm", "cold"

PARTS = ("discovery", "library", "rest")
"""Of a first call: finding and loading the backend; reading its sources and its library of prebuilt kernels, where it
has such a thing; and all else."""


@dataclass(frozen=True)
class DiskCache:
    """Environment variables of a backend that keeps kernels.

    Attributes
    ----------
    folder
        Names the folder they are kept in.
    prebuilt
        `0` switches prebuilt kernels off; None where there are none.
    """

    folder: str
    prebuilt: str | None

    def variables(self, mode: str, folder: str) -> dict[str, str]:
        """What a process of a mode finds set."""
        prebuilt = {} if self.prebuilt is None else {self.prebuilt: "1" if mode == INSTALLED else "0"}
        return {self.folder: folder, **prebuilt}


CACHES = {
    "cute": DiskCache("LA_CUTE_CACHE_DIR", "LA_CUTE_PREBUILT"),
    "triton": DiskCache("TRITON_CACHE_DIR", None),
}
"""By backend; all others keep no kernels."""


@dataclass
class FirstCall:
    """Samples of one backend and mode, one of each process, in milliseconds.

    Attributes
    ----------
    later
        Median of the later calls.
    kernels
        Kernels that were made in a process, by where they came from.
    fault
        Why a process of this mode failed; no other was started then.
    """

    backend: str
    mode: str
    parts: dict[str, list[float]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    fault: str | None = None

    def add(self, answer: Mapping[str, Any]) -> None:
        """What one process measured."""
        for name, milliseconds in answer["parts"].items():
            self.parts.setdefault(name, []).append(milliseconds)
        self.first.append(sum(answer["parts"].values()))
        self.later.append(statistics.median(answer["later"]))
        self.kernels = answer["kernels"]

    @property
    def beyond(self) -> Spread:
        """What the first call took beyond a later one."""
        return spread([first - later for first, later in zip(self.first, self.later, strict=True)])


def modes_of(backend: str) -> tuple[str, ...]:
    """Modes that differ for a backend.

    `installed`: nothing is cached, and prebuilt kernels may be used. `warm`: they may not, and the kernel is in the
    disk cache. `cold`: neither; without prebuilt kernels that is how a backend is installed.
    """
    cache = CACHES.get(backend)
    if cache is None:
        return (INSTALLED,)
    return (WARM, COLD) if cache.prebuilt is None else (INSTALLED, WARM, COLD)


def select_modes(backend: str, wanted: Sequence[str]) -> tuple[str, ...]:
    """The wanted modes, or all.

    Raises
    ------
    UsageError
        The backend has no such mode.
    """
    known = modes_of(backend)
    for mode in wanted:
        if mode not in known:
            raise UsageError(f"--modes of {backend} can be {listing(known)}; got {mode!r}.")
    return tuple(dict.fromkeys(wanted)) or known


Ask = Callable[[Mapping[str, Any], Mapping[str, str]], Mapping[str, Any]]
"""Lets a process make its first call: options of :func:`la_bench.first_call_process.first_call`, and variables."""


def measure_first(
    backend: str,
    package: str,
    device: str,
    modes: Sequence[str],
    samples: int,
    tick: Tick = lambda done: None,
    ask: Ask | None = None,
) -> tuple[list[FirstCall], bool]:
    """Every mode in `samples` processes, taken in turns; and whether Ctrl-C ended that early, which keeps what is done.

    A process before them, which does not count, tells what a call of the mode imports, so that the others import it
    first. In the mode `warm` yet another fills the cache before that, and with it imports a compiler that no call of
    this mode needs.
    """
    ask = ask or ask_process
    results = [FirstCall(backend, mode) for mode in modes]
    try:
        _measure_in_turns(results, package, device, samples, tick, ask)
    except KeyboardInterrupt:
        return [result for result in results if result.first or result.fault is not None], True
    return results, False


def _measure_in_turns(
    results: Sequence[FirstCall], package: str, device: str, samples: int, tick: Tick, ask: Ask
) -> None:
    imports: dict[str, list[str]] = {}
    with ExitStack() as stack:

        def new_folder() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory(prefix="la-bench-first-"))

        filled = new_folder()
        for number_of_round in range(-1, samples):
            for place, result in enumerate(results):
                mode = result.mode
                tick(((number_of_round + 1) * len(results) + place) / ((samples + 1) * len(results)))
                if result.fault is not None:
                    continue
                cache, folder = CACHES.get(result.backend), filled if mode == WARM else new_folder()
                options: dict[str, Any] = {"backend": result.backend, "package": package, "device": device}
                options["imports"] = imports.get(mode, [])
                variables = cache.variables(mode, folder) if cache else {}
                try:
                    if number_of_round < 0 and mode == WARM:
                        ask(options, variables)
                    answer = ask(options, variables)
                except RuntimeError as reason:
                    result.fault = str(reason)
                    continue
                if number_of_round < 0:
                    imports[mode] = answer["imported"]
                else:
                    result.add(answer)
        tick(1.0)


def ask_process(options: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
    """See :data:`Ask`.

    Raises
    ------
    RuntimeError
        The process failed; the last line that it printed says why.
    """
    command = [sys.executable, "-m", "la_bench.first_call_process"]
    # Not on the command line: a compiler imports more modules than fit there.
    done = subprocess.run(
        command, input=json.dumps(options), env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"the process ended with status {done.returncode}")
    answer: Mapping[str, Any] = json.loads(done.stdout)
    return answer


def first_table(results: Sequence[FirstCall]) -> Table:
    """A line for each that was measured; parts that none has are left out."""
    parts = [name for name in PARTS if any(name in result.parts for result in results)]
    lines = []
    for result in results:
        if result.fault is not None:
            continue
        first = spread(result.first)
        cells = [result.backend, result.mode, number(first.median), f"{number(first.p20)} to {number(first.p80)}"]
        cells += [number(statistics.median(result.later)), number(result.beyond.median)]
        cells += [number(statistics.median(result.parts[name])) if name in result.parts else "-" for name in parts]
        lines.append((*cells, listing([f"{n} {origin}" for origin, n in sorted(result.kernels.items())]) or "-"))
    columns = ("backend", "mode", "first ms", "p20 to p80", "later ms", "beyond ms", *parts, "kernels")
    return Table(columns, tuple(lines), text_columns=2)


def first_json_lines(results: Sequence[FirstCall], source_hash: str | None, environment: Environment) -> str:
    """One object for each mode."""
    lines = []
    for result in results:
        row = {
            "schema": SCHEMA,
            "backend": result.backend,
            "source_hash": source_hash,
            "mode": result.mode,
            "first_ms": result.first,
            "later_ms": result.later,
            "parts_ms": result.parts,
            "kernels": result.kernels,
            "fault": result.fault,
            "environment": asdict(environment),
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


def read_first_call(row: Mapping[str, Any]) -> FirstCall:
    """The samples of such an object."""
    measured = (row["parts_ms"], row["first_ms"], row["later_ms"], row["kernels"], row["fault"])
    return FirstCall(row["backend"], row["mode"], *measured)
