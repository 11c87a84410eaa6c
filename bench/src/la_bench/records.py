"""Records of runs on real cards: what ran, on which versions, and whether the sources have changed since.

`<folder>/<gpu>/<run>/` holds the files of one run; `bench/records/README.md` says which. Records are never edited, so
rows of every schema are read here, as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from la_bench.errors import UsageError
from la_bench.report_text import count, listing
from la_core.conformance.source_hash import folder_hash, source_hash

VERSIONS = ("torch", "triton", "cutlass_dsl", "python", "driver")
CORE, BENCH = "la_core", "la_bench"
"""Rows name the latter, but a record does not become stale when only the program that measured has changed."""

SUITE = "shared_tests"
"""The folder whose tests an outcome lists; its sources are those of a checkout."""

Hashes = dict[str, frozenset[str]]
"""Hashes of the sources that ran, by package of the core and of la-bench, or by name of a backend."""

PresentHash = Callable[[str], str | None]
"""Hash of the sources of such a name as they are now; None if it is not installed."""


@dataclass(frozen=True)
class RecordFile:
    """One file of a record.

    Attributes
    ----------
    when
        The first time that it names; empty if it names none.
    """

    path: Path
    when: str
    what: str
    versions: str
    hashes: Hashes


@dataclass(frozen=True)
class Record:
    """One run on one card."""

    gpu: str
    run: str
    files: tuple[RecordFile, ...]

    @property
    def name(self) -> str:
        """As a path below the folder of records."""
        return f"{self.gpu}/{self.run}"


def records_folder() -> Path:
    """The folder of records of the checkout that this package lies in.

    Raises
    ------
    UsageError
        It does not lie in one.
    """
    folder = Path(__file__).parents[2] / "records"
    if not folder.is_dir():
        raise UsageError("there are no records beside the installed la-bench. Pass --folder with bench/records.")
    return folder


def read_records(folder: Path) -> list[Record]:
    """All records of a folder, by card and name.

    Raises
    ------
    UsageError
        The folder is missing, or a file does not hold what its name promises.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of records.")
    records = []
    for run in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        files = tuple(_read_file(path) for path in sorted(run.iterdir()) if path.suffix in (".json", ".jsonl"))
        records.append(Record(run.parent.name, run.name, files))
    return records


def changed_since(hashes: Hashes, present: PresentHash) -> list[str]:
    """Names whose sources are others now, those that are not installed included."""
    return [name for name, ran in hashes.items() if name != BENCH and ran != {present(name)}]


def changed_after(records: Sequence[Record], file: str) -> dict[str, str]:
    """Backends whose sources in a file are not those of the newest file that names them, with that one's record.

    The records alone decide, whatever is installed. `file` is a path below their folder.
    """
    files = [(record.name, one) for record in records for one in record.files]
    (ran,) = (one.hashes for record, one in files if f"{record}/{one.path.name}" == file)
    changed = {}
    for name in (name for name in ran if name not in (CORE, BENCH, SUITE)):
        record, newest = max((pair for pair in files if name in pair[1].hashes), key=lambda pair: pair[1].when)
        if newest.hashes[name] != ran[name]:
            changed[name] = record
    return changed


def sources_cell(hashes: Hashes, present: PresentHash) -> str:
    """Whether a file still speaks for the sources as they are, and if not, which have changed."""
    names = [name for name in hashes if name != BENCH]
    if not names:
        return "names no sources"
    changed = changed_since(hashes, present)
    absent = [name for name in changed if present(name) is None]
    parts = []
    if set(changed) - set(absent):
        parts.append(f"STALE: {listing([name for name in changed if name not in absent])} changed since")
    if absent:
        parts.append(f"not installed here: {listing(absent)}")
    same = [name for name in names if name not in changed]
    if same:
        parts.append(f"current: {listing(same)}")
    if CORE not in names:
        parts.append(f"{CORE} not recorded")
    return "; ".join(parts)


def record_lines(record: Record, present: PresentHash) -> list[str]:
    """The record's name, and three lines for each file: when and how stale, what ran, versions."""
    lines = [record.name]
    for file in record.files:
        head = [file.path.name, *([file.when] if file.when else []), sources_cell(file.hashes, present)]
        lines.append("  " + "  ".join(head))
        lines += [f"      {text}" for text in (file.what, file.versions) if text]
    return lines


def summary_lines(records: Sequence[Record], present: PresentHash) -> list[str]:
    """How many records and files there are, and which files are stale because of what."""
    files = [(f"{record.name}/{file.path.name}", file) for record in records for file in record.files]
    stale = []
    for name, file in files:
        changed = [source for source in changed_since(file.hashes, present) if present(source) is not None]
        if changed:
            stale.append(f"stale: {name}: {listing(changed)} changed since")
    unknown = sum(not set(file.hashes) - {BENCH} for _, file in files)
    total = f"{count(len(records), 'record')}, {count(len(files), 'file')}"
    return [f"{total}: {len(stale)} stale, {unknown} of unknown sources.", *stale]


def present_hash(name: str) -> str | None:
    """See :data:`PresentHash`."""
    from la_bench.variants import backend_facts

    if name in (CORE, BENCH):
        return source_hash(name)
    if name == SUITE:
        folder = Path(__file__).parents[3] / SUITE
        return folder_hash(folder) if folder.is_dir() else None
    return backend_facts(name).source_hash


def _read_file(path: Path) -> RecordFile:
    try:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line] if path.suffix == ".jsonl" else [text]
        return _describe(path, [json.loads(line) for line in lines])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as reason:
        raise UsageError(f"{path} cannot be read as a file of a record: {type(reason).__name__}: {reason}") from reason


def _describe(path: Path, entries: Sequence[dict[str, Any]]) -> RecordFile:
    environments = [entry["environment"] for entry in entries if "environment" in entry]
    first = environments[0] if environments else {}
    versions = [f"{name} {first[name]}" for name in VERSIONS if first.get(name)]
    when = str(first.get("utc") or first.get("date") or "")[:19].replace("T", " ")
    return RecordFile(path, when, _what_ran(entries), listing(versions), _hashes(entries))


def _what_ran(entries: Sequence[dict[str, Any]]) -> str:
    if "outcomes" in entries[0]:
        return "; ".join(
            f"{target}: {listing([f'{len(tests)} {outcome}' for outcome, tests in outcomes.items()])}"
            for target, outcomes in entries[0]["outcomes"].items()
        )
    if "workload" in entries[0]:
        subjects = {entry["workload"]["name"] for entry in entries}
        timed = dict.fromkeys(entry["backend"]["name"] for entry in entries if entry["status"] == "ok")
        noun = "point" if entries[0]["workload"].get("grid") else "workload"
        depth = "quick: " if entries[0]["environment"]["quick"] else ""
        op = entries[0]["workload"].get("op")
        depth = f"{op}, {depth}" if op else depth
        dtypes = listing(sorted({entry["workload"]["state_dtype"] for entry in entries}))
        return f"{depth}{count(len(subjects), noun)}, {dtypes} states; timed: {listing(list(timed))}"
    if "first_ms" in entries[0]:
        modes = [f"{entry['backend']} {entry['mode']}" for entry in entries if not entry["fault"]]
        return f"first calls: {listing(modes)}"
    if "tiles" in entries[0]:
        backends = dict.fromkeys(str(entry["backend"]) for entry in entries)
        return f"tiles of {listing(list(backends))}: {count(len(entries), 'time')}"
    return "other figures"


def _hashes(entries: Iterable[dict[str, Any]]) -> Hashes:
    found: dict[str, set[str]] = {}
    for entry in entries:
        for name, value in _hashes_of(entry):
            if value is not None:
                found.setdefault(name, set()).add(value)
    return {name: frozenset(values) for name, values in found.items()}


def _hashes_of(entry: dict[str, Any]) -> Iterable[tuple[str, str | None]]:
    """Names and hashes of one object: the outcome of a suite, a row of a comparison, or a time of a tile."""
    environment = entry.get("environment", {})
    yield from environment.get("sources_sha256", {}).items()
    yield from (environment.get("sources") or {}).items()
    backend = entry.get("backend")
    if isinstance(backend, str):
        yield backend, entry["source_hash"]
    elif backend is not None and backend.get("kind", "backend") != "peer":
        is_floor = backend.get("kind") == "floor"
        yield BENCH if is_floor else backend["name"].partition("+")[0], backend["source_hash"]
