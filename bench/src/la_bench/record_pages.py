"""Pages made from records alone: what is known about each card, and the README's table.

Of every backend the newest run of a grid counts, by the time that its rows name; a full run counts before quick ones.
A run whose backends have a newer record of other sources says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from la_bench.compare_runs import read_rows
from la_bench.first_call import MODES, FirstCall, first_table, read_first_call
from la_bench.records import Record, changed_after, read_records
from la_bench.report_blocks import Block, Bullets, Heading, Paragraph, Table, to_markdown
from la_bench.report_content import PLAIN_TORCH, against_others, doubts, kernel_table, notes, ours
from la_bench.report_grid import accuracy_table, host_table, points_by_states, ratio_table, time_table
from la_bench.report_text import KERNELS_MADE, count, listing, number, times
from la_bench.report_window import TITLES, ratio_tables, setting, summary, time_tables, ways
from la_bench.rows import Result, Row, ok_rows
from la_bench.window_spec import WINDOW_OPS
from la_core.backends.discover_backends import KNOWN_NAMES

GRIDS = "grid*.jsonl"
SUITES = "suite*.json"
FIRST_CALLS = "first*.jsonl"
WRITTEN_BY = "<!-- Written by docs/generate.py from bench/records. Do not edit: run `python docs/generate.py`. -->"
README_DTYPE, README_LAYOUT = "float32", "vk"
"""The states that the README's table is about."""


@dataclass(frozen=True)
class GridRun:
    """A file of rows of a grid, and the backends of which none is newer."""

    file: str
    rows: tuple[Row, ...]
    newest_of: tuple[str, ...]

    @property
    def states(self) -> tuple[str, str]:
        """Dtype and layout of the states."""
        facts = self.rows[0].workload
        return facts.state_dtype, facts.state_layout

    @property
    def step(self) -> tuple[int | None, int | None]:
        """Drafts and layers of a step, of operators that have such."""
        facts = self.rows[0].workload
        return facts.drafts, facts.layers

    @property
    def which(self) -> str:
        """What tells it from other runs of its operator."""
        (dtype, layout), (drafts, layers) = self.states, self.step
        step = f", T = {drafts}, L = {layers}" if layers is not None else ""
        return f"{dtype} states, {layout}{step}"

    @property
    def machine(self) -> str:
        """The card's name."""
        return self.rows[0].environment.machine


@dataclass(frozen=True)
class SuiteRun:
    """The newest outcome of the shared suite on one backend and type of device."""

    target: str
    file: str
    counts: dict[str, int]
    when: str
    torch: str


@dataclass(frozen=True)
class FirstCallRun:
    """Of a file of first calls, those of which no file holds newer ones: of a backend, in a mode."""

    file: str
    when: str
    calls: tuple[FirstCall, ...]


def cards(folder: Path) -> list[str]:
    """Names of the folders of cards."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def newest_grids(folder: Path, card: str, op: str | None = None) -> list[GridRun]:
    """The runs of decode, or of another operator, of which some backend has none that is newer; by states and steps,
    the newest first.
    """
    runs = [
        GridRun(path.relative_to(folder).as_posix(), tuple(rows), ())
        for path in sorted((folder / card).glob(f"*/{GRIDS if op is None else f'{op}*.jsonl'}"))
        if (facts := (rows := read_rows(path))[0].workload).grid and facts.op == op
    ]
    newest: dict[tuple[object, ...], GridRun] = {}
    for run in sorted(runs, key=_age):
        for backend in _backends(run.rows):
            newest[backend, run.states, run.step] = run
    chosen = []
    for run in sorted(runs, key=_age, reverse=True):
        mine = tuple(str(name) for (name, *_), best in newest.items() if best is run)
        if mine:
            chosen.append(GridRun(run.file, run.rows, tuple(sorted(mine, key=_preference))))
    first = (README_DTYPE, README_LAYOUT)
    return sorted(chosen, key=lambda run: (run.states != first, run.states, [count or 0 for count in run.step]))


def newest_suites(folder: Path, card: str) -> list[SuiteRun]:
    """The newest outcome of every backend and type of device; of two of one time, that of the later record."""
    newest: dict[str, SuiteRun] = {}
    for path in sorted((folder / card).glob(f"*/{SUITES}")):
        data = json.loads(path.read_text(encoding="utf-8"))
        when, torch = data["environment"]["date"], data["environment"]["torch"]
        for target, outcomes in data["outcomes"].items():
            counts = {outcome: len(tests) for outcome, tests in outcomes.items()}
            if target not in newest or newest[target].when <= when:
                newest[target] = SuiteRun(target, path.relative_to(folder).as_posix(), counts, when, torch)
    return sorted(newest.values(), key=lambda run: (_preference(run.target.rpartition("-")[0]), run.target))


def newest_first_calls(folder: Path, card: str) -> list[FirstCallRun]:
    """The newest first calls of every backend and mode that were measured, by file, the newest file first."""
    newest: dict[tuple[str, str], tuple[str, str, FirstCall]] = {}
    for path in sorted((folder / card).glob(f"*/{FIRST_CALLS}")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            found, when = read_first_call(row), rows[0]["environment"]["utc"]
            key = (found.backend, found.mode)
            if found.fault is None and (key not in newest or newest[key][0] < when):
                newest[key] = when, path.relative_to(folder).as_posix(), found
    runs: dict[tuple[str, str], list[FirstCall]] = {}
    for backend, mode in sorted(newest, key=lambda key: (_preference(key[0]), MODES.index(key[1]))):
        when, file, found = newest[backend, mode]
        runs.setdefault((when, file), []).append(found)
    by_time = sorted(runs.items(), key=lambda run: run[0][0], reverse=True)
    return [FirstCallRun(file, when, tuple(calls)) for (when, file), calls in by_time]


def card_page(folder: Path, card: str) -> str:
    """The page of one card, as Markdown; the same records give the same bytes."""
    runs, suites, records = newest_grids(folder, card), newest_suites(folder, card), read_records(folder)
    blocks: list[Block] = [Heading(1, runs[0].machine if runs else card)]
    if suites:
        blocks += [Heading(2, "The shared suite"), Paragraph("The newest outcome of each backend."), _suites(suites)]
        blocks += [block for file in dict.fromkeys(run.file for run in suites) for block in _older(records, file)]
    blocks += _first_calls(newest_first_calls(folder, card), records)
    for run in runs:
        blocks += _grid_section(run, records)
    for op in WINDOW_OPS:
        for run in newest_grids(folder, card, op):
            blocks += _window_section(run, records)
    head, rest = to_markdown(blocks).split("\n", 1)
    return f"{head}\n\n{WRITTEN_BY}\n{rest}"


def readme_table(folder: Path) -> str:
    """What the README says about speed, for every card and the states of `README_DTYPE` and `README_LAYOUT`."""
    blocks: list[Block] = []
    records = read_records(folder)
    for card in cards(folder):
        for run in newest_grids(folder, card):
            if run.states == (README_DTYPE, README_LAYOUT):
                public = dict.fromkeys(row.backend.name for row, _ in _public(ok_rows(run.rows)))
                kernels = f" Public kernels in this run: {listing(list(public))}." if public else ""
                blocks += [Paragraph(f"{_about(run)}{kernels} From {run.file}."), *_older(records, run.file)]
                blocks += [speed_table(run.rows), *_notes_of_best(run.rows)]
    return to_markdown(blocks).strip()


def speed_table(rows: Sequence[Row]) -> Table:
    """One line for each number of states in a call, at the fewest heads that have it.

    Times of our backends, the best public kernel and the floors, and how many times faster than that kernel the
    fastest of ours is, without and with overlap.
    """
    names = sorted(dict.fromkeys(row.backend.name for row, _ in ours(rows)), key=_preference)
    floors = list(dict.fromkeys(row.backend.name for row, _ in ok_rows(rows) if row.backend.kind == "floor"))
    lines = []
    for here in points_by_states(rows):
        point = (str(here[0].workload.H), str(here[0].workload.padded_rows[0]))
        lines.append((*point, *_speeds(here, names, floors)))
    columns = ("H", "B", *names, "best public kernel", *floors, "vs public", "with overlap")
    return Table(columns, tuple(lines), text_columns=0)


def _public(timed: Sequence[tuple[Row, Result]]) -> list[tuple[Row, Result]]:
    return [pair for pair in timed if pair[0].backend.kind == "peer" and pair[0].backend.name != PLAIN_TORCH]


def _best_public(rows_of_point: Sequence[Row]) -> tuple[Row, Result] | None:
    return min(_public(ok_rows(rows_of_point)), key=lambda pair: pair[1].time_us, default=None)


def _notes_of_best(rows: Sequence[Row]) -> list[Block]:
    """What the public kernels that are the best of some line of the table do differently."""
    best = [pair[0].backend for here in points_by_states(rows) if (pair := _best_public(here)) is not None]
    items = dict.fromkeys((backend.name, backend.note) for backend in best if backend.note)
    if not items:
        return []
    words = "What the best public kernels do otherwise than the contract:"
    return [Paragraph(words), Bullets(tuple((name, note) for name, note in items if note))]


def _speeds(rows_of_point: Sequence[Row], names: Sequence[str], floors: Sequence[str]) -> list[str]:
    timed = {row.backend.name: (row, result) for row, result in ok_rows(rows_of_point)}

    def cell(name: str) -> str:
        return number(timed[name][1].time_us) if name in timed else "-"

    best = _best_public(rows_of_point)
    ratios = []
    for overlap in (False, True):
        mine = [
            result.time_us
            for row, result in timed.values()
            if (row.backend.kind, row.backend.overlap) == ("backend", overlap)
        ]
        ratios.append(times(best[1].time_us / min(mine)) if best and mine else "-")
    public = f"{number(best[1].time_us)} ({best[0].backend.name})" if best else "-"
    return [*map(cell, names), public, *map(cell, floors), *ratios]


def _grid_section(run: GridRun, records: Sequence[Record]) -> list[Block]:
    rows = run.rows
    versions = listing([f"{name} {value}" for name, value in _versions(rows[0]) if value])
    blocks: list[Block] = [
        Heading(2, f"Decode, {run.which}: {listing(run.newest_of)}"),
        Paragraph(f"{_about(run)} {versions}. From {run.file}, the newest run of {listing(run.newest_of)}."),
        *_older(records, run.file),
        *against_others(rows),
        *doubts(rows),
    ]
    for heads in dict.fromkeys(row.workload.H for row in rows):
        here = [row for row in rows if heads == row.workload.H]
        blocks += [Heading(3, f"H = {heads}, {run.which}, {run.newest_of[0]}"), time_table(here)]
        ratios = ratio_table(here)
        if ratios is not None:
            blocks += [Paragraph("How many times faster than the fastest peer, and share of the floor:"), ratios]
    host = host_table(rows)
    if host is not None:
        blocks += [Paragraph("Host time in microseconds, over the points with small calls:"), host]
    kernels = kernel_table(rows)
    if kernels is not None:
        blocks += [Paragraph(KERNELS_MADE), kernels]
    blocks += [Paragraph("Relative L2 error against float64 in the worst (row, head):"), accuracy_table(rows)]
    return [*blocks, *notes(rows)[1:]]


def _window_section(run: GridRun, records: Sequence[Record]) -> list[Block]:
    rows = run.rows
    environment = rows[0].environment
    depth = "A quick run of" if environment.quick else "A run of"
    versions = listing([f"{name} {value}" for name, value in _versions(rows[0]) if value])
    points = count(len({row.workload.name for row in rows}), "point")
    blocks: list[Block] = [
        Heading(2, f"{TITLES[rows[0].workload.op or '']}, {run.which}: {listing(run.newest_of)}"),
        Paragraph(
            f"{depth} {points} on {environment.machine}, {environment.utc[:10]}. {setting(rows[0])} {versions}. From "
            f"{run.file}, the newest run of {listing(run.newest_of)}."
        ),
        *_older(records, run.file),
        *summary(rows),
        *doubts(rows),
    ]
    for title, table in (*ratio_tables(rows), *time_tables(rows)):
        blocks += [Heading(3, f"{rows[0].workload.op}, {title}, {run.which}, {run.newest_of[0]}"), table]
    host = host_table(rows)
    if host is not None:
        blocks += [Paragraph("Host time in microseconds, over the points with small calls:"), host]
    blocks += [Paragraph("Relative L2 error against float64 in the worst (row, head):"), accuracy_table(rows)]
    return [*blocks, *ways(rows)[1:], *notes(rows)[1:]]


def _about(run: GridRun) -> str:
    facts, environment = run.rows[0].workload, run.rows[0].environment
    points = len({row.workload.name for row in run.rows})
    depth = "a quick run of " if environment.quick else ""
    kind = "device time" if environment.device == "cuda" else "time"
    return (
        f"{environment.machine}, {environment.utc[:10]}, {depth}{count(points, 'point')}: {kind} of a call in "
        f"microseconds over cold slots; K = V = {facts.K}, q, k, v in {facts.io_dtype}, states in {facts.state_dtype}, "
        f"layout {facts.state_layout}."
    )


def _suites(suites: Sequence[SuiteRun]) -> Table:
    outcomes = ("passed", "failed", "skipped")
    lines = tuple(
        (run.target, run.file, run.when[:10], run.torch, *(str(run.counts.get(outcome, 0)) for outcome in outcomes))
        for run in suites
    )
    return Table(("backend and device", "record", "when", "torch", *outcomes), lines, text_columns=4)


def _first_calls(runs: Sequence[FirstCallRun], records: Sequence[Record]) -> list[Block]:
    """A section on first calls, with a table for each run; none without any."""
    if not runs:
        return []
    words = (
        "What the first call of a process takes beside a later one, in milliseconds and without imports: as installed, "
        "with the kernel on disk, and with neither. Of each backend and mode the newest, a table for each run."
    )
    blocks: list[Block] = [Heading(2, "The first call of a process"), Paragraph(words)]
    for run in runs:
        blocks += [Paragraph(f"{run.when[:10]}, from {run.file}:"), *_older(records, run.file), first_table(run.calls)]
    return blocks


def _older(records: Sequence[Record], file: str) -> list[Block]:
    """A sentence for each record that holds newer sources of backends than a file does."""
    changed = changed_after(records, file)
    return [
        Paragraph(
            f"{file} ran on older sources of {listing([name for name in changed if changed[name] == record])} than "
            f"{record}, their newest record.",
            alarm=True,
        )
        for record in dict.fromkeys(changed.values())
    ]


def _versions(row: Row) -> list[tuple[str, str | None]]:
    facts = row.environment
    return [("torch", facts.torch), ("Triton", facts.triton), ("CuTe DSL", facts.cutlass_dsl)]


def _age(run: GridRun) -> tuple[bool, str]:
    """Newer runs compare greater, and full ones greater than quick ones and than those that were interrupted."""
    environment = run.rows[0].environment
    whole = not environment.quick and all(row.status != "interrupted" for row in run.rows)
    return whole, environment.utc


def _backends(rows: Sequence[Row]) -> list[str]:
    """Backends with a time of the operator, whether with overlap or without."""
    op = rows[0].workload.op
    timed = (row for row, _ in ours(rows) if op is None or row.window is not None)
    return list(dict.fromkeys(row.backend.name.partition("+")[0] for row in timed))


def _preference(name: str) -> tuple[int, str]:
    """The project's order of backends, others after them; with overlap after without."""
    base = name.partition("+")[0]
    return KNOWN_NAMES.index(base) if base in KNOWN_NAMES else len(KNOWN_NAMES), name
