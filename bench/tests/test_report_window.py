"""Reports, plots and pages of operators with a window, from rows made up without measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from la_bench.compare_runs import compare_runs
from la_bench.record_pages import card_page, newest_grids, readme_table
from la_bench.records import read_records, record_lines
from la_bench.report_window import ratio_tables, summary, time_tables
from la_bench.rows import Row, from_json_lines, to_json_lines
from la_bench.write_report import render_report

MakeRow = Callable[..., Row]
RoleTimes = dict[str, float]


def of_op(
    row: Row,
    op: str,
    *,
    window: int | None = None,
    over: RoleTimes | None = None,
    state_dtype: str = "float32",
    utc: str = "2026-01-01",
) -> Row:
    """The same row of another operator, from a GPU."""
    facts = replace(row.workload, name=f"{op}/{row.workload.name}", op=op, state_dtype=state_dtype)
    facts = replace(facts, floor_dtype="float32") if op == "deferred" else facts
    if op != "deferred":
        facts = replace(facts, drafts=4, layers=1, accepted="uniform over 1 to 4")
    result = row.result and replace(row.result, time_over=over)
    environment = replace(row.environment, device="cuda", machine="A Card", utc=utc)
    way = None if window is None else f"with a window of {window}"
    return replace(row, workload=facts, result=result, environment=environment, window=window, way=way)


@pytest.fixture
def deferred(make_row: MakeRow) -> list[Row]:
    rows = []
    for B, share, recurrent in ((1, 0.8, 1.1), (256, 1.75, 0.57)):
        grid = (64, B)
        for name, window in (("cute+window7", 7), ("cute+window7+overlap", 7), ("cute", None)):
            over = None if window is None else {"recurrent": recurrent}
            row = make_row(backend=name, time_us=2.0 * B, against=(1 / recurrent, share), host_us=6.0, grid=grid)
            row = replace(row, backend=replace(row.backend, overlap=name.endswith("overlap")))
            rows.append(of_op(row, "deferred", window=window, over=over, state_dtype="bfloat16"))
        rows.append(of_op(make_row(backend="in-place floor", kind="floor", time_us=3.0 * B, grid=grid), "deferred"))
        rows.append(of_op(make_row(backend="cula", kind="peer", time_us=4.0 * B, grid=grid), "deferred"))
    refused = make_row(backend="triton+window7", status="refused", reason="does not implement it", grid=(64, 1))
    return [*rows, of_op(refused, "deferred", window=7)]


@pytest.fixture
def verify(make_row: MakeRow) -> list[Row]:
    rows = []
    for B in (16, 128):
        grid = (64, B)
        kept = {"decodes": 0.2 if B == 16 else 0.19, "commit": 0.5}
        rows += [
            of_op(make_row(backend="cute+window16", time_us=2.0, grid=grid), "verify", window=16, over=kept),
            of_op(make_row(backend="cute+commit", time_us=4.0, grid=grid), "verify", window=4, over={"decodes": 0.4}),
            of_op(make_row(backend="cute", time_us=10.0, grid=grid), "verify"),
        ]
    return rows


def test_a_report_of_deferred_decode(deferred: list[Row]) -> None:
    files = render_report(deferred)
    text = files["report.md"]
    assert {"time_over_floor.svg", "time_over_recurrent.svg", "host_time.svg", "accuracy.svg"} < set(files)
    assert (
        "| cute+window7 | 57 % (H64/B256) to 125 % (H64/B1) | 0.91x (H64/B1) to 1.75x (H64/B256) | 0.91x (H64/B1) to "
    ) in text
    assert "states in bfloat16, layout vk" in text
    assert "The in-place floor is that of recurrent decode with float32 states." in text
    assert "| triton+window7 | refused | deferred/H64/B1 | does not implement it |" in text
    assert "What la_core.decode with a window chooses by itself here:" in text
    assert "- **window7**: with a window of 7" in text
    assert from_json_lines(files["rows.jsonl"]) == deferred
    assert render_report(from_json_lines(files["rows.jsonl"])) == files


def test_tables_of_deferred_decode(deferred: list[Row]) -> None:
    ((title, ratios),) = ratio_tables(deferred)
    assert title == "H = 64: ratios"
    assert ratios.columns[:5] == (
        *("B", "fastest peer"),
        *("cute+window7, of floor", "cute+window7, vs recurrent", "cute+window7, vs peer"),
    )
    assert ratios.rows[1][:5] == ("256", "cula", "57 %", "1.75x", "1.75x")
    ((title, times),) = time_tables(deferred)
    assert title == "H = 64: device time of a call in us"
    assert times.columns == (
        "B",
        "copy floor of recurrent decode",
        "cute+window7",
        "cute+window7+overlap",
        "cute",
        "in-place floor",
        "cula",
    )


def test_the_fastest_peer_is_named_and_may_be_plain_torch(deferred: list[Row]) -> None:
    def peer_is(name: str) -> str:
        rows = [
            replace(row, backend=replace(row.backend, name=name)) if row.backend.kind == "peer" else row
            for row in deferred
        ]
        return render_report(rows)["report.md"].split("## Plots")[0]

    assert "| times as fast as recurrent decode | times as fast as the fastest peer (cula) |" in peer_is("cula")
    assert "Peers that were timed: cula.\n" in peer_is("cula")
    only_torch = peer_is("torch-naive")
    assert "| times as fast as the fastest peer (torch-naive) |" in only_torch
    assert "torch-naive is plain torch: no public kernel was timed." in only_torch


@pytest.mark.parametrize(
    ("op", "head", "floor"),
    [
        ("deferred", "copy floor of recurrent decode", "7.00"),
        ("verify", "copy floor of T decodes", "7.00"),
        ("commit", "copy floor of a commit", "3.00"),
    ],
)
def test_tables_say_of_what_the_copy_floor_is(op: str, head: str, floor: str, make_row: MakeRow) -> None:
    def moving(name: str, floor_us: float, window: int | None) -> Row:
        row = make_row(backend=name, grid=(64, 16))
        return of_op(replace(row, result=row.result and replace(row.result, copy_floor_us=floor_us)), op, window=window)

    ((_, table),) = time_tables([moving("cute+window7", 3.0, 7), moving("cute", 7.0, None)])
    assert table.columns[1] == head
    assert table.rows[0][1] == floor
    # Without a time of what the column names there is nothing to show.
    ((_, alone),) = time_tables([moving("cute+window7", 3.0, 7)])
    assert alone.rows[0][1] == (floor if op == "commit" else "-")


def test_a_report_of_verify(verify: list[Row]) -> None:
    text = render_report(verify)["report.md"]
    assert "| cute+window16 | 19 % (H64/B128) to 20 % (H64/B16) | 50 % |" in text
    assert "| cute+commit | 40 % | - |" in text
    assert "accepted: uniform over 1 to 4; L = 1." in text
    assert "| 16 | 20 % | 50 % | 40 % |" in text
    assert "device time of a step of one layer in us" in text
    assert "**Overlap**: none" in text
    assert "**Peers**" not in text
    complete = text.split("## All results\n")[1].split("\n### Variants")[0]
    assert "| 128 | cute+window16 | 2.00 us | 1.80 us to 2.40 us | 30 |" in complete


def test_a_report_of_commit(make_row: MakeRow) -> None:
    rows = []
    for B in (16, 128):
        layers = make_row(backend="cute+layers", time_us=2.0, grid=(64, B))
        rows += [
            of_op(layers, "commit", window=16, over={"commit": 0.9, "fold": 1.0}),
            of_op(make_row(backend="cute+commit", time_us=2.2, grid=(64, B)), "commit", window=16),
        ]
    files = render_report(rows)
    assert "time_over_commits.svg" in files
    assert "| cute+layers | 90 % | 100 % |" in files["report.md"]


def test_nothing_timed_is_reported_too(make_row: MakeRow) -> None:
    row = of_op(make_row(backend="cute+window7", status="failed", reason="off", grid=(8, 1)), "deferred", window=7)
    files = render_report([row])
    assert "**FAILED: cute+window7 on deferred/H8/B1. First: off**" in files["report.md"]
    assert summary([row]) == []
    assert not any(name.endswith(".svg") for name in files)


def test_rows_of_decode_stay_as_they_were(make_row: MakeRow) -> None:
    text = to_json_lines([make_row(grid=(8, 1))])
    for name in ("op", "drafts", "layers", "accepted", "floor_dtype", "time_over", "window", "way"):
        assert f'"{name}"' not in text


def test_runs_with_other_windows_are_no_counterparts(verify: list[Row]) -> None:
    other = [
        replace(row, backend=replace(row.backend, name=row.backend.name.replace("window16", "window32")))
        for row in verify
    ]
    difference = compare_runs(verify, other)
    assert {str(key) for key in difference.only_new} == {
        f"cute+window32 on verify/H64/B{B} (bfloat16 tokens, float32 states, vk)" for B in (16, 128)
    }
    assert {change.verdict for change in difference.changes} == {"SAME"}


def put(folder: Path, file: str, rows: list[Row]) -> None:
    path = folder / "a-card" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json_lines(rows))


def test_the_newest_record_of_each_operator_is_on_the_page(
    tmp_path: Path, deferred: list[Row], verify: list[Row], make_row: MakeRow
) -> None:
    decode = of_op(make_row(backend="cute", grid=(8, 1)), "deferred")
    decode = replace(decode, workload=replace(decode.workload, op=None, name="H8/B1", floor_dtype=None))
    put(tmp_path, "one/grid.jsonl", [decode])
    put(tmp_path, "one/deferred-bf16.jsonl", deferred)
    put(tmp_path, "one/verify.jsonl", verify)
    put(
        tmp_path, "two/verify.jsonl", [replace(r, environment=replace(r.environment, utc="2026-01-02")) for r in verify]
    )
    assert [run.file for run in newest_grids(tmp_path, "a-card", "verify")] == ["a-card/two/verify.jsonl"]
    assert [run.newest_of for run in newest_grids(tmp_path, "a-card", "deferred")] == [("cute",)]
    assert newest_grids(tmp_path, "a-card", "commit") == []
    page = card_page(tmp_path, "a-card")
    assert "## Lightning Attention decode with a window, bfloat16 states, vk: cute" in page
    assert "## Lightning Attention verify with a window, float32 states, vk, T = 4, L = 1: cute" in page
    assert "From a-card/two/verify.jsonl, the newest run of cute." in page
    assert "one/verify.jsonl" not in page
    assert "deferred" not in readme_table(tmp_path)
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == len(set(headings))


def test_records_say_which_operator_ran(tmp_path: Path, verify: list[Row]) -> None:
    put(tmp_path, "one/verify.jsonl", verify)
    (record,) = read_records(tmp_path)
    (file,) = record.files
    assert file.what == "verify, 2 points, float32 states; timed: cute+window16, cute+commit, cute"
    assert set(file.hashes) == {"cute"}
    assert record_lines(record, lambda name: None)[0] == "a-card/one"
