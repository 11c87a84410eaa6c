"""What a report says: rows in, blocks out. Nothing but the rows decides, so the same rows give the same report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from la_bench.environment import NOT_KNOWN
from la_bench.grid_plots import host_bars
from la_bench.peers.torch_naive import TorchNaivePeer
from la_bench.report_blocks import Block, Bullets, Heading, Paragraph, Plot, Table
from la_bench.report_plots import accuracy_plot, share_plot, time_plot
from la_bench.report_text import (
    FULL_COLUMNS,
    HOW_TO_READ,
    KERNELS_MADE,
    STATUS_WORDS,
    count,
    full_cells,
    listing,
    number,
    percent,
    span,
    time,
    times,
)
from la_bench.rows import Result, Row, ok_rows

STEADY = 1.25
"""Copy bandwidths of one run that differ by more than this factor are worth a warning."""

NARROW = {"cpu": 1.5, "cuda": 1.1}
"""So is a p80 that is more than this factor above p20: in the records of an H200, 99 rows in 100 stay below 1.05."""

HOST_CAPTION = "Host time of a call of the smallest batch: median over the workloads, and from the least to the most."

CHOOSERS = {
    None: "la_core.decode",
    "deferred": "la_core.decode with a window",
    "verify": "la_core.verify",
    "commit": "la_core.commit_layers",
}
"""Who chooses a backend, by operator."""

PLAIN_TORCH = TorchNaivePeer.name
"""The peer that is no public kernel."""

AGAINST_COLUMNS = ("share of floor", "vs fastest peer", "the same without overlap")
EMPTY_COLUMNS = (*AGAINST_COLUMNS, "host time", "vs ref")
"""Left out where they are empty: what only a GPU fills, and la-ref, which a grid on a GPU leaves out."""

TRIED = ("ok", "checked", "failed", "error")
"""Statuses of what stands in a complete table; the rest is told under what was not timed."""


def report_blocks(rows: Sequence[Row]) -> list[Block]:
    """The whole report, in order."""
    if not rows:
        return [Heading(1, "Lightning Attention decode: backends compared"), Paragraph("There are no rows to report.")]
    return [
        Heading(1, "Lightning Attention decode: backends compared"),
        *_summary(rows),
        *_plots(rows),
        *_full_tables(rows),
        *kernel_blocks(rows),
        *not_run(rows),
        *environment_blocks(rows),
        Heading(2, "How to read this report"),
        Bullets(HOW_TO_READ),
    ]


def best_of(rows: Sequence[Row], workload: str) -> tuple[Row, Result] | None:
    """The fastest backend on a workload, peers and floors left aside."""
    timed = [(row, result) for row, result in ours(rows) if row.workload.name == workload]
    return min(timed, key=lambda pair: pair[1].time_us, default=None)


def ours(rows: Sequence[Row]) -> list[tuple[Row, Result]]:
    """Rows of backends that carry a result."""
    return [(row, result) for row, result in ok_rows(rows) if row.backend.kind == "backend"]


def _summary(rows: Sequence[Row]) -> list[Block]:
    workloads = _names(row.workload.name for row in rows)
    ran = _names(row.backend.name for row, _ in ours(rows))
    environment = rows[0].environment
    depth = "A quick run, with few samples, of" if environment.quick else "A run of"
    blocks: list[Block] = [
        Paragraph(
            f"{depth} {count(len(workloads), 'workload')} on {environment.machine} "
            f"({environment.device}, {count(environment.threads, 'thread')}), {environment.utc}."
        ),
        *(Paragraph(sentence) for sentence in _who_is_best(rows, workloads, ran)),
        *against_others(rows),
        *judged_only(rows),
        *trouble(rows),
    ]
    blocks += doubts(rows)
    return [*blocks, _best_by_workload(rows, workloads)]


def _best_by_workload(rows: Sequence[Row], workloads: Sequence[str]) -> Table:
    """The fastest backend, its share of the limits, and its lead over la-ref and the fastest peer."""
    columns = [
        "workload",
        "best backend",
        "time per call",
        "share of copy bandwidth",
        "speed-up vs ref",
        *AGAINST_COLUMNS,
    ]
    lines = []
    for workload in workloads:
        best = best_of(rows, workload)
        if best is None:
            lines.append((workload, "none", *("-",) * (len(columns) - 2)))
            continue
        row, result = best
        floor = "-" if result.share_of_floor is None else percent(result.share_of_floor)
        cells = (time(result.time_us), percent(result.share_of_copy), times(result.speedup_vs_ref), floor)
        leads = (times(result.speedup_vs_peer), times(plain_lead(rows, workload)))
        lines.append((workload, row.backend.name, *cells, *leads))
    return without_empty_columns(columns, lines, text_columns=2)


def doubts(rows: Sequence[Row]) -> list[Block]:
    """Why times may say less than they seem to: an unsteady machine, scattered samples, floors that are none, states
    found in a cache.
    """
    blocks: list[Block] = []
    noun = subject_noun(rows)
    speeds = [result.copy_gb_per_s for _, result in ok_rows(rows)]
    if speeds and max(speeds) > STEADY * min(speeds):
        blocks.append(
            Paragraph(
                f"The machine was not steady: its copy bandwidth lay between {number(min(speeds))} and "
                f"{number(max(speeds))} GB/s. Other programs, or the clock, changed it. Figures of one {noun} were "
                f"taken side by side and can be compared; times of different {noun}s less so.",
            )
        )
    narrow = NARROW[rows[0].environment.device]
    scattered = [row for row, result in ok_rows(rows) if result.time_us_p80 > narrow * result.time_us_p20]
    if scattered:
        names = listing([f"{row.backend.name} on {row.workload.name}" for row in scattered])
        blocks.append(
            Paragraph(f"Times scattered (p80 above {narrow:g} times p20), so the median says little: {names}.")
        )
    slow = _slow_floors(rows)
    if slow:
        blocks.append(
            Paragraph(
                f"On {listing(slow)} the in-place floor with overlap took longer than the one without, so it is no "
                "floor there: shares of it are too high."
            )
        )
    cache = rows[0].environment.cache_bytes or 0
    warm = _names(row.workload.name for row, _ in ok_rows(rows) if row.workload.reuse_bytes < cache)
    if warm:
        sentence = "part of the states is found in the machine's cache, so more than 100 % is possible."
        blocks.append(Paragraph(f"On {listing(warm)} {sentence}"))
    return blocks


def _slow_floors(rows: Sequence[Row]) -> list[str]:
    """Where the floor with overlap took longer than the one without."""
    floors = {
        (row.workload.name, row.backend.overlap): result.time_us
        for row, result in ok_rows(rows)
        if row.backend.kind == "floor"
    }
    return [name for (name, overlap), us in floors.items() if overlap and us > floors.get((name, False), us)]


def subject_noun(rows: Sequence[Row]) -> str:
    """What rows are about: workloads, or points of a grid."""
    return "point" if rows[0].workload.grid else "workload"


def judged_only(rows: Sequence[Row]) -> list[Block]:
    """A sentence for each backend that was found right without being timed."""
    blocks: list[Block] = []
    for name in _names(row.backend.name for row in rows if row.status == "checked"):
        mine = [row for row in rows if (row.backend.name, row.status) == (name, "checked")]
        where = listing([row.workload.name for row in mine])
        blocks.append(Paragraph(f"{name} is right on {where}. It was {mine[0].reason}."))
    return blocks


def trouble(rows: Sequence[Row]) -> list[Block]:
    """What is wrong, raised or was interrupted, as paragraphs that cannot be overlooked."""
    blocks: list[Block] = []
    for backend in _names(row.backend.name for row in rows if row.status in ("failed", "error")):
        bad = [row for row in rows if row.backend.name == backend and row.status in ("failed", "error")]
        blocks.append(
            Paragraph(
                f"{STATUS_WORDS[bad[0].status]}: {backend} on {listing([row.workload.name for row in bad])}. "
                f"First: {bad[0].reason}",
                alarm=True,
            )
        )
    interrupted = _names(row.workload.name for row in rows if row.status == "interrupted")
    if interrupted:
        blocks.append(
            Paragraph(
                f"The run was stopped by Ctrl-C: {count(len(interrupted), subject_noun(rows))} not finished.",
                alarm=True,
            )
        )
    return blocks


def against_others(rows: Sequence[Row]) -> list[Block]:
    """Where the backends stand between the floor and the peers, a sentence for each that has one to compare with, and
    which peers these are.
    """
    blocks: list[Block] = []
    for backend in _names(row.backend.name for row, _ in ours(rows)):
        mine = [(row, result) for row, result in ours(rows) if row.backend.name == backend]
        speedups = [(r.speedup_vs_peer, row.workload.name) for row, r in mine if r.speedup_vs_peer is not None]
        shares = [(r.share_of_floor, row.workload.name) for row, r in mine if r.share_of_floor is not None]
        parts = []
        if speedups:
            best = fastest_peers(rows, [workload for _, workload in speedups])
            parts.append(f"{value_range(speedups, times)} as fast as the fastest peer ({best})")
        if shares:
            overlap = " with overlap" if mine[0][0].backend.overlap else ""
            parts.append(f"at {value_range(shares, percent)} of the in-place floor{overlap}")
        if parts:
            blocks.append(Paragraph(f"{backend} is {' and '.join(parts)}."))
    return [*blocks, *peers_timed(rows)]


def peers_timed(rows: Sequence[Row]) -> list[Block]:
    """A sentence on what "the fastest peer" is chosen from; none where no peer was to run."""
    peers = _names(row.backend.name for row in rows if row.backend.kind == "peer")
    timed = _names(row.backend.name for row, _ in ok_rows(rows) if row.backend.kind == "peer")
    if not peers:
        return []
    sentence = f"Peers that were timed: {listing(timed) or 'none'}"
    others = [name for name in peers if name not in timed]
    sentence += f"; not timed: {listing(others)}." if others else "."
    if timed == [PLAIN_TORCH]:
        sentence += f" {PLAIN_TORCH} is plain torch: no public kernel was timed."
    elif PLAIN_TORCH in timed:
        sentence += f" {PLAIN_TORCH} is plain torch, the others are public kernels."
    return [Paragraph(sentence)]


def plain_lead(rows: Sequence[Row], workload: str) -> float | None:
    """How many times faster than the fastest peer the fastest backend is without overlap, which no peer has.

    None where no backend ran with overlap: that is said already.
    """
    here = [(row, r) for row, r in ours(rows) if row.workload.name == workload]
    if not any(row.backend.overlap for row, _ in here):
        return None
    plain = [r for row, r in here if not row.backend.overlap]
    return max((r.speedup_vs_peer for r in plain if r.speedup_vs_peer is not None), default=None)


def fastest_peers(rows: Sequence[Row], workloads: Iterable[str]) -> str:
    """Names of the fastest peers, of workloads that have one."""
    return listing([name for name in _names(fastest_peer(rows, one) for one in workloads) if name != "-"])


def fastest_peer(rows: Sequence[Row], workload: str) -> str:
    """Name of the fastest peer on a workload, a dash without any."""
    timed = [
        (r.time_us, row.backend.name)
        for row, r in ok_rows(rows)
        if (row.workload.name, row.backend.kind) == (workload, "peer")
    ]
    return min(timed)[1] if timed else "-"


def value_range(values: Sequence[tuple[float, str]], words: Callable[[float], str]) -> str:
    """`low (where) to high (where)`, or one of them where both read the same."""
    (low, first), (high, last) = min(values), max(values)
    return words(low) if words(low) == words(high) else f"{words(low)} ({first}) to {words(high)} ({last})"


def _who_is_best(rows: Sequence[Row], workloads: Sequence[str], ran: Sequence[str]) -> list[str]:
    if not ran:
        return ["No backend has a result."]
    shares = [result.share_of_copy for _, result in ours(rows)]
    reach = span([percent(min(shares)), percent(max(shares))])
    if ran == ["ref"]:
        sentence = f"ref (la-ref) is the only backend that was timed, and it reaches {reach} of the copy bandwidth. "
        if rows[0].environment.device == "cpu":
            sentence += (
                "On a CPU that is what plain torch gives: gathering, updating, scattering and summing the states are "
                "passes of their own, where a fused kernel would read and write each state once. "
            )
        return [sentence + "No other backend was left out silently: see What was not timed, and why."]
    wins = dict.fromkeys(ran, 0)
    for workload in workloads:
        best = best_of(rows, workload)
        if best is not None:
            wins[best[0].backend.name] += 1
    order = sorted(wins, key=lambda backend: -wins[backend])
    won = "; ".join(f"{backend} is the fastest on {wins[backend]}" for backend in order if wins[backend])
    return [
        f"Backends that were timed: {listing(ran)}. Of {count(len(workloads), 'workload')}, {won}.",
        f"Shares of the copy bandwidth lie between {percent(min(shares))} and {percent(max(shares))}.",
    ]


def _plots(rows: Sequence[Row]) -> list[Block]:
    if not ok_rows(rows):
        return []
    host = host_bars(rows)
    return [
        Heading(2, "Plots"),
        Plot(
            "share_of_copy",
            "Share of the machine's copy bandwidth, higher is better. 100 % moves the call's bytes as fast as a copy.",
            share_plot(rows),
        ),
        Plot(
            "time",
            "Time per call: median with a bar from p20 to p80, lower is better. The upright stroke is the copy floor.",
            time_plot(rows),
        ),
        *([] if host is None else [Plot("host_time", HOST_CAPTION, host)]),
        Plot(
            "accuracy",
            "Relative L2 error against float64 in the worst (row, head), lower is better: output and state.",
            accuracy_plot(rows),
        ),
    ]


def _full_tables(rows: Sequence[Row]) -> list[Block]:
    blocks: list[Block] = [Heading(2, "All results")]
    for workload in _names(row.workload.name for row in rows):
        here = [row for row in rows if row.workload.name == workload]
        shown = [row for row in here if row.status in TRIED]
        facts = here[0].workload
        blocks.append(Heading(3, workload))
        layers = f"{len(facts.layers_timed)} of {facts.linear_layers} linear layers"
        if 0 < len(facts.layers_timed) < facts.linear_layers:
            layers += f" ({_numbers(facts.layers_timed)})"
        blocks.append(
            Paragraph(
                f"{facts.description}. H = {facts.H}, G = {facts.G}, K = {facts.K}, V = {facts.V}; q, k, v in "
                f"{facts.io_dtype}, states in {facts.state_dtype} ({facts.state_layout}), out in {facts.out_dtype}, "
                f"offsets in {facts.offsets_dtype}; slopes {facts.slopes!r}. Live rows {_numbers(facts.live_rows)} of "
                f"{_numbers(facts.padded_rows)}; {number(facts.bytes_per_call / 1e6)} MB per call; the pools of "
                f"{layers} take turns, and nine of ten states are reused after "
                f"{number(facts.reuse_bytes / 2**20)} MiB or more."
            )
        )
        if shown:
            blocks.append(without_empty_columns(FULL_COLUMNS, [full_cells(row) for row in shown]))
        blocks += [
            Paragraph(f"{STATUS_WORDS[row.status]}: {row.backend.name}: {row.reason}", alarm=True)
            for row in shown
            if row.status in ("failed", "error")
        ]
    return blocks + notes(rows)


def without_empty_columns(columns: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int = 1) -> Table:
    """A table without those of `EMPTY_COLUMNS` that are empty."""
    keep = [n for n, column in enumerate(columns) if column not in EMPTY_COLUMNS or any(row[n] != "-" for row in cells)]
    kept = tuple(tuple(row[n] for n in keep) for row in cells)
    return Table(tuple(columns[n] for n in keep), kept, text_columns)


def notes(rows: Sequence[Row]) -> list[Block]:
    """What peers and floors do differently."""
    items = dict.fromkeys((row.backend.name, row.backend.note) for row in rows if row.backend.note)
    if not items:
        return []
    return [Heading(3, "Floors and peers"), Bullets(tuple((name, note) for name, note in items if note))]


def kernel_blocks(rows: Sequence[Row]) -> list[Block]:
    """A section on the kernels that were made; none where nobody could tell."""
    table = kernel_table(rows)
    return [] if table is None else [Heading(2, "Kernels made"), Paragraph(KERNELS_MADE), table]


def kernel_table(rows: Sequence[Row]) -> Table | None:
    """Kernels of each backend over the whole run, and the seconds that making them took."""
    lines = []
    for name in _names(row.backend.name for row in rows):
        made = [row.kernels for row in rows if row.backend.name == name and row.kernels is not None]
        if made:
            origins: Counter[str] = Counter()
            for one in made:
                origins.update(one.origins or {})
            kernels, seconds = sum(one.count for one in made), sum(one.seconds for one in made)
            of_which = listing([f"{n} {origin}" for origin, n in sorted(origins.items())])
            of_which = of_which or ("not told" if kernels else "-")
            lines.append((name, of_which, str(kernels), f"{seconds:.3f}"))
    return Table(("variant", "where from", "kernels", "seconds"), tuple(lines), text_columns=2) if lines else None


def not_run(rows: Sequence[Row]) -> list[Block]:
    """Every variant without a time, with its reason, and what is chosen without a name."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "ok":
            key = (row.backend.name, STATUS_WORDS[row.status], row.reason or "")
            groups.setdefault(key, []).append(row.workload.name)
    everything = _names(row.workload.name for row in rows)
    blocks: list[Block] = [Heading(2, "What was not timed, and why")]
    if groups:
        cells = [
            (backend, status, "all" if names == everything else listing(names), reason)
            for (backend, status, reason), names in groups.items()
        ]
        blocks.append(Table(("backend", "status", f"{subject_noun(rows)}s", "reason"), tuple(cells), text_columns=4))
    else:
        blocks.append(Paragraph(f"Every backend was timed on every {subject_noun(rows)}."))
    choices: dict[str, list[str]] = {}
    for row in rows:
        if row.workload.name not in choices.setdefault(row.auto_choice, []):
            choices[row.auto_choice].append(row.workload.name)
    blocks.append(Paragraph(f"What {CHOOSERS[rows[0].workload.op]} chooses by itself here:"))
    blocks.append(
        Bullets(tuple(("all" if names == everything else listing(names), choice) for choice, names in choices.items()))
    )
    return blocks


def environment_blocks(rows: Sequence[Row]) -> list[Block]:
    """Where and with what the run happened."""
    facts = [asdict(row.environment) for row in rows]
    names = [name for name in facts[0] if name != "sources"]
    table = [(name, ", ".join(_names(_plain(one[name], name) for one in facts))) for name in names]
    for name, values in (
        ("sm_mhz while timed", [result.sm_mhz for _, result in ok_rows(rows)]),
        ("memory_mhz while timed", [result.memory_mhz for _, result in ok_rows(rows)]),
    ):
        known = [value for value in values if value is not None]
        if known:
            table.append((name, span([str(min(known)), str(max(known))])))
    return [
        Heading(2, "Environment"),
        Table(("fact", "value"), tuple(table), text_columns=2),
        Table(("source", "distribution or file", "SHA-256 of its sources"), _sources(rows), text_columns=3),
        *_chosen_tiles(rows),
    ]


def _sources(rows: Sequence[Row]) -> tuple[tuple[str, str, str], ...]:
    """A line for each package, backend, floor and peer."""
    backends = {row.backend.name: row.backend for row in rows}.values()
    here = {row.backend.name for row in rows if row.status != "unavailable"}
    environment = rows[0].environment
    versions = {"la_core": environment.la_core, "la_bench": environment.la_bench}
    packages = [
        (name, f"{name.replace('_', '-')} {versions.get(name, '')}".strip(), value or "-")
        for name, value in (environment.sources or {}).items()
    ]
    others = [
        (b.name, b.distribution or ("-" if b.name in here else "not installed"), b.source_hash or "-") for b in backends
    ]
    return (*packages, *others)


def _chosen_tiles(rows: Sequence[Row]) -> list[Block]:
    """What each variant ran with, and where."""
    where: dict[tuple[str, str], list[str]] = {}
    for row, result in ok_rows(rows):
        if result.tiles is not None:
            where.setdefault((row.backend.name, result.tiles), []).append(row.workload.name)
    if not where:
        return []
    lines = tuple((name, tiles, listing(names)) for (name, tiles), names in where.items())
    return [
        Paragraph("Tiles: chosen by the backend for the largest call, for floors by measuring."),
        Table(("variant", "tiles", f"{subject_noun(rows)}s"), lines, text_columns=3),
    ]


def _names(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _plain(value: object, name: str) -> str:
    if value is None:
        return "unknown" if name in NOT_KNOWN else "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
