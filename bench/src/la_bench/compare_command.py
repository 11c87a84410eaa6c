"""`la-bench compare`: options in, tables on the terminal and files out."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from la_bench.environment import Environment, read_environment
from la_bench.errors import UsageError
from la_bench.gpu_timing import require_cuda
from la_bench.grid import DTYPES, GRID_FULL, GRID_QUICK, GridPoint, estimate_seconds, estimate_setup_seconds, in_words
from la_bench.grid_spec import default_grid, parse_grid
from la_bench.option_words import option_words, pair_words
from la_bench.peers import PEERS, select_peers
from la_bench.report_content import kernel_table
from la_bench.report_grid import host_table, time_table
from la_bench.report_text import STATUS_WORDS, count, error, percent, time, times
from la_bench.report_window import window_tables
from la_bench.row_file import RowFile, rows_in
from la_bench.rows import Row
from la_bench.run_compare import estimate_workload_seconds, run_compare
from la_bench.run_grid import run_grid
from la_bench.run_window import check_layers_fit, estimate_window_seconds, run_window
from la_bench.terminal import filled_table, new_table, print_line, progress_bar, show
from la_bench.timing import FULL, QUICK, Effort
from la_bench.variants import (
    BASELINE,
    Variant,
    backend_variants,
    floor_variants,
    peer_variants,
    select_backends,
)
from la_bench.window_spec import CPU_GRID, DECODE, GRIDS, QUICK_GRIDS, WindowSpec, window_spec
from la_bench.window_variants import window_variants
from la_bench.workloads import make_workload, select_workloads
from la_bench.write_report import ROWS, check_folder, write_report
from la_core import list_backends
from la_core.spec.decode_problem import StateLayout, compute_capability


@dataclass(frozen=True)
class Plan:
    """What a command line asks for: points of a grid, or names of workloads, and what to run on them."""

    device: torch.device
    points: Sequence[GridPoint]
    workloads: Sequence[str]
    variants: Sequence[Variant]
    environment: Environment
    effort: Effort
    window: WindowSpec | None


def compare(options: Namespace) -> int:
    """`la-bench compare`."""
    if options.device == "cuda":
        require_cuda()
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    if options.list:
        return _list_compare(options, device)
    plan = _plan(options, device)
    file = RowFile(options.out / ROWS, _complain)
    rows = _measure(plan, file)
    # Before the files: if they cannot be written, the figures are at least here.
    _show_rows(rows)
    try:
        paths = write_report(rows, options.out, rows_are_there=file.holds(rows))
    except OSError as reason:
        kept = rows_in(file.path)
        _complain(
            f"{options.out}: {reason.strerror or reason}. No report was written. "
            f"{'All' if kept == len(rows) else f'The first {kept} of'} {len(rows)} rows are in {file.path}: "
            f"la-bench report {file.path} --out ELSEWHERE makes it of them."
        )
        return _exit_status(rows) or 1
    for path in paths:
        print_line(str(path))
    return _exit_status(rows)


def _plan(options: Namespace, device: torch.device) -> Plan:
    """Everything that can be wrong with the options is found here, before anything is measured."""
    spec = window_spec(options.op, options.window, options.drafts, options.layers)
    backends = select_backends(options.backends)
    paths = dict(options.peer)
    peers = _peers(options, paths, device)
    points = _grid_points(options, device)
    if spec is not None:
        check_layers_fit(points, spec)
    if points and BASELINE not in options.backends and device.type == "cuda":
        # Plain torch stands there as a peer; la-ref is no faster and takes longer than all others together.
        backends = tuple(name for name in backends if name != BASELINE)
    names = select_workloads(device.type, options.workloads, quick=options.quick)
    check_folder(options.out)
    arch = compute_capability(device)
    if spec is None:
        variants = backend_variants(backends, arch) + floor_variants(arch)
    else:
        variants = window_variants(backends, spec, arch)
    variants += peer_variants(peers, paths)
    words = options_in_words(options, points)
    environment = read_environment(device, seed=options.seed, quick=options.quick, options=words)
    quick, full = (GRID_QUICK, GRID_FULL) if points else (QUICK, FULL[device.type])
    return Plan(device, points, names, variants, environment, quick if options.quick else full, spec)


def _peers(options: Namespace, paths: dict[str, Path], device: torch.device) -> tuple[str, ...]:
    """Names of the peers to run; all of them decode, so that there are none for what cannot be set against decode."""
    decodes = options.op in (DECODE, "deferred")
    if not decodes and (options.peers or paths):
        raise UsageError("--peers and --peer belong to --op decode and deferred: the peers decode and do not verify.")
    return select_peers(options.peers, paths, by_default=decodes and device.type == "cuda")


def _measure(plan: Plan, file: RowFile) -> list[Row]:
    """Run the plan; rows go to the file as soon as they are there."""
    print_line(f"{_size_in_words(plan)}. Ctrl-C keeps what is done.")
    with progress_bar() as progress:
        task = progress.add_task("", total=1.0)

        def say(subject: str, doing: str) -> None:
            progress.update(task, description=f"{subject}: {doing}" if subject else doing)

        def tick(done: float) -> None:
            progress.update(task, completed=done)

        what = (plan.variants, plan.device, plan.environment, plan.effort)
        try:
            if plan.window is not None:
                return run_window(plan.points, plan.window, *what, say=say, tick=tick, keep=file.add)
            if plan.points:
                return run_grid(plan.points, *what, say=say, tick=tick, keep=file.add)
            workloads = [make_workload(name, plan.device.type, plan.environment.seed) for name in plan.workloads]
            return run_compare(workloads, *what, say=say, tick=tick, keep=file.add)
        finally:
            for variant in plan.variants:
                variant.close()


def _size_in_words(plan: Plan) -> str:
    """What will be run, and about how long that takes."""
    names = [variant.name for variant in plan.variants if variant.untimed is None]
    interpreted = len(plan.variants) - len(names)
    seconds = estimate_setup_seconds(plan.device.type, len(plan.points or plan.workloads), interpreted)
    if plan.window is not None:
        spec = plan.window
        seconds += sum(estimate_window_seconds(point, names, plan.effort, spec) for point in plan.points)
        subjects = count(len(plan.points), "point")
    elif plan.points:
        seconds += sum(estimate_seconds(point, names, plan.effort) for point in plan.points)
        subjects = count(len(plan.points), "point")
    else:
        seconds += len(plan.workloads) * estimate_workload_seconds(len(names), plan.effort, plan.device.type)
        subjects = count(len(plan.workloads), "workload")
    return f"{subjects} x {count(len(plan.variants), 'variant')}, about {in_words(seconds)}"


def _show_rows(rows: Sequence[Row]) -> None:
    for table in _tables(rows):
        show(table)
    kernels = kernel_table(rows)
    if kernels is not None:
        show(filled_table("kernels made, over the whole run", kernels))
    for backend, reason in dict.fromkeys(
        (f"{STATUS_WORDS[row.status]}: {row.backend.name} on {row.workload.name}", row.reason)
        for row in rows
        if row.status in ("failed", "error")
    ):
        print_line(f"{backend}: {reason}")


def _tables(rows: Sequence[Row]) -> list[Table]:
    if rows[0].workload.op is not None:
        return [filled_table(title, content) for title, content in window_tables(rows)]
    return _grid_tables(rows) if rows[0].workload.grid else [_compare_table(rows)]


def _complain(sentence: str) -> None:
    sys.stderr.write(f"la-bench compare: {sentence}\n")


def _exit_status(rows: Sequence[Row]) -> int:
    if any(row.status == "interrupted" for row in rows):
        return 130
    # A peer that is wrong is a finding, not a failure of this project.
    statuses = {row.status for row in rows if row.backend.kind != "peer"}
    ran = any(row.status == "ok" for row in rows if row.backend.kind == "backend")
    return 1 if statuses & {"failed", "error"} or not ran else 0


def options_in_words(options: Namespace, points: Sequence[GridPoint]) -> str:
    """The options that decide what is measured; of a path the last part, since rows are made to be shown around."""
    words = option_words(options, "quick", "op", "window", "drafts", "layers")
    if options.grid is not None:
        words += pair_words("grid", [(point.H, point.B) for point in points])
    words += option_words(options, "backends", "workloads", "peers")
    for name, path in options.peer:
        words += ["--peer", f"{name}={path.name}"]
    words += option_words(options, "dtype", "state-dtype", "layout", "seed", "device")
    return " ".join(words)


def _list_compare(options: Namespace, device: torch.device) -> int:
    for name in select_workloads(device.type, options.workloads, quick=options.quick):
        workload = make_workload(name, device.type, options.seed)
        print_line(f"{workload.name}: {workload.description}")
    for info in list_backends():
        print_line(f"backend {info.name}: {info.distribution}{f': {info.error}' if info.error else ''}")
    for peer in PEERS:
        print_line(f"peer {peer}")
    return 0


def _grid_points(options: Namespace, device: torch.device) -> list[GridPoint]:
    """The points that were asked for; on a GPU a grid is what is run if nothing is asked for."""
    grid = options.grid
    if options.op != DECODE:
        if options.workloads:
            raise UsageError("--workloads belong to --op decode: operators with a window run on a grid. Pass --grid.")
        grid = grid or parse_grid(_window_grid(options, device))
    elif grid == () or (grid is None and device.type == "cuda" and not options.workloads):
        grid = parse_grid(default_grid(device.type, quick=options.quick))
    if grid is None:
        if options.dtype or options.state_dtype or options.layout:
            raise UsageError("--dtype, --state-dtype and --layout belong to --grid; models have theirs. Pass it too.")
        return []
    if options.workloads:
        raise UsageError("--grid and --workloads are two kinds of runs. Pass one of them.")
    state_dtype = DTYPES[options.state_dtype or "float32"]
    layout: StateLayout = options.layout or "vk"
    io_dtype = DTYPES[options.dtype or "bfloat16"]
    points = [GridPoint(H, B, state_dtype, layout, device.type, io_dtype) for H, B in grid]
    too_large = [point.name for point in points if not point.fits]
    if too_large:
        raise UsageError(f"--grid: the states of {too_large[0]} do not fit into the largest pool. Pass smaller sizes.")
    return points


def _window_grid(options: Namespace, device: torch.device) -> str:
    if device.type != "cuda":
        return CPU_GRID
    return (QUICK_GRIDS if options.quick else GRIDS)[str(options.op)]


def _compare_table(rows: Sequence[Row]) -> Table:
    columns = ("workload", "backend", "time", "of copy", "vs ref", "error out", "of state")
    table = new_table("Lightning Attention decode", *columns, words=2)
    for row in rows:
        result = row.result
        if row.accuracy is not None:
            errors = error(row.accuracy.out_error), error(row.accuracy.state_error)
            table.add_row(row.workload.name, row.backend.name, STATUS_WORDS[row.status], "", "", *errors)
            continue
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
        tables.append(filled_table(f"H = {heads}: {kind} of a call in us", content))
    host = host_table(rows)
    return [*tables, filled_table("host time of a call in us", host)] if host else tables
