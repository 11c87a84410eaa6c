"""What commands print: tables, lines of their own, and bars while something is measured."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from la_bench.report_blocks import Table as ReportTable
from la_bench.report_text import number
from la_bench.timing import Spread


def filled_table(title: str, content: ReportTable) -> Table:
    """A table of a report, for the terminal."""
    table = new_table(title, *content.columns, words=content.text_columns)
    for line in content.rows:
        table.add_row(*line)
    return table


def new_table(title: str, *columns: str, words: int = 1) -> Table:
    """A table without lines yet; the first `words` columns are words, the others numbers."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", caption_justify="left"
    )
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n < words else "right", no_wrap=n < words)
    return table


def spread_cells(spread: Spread) -> tuple[str, str]:
    """Median, and p20 to p80."""
    return number(spread.median), f"{number(spread.p20)} to {number(spread.p80)}"


def print_line(line: str) -> None:
    """A line of its own on stdout, unwrapped: programs read paths from there. Lines of a reason are joined."""
    sys.stdout.write(re.sub(r"\s*\n\s*", " ", line) + "\n")


def show(table: Table) -> None:
    """Print a table on stdout."""
    # Where there is no terminal nothing limits the width, and rich would assume 80 columns.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@contextmanager
def progress_bar() -> Iterator[Progress]:
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
