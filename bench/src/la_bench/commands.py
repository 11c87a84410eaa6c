"""The commands of `la-bench` that measure one thing: options in, tables on the terminal and files out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from rich.table import Table

from la_bench.environment import cpu_model
from la_bench.errors import UsageError
from la_bench.host_overhead import measure_host, over_limit
from la_bench.ref_cost import IN_TURN, RefCost, measure_blocks, measure_ref
from la_bench.terminal import new_table, print_line, progress_bar, show, spread_cells


def host(options: Namespace) -> int:
    """`la-bench host`."""
    with progress_bar() as progress:
        task = progress.add_task("interleaved calls", total=1.0)
        costs = measure_host(options.samples, lambda done: progress.update(task, completed=done))
    table = new_table(
        f"operators around a backend that does nothing, {cpu_model()}", "call", "us", "p20 to p80", "ratio"
    )
    for cost in costs:
        table.add_row(f"{cost.name}{' *' if cost.main else ''}", *spread_cells(cost.time_us), f"{cost.ratio:.2f}x")
    show(table)
    print_line("* main figures: K = V = 128, 8 heads, all checks on, values of offsets and cursors included.")
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
