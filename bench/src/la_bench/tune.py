"""Which tiles of a backend are the fastest, by states in a call: the data behind its choice of tiles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from la_bench.environment import Environment
from la_bench.errors import UsageError
from la_bench.grid import SIZE, GridPoint
from la_bench.report_blocks import Table
from la_bench.report_text import number, times
from la_bench.rows import BackendFacts
from la_bench.run_compare import short
from la_bench.tile_words import block_and_warps, brief_tiles, plain_tiles
from la_bench.timing import Effort, Lap, Spread, Tick, Timing, spread
from la_bench.tune_backends import TunableBackend
from la_bench.tune_subjects import TuneSubject, tune_subjects
from la_bench.variants import Variant
from la_bench.window_spec import DECODE, WindowSpec
from la_core.spec.decode_problem import StateLayout

SCHEMA = 1
UNITS = tuple(1 << n for n in range(3, 15))
"""States of a call: 8 to 16384, as many as 8 heads of one row and 32 heads of 512 rows."""

MAX_ROWS, LEAST_HEADS = 512, 8
EFFORT = Effort(seconds=1.0, min_rounds=9, max_rounds=25)

WITHIN = 1.02
"""Over the best: tiles that are nearer are as good, and change with the run."""

UNIT = 64 << 10
"""Bytes of states in which backends count: a state of K = V = 128 in float32."""


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

    def costs(self) -> dict[Hashable, float]:
        """Times over that of the best, of all that were timed."""
        best = self.best
        if best is None or best.time_us is None:
            return {}
        return {one.tiles: one.time_us.median / best.time_us.median for one in self.times if one.time_us}

    @property
    def cost_of_choice(self) -> float | None:
        """Time of the present choice over that of the best."""
        return self.costs().get(self.chosen)


Measure = Callable[[Mapping[str, Lap]], Timing]
"""Times laps side by side."""

Wanted = Sequence[tuple[float, int]]


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


def tune(
    points: Sequence[GridPoint],
    backend: TunableBackend,
    device: torch.device,
    *,
    overlap: bool,
    measure: Measure,
    spec: WindowSpec | None = None,
    wanted: Wanted = (),
    seed: int = 0,
    tick: Tick = lambda done: None,
) -> tuple[list[TunedPoint], BaseException | None]:
    """All tiles at all points, and what ended the run early: Ctrl-C or an exception, which keeps the points before.

    Parameters
    ----------
    spec
        What is tuned with windows of one size; decode if None.
    wanted
        Pairs of KiB of states in a block and warps to which the candidates are narrowed, beside the present choice.
    """
    tuned: list[TunedPoint] = []
    try:
        for number, subject in enumerate(tune_subjects(points, spec, device, seed)):
            tuned.append(_tune_point(subject, backend, overlap, measure, wanted))
            tick((number + 1) / len(points))
    except (Exception, KeyboardInterrupt) as reason:
        return tuned, reason
    return tuned, None


def _tune_point(
    subject: TuneSubject, backend: TunableBackend, overlap: bool, measure: Measure, wanted: Wanted
) -> TunedPoint:
    subject.start_judging()
    problem = replace(subject.facts_of_calls(), overlap=overlap)
    chosen = backend.chosen(problem)
    row_bytes = SIZE * subject.point.state_dtype.itemsize
    candidates = list(dict.fromkeys((chosen, *_narrowed(backend.candidates(problem), wanted, row_bytes))))
    faults: dict[Hashable, str] = {}
    variants: dict[Hashable, Variant] = {}
    for tiles in candidates:
        try:
            variant = subject.variant(backend, problem, tiles)
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
    return TunedPoint(subject.point, overlap, chosen, tuple(times))


def _narrowed(candidates: Sequence[Hashable], wanted: Wanted, row_bytes: int) -> Sequence[Hashable]:
    """Those of the wanted blocks and warps; all if none are named.

    Raises
    ------
    UsageError
        No candidate is one of those that were named.
    """
    if not wanted:
        return candidates
    shapes = {tiles: block_and_warps(tiles, row_bytes) for tiles in candidates}
    left = [tiles for tiles, shape in shapes.items() if shape in wanted]
    if not left:
        known = ", ".join(f"{kib:g}x{warps}" for kib, warps in sorted({shape for shape in shapes.values() if shape}))
        raise UsageError(f"--tiles names no candidate. There are, as KiB of a block x warps: {known or 'none'}.")
    return left


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


@dataclass(frozen=True)
class Range:
    """Tiles that hold up to a number of states.

    Attributes
    ----------
    last
        The largest point that was measured of it.
    costs
        Over the best, at each of its points.
    """

    last: TunedPoint
    tiles: Hashable
    costs: tuple[float, ...]


def ranges(tuned: Sequence[TunedPoint], within: float = WITHIN) -> list[Range]:
    """The fewest ranges of states in each of which one choice of tiles is within `within` times the best.

    Each range begins where the one before ends and goes as far as any tiles do; of several the fastest ones.
    """
    points = [(one, one.costs()) for one in tuned if one.best]
    found: list[Range] = []
    while points:
        runs = {tiles: _run(tiles, [costs for _, costs in points], within) for tiles in points[0][1]}
        tiles = min(runs, key=lambda name: (-len(runs[name]), sum(runs[name])))
        found.append(Range(points[len(runs[tiles]) - 1][0], tiles, tuple(runs[tiles])))
        points = points[len(runs[tiles]) :]
    return found


def _run(tiles: Hashable, costs: Sequence[Mapping[Hashable, float]], within: float) -> list[float]:
    """What the tiles cost at the first points, as far as they are near the best."""
    run: list[float] = []
    for at_point in costs:
        if at_point.get(tiles, math.inf) > within:
            break
        run.append(at_point[tiles])
    return run


def choice_table(tuned: Sequence[TunedPoint]) -> Table:
    """The ranges as a table of a backend's choice has them: units of 64 KiB up to which tiles hold, and the tiles."""
    lines = []
    found = ranges(tuned)
    for one in found:
        point = one.last.point
        units = "more" if one is found[-1] else f"{point.state_bytes / UNIT:g}"
        tiles = brief_tiles(one.tiles, SIZE * point.state_dtype.itemsize)
        low, high = (f"{cost:.2f}" for cost in (min(one.costs), max(one.costs)))
        lines.append((units, tiles, low if low == high else f"{low} to {high}"))
    return Table(("units up to", "tiles", "of the best"), tuple(lines), text_columns=2)


def tune_json_lines(
    tuned: Sequence[TunedPoint], backend: BackendFacts, environment: Environment, spec: WindowSpec | None = None
) -> str:
    """One object for each number of states and choice of tiles."""
    windows = {"op": DECODE} if spec is None else {"op": spec.op, "places": spec.places[0], "drafts": spec.drafts}
    lines = []
    for one in tuned:
        for tile in one.times:
            row = {
                "schema": SCHEMA,
                "backend": backend.name,
                "source_hash": backend.source_hash,
                **windows,
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
