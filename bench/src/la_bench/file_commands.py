"""The commands of `la-bench` that measure nothing: rows and records in, tables and reports out."""

from __future__ import annotations

import functools
from argparse import Namespace

from la_bench.compare_runs import change_table, check_one_run, compare_runs, read_rows, summary_table, unmatched
from la_bench.records import present_hash, read_records, record_lines, records_folder, summary_lines
from la_bench.terminal import filled_table, print_line, show
from la_bench.write_report import ROWS, check_folder, unusable, write_report


def diff(options: Namespace) -> int:
    """`la-bench diff`."""
    old, new = read_rows(options.old), read_rows(options.new)
    difference = compare_runs(old, new, resolution=options.resolution / 100, any_machine=options.any_machine)
    changes = change_table(difference)
    if changes.rows:
        show(filled_table(f"{options.old} -> {options.new}", changes))
    for line in unmatched(difference):
        print_line(line)
    for note in difference.notes:
        print_line(f"differs: {note}")
    summary = summary_table(difference)
    if summary.rows:
        show(filled_table("rows by verdict", summary))
    for change in difference.bad:
        print_line(f"{change.verdict}: {change.key}{f': {change.new.reason}' if change.new.reason else ''}")
    for fault in difference.faults:
        print_line(fault)
    if difference.changes and not difference.any_times:
        print_line("No row has a time in both runs: no times were compared.")
    if not difference.changes:
        print_line("No row of OLD has a counterpart in NEW: nothing was compared.")
    return 1 if difference.bad or difference.faults or not difference.changes else 0


def records(options: Namespace) -> int:
    """`la-bench records`."""
    found = read_records(options.folder or records_folder())
    present = functools.cache(present_hash)
    for record in found:
        for line in (*record_lines(record, present), ""):
            print_line(line)
    for line in summary_lines(found, present):
        print_line(line)
    return 0


def report(options: Namespace) -> int:
    """`la-bench report`."""
    rows = read_rows(options.rows)
    check_one_run(rows, options.rows)
    check_folder(options.out)
    rows_are_there = options.rows.resolve() == (options.out / ROWS).resolve()
    try:
        paths = write_report(rows, options.out, rows_are_there=rows_are_there)
    except OSError as reason:
        raise unusable(options.out, reason) from reason
    for path in paths:
        print_line(str(path))
    return 0
