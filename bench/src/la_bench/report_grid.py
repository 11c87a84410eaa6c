"""What a report of a grid says: tables of times, of ratios and of all results for each number of heads."""

from __future__ import annotations

from collections.abc import Sequence

from la_bench.grid_plots import grid_plots
from la_bench.report_blocks import Block, Bullets, Folded, Heading, Paragraph, Table
from la_bench.report_content import (
    AGAINST_COLUMNS,
    TRIED,
    against_others,
    doubts,
    environment_blocks,
    fastest_peer,
    judged_only,
    kernel_blocks,
    not_run,
    notes,
    ours,
    plain_lead,
    trouble,
    without_empty_columns,
)
from la_bench.report_text import (
    FULL_COLUMNS,
    HOW_TO_READ_GRID,
    STATUS_WORDS,
    count,
    error,
    full_cells,
    memory,
    number,
    percent,
    times,
)
from la_bench.rows import Row, ok_rows
from la_bench.timing import spread

TITLE = "Lightning Attention decode: a grid of sizes"


def grid_blocks(rows: Sequence[Row]) -> list[Block]:
    """The whole report, in order."""
    environment, facts = rows[0].environment, rows[0].workload
    points = dict.fromkeys(row.workload.name for row in rows)
    depth = "A quick run, with few samples, of" if environment.quick else "A run of"
    speeds = [result.copy_gb_per_s for _, result in ok_rows(rows)]
    copy = f" A large copy moves {number(min(speeds))} to {number(max(speeds))} GB/s." if speeds else ""
    blocks: list[Block] = [
        Heading(1, TITLE),
        Paragraph(
            f"{depth} {count(len(points), 'point')} on {environment.machine} ({environment.device}), "
            f"{environment.utc}. K = V = {facts.K}, q, k, v in {facts.io_dtype}, states in {facts.state_dtype}, "
            f"layout {facts.state_layout}; full batches, slots in random order.{copy}"
        ),
        *against_others(rows),
        *judged_only(rows),
        *trouble(rows),
        *doubts(rows),
        *_best_by_states(rows),
    ]
    plots = grid_plots(rows)
    blocks += [Heading(2, "Plots"), *plots] if plots else []
    kind = "Device time" if environment.device == "cuda" else "Time"
    for heads in dict.fromkeys(row.workload.H for row in rows):
        here = [row for row in rows if heads == row.workload.H]
        blocks += [Heading(2, f"H = {heads}"), Paragraph(f"{kind} of a call in microseconds, medians:")]
        blocks.append(time_table(here))
        ratios = ratio_table(here)
        if ratios is not None:
            blocks += [Paragraph("How many times faster than the fastest peer, and share of the floor:"), ratios]
    host = host_table(rows)
    if host is not None:
        words = "Time that Python is busy with a call, in microseconds, over the points with small calls:"
        blocks += [Heading(2, "Host time"), Paragraph(words), host]
    if ok_rows(rows):
        words = "Relative L2 error against float64 in the worst (row, head), over the points:"
        blocks += [Heading(2, "Accuracy"), Paragraph(words), accuracy_table(rows)]
        words = "Peak of what a call allocates beyond arguments and output, over the points:"
        blocks += [Heading(2, "Extra memory"), Paragraph(words), memory_table(rows)]
    return [
        *blocks,
        *complete_tables(rows),
        *kernel_blocks(rows),
        *notes(rows),
        *not_run(rows),
        *environment_blocks(rows),
        Heading(2, "How to read this report"),
        Bullets(HOW_TO_READ_GRID),
    ]


def complete_tables(rows: Sequence[Row]) -> list[Block]:
    """All that is known about each time, in a table for each number of heads."""
    tables = []
    for heads in dict.fromkeys(row.workload.H for row in rows):
        shown = [row for row in rows if heads == row.workload.H and row.status in TRIED]
        cells = [(str(_batch([row])), *full_cells(row)) for row in shown]
        table = without_empty_columns(("B", "variant", "time", *FULL_COLUMNS[2:]), cells, text_columns=2)
        tables += [Folded(f"H = {heads}: {count(len(cells), 'row')}", table)] if cells else []
    return [Heading(2, "All results"), *tables] if tables else []


def points_by_states(rows: Sequence[Row]) -> list[list[Row]]:
    """For each number of states in a call, heads x rows, the rows of the point with the fewest heads."""
    points: dict[int, list[Row]] = {}
    for here in sorted(_by_batch(rows), key=lambda here: here[0].workload.H):
        points.setdefault(here[0].workload.H * _batch(here), here)
    return [here for _, here in sorted(points.items())]


def _best_by_states(rows: Sequence[Row]) -> list[Block]:
    """The fastest backend, its share of both limits and its lead over the fastest peer, by states in a call."""
    columns = ("H", "B", "best backend", "time in us", "share of copy bandwidth", *AGAINST_COLUMNS)
    lines = []
    for here in points_by_states(rows):
        best = min(ours(here), key=lambda pair: pair[1].time_us, default=None)
        point = (str(here[0].workload.H), str(_batch(here)))
        if best is None:
            lines.append((*point, "none", *("-",) * (len(columns) - 3)))
            continue
        row, result = best
        floor = "-" if result.share_of_floor is None else percent(result.share_of_floor)
        cells = (number(result.time_us), percent(result.share_of_copy), floor)
        leads = (times(result.speedup_vs_peer), times(plain_lead(here, row.workload.name)))
        lines.append((*point, row.backend.name, *cells, *leads))
    words = "The fastest backend by states in a call, each number of states at the fewest heads that have it:"
    return [Paragraph(words), without_empty_columns(columns, lines, text_columns=3)]


def time_table(
    rows: Sequence[Row], copy_floor_of: Sequence[Row] | None = None, copy_floor: str = "copy floor"
) -> Table:
    """Times of one number of heads: a line for each B, a column for each variant that was tried.

    The copy floor is that of the first of some rows, or of all, at a point: it follows the bytes of a call. Its column
    can say of which call.
    """
    names = _tried(rows)
    lines = []
    for rows_of_point in _by_batch(rows):
        by_name = {row.backend.name: row for row in rows_of_point}
        chosen = rows if copy_floor_of is None else copy_floor_of
        point = rows_of_point[0].workload.name
        floors = [result.copy_floor_us for row, result in ok_rows(chosen) if row.workload.name == point]
        floor = number(floors[0]) if floors else "-"
        lines.append((str(_batch(rows_of_point)), floor, *(_time(by_name.get(name)) for name in names)))
    return Table(("B", copy_floor, *names), tuple(lines))


def ratio_table(rows: Sequence[Row]) -> Table | None:
    """Two columns for each of our variants; None where there is neither a peer nor a floor."""
    names = list(dict.fromkeys(row.backend.name for row, _ in ours(rows)))
    compared = [r for _, r in ours(rows) if r.speedup_vs_peer is not None or r.share_of_floor is not None]
    if not compared:
        return None
    lines = []
    for rows_of_point in _by_batch(rows):
        results = {row.backend.name: result for row, result in ours(rows_of_point)}
        cells = [str(_batch(rows_of_point)), fastest_peer(rows_of_point, rows_of_point[0].workload.name)]
        for name in names:
            result = results.get(name)
            cells.append(times(result.speedup_vs_peer) if result else "-")
            cells.append("-" if result is None or result.share_of_floor is None else percent(result.share_of_floor))
        lines.append(tuple(cells))
    columns = ["B", "fastest peer"]
    for name in names:
        columns += [f"{name}, vs peer", f"{name}, of floor"]
    return Table(tuple(columns), tuple(lines), text_columns=2)


def host_table(rows: Sequence[Row]) -> Table | None:
    """Median over the points, and their span, of each variant; None without any.

    Floors are left out: they are floors of device time, launched by Triton's own slow launcher.
    """
    lines = []
    floors = {row.backend.name for row in rows if row.backend.kind == "floor"}
    for name in (name for name in _tried(rows) if name not in floors):
        host = [r.host_us for row, r in ok_rows(rows) if row.backend.name == name and r.host_us is not None]
        if host:
            lines.append((name, number(spread(host).median), f"{number(min(host))} to {number(max(host))}"))
    return Table(("variant", "median", "least to most"), tuple(lines)) if lines else None


def accuracy_table(rows: Sequence[Row]) -> Table:
    """Median and largest error of output and state over the points, for each variant with a result."""
    lines = []
    for name in dict.fromkeys(row.backend.name for row, _ in ok_rows(rows)):
        results = [result for row, result in ok_rows(rows) if row.backend.name == name]
        cells: list[str] = []
        for errors in ([r.out_error for r in results], [r.state_error for r in results]):
            known = [one for one in errors if one is not None]
            cells += [error(spread(known).median), error(max(known))] if known else ["-", "-"]
        lines.append((name, *cells))
    return Table(("variant", "out, median", "out, most", "state, median", "state, most"), tuple(lines))


def memory_table(rows: Sequence[Row]) -> Table:
    """Extra memory at the point that needs least and at the one that needs most, for each variant with a result."""
    lines = []
    for name in dict.fromkeys(row.backend.name for row, _ in ok_rows(rows)):
        extra = [(result.extra_bytes, row.workload.name) for row, result in ok_rows(rows) if row.backend.name == name]
        (least, _), (most, where) = min(extra), max(extra)
        lines.append((name, memory(least), memory(most), where if most > least else "all"))
    return Table(("variant", "least", "most", "where most"), tuple(lines))


def _tried(rows: Sequence[Row]) -> list[str]:
    """Names of variants with a result, or a fault, somewhere."""
    return list(dict.fromkeys(row.backend.name for row in rows if row.status in ("ok", "failed", "error")))


def _by_batch(rows: Sequence[Row]) -> list[list[Row]]:
    points = dict.fromkeys(row.workload.name for row in rows)
    return [[row for row in rows if row.workload.name == point] for point in points]


def _batch(rows: Sequence[Row]) -> int:
    return rows[0].workload.padded_rows[0]


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return number(row.result.time_us) if row.result else STATUS_WORDS[row.status]
