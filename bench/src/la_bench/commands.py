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
from la_bench.gpu_timing import require_cuda
from la_bench.host_overhead import measure_host, over_limit
from la_bench.ref_cost import IN_TURN, RefCost, measure_blocks, measure_ref
from la_bench.report_text import STATUS_WORDS, number, percent, time, times
from la_bench.rows import Row
from la_bench.run_compare import run_compare, select_backends
from la_bench.timing import FULL, QUICK, Spread
from la_bench.workloads import make_workload, select_workloads
from la_bench.write_report import check_folder, write_report
from la_core import list_backends


def compare(options: Namespace) -> int:
    """`la-bench compare`."""
    if options.device == "cuda":
        require_cuda()
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    names = select_workloads(device.type, options.workloads, quick=options.quick)
    backends = select_backends(options.backends)
    workloads = [make_workload(name, device.type, options.seed) for name in names]
    if options.list:
        for workload in workloads:
            _say(f"{workload.name}: {workload.description}")
        for info in list_backends():
            _say(f"backend {info.name}: {info.distribution}{f': {info.error}' if info.error else ''}")
        return 0
    check_folder(options.out)
    environment = read_environment(device, seed=options.seed, quick=options.quick)
    with _progress() as progress:
        task = progress.add_task("", total=1.0)

        def say(workload: str, doing: str) -> None:
            progress.update(task, description=f"{workload}: {doing}" if workload else doing)

        rows = run_compare(
            workloads,
            backends,
            device,
            environment,
            QUICK if options.quick else FULL,
            say=say,
            tick=lambda done: progress.update(task, completed=done),
        )
    paths = write_report(rows, options.out)
    _show(_compare_table(rows))
    for row in rows:
        if row.status in ("failed", "error"):
            _say(f"{STATUS_WORDS[row.status]}: {row.backend.name} on {row.workload.name}: {row.reason}")
    for path in paths:
        _say(str(path))
    statuses = {row.status for row in rows}
    if "interrupted" in statuses:
        return 130
    return 1 if statuses & {"failed", "error"} or "ok" not in statuses else 0


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
            f"{result.out_error:.1e}",
            f"{result.state_error:.1e}",
        )
    missing = dict.fromkeys(row.backend.name for row in rows if row.status == "unavailable")
    stopped = dict.fromkeys(row.workload.name for row in rows if row.status == "interrupted")
    captions = [f"not available: {', '.join(missing)}; the report says why"] if missing else []
    captions += [f"stopped by Ctrl-C; not finished: {', '.join(stopped)}"] if stopped else []
    table.caption = "\n".join(captions)
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
