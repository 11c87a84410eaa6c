"""`la-bench tune`: options in, a table for each backend and one file out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import Progress, TaskID

from la_bench.environment import Environment, read_environment
from la_bench.errors import UsageError
from la_bench.gpu_timing import GraphTimer, require_cuda
from la_bench.grid import DTYPES, GridPoint
from la_bench.option_words import option_words, pair_words
from la_bench.report_text import count
from la_bench.run_compare import short
from la_bench.terminal import filled_table, print_line, progress_bar, show
from la_bench.tile_words import show_tiles
from la_bench.timing import CopyProbe, Lap, Timing
from la_bench.tune import (
    EFFORT,
    WITHIN,
    Measure,
    Wanted,
    choice_table,
    default_units,
    tune_json_lines,
    tune_points,
    tune_table,
)
from la_bench.tune import tune as tune_backend
from la_bench.tune_backends import TunableBackend, tunable_backends
from la_bench.variants import backend_facts
from la_bench.window_spec import WindowSpec, window_spec
from la_bench.write_report import check_file, write_file
from la_core.backends.discover_backends import installed_names
from la_core.spec.decode_problem import StateLayout


def tune(options: Namespace) -> int:
    """`la-bench tune`."""
    specs = window_specs(options)
    require_cuda("tune", instead="")
    device = torch.device("cuda")
    layout: StateLayout = options.layout
    units = options.units or default_units(options.heads)
    points = tune_points(units, DTYPES[options.state_dtype], layout, device.type, options.heads)
    backends = tunable_backends(options.backend, installed_names(), windows=specs != [None])
    if options.out is not None:
        check_file(options.out)
    timer, copy = GraphTimer(), CopyProbe(device)
    environment = read_environment(device, seed=0, quick=False, options=tune_words(options))

    def measure(laps: Mapping[str, Lap]) -> Timing:
        return timer.time(laps, copy, EFFORT, lambda done: None)

    return tune_in_turn(
        backends,
        points,
        device,
        environment,
        specs=specs,
        wanted=options.tiles,
        overlap=options.overlap,
        measure=measure,
        out=options.out,
    )


def tune_words(options: Namespace) -> str:
    """The options that decide what is measured."""
    words = option_words(options, "op", "window", "drafts", "backend")
    words += pair_words("tiles", options.tiles)
    return " ".join(words + option_words(options, "layout", "state-dtype", "overlap", "units", "heads"))


def window_specs(options: Namespace) -> list[WindowSpec | None]:
    """What is tuned in turn, with one size of window each; None is decode.

    Raises
    ------
    UsageError
        Options that do not belong together.
    """
    spec = window_spec(options.op, options.window, options.drafts, None)
    if spec is None:
        return [None]
    if spec.op == "commit" and options.overlap:
        raise UsageError("--overlap belongs to --op decode, deferred and verify: commit waits for the tokens.")
    return [replace(spec, places=(places,), layers=1) for places in spec.places]


def tune_in_turn(
    backends: Mapping[str, TunableBackend],
    points: Sequence[GridPoint],
    device: torch.device,
    environment: Environment,
    *,
    overlap: bool,
    measure: Measure,
    out: Path | None,
    specs: Sequence[WindowSpec | None] = (None,),
    wanted: Wanted = (),
) -> int:
    """Tune one backend after the other, write all lines so far after each of them, and return the exit status.

    What one backend raises leaves the others; Ctrl-C ends the run and keeps what is done.
    """
    lines, failed = "", False
    jobs = [(_subject(backend, spec), backend, spec) for backend in backends for spec in specs]
    for number, (name, key, spec) in enumerate(jobs):
        with progress_bar() as progress:
            task = progress.add_task(f"tiles of {name}", total=1.0)

            def tick(done: float, task: TaskID = task, progress: Progress = progress) -> None:
                progress.update(task, completed=done)

            tuned, stopped = tune_backend(
                points, backends[key], device, spec=spec, wanted=wanted, overlap=overlap, measure=measure, tick=tick
            )
        show(filled_table(_title(name, points, overlap), tune_table(tuned)))
        if tuned:
            show(
                filled_table(f"the shortest choice for {name} within {WITHIN - 1:.0%} of the best", choice_table(tuned))
            )
        lines += tune_json_lines(tuned, backend_facts(key), environment, spec)
        if out is not None and lines:
            write_file(out, lines)
        faults = [(one.units, tile) for one in tuned for tile in one.times if tile.fault]
        for units, tile in faults:
            print_line(f"FAILED: {name}, {show_tiles(tile.tiles)} at {units} units: {tile.fault}")
        failed = failed or bool(faults) or stopped is not None
        if stopped is not None:
            by_hand = isinstance(stopped, KeyboardInterrupt)
            what = "stopped by Ctrl-C" if by_hand else f"{type(stopped).__name__}: {stopped}"
            left = ", ".join(str(point.H * point.B) for point in points[len(tuned) :])
            print_line(f"{name}: {what}; states in a call not finished: {left}")
            if by_hand:
                for other, *_ in jobs[number + 1 :]:
                    print_line(f"{other}: not begun")
                return 130
    return 1 if failed else 0


def _subject(backend: str, spec: WindowSpec | None) -> str:
    """The backend, and what is tuned of it besides decode."""
    if spec is None:
        return backend
    words = {
        "deferred": f"decode with {count(spec.places[0], 'place')}",
        "verify": f"verify of {count(spec.drafts, 'draft')} with {count(spec.places[0], 'place')}",
        "commit": f"commit of {count(spec.drafts, 'draft')}",
    }
    return f"{backend}, {words[spec.op]}"


def _title(name: str, points: Sequence[GridPoint], overlap: bool) -> str:
    heads = sorted({point.H for point in points})
    words = [name, short(points[0].state_dtype), points[0].layout, *(["overlap"] if overlap else [])]
    words += [count(heads[0], "head")] if len(heads) == 1 else [f"{heads[0]} to {heads[-1]} heads"]
    return f"tiles of {', '.join(words)}: states in a call, and what the present choice costs"
