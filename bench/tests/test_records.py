"""Records: every one is listed with what ran, and a changed source makes those that it ran in stale."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from la_bench.cli import main
from la_bench.errors import UsageError
from la_bench.records import (
    changed_since,
    present_hash,
    read_records,
    record_lines,
    records_folder,
    sources_cell,
    summary_lines,
)
from la_bench.rows import Row, to_json_lines
from la_core.conformance.source_hash import folder_hash, source_hash

MakeRow = Callable[..., Row]
Capture = pytest.CaptureFixture[str]

SUITE = {
    "environment": {
        "date": "2026-01-02T03:04:05+00:00",
        "sources_sha256": {"la_core": "c0", "triton": "t0"},
        "torch": "2.11.0",
        "python": "3.12.3",
    },
    "outcomes": {"triton-cuda": {"passed": ["one", "two"], "skipped": ["three"]}},
}
PRESENT = {"la_core": "c0", "triton": "t0", "ref": "r0"}


def with_hash(row: Row, value: str) -> Row:
    return replace(row, backend=replace(row.backend, source_hash=value))


@pytest.fixture
def folder(tmp_path: Path, make_row: MakeRow) -> Path:
    """One record: a suite, rows with a floor and a peer, and figures that name no sources."""
    run = tmp_path / "a-card" / "2026-01-02-one"
    run.mkdir(parents=True)
    (run / "suite.json").write_text(json.dumps(SUITE))
    rows = [
        with_hash(make_row(backend="triton", grid=(8, 1)), "t0"),
        with_hash(make_row(backend="triton+overlap", grid=(8, 2)), "t0"),
        with_hash(make_row(backend="in-place floor", kind="floor", grid=(8, 1)), "b0"),
        with_hash(make_row(backend="sglang", kind="peer", grid=(8, 1)), "p0"),
        make_row(backend="cula", kind="peer", status="refused", reason="no", grid=(8, 1)),
    ]
    (run / "grid.jsonl").write_text(to_json_lines(rows))
    (run / "figures.json").write_text("{}")
    (tmp_path / "README.md").write_text("not a record")
    return tmp_path


def test_what_ran_is_listed(folder: Path) -> None:
    (record,) = read_records(folder)
    assert record_lines(record, PRESENT.get) == [
        "a-card/2026-01-02-one",
        "  figures.json  names no sources",
        "      other figures",
        "  grid.jsonl  2026-01-02 03:04:05  current: triton; la_core not recorded",
        "      2 points, float32 states; timed: triton, triton+overlap, in-place floor, sglang",
        "      torch 2.13.0, python 3.11.0",
        "  suite.json  2026-01-02 03:04:05  current: la_core, triton",
        "      triton-cuda: 2 passed, 1 skipped",
        "      torch 2.11.0, python 3.12.3",
    ]
    assert summary_lines([record], PRESENT.get) == ["1 record, 3 files: 0 stale, 1 of unknown sources."]


def test_a_changed_package_makes_what_it_ran_in_stale(folder: Path) -> None:
    (record,) = read_records(folder)
    now = {**PRESENT, "la_core": "c1"}
    assert summary_lines([record], now.get) == [
        "1 record, 3 files: 1 stale, 1 of unknown sources.",
        "stale: a-card/2026-01-02-one/suite.json: la_core changed since",
    ]
    now["triton"] = "t1"
    assert "stale: a-card/2026-01-02-one/grid.jsonl: triton changed since" in summary_lines([record], now.get)


def test_sources_in_words() -> None:
    hashes = {"la_core": frozenset({"c0"}), "triton": frozenset({"t0", "t1"}), "cute": frozenset({"x"})}
    words = "STALE: triton changed since; not installed here: cute; current: la_core"
    assert sources_cell(hashes, PRESENT.get) == words
    assert changed_since({"la_bench": frozenset({"b0"})}, PRESENT.get) == []


def test_tiles_name_their_backend(tmp_path: Path) -> None:
    run = tmp_path / "card" / "run"
    run.mkdir(parents=True)
    line = {"schema": 1, "backend": "triton", "source_hash": "t0", "tiles": {}, "environment": {"utc": "2026-01-02T"}}
    (run / "tiles.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_records(tmp_path)
    assert record.files[0].what == "tiles of triton: 1 time"
    assert record.files[0].hashes == {"triton": {"t0"}}


def test_the_sources_of_this_checkout_are_what_records_are_compared_with() -> None:
    assert present_hash("la_core") == source_hash("la_core")
    assert present_hash("ref") == source_hash("la_ref")
    assert present_hash("shared_tests") == folder_hash(Path(__file__).parents[2] / "shared_tests")
    assert present_hash("never-heard-of") is None


def test_every_record_of_the_repository_can_be_listed(capsys: Capture) -> None:
    assert main(["records"]) == 0
    printed = capsys.readouterr().out
    for file in records_folder().glob("*/*/*.json*"):
        assert f"  {file.name}  " in printed
        assert f"{file.parent.parent.name}/{file.parent.name}\n" in printed


def test_a_file_that_is_damaged_is_named(folder: Path, capsys: Capture) -> None:
    suite = folder / "a-card" / "2026-01-02-one" / "suite.json"
    suite.write_text(suite.read_text()[:40])
    assert main(["records", "--folder", str(folder)]) == 2
    assert f"{suite} cannot be read as a file of a record: JSONDecodeError" in capsys.readouterr().err
    assert main(["records", "--folder", str(folder / "nowhere")]) == 2
    assert "is not a folder of records" in capsys.readouterr().err


def test_a_file_without_a_line_is_named(tmp_path: Path) -> None:
    run = tmp_path / "card" / "run"
    run.mkdir(parents=True)
    (run / "grid.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"grid\.jsonl cannot be read as a file of a record"):
        read_records(tmp_path)
