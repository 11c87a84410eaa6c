"""Two runs, row by row: what became faster, slower or wrong, and where the measurements do not say."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from la_bench.errors import UsageError
from la_bench.report_blocks import Table
from la_bench.report_text import STATUS_WORDS, listing, number, span, times
from la_bench.rows import Result, Row, cut_off, from_json_lines, ok_rows
from la_bench.timing import spread

RESOLUTION = 0.01
"""Half of what an interval spans at least, as a share of the median.

One process repeats itself to 0.3 % on a GPU, but the next one may place memory otherwise: between two runs on one H200,
an hour apart, unchanged kernels moved by up to 1.4 % (28 points of SGLang's decode and of the in-place floor). Runs
that need not be on the same card can differ by more: those in the records of 2026-11-30 do.
"""

Verdict = Literal["SAME", "FASTER", "SLOWER", "UNCLEAR", "WRONG", "NO TIME", "TIME NOW"]
"""Two times: `SAME` to `UNCLEAR`. `WRONG`: it fails the gate or raises, and did not before. `NO TIME`: right before,
and now refused, unavailable or interrupted. `TIME NOW`: timed, and not before."""

VERDICTS: tuple[Verdict, ...] = ("SAME", "FASTER", "SLOWER", "UNCLEAR", "WRONG", "NO TIME", "TIME NOW")
BAD: tuple[Verdict, ...] = ("SLOWER", "WRONG", "NO TIME")
RIGHT_STATUS, WRONG_STATUS = ("ok", "checked"), ("failed", "error")


@dataclass(frozen=True)
class RowKey:
    """What makes a row of one run the counterpart of a row of another."""

    workload: str
    io_dtype: str
    state_dtype: str
    layout: str
    backend: str

    @property
    def kind(self) -> str:
        """Dtypes and layout, in words."""
        return f"{self.io_dtype} tokens, {self.state_dtype} states, {self.layout}"

    def __str__(self) -> str:
        return f"{self.backend} on {self.workload} ({self.kind})"


@dataclass(frozen=True)
class Change:
    """A row of both runs. Without a verdict if neither has a time and nothing became wrong."""

    key: RowKey
    old: Row
    new: Row
    verdict: Verdict | None


@dataclass(frozen=True)
class Difference:
    """All of two runs."""

    changes: tuple[Change, ...]
    only_old: tuple[RowKey, ...]
    only_new: tuple[RowKey, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    """What is bad about rows of one run: a backend that is gone from a workload that is there, or new and wrong."""

    @property
    def bad(self) -> tuple[Change, ...]:
        """Backends that became slower or wrong or have no time any more. Peers and floors that did tell of the machine,
        not of this project.
        """
        return tuple(
            change for change in self.changes if change.new.backend.kind == "backend" and change.verdict in BAD
        )

    @property
    def any_times(self) -> bool:
        """Whether a row has a time in both runs."""
        return any(change.old.result and change.new.result for change in self.changes)


def read_rows(file: Path) -> list[Row]:
    """The rows of a file.

    Raises
    ------
    UsageError
        It cannot be read, or holds something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
        rows = from_json_lines(text)
    except OSError as reason:
        raise UsageError(f"{file}: {reason.strerror or reason}.") from reason
    except (ValueError, TypeError, KeyError) as reason:
        raise UsageError(f"{file} does not hold rows of la-bench compare: {reason}.") from reason
    if not rows:
        raise UsageError(f"{file} holds no rows.")
    if cut_off(text):
        sys.stderr.write(f"{file}: its last row was cut off, and is left out.\n")
    return rows


def check_one_run(rows: Sequence[Row], file: Path) -> None:
    """See that the rows of a file can stand in one report.

    Raises
    ------
    UsageError
        They are of several operators, of a grid and of workloads, or one is there twice.
    """
    kinds = dict.fromkeys(row.workload.op or ("a grid of decode" if row.workload.grid else "workloads") for row in rows)
    if len(kinds) > 1:
        raise UsageError(f"{file} holds rows of {' and '.join(kinds)}. Pass the rows of one run.")
    _by_key(rows, str(file))


def compare_runs(
    old: Sequence[Row], new: Sequence[Row], *, resolution: float = RESOLUTION, any_machine: bool = False
) -> Difference:
    """Match the rows of two runs and judge each pair.

    Raises
    ------
    UsageError
        A run holds a row twice, or the runs come from two machines and that was not allowed.
    """
    machines = [" and ".join(dict.fromkeys(row.environment.machine for row in rows)) for rows in (old, new)]
    if machines[0] != machines[1] and not any_machine:
        raise UsageError(
            f"times of two machines say nothing about the code: OLD is from {machines[0]}, NEW from {machines[1]}. "
            "Pass --any-machine to compare them all the same."
        )
    before, after = _by_key(old, "OLD"), _by_key(new, "NEW")
    both = [key for key in before if key in after]
    changes = tuple(
        Change(key, before[key], after[key], row_verdict(before[key], after[key], resolution)) for key in both
    )
    only_old = tuple(key for key in before if key not in after)
    only_new = tuple(key for key in after if key not in before)
    faults = (*_lost(only_old, before, after), *_wrong_from_the_start(only_new, after))
    return Difference(changes, only_old, only_new, _notes(old, new), faults)


def row_verdict(old: Row, new: Row, resolution: float) -> Verdict | None:
    """See :data:`Verdict`."""
    if old.result is not None and new.result is not None:
        return time_verdict(old.result, new.result, resolution)
    if new.status in WRONG_STATUS:
        return "WRONG" if old.status not in WRONG_STATUS else None
    if old.status in RIGHT_STATUS:
        return "NO TIME" if new.status not in RIGHT_STATUS or old.status == "ok" else None
    return "TIME NOW" if new.status == "ok" else None


def time_verdict(old: Result, new: Result, resolution: float) -> Verdict:
    """`FASTER` or `SLOWER` if the intervals are apart, `SAME` if each holds the other's median, else `UNCLEAR`.

    An interval reaches from p20 to p80, and at least `resolution` of the median to both sides.
    """
    (low, high), (new_low, new_high) = _interval(old, resolution), _interval(new, resolution)
    if new_high < low:
        return "FASTER"
    if new_low > high:
        return "SLOWER"
    return "SAME" if low <= new.time_us <= high and new_low <= old.time_us <= new_high else "UNCLEAR"


def change_table(difference: Difference) -> Table:
    """A line for each row of both runs that has a verdict."""
    lines = []
    for change in difference.changes:
        if change.verdict is not None:
            key, old, new = change.key, change.old, change.new
            ratio = new.result.time_us / old.result.time_us if old.result and new.result else None
            pool = f"{key.state_dtype} {key.layout}"
            cells = (key.workload, pool, key.backend, change.verdict, _times_of(old), _times_of(new), times(ratio))
            lines.append(cells)
    columns = ("workload", "pool", "backend", "verdict", "old, p20 to p80 us", "new, p20 to p80 us", "new / old")
    return Table(columns, tuple(lines), text_columns=4)


def summary_table(difference: Difference) -> Table:
    """How many rows of each backend got which verdict, and the median ratio of their times."""
    lines = []
    for name in dict.fromkeys(change.key.backend for change in difference.changes):
        mine = [change for change in difference.changes if change.key.backend == name]
        counts = Counter(change.verdict for change in mine)
        ratios = [c.new.result.time_us / c.old.result.time_us for c in mine if c.old.result and c.new.result]
        ratio = times(spread(ratios).median) if ratios else "-"
        if any(verdict is not None for verdict in counts):
            lines.append((name, *(str(counts[verdict]) for verdict in VERDICTS), ratio))
    return Table(("backend", *VERDICTS, "new / old"), tuple(lines))


def unmatched(difference: Difference) -> list[str]:
    """Rows of one run only, a sentence for each backend."""
    lines = []
    for which, keys in (("OLD", difference.only_old), ("NEW", difference.only_new)):
        by_backend: dict[tuple[str, str], list[str]] = {}
        for key in keys:
            by_backend.setdefault((key.backend, key.kind), []).append(key.workload)
        for (backend, kind), workloads in by_backend.items():
            lines.append(f"only in {which}: {backend} ({kind}) on {listing(workloads)}")
    return lines


def _lost(only_old: Sequence[RowKey], before: dict[RowKey, Row], after: dict[RowKey, Row]) -> list[str]:
    """Backends that were right on a workload which NEW has without them."""
    there = {replace(key, backend="") for key in after}
    return [
        f"LOST: {key}"
        for key in only_old
        if replace(key, backend="") in there
        and before[key].backend.kind == "backend"
        and before[key].status in RIGHT_STATUS
    ]


def _wrong_from_the_start(only_new: Sequence[RowKey], after: dict[RowKey, Row]) -> list[str]:
    rows = [(key, after[key]) for key in only_new]
    return [
        f"WRONG: {key}: {row.reason}"
        for key, row in rows
        if row.backend.kind == "backend" and row.status in WRONG_STATUS
    ]


def _by_key(rows: Sequence[Row], which: str) -> dict[RowKey, Row]:
    by_key: dict[RowKey, Row] = {}
    for row in rows:
        facts = row.workload
        key = RowKey(facts.name, facts.io_dtype, facts.state_dtype, facts.state_layout, row.backend.name)
        if key in by_key:
            raise UsageError(f"{which} holds two rows for {key}. Pass the rows of one run.")
        by_key[key] = row
    return by_key


def _interval(result: Result, resolution: float) -> tuple[float, float]:
    middle = result.time_us
    return min(result.time_us_p20, middle * (1 - resolution)), max(result.time_us_p80, middle * (1 + resolution))


def _notes(old: Sequence[Row], new: Sequence[Row]) -> tuple[str, ...]:
    """What else may have moved the times: machine, versions, effort, speed of the large copy."""
    notes = []
    for field in (
        *("machine", "driver", "torch", "triton", "cutlass_dsl", "cuda", "python", "threads", "la_bench"),
        *("quick", "seed", "options", "variables"),
    ):
        values = [
            span([str(v) for v in dict.fromkeys(getattr(r.environment, field) for r in rows)]) for rows in (old, new)
        ]
        if values[0] != values[1]:
            notes.append(f"{field}: {values[0]} in OLD, {values[1]} in NEW")
    speeds = [[result.copy_gb_per_s for _, result in ok_rows(rows)] for rows in (old, new)]
    if all(speeds):
        one, two = (spread(values).median for values in speeds)
        if abs(two / one - 1) > RESOLUTION:
            notes.append(f"a large copy moves {number(one)} GB/s in OLD, {number(two)} GB/s in NEW")
    return tuple(notes)


def _times_of(row: Row) -> str:
    result = row.result
    if result is None:
        return STATUS_WORDS[row.status]
    return f"{number(result.time_us)}, {number(result.time_us_p20)} to {number(result.time_us_p80)}"
