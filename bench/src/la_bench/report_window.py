"""What a report of an operator with a window says: times, and ratios to what they are set against in the same run.

`Result.time_over` holds these ratios by what they are over:

========== ========================================================================================
recurrent  deferred: decode without a window, same backend, same states, overlap like this one's
decodes    verify: T calls of decode without a window, same backend
commit     verify: verify and immediate commit; commit: one commit for each layer
fold       commit: one fold for each layer, with as many tokens pending
========== ========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from la_bench.report_blocks import Block, Bullets, Heading, Paragraph, Table
from la_bench.report_content import (
    doubts,
    environment_blocks,
    fastest_peer,
    fastest_peers,
    judged_only,
    kernel_blocks,
    not_run,
    notes,
    peers_timed,
    trouble,
    value_range,
)
from la_bench.report_grid import accuracy_table, complete_tables, host_table, memory_table, time_table
from la_bench.report_text import HOW_TO_READ_GRID, count, number, percent, times
from la_bench.rows import Result, Row, ok_rows
from la_bench.window_plots import Ratio, over, over_floor, window_plots

TITLES = {
    "deferred": "Lightning Attention decode with a window",
    "verify": "Lightning Attention verify with a window",
    "commit": "Lightning Attention commit of a window",
}
UNITS = {"deferred": "call", "verify": "step of one layer", "commit": "layer"}
"""What a time is that of."""


def _faster(role: str) -> Ratio:
    """How many times faster than the rival with a role."""
    ratio = over(role)
    return lambda result: None if (value := ratio(result)) is None else 1 / value


COLUMNS: dict[str, tuple[tuple[str, Ratio, Callable[[float], str]], ...]] = {
    "deferred": (
        ("of floor", over_floor, percent),
        ("vs recurrent", _faster("recurrent"), times),
        ("vs peer", lambda result: result.speedup_vs_peer, times),
    ),
    "verify": (
        ("of T decodes", over("decodes"), percent),
        ("of verify + commit", over("commit"), percent),
    ),
    "commit": (
        ("of commits", over("commit"), percent),
        ("of folds", over("fold"), percent),
    ),
}
"""By operator: what stands behind a variant's name in the table of ratios, and what a summary says."""

HEADS = {
    "of floor": "time over the in-place floor, float32 states",
    "vs recurrent": "times as fast as recurrent decode",
    "vs peer": "times as fast as the fastest peer",
    "of T decodes": "time over T calls of decode",
    "of verify + commit": "time over verify and immediate commit",
    "of commits": "time over one commit a layer",
    "of folds": "time over one fold a layer",
}
"""The same columns at more length."""

COPY_FLOORS = {
    "deferred": "copy floor of recurrent decode",
    "verify": "copy floor of T decodes",
    "commit": "copy floor of a commit",
}
"""Head of the column in tables of times: variants with a window move fewer bytes than what they are set against."""

COMMON_TERMS = {
    "Gate": "before anything is timed, a variant makes the calls that are timed, on the same tensors, one after the "
    "other: of a step those of every operator. Some of the rows, full and empty windows among them, are judged against "
    "float64 per (row, head), all cursors are, and all memory that a call must not change is compared bit by bit. A "
    "variant that fails has no time.",
    "Copy floor": "the time that the fewest bytes that a variant can move would take at the speed of a large eager "
    "copy, made once per round beside the calls. Tables of times show that of one call, which the column names; All "
    "results shows each variant's own.",
    "Host time": "how long Python is busy with a call or a step on a GPU, with all checks of la_core on and launches "
    "not waited for, over points with few states.",
}
"""What reads otherwise than for a grid of decode."""

TERMS: dict[str, tuple[tuple[str, str], ...]] = {
    "deferred": (
        (
            "Window",
            "NAME+windowN is la_core.decode with a window of N places. Cursors are uniform over 0 to N pending tokens, "
            "every length as often as each other, so that one row in N + 1 writes its state: the mean over a period. "
            "Timed calls leave the cursors alone. NAME alone is recurrent decode, without a window.",
        ),
        (
            "of floor",
            "time over that of the in-place floor of recurrent decode with float32 states, whatever the states of the "
            "run are, with overlap for variants with overlap. Below 100 % a call is faster than any recurrent decode "
            "can be.",
        ),
    ),
    "verify": (
        (
            "Step",
            "NAME+windowN verifies T drafts, commits the rows that would have no room for T more, and advances by the "
            "accepted ones. Drafts that are accepted are drawn anew for each sample, uniformly over 1 to T: the first "
            "token of a verification was sampled before, and is right. Phases are those of a long run. Commits run "
            "half a lap behind the verification of the same slots, so that both find cold states.",
        ),
        (
            "NAME and NAME+commit",
            "as many calls of recurrent decode on the same rows, each on cold states; and verify with a commit of what "
            "is accepted, whose window holds T tokens and is empty between steps. The commit runs half a lap behind.",
        ),
        (
            "Layers",
            "commit_layers and advance are launched once for all layers of a model. With L layers a step has L "
            "verifications for one launch of each, and the time is divided by L; with L = 1 they are counted in full.",
        ),
        ("Overlap", "none: within a step a kernel reads states and cursors that one just before it has written."),
    ),
    "commit": (
        (
            "Commit",
            "NAME+layers brings the accepted drafts of all layers into their states in one launch, NAME+commit in one "
            "for each layer. NAME+fold folds windows in which the same tokens are pending. Windows are empty before; "
            "accepted drafts are uniform over 1 to T. Times are those of one layer.",
        ),
        ("Overlap", "none is measured."),
    ),
}


def window_blocks(rows: Sequence[Row]) -> list[Block]:
    """The whole report, in order."""
    op = rows[0].workload.op or ""
    environment = rows[0].environment
    speeds = [result.copy_gb_per_s for _, result in ok_rows(rows)]
    copy = f" A large copy moves {number(min(speeds))} to {number(max(speeds))} GB/s." if speeds else ""
    depth = "A quick run, with few samples, of" if environment.quick else "A run of"
    points = dict.fromkeys(row.workload.name for row in rows)
    blocks: list[Block] = [
        Heading(1, TITLES[op]),
        Paragraph(
            f"{depth} {count(len(points), 'point')} on {environment.machine} ({environment.device}), "
            f"{environment.utc}. {setting(rows[0])}{copy}"
        ),
        *summary(rows),
        *judged_only(rows),
        *trouble(rows),
        *doubts(rows),
    ]
    plots = window_plots(rows)
    blocks += [Heading(2, "Plots"), *plots] if plots else []
    for title, table in ratio_tables(rows):
        blocks += [Heading(2, title), table]
    for title, table in time_tables(rows):
        blocks += [Heading(2, title), table]
    host = host_table(rows)
    if host is not None:
        words = f"Time that Python is busy with a {UNITS[op]}, in microseconds, over the points with small calls:"
        blocks += [Heading(2, "Host time"), Paragraph(words), host]
    if ok_rows(rows):
        words = "Relative L2 error against float64 in the worst (row, head), over the points:"
        blocks += [Heading(2, "Accuracy"), Paragraph(words), accuracy_table(rows)]
        words = "Peak of what a call allocates beyond arguments and output, over the points:"
        blocks += [Heading(2, "Extra memory"), Paragraph(words), memory_table(rows)]
    terms = {**dict(HOW_TO_READ_GRID), **COMMON_TERMS, **dict(TERMS[op])}
    for name in ("Floor", "Peers") if op != "deferred" else ("Floor",):
        terms.pop(name)
    return [
        *blocks,
        *complete_tables(rows),
        *ways(rows),
        *kernel_blocks(rows),
        *notes(rows),
        *not_run(rows),
        *environment_blocks(rows),
        Heading(2, "How to read this report"),
        Bullets(tuple(terms.items())),
    ]


def setting(row: Row) -> str:
    """Sizes, dtypes and what was drawn, in sentences."""
    facts = row.workload
    parts = [
        f"K = V = {facts.K}, q, k, v and windows in {facts.io_dtype}, states in {facts.state_dtype}, layout "
        f"{facts.state_layout}; full batches, slots in random order."
    ]
    if facts.drafts is not None:
        parts.append(f"T = {facts.drafts} drafts of a row, accepted: {facts.accepted}; L = {facts.layers}.")
    if facts.floor_dtype is not None and facts.floor_dtype != facts.state_dtype:
        parts.append(f"The in-place floor is that of recurrent decode with {facts.floor_dtype} states.")
    return " ".join(parts)


def summary(rows: Sequence[Row]) -> list[Block]:
    """For each variant with a window, from where to where its ratios go."""
    columns = COLUMNS[rows[0].workload.op or ""]
    lines = []
    for name in _with_ratios(rows):
        mine = [(row, result) for row, result in ok_rows(rows) if row.backend.name == name]
        cells = []
        for _, ratio, words in columns:
            values = [(value, _place(row)) for row, result in mine if (value := ratio(result)) is not None]
            cells.append(value_range(values, words) if values else "-")
        lines.append((name, *cells))
    if not lines:
        return []
    # Which peers: one of them may be plain torch, and no public kernel.
    peers = fastest_peers(rows, dict.fromkeys(row.workload.name for row in rows))
    heads = {**HEADS, "vs peer": f"{HEADS['vs peer']} ({peers})"} if peers else HEADS
    head = ("variant", *(heads[column] for column, _, _ in columns))
    return [Table(head, tuple(lines), text_columns=len(head)), *peers_timed(rows)]


def window_tables(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """Everything for a terminal, with titles."""
    host = host_table(rows)
    tables = [*time_tables(rows), *ratio_tables(rows)]
    return [*tables, ("host time in us", host)] if host else tables


def time_tables(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """Medians by number of heads; the copy floor is that of what has no window, where that was timed."""
    tables = []
    kind = "device time" if rows[0].environment.device == "cuda" else "time"
    for heads, here in _by_heads(rows):
        op = here[0].workload.op or ""
        title = f"H = {heads}: {kind} of a {UNITS[op]} in us"
        recurrent = [row for row in here if row.window is None and row.backend.kind == "backend"]
        tables.append((title, time_table(here, here if op == "commit" else recurrent, COPY_FLOORS[op])))
    return tables


def ratio_tables(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """Ratios by number of heads, a column for each ratio of each variant that has it."""
    tables = []
    for heads, here in _by_heads(rows):
        chosen = [
            (name, column, ratio, words)
            for name in _with_ratios(here)
            for column, ratio, words in COLUMNS[here[0].workload.op or ""]
            if any(ratio(result) is not None for row, result in ok_rows(here) if row.backend.name == name)
        ]
        if not chosen:
            continue
        peers = any(row.backend.kind == "peer" for row in here)
        lines = []
        for point in dict.fromkeys(row.workload.name for row in here):
            at = {row.backend.name: result for row, result in ok_rows(here) if row.workload.name == point}
            rows_of_point = [row for row in here if row.workload.name == point]
            cells = [str(rows_of_point[0].workload.padded_rows[0])]
            cells += [fastest_peer(rows_of_point, point)] if peers else []
            lines.append((*cells, *(_cell(at.get(name), ratio, words) for name, _, ratio, words in chosen)))
        columns = ("B", *(["fastest peer"] if peers else []), *(f"{name}, {column}" for name, column, _, _ in chosen))
        tables.append((f"H = {heads}: ratios", Table(columns, tuple(lines), text_columns=2 if peers else 1)))
    return tables


def ways(rows: Sequence[Row]) -> list[Block]:
    """What each variant with a window does."""
    items = dict.fromkeys((row.backend.name.partition("+")[2], row.way) for row in rows if row.way is not None)
    words = {label.removesuffix("overlap").rstrip("+") or "without a window": way or "" for label, way in items}
    return [Heading(3, "Variants"), Bullets(tuple(words.items()))] if words else []


def _place(row: Row) -> str:
    """A point without what all of them share."""
    return f"H{row.workload.H}/B{row.workload.padded_rows[0]}"


def _with_ratios(rows: Sequence[Row]) -> list[str]:
    """Names of variants with a window that are set against something."""
    named = [
        row.backend.name
        for row, result in ok_rows(rows)
        if row.window is not None and any(ratio(result) is not None for _, ratio, _ in COLUMNS[row.workload.op or ""])
    ]
    return list(dict.fromkeys(named))


def _by_heads(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    heads = dict.fromkeys(row.workload.H for row in rows)
    return [(H, [row for row in rows if row.workload.H == H]) for H in heads]


def _cell(result: Result | None, ratio: Ratio, words: Callable[[float], str]) -> str:
    value = None if result is None else ratio(result)
    return "-" if value is None else words(value)
