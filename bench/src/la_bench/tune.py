"""Which tiles of a backend are the fastest, by states in a call: the data behind its choice of tiles."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from la_bench.environment import Environment
from la_bench.errors import UsageError
from la_bench.grid import SIZE, GridPoint
from la_bench.report_blocks import Table
from la_bench.report_text import number, times
from la_bench.rows import BackendFacts
from la_bench.run_compare import short
from la_bench.run_grid import GridSubject, GridTensors
from la_bench.tensors import DecodeCall
from la_bench.tile_words import brief_tiles, plain_tiles
from la_bench.timing import Bound, Effort, Lap, Spread, Tick, Timing, spread
from la_bench.variants import Variant
from la_core import DecodeProblem
from la_core.spec.decode_problem import StateLayout

SCHEMA = 1
UNITS = tuple(1 << n for n in range(3, 15))
"""States of a call: 8 to 16384, as many as 8 heads of one row and 32 heads of 512 rows."""

MAX_ROWS, LEAST_HEADS = 512, 8
EFFORT = Effort(seconds=1.0, min_rounds=9, max_rounds=25)


ALL = "all"
"""Stands for every backend that can be tuned."""


class TunableBackend(Protocol):
    """What a backend must offer to be tuned."""

    def candidates(self, problem: DecodeProblem) -> Sequence[Hashable]:
        """Tiles that are worth trying."""

    def chosen(self, problem: DecodeProblem) -> Hashable:
        """The tiles that are used now."""

    def launch(self, problem: DecodeProblem, tiles: Hashable) -> Callable[..., None]:
        """A launch with (q, k, v, s, s_offsets, decay_scales, softmax_scale, out)."""


class PackageBackend:
    """A backend of this project, by the names that its package gives to tiles and launches."""

    def __init__(self, name: str) -> None:
        try:
            tiles: Any = importlib.import_module(f"la_{name}.decode_tiles")
            self._launch: Any = importlib.import_module(f"la_{name}.decode_launch")
        except ImportError as reason:
            raise UsageError(f"--backend {name} cannot be tuned: {reason}.") from reason
        if not hasattr(tiles, "candidate_tiles"):
            raise UsageError(f"--backend {name} cannot be tuned: la_{name}.decode_tiles has no candidate_tiles.")
        self._tiles = tiles

    def candidates(self, problem: DecodeProblem) -> Sequence[Hashable]:
        """See :class:`TunableBackend`."""
        return tuple(self._tiles.candidate_tiles(problem))

    def chosen(self, problem: DecodeProblem) -> Hashable:
        """See :class:`TunableBackend`."""
        tiles: Hashable = self._tiles.choose_decode_tiles(problem)
        return tiles

    def launch(self, problem: DecodeProblem, tiles: Hashable) -> Callable[..., None]:
        """See :class:`TunableBackend`."""
        launch: Callable[..., None] = self._launch.DecodeLaunch(problem, tiles)
        return launch


@dataclass(frozen=True)
class TileTime:
    """Microseconds per call of one choice of tiles; a sentence instead for one that is wrong or cannot run."""

    tiles: Hashable
    time_us: Spread | None
    fault: str | None = None


@dataclass(frozen=True)
class TunedPoint:
    """All tiles at one number of states."""

    point: GridPoint
    overlap: bool
    chosen: Hashable
    times: tuple[TileTime, ...]

    @property
    def units(self) -> int:
        """States in a call."""
        return self.point.H * self.point.B

    @property
    def best(self) -> TileTime | None:
        """The fastest."""
        timed = [(one.time_us.median, n) for n, one in enumerate(self.times) if one.time_us]
        return self.times[min(timed)[1]] if timed else None

    @property
    def cost_of_choice(self) -> float | None:
        """Time of the present choice over that of the best."""
        present = next((one.time_us for one in self.times if one.tiles == self.chosen), None)
        best = self.best.time_us if self.best else None
        return present.median / best.median if present and best else None


class TileVariant(Variant):
    """The backend with given tiles, on the calls of one point, which all are the same problem."""

    def __init__(self, backend: TunableBackend, problem: DecodeProblem, tiles: Hashable) -> None:
        self.facts = BackendFacts(str(tiles), None, None, overlap=problem.overlap)
        self._launch = backend.launch(problem, tiles)

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Variant`."""
        tensors = (call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales)
        return partial(self._launch, *tensors, call.softmax_scale, call.out)

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`Variant`."""
        self.bind(call)()
        return call.out


Measure = Callable[[Mapping[str, Lap]], Timing]
"""Times laps side by side."""


def tune_points(
    units: Iterable[int],
    state_dtype: torch.dtype,
    layout: StateLayout,
    device_type: str,
    heads: int | None = None,
) -> list[GridPoint]:
    """A point for each number of states, with as many heads as are given; with None 8 as long as 512 rows suffice, and
    more beyond.

    Raises
    ------
    UsageError
        A number is no multiple of the heads, or its states do not fit into a pool.
    """
    points = []
    for count in units:
        H = heads or max(LEAST_HEADS, -(-count // MAX_ROWS))
        point = GridPoint(H, count // H, state_dtype, layout, device_type)
        if count % H or not point.fits:
            raise UsageError(f"--units must be multiples of {heads or LEAST_HEADS} that fit into a pool; got {count}.")
        points.append(point)
    return points


def default_units(heads: int | None) -> tuple[int, ...]:
    """Those of `UNITS` that calls of so many heads and at most 512 rows can have.

    Raises
    ------
    UsageError
        There are none.
    """
    if heads is None:
        return UNITS
    units = tuple(count for count in UNITS if count % heads == 0 and count <= heads * MAX_ROWS)
    if not units:
        raise UsageError(f"--heads {heads} divides none of the usual numbers of states. Pass --units too.")
    return units


def tunable_backends(names: Sequence[str], installed: Iterable[str]) -> dict[str, PackageBackend]:
    """The named backends; for `all`, every installed one that has tiles to choose from.

    Raises
    ------
    UsageError
        A named one cannot be tuned, or none can.
    """
    if tuple(names) != (ALL,):
        return {name: PackageBackend(name) for name in names}
    found = {}
    for name in installed:
        with suppress(UsageError):
            found[name] = PackageBackend(name)
    if not found:
        raise UsageError("--backend all: no installed backend has tiles to choose from.")
    return found


def tune(
    points: Sequence[GridPoint],
    backend: TunableBackend,
    device: torch.device,
    *,
    overlap: bool,
    measure: Measure,
    seed: int = 0,
    tick: Tick = lambda done: None,
) -> tuple[list[TunedPoint], BaseException | None]:
    """All tiles at all points, and what ended the run early: Ctrl-C or an exception, which keeps the points before."""
    tuned: list[TunedPoint] = []
    try:
        tensors = GridTensors(points, device, seed)
        for number, point in enumerate(points):
            tuned.append(_tune_point(point, GridSubject(point, tensors), backend, overlap, measure))
            tick((number + 1) / len(points))
    except (Exception, KeyboardInterrupt) as reason:
        return tuned, reason
    return tuned, None


def _tune_point(
    point: GridPoint, subject: GridSubject, backend: TunableBackend, overlap: bool, measure: Measure
) -> TunedPoint:
    subject.start_judging()
    problem = replace(subject.first_problem(), overlap=overlap)
    chosen = backend.chosen(problem)
    candidates = list(dict.fromkeys((chosen, *backend.candidates(problem))))
    faults: dict[Hashable, str] = {}
    variants: dict[Hashable, TileVariant] = {}
    for tiles in candidates:
        try:
            variant = TileVariant(backend, problem, tiles)
            found = subject.judge(variant).faults
        except Exception as reason:
            found = (f"{type(reason).__name__}: {reason}",)
        if found:
            faults[tiles] = "; ".join(found)
        else:
            variants[tiles] = variant
    calls = subject.calls()
    names = {tiles: f"{n}: {tiles}" for n, tiles in enumerate(variants)}
    timing = measure({names[tiles]: variant.lap(calls.lap, 1) for tiles, variant in variants.items()})
    times = []
    for tiles in candidates:
        fault, samples = faults.get(tiles), timing.seconds.get(names.get(tiles, ""), [])
        if fault is None and names[tiles] in timing.errors:
            fault = str(timing.errors[names[tiles]])
        microseconds = spread([one * 1e6 for one in samples]) if samples and fault is None else None
        times.append(TileTime(tiles, microseconds, fault))
    return TunedPoint(point, overlap, chosen, tuple(times))


def tune_table(tuned: Sequence[TunedPoint]) -> Table:
    """For each number of states the best tiles, and what the present choice costs."""
    lines = []
    for one in tuned:
        best = one.best
        microseconds = number(best.time_us.median) if best and best.time_us else "-"
        row_bytes = SIZE * one.point.state_dtype.itemsize
        name = brief_tiles(best.tiles, row_bytes) if best else "none"
        chosen = brief_tiles(one.chosen, row_bytes)
        lines.append((str(one.units), name, chosen, microseconds, times(one.cost_of_choice)))
    return Table(("units", "best tiles", "present choice", "best us", "cost of choice"), tuple(lines), text_columns=3)


def tune_json_lines(tuned: Sequence[TunedPoint], backend: BackendFacts, environment: Environment) -> str:
    """One object for each number of states and choice of tiles."""
    lines = []
    for one in tuned:
        for tile in one.times:
            row = {
                "schema": SCHEMA,
                "backend": backend.name,
                "source_hash": backend.source_hash,
                "units": one.units,
                "H": one.point.H,
                "B": one.point.B,
                "K": SIZE,
                "V": SIZE,
                "state_dtype": short(one.point.state_dtype),
                "layout": one.point.layout,
                "overlap": one.overlap,
                "tiles": plain_tiles(tile.tiles),
                "time_us": tile.time_us.median if tile.time_us else None,
                "time_us_p20": tile.time_us.p20 if tile.time_us else None,
                "time_us_p80": tile.time_us.p80 if tile.time_us else None,
                "fault": tile.fault,
                "present_choice": tile.tiles == one.chosen,
                "environment": asdict(environment),
            }
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)
