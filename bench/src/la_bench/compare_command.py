"""`la-bench compare`: options in, tables on the terminal and files out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from rich.table import Table

from la_bench.environment import read_environment
from la_bench.errors import UsageError
from la_bench.gpu_timing import require_cuda
from la_bench.grid import GRID_FULL, GRID_QUICK, STATE_DTYPES, GridPoint, estimate_seconds, in_words
from la_bench.peers import PEERS, select_peers
from la_bench.report_grid import host_table, time_table
from la_bench.report_text import STATUS_WORDS, error, percent, time, times
from la_bench.rows import Row
from la_bench.run_compare import run_compare
from la_bench.run_grid import run_grid
from la_bench.terminal import filled_table, new_table, print_line, progress_bar, show
from la_bench.timing import FULL, QUICK
from la_bench.variants import (
    BASELINE,
    backend_variants,
    floor_variants,
    peer_variants,
    select_backends,
)
from la_bench.workloads import make_workload, select_workloads
from la_bench.write_report import check_folder, write_report
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
        print_line(
            f"{len(points)} points x {len(variants)} variants, about {in_words(seconds)}. Ctrl-C keeps what is done."
        )
    with progress_bar() as progress:
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
        show(table)
    for backend, reason in dict.fromkeys(
        (f"{STATUS_WORDS[row.status]}: {row.backend.name} on {row.workload.name}", row.reason)
        for row in rows
        if row.status in ("failed", "error")
    ):
        print_line(f"{backend}: {reason}")
    for path in write_report(rows, options.out):
        print_line(str(path))
    if any(row.status == "interrupted" for row in rows):
        return 130
    # A peer that is wrong is a finding, not a failure of this project.
    statuses = {row.status for row in rows if row.backend.kind != "peer"}
    ran = any(row.status == "ok" for row in rows if row.backend.kind == "backend")
    return 1 if statuses & {"failed", "error"} or not ran else 0


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


def _compare_table(rows: Sequence[Row]) -> Table:
    columns = ("workload", "backend", "time", "of copy", "vs ref", "error out", "of state")
    table = new_table("Lightning Attention decode", *columns, words=2)
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
        tables.append(filled_table(f"H = {heads}: {kind} of a call in us", content))
    host = host_table(rows)
    return [*tables, filled_table("host time of a call in us", host)] if host else tables
