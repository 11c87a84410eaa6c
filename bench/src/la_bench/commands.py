"""The commands of `la-bench`: options in, tables on the terminal and files out."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from la_bench.environment import cpu_model, read_environment
from la_bench.errors import UsageError
from la_bench.gpu_timing import GraphTimer, require_cuda
from la_bench.grid import GRID_FULL, GRID_QUICK, STATE_DTYPES, GridPoint, estimate_seconds, in_words
from la_bench.host_overhead import measure_host, over_limit
from la_bench.peers import PEERS, select_peers
from la_bench.ref_cost import IN_TURN, RefCost, measure_blocks, measure_ref
from la_bench.report_blocks import Table as ReportTable
from la_bench.report_grid import host_table, time_table
from la_bench.report_text import STATUS_WORDS, error, number, percent, time, times
from la_bench.rows import Row
from la_bench.run_compare import run_compare
from la_bench.run_grid import run_grid
from la_bench.timing import FULL, QUICK, CopyProbe, Spread
from la_bench.tune import EFFORT as TUNE_EFFORT
from la_bench.tune import UNITS, PackageBackend, show_tiles, tune_json_lines, tune_points, tune_table
from la_bench.tune import tune as tune_backend
from la_bench.variants import (
    BASELINE,
    backend_facts,
    backend_variants,
    floor_variants,
    peer_variants,
    select_backends,
)
from la_bench.workloads import make_workload, select_workloads
from la_bench.write_report import check_file, check_folder, write_file, write_report
from la_core import list_backends
from la_core.spec.decode_problem import StateLayout, compute_capability


def compare(options: Namespace) -> int:
    """`la-bench compare`."""
    if options.device == "cuda":
        require_cuda()
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    backends = select_backends(options.backends)
    if options.list:
        return _list_compare(options, device)
    paths = dict(options.peer)
    peers = select_peers(options.peers, paths, by_default=device.type == "cuda")
    points = _grid_points(options, device)
    if points and BASELINE not in options.backends and device.type == "cuda":
        # Plain torch stands there as a peer; la-ref is no faster and takes longer than all others together.
        backends = tuple(name for name in backends if name != BASELINE)
    names = select_workloads(device.type, options.workloads, quick=options.quick)
    check_folder(options.out)
    arch = compute_capability(device)
    variants = backend_variants(backends, arch) + floor_variants(arch) + peer_variants(peers, paths)
    environment = read_environment(device, seed=options.seed, quick=options.quick)
    effort = QUICK if options.quick else FULL
    if points:
        effort = GRID_QUICK if options.quick else GRID_FULL
        seconds = sum(estimate_seconds(point, [v.name for v in variants], effort) for point in points)
        _say(f"{len(points)} points x {len(variants)} variants, about {in_words(seconds)}. Ctrl-C keeps what is done.")
    with _progress() as progress:
        task = progress.add_task("", total=1.0)

        def say(subject: str, doing: str) -> None:
            progress.update(task, description=f"{subject}: {doing}" if subject else doing)

        def tick(done: float) -> None:
            progress.update(task, completed=done)

        if points:
            rows = run_grid(points, variants, device, environment, effort, say=say, tick=tick)
        else:
            workloads = [make_workload(name, device.type, options.seed) for name in names]
            rows = run_compare(workloads, variants, device, environment, effort, say=say, tick=tick)
    # Before the files: if they cannot be written, the figures are at least here.
    for table in _grid_tables(rows) if points else [_compare_table(rows)]:
        _show(table)
    for backend, reason in dict.fromkeys(
        (f"{STATUS_WORDS[row.status]}: {row.backend.name} on {row.workload.name}", row.reason)
        for row in rows
        if row.status in ("failed", "error")
    ):
        _say(f"{backend}: {reason}")
    for path in write_report(rows, options.out):
        _say(str(path))
    if any(row.status == "interrupted" for row in rows):
        return 130
    # A peer that is wrong is a finding, not a failure of this project.
    statuses = {row.status for row in rows if row.backend.kind != "peer"}
    ran = any(row.status == "ok" for row in rows if row.backend.kind == "backend")
    return 1 if statuses & {"failed", "error"} or not ran else 0


def _list_compare(options: Namespace, device: torch.device) -> int:
    for name in select_workloads(device.type, options.workloads, quick=options.quick):
        workload = make_workload(name, device.type, options.seed)
        _say(f"{workload.name}: {workload.description}")
    for info in list_backends():
        _say(f"backend {info.name}: {info.distribution}{f': {info.error}' if info.error else ''}")
    for peer in PEERS:
        _say(f"peer {peer}")
    return 0


def _grid_points(options: Namespace, device: torch.device) -> list[GridPoint]:
    """The points that were asked for; none without `--grid`."""
    if options.grid is None:
        if options.state_dtype or options.layout:
            raise UsageError("--state-dtype and --layout belong to --grid; models have theirs. Pass --grid too.")
        return []
    if options.workloads:
        raise UsageError("--grid and --workloads are two kinds of runs. Pass one of them.")
    state_dtype = STATE_DTYPES[options.state_dtype or "float32"]
    layout: StateLayout = options.layout or "vk"
    points = [GridPoint(H, B, state_dtype, layout, device.type) for H, B in options.grid]
    too_large = [point.name for point in points if not point.fits]
    if too_large:
        raise UsageError(f"--grid: the states of {too_large[0]} do not fit into the largest pool. Pass smaller sizes.")
    return points


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
    with _progress() as progress:
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
    _show(_filled(f"tiles of {words}: states in a call, and what the present choice costs", tune_table(tuned)))
    if options.out is not None and tuned:
        environment = read_environment(device, seed=0, quick=False)
        write_file(options.out, tune_json_lines(tuned, backend_facts(options.backend), environment))
    faults = [(one.units, tile) for one in tuned for tile in one.times if tile.fault]
    for units, tile in faults:
        _say(f"FAILED: {show_tiles(tile.tiles)} at {units} units: {tile.fault}")
    if stopped is not None:
        left = ", ".join(str(point.H * point.B) for point in points[len(tuned) :])
        what = "stopped by Ctrl-C" if isinstance(stopped, KeyboardInterrupt) else f"{type(stopped).__name__}: {stopped}"
        _say(f"{what}; states in a call not finished: {left}")
    if isinstance(stopped, KeyboardInterrupt):
        return 130
    return 1 if faults or stopped else 0


def host(options: Namespace) -> int:
    """`la-bench host`."""
    with _progress() as progress:
        task = progress.add_task("interleaved calls", total=1.0)
        costs = measure_host(options.samples, lambda done: progress.update(task, completed=done))
    table = _table(
        f"la_core.decode around a backend that does nothing, {cpu_model()}", "call", "us", "p20 to p80", "ratio"
    )
    for cost in costs:
        table.add_row(f"{cost.name}{' *' if cost.main else ''}", *_spread_cells(cost.time_us), f"{cost.ratio:.2f}x")
    _show(table)
    _say("* main figures: K = V = 128, 8 heads, all checks on, offset values included.")
    too_slow = over_limit(costs, options.max_ratio) if options.max_ratio else []
    for cost in too_slow:
        _say(f"OVER THE LIMIT of {options.max_ratio:g}x: {cost.name}: {cost.ratio:.2f}x")
    return 1 if too_slow else 0


def ref(options: Namespace) -> int:
    """`la-bench ref`."""
    if options.blocks and options.max_ratio:
        raise UsageError("--max-ratio applies to the usual block size. Pass it without --blocks.")
    with _progress() as progress:
        task = progress.add_task("interleaved rounds", total=1.0)
        measure = measure_blocks if options.blocks else measure_ref
        costs = measure(options.rounds, lambda done: progress.update(task, completed=done))
    _show(_ref_table(costs))
    too_slow = [c for c in costs if options.max_ratio and c.arrangement == IN_TURN and c.ratio > options.max_ratio]
    for cost in too_slow:
        _say(f"OVER THE LIMIT of {options.max_ratio:g}x: {cost.arrangement}: {cost.ratio:.2f}x")
    return 1 if too_slow else 0


def _compare_table(rows: Sequence[Row]) -> Table:
    columns = ("workload", "backend", "time", "of copy", "vs ref", "error out", "of state")
    table = _table("Lightning Attention decode", *columns, words=2)
    for row in rows:
        result = row.result
        if result is None:
            if row.status not in ("unavailable", "interrupted"):
                table.add_row(row.workload.name, row.backend.name, STATUS_WORDS[row.status])
            continue
        table.add_row(
            row.workload.name,
            row.backend.name,
            time(result.time_us),
            percent(result.share_of_copy),
            times(result.speedup_vs_ref),
            error(result.out_error),
            error(result.state_error),
        )
    missing = dict.fromkeys(row.backend.name for row in rows if row.status == "unavailable")
    stopped = dict.fromkeys(row.workload.name for row in rows if row.status == "interrupted")
    captions = [f"not available: {', '.join(missing)}; the report says why"] if missing else []
    captions += [f"stopped by Ctrl-C; not finished: {', '.join(stopped)}"] if stopped else []
    table.caption = "\n".join(captions)
    return table


def _grid_tables(rows: Sequence[Row]) -> list[Table]:
    """A table of times for each number of heads, and one of host times."""
    tables = []
    kind = "device time" if rows[0].environment.device == "cuda" else "time"
    for heads in dict.fromkeys(row.workload.H for row in rows):
        content = time_table([row for row in rows if heads == row.workload.H])
        tables.append(_filled(f"H = {heads}: {kind} of a call in us", content))
    host = host_table(rows)
    return [*tables, _filled("host time of a call in us", host)] if host else tables


def _filled(title: str, content: ReportTable) -> Table:
    table = _table(title, *content.columns, words=content.text_columns)
    for line in content.rows:
        table.add_row(*line)
    return table


def _ref_table(costs: Sequence[RefCost]) -> Table:
    title = f"la-ref against s.mul_(a) over the same states: 64 rows, 16 heads, K = V = 128, float32, {cpu_model()}"
    table = _table(title, "states", "decode ms", "p20 to p80", "mul_ ms", "p20 to p80", "ratio")
    for cost in costs:
        table.add_row(
            cost.arrangement, *_spread_cells(cost.decode_ms), *_spread_cells(cost.mul_ms), f"{cost.ratio:.2f}x"
        )
    return table


def _table(title: str, *columns: str, words: int = 1) -> Table:
    table = Table(
        title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", caption_justify="left"
    )
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n < words else "right", no_wrap=n < words)
    return table


def _spread_cells(spread: Spread) -> tuple[str, str]:
    return number(spread.median), f"{number(spread.p20)} to {number(spread.p80)}"


def _say(line: str) -> None:
    """A line of its own on stdout, unwrapped: programs read paths from there."""
    sys.stdout.write(line + "\n")


def _show(table: Table) -> None:
    # Where there is no terminal nothing limits the width, and rich would assume 80 columns.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on stderr, gone when the work is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
