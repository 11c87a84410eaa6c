"""The commands of `la-bench` that measure one thing: options in, tables on the terminal and files out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from rich.table import Table

from la_bench.environment import cpu_model, read_environment
from la_bench.errors import UsageError
from la_bench.gpu_timing import GraphTimer, require_cuda
from la_bench.grid import STATE_DTYPES
from la_bench.host_overhead import measure_host, over_limit
from la_bench.ref_cost import IN_TURN, RefCost, measure_blocks, measure_ref
from la_bench.terminal import filled_table, new_table, print_line, progress_bar, show, spread_cells
from la_bench.tile_words import show_tiles
from la_bench.timing import CopyProbe
from la_bench.tune import EFFORT as TUNE_EFFORT
from la_bench.tune import UNITS, PackageBackend, tune_json_lines, tune_points, tune_table
from la_bench.tune import tune as tune_backend
from la_bench.variants import (
    backend_facts,
)
from la_bench.write_report import check_file, write_file
from la_core.spec.decode_problem import StateLayout


def tune(options: Namespace) -> int:
    """`la-bench tune`."""
    require_cuda("tune", instead="")
    device = torch.device("cuda")
    layout: StateLayout = options.layout
    points = tune_points(options.units or UNITS, STATE_DTYPES[options.state_dtype], layout, device.type)
    backend = PackageBackend(options.backend)
    if options.out is not None:
        check_file(options.out)
    timer, copy = GraphTimer(), CopyProbe(device)
    with progress_bar() as progress:
        task = progress.add_task("tiles", total=1.0)
        tuned, stopped = tune_backend(
            points,
            backend,
            device,
            overlap=options.overlap,
            measure=lambda laps: timer.time(laps, copy, TUNE_EFFORT, lambda done: None),
            tick=lambda done: progress.update(task, completed=done),
        )
    words = f"{options.backend}, {options.state_dtype}, {layout}{', overlap' if options.overlap else ''}"
    show(filled_table(f"tiles of {words}: states in a call, and what the present choice costs", tune_table(tuned)))
    if options.out is not None and tuned:
        environment = read_environment(device, seed=0, quick=False)
        write_file(options.out, tune_json_lines(tuned, backend_facts(options.backend), environment))
    faults = [(one.units, tile) for one in tuned for tile in one.times if tile.fault]
    for units, tile in faults:
        print_line(f"FAILED: {show_tiles(tile.tiles)} at {units} units: {tile.fault}")
    if stopped is not None:
        left = ", ".join(str(point.H * point.B) for point in points[len(tuned) :])
        what = "stopped by Ctrl-C" if isinstance(stopped, KeyboardInterrupt) else f"{type(stopped).__name__}: {stopped}"
        print_line(f"{what}; states in a call not finished: {left}")
    if isinstance(stopped, KeyboardInterrupt):
        return 130
    return 1 if faults or stopped else 0


def host(options: Namespace) -> int:
    """`la-bench host`."""
    with progress_bar() as progress:
        task = progress.add_task("interleaved calls", total=1.0)
        costs = measure_host(options.samples, lambda done: progress.update(task, completed=done))
    table = new_table(
        f"la_core.decode around a backend that does nothing, {cpu_model()}", "call", "us", "p20 to p80", "ratio"
    )
    for cost in costs:
        table.add_row(f"{cost.name}{' *' if cost.main else ''}", *spread_cells(cost.time_us), f"{cost.ratio:.2f}x")
    show(table)
    print_line("* main figures: K = V = 128, 8 heads, all checks on, offset values included.")
    too_slow = over_limit(costs, options.max_ratio) if options.max_ratio else []
    for cost in too_slow:
        print_line(f"OVER THE LIMIT of {options.max_ratio:g}x: {cost.name}: {cost.ratio:.2f}x")
    return 1 if too_slow else 0


def ref(options: Namespace) -> int:
    """`la-bench ref`."""
    if options.blocks and options.max_ratio:
        raise UsageError("--max-ratio applies to the usual block size. Pass it without --blocks.")
    with progress_bar() as progress:
        task = progress.add_task("interleaved rounds", total=1.0)
        measure = measure_blocks if options.blocks else measure_ref
        costs = measure(options.rounds, lambda done: progress.update(task, completed=done))
    show(_ref_table(costs))
    too_slow = [c for c in costs if options.max_ratio and c.arrangement == IN_TURN and c.ratio > options.max_ratio]
    for cost in too_slow:
        print_line(f"OVER THE LIMIT of {options.max_ratio:g}x: {cost.arrangement}: {cost.ratio:.2f}x")
    return 1 if too_slow else 0


def _ref_table(costs: Sequence[RefCost]) -> Table:
    title = f"la-ref against s.mul_(a) over the same states: 64 rows, 16 heads, K = V = 128, float32, {cpu_model()}"
    table = new_table(title, "states", "decode ms", "p20 to p80", "mul_ ms", "p20 to p80", "ratio")
    for cost in costs:
        table.add_row(cost.arrangement, *spread_cells(cost.decode_ms), *spread_cells(cost.mul_ms), f"{cost.ratio:.2f}x")
    return table
