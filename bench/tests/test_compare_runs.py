"""`la-bench diff`: which verdict two runs give a row, and what the program prints and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from la_bench.cli import main
from la_bench.compare_runs import RESOLUTION, compare_runs, read_rows, row_verdict, summary_table, unmatched
from la_bench.errors import UsageError
from la_bench.rows import Row, to_json_lines

MakeRow = Callable[..., Row]
Capture = pytest.CaptureFixture[str]
RECORD = Path(__file__).parents[1] / "records" / "nvidia-h200" / "2026-11-29-la-triton-2"


def timed(row: Row, p20: float, median: float, p80: float) -> Row:
    assert row.result is not None
    return replace(row, result=replace(row.result, time_us=median, time_us_p20=p20, time_us_p80=p80))


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((90, 100, 110), "SAME"),
        ((95, 109, 120), "SAME"),
        ((111, 120, 130), "SLOWER"),
        ((70, 80, 89), "FASTER"),
        # They overlap, but a median lies outside of the other interval.
        ((109, 120, 130), "UNCLEAR"),
        ((99, 109.5, 109.9), "SAME"),
        ((104, 109, 112), "UNCLEAR"),
    ],
)
def test_verdicts_by_the_intervals(new: tuple[float, float, float], verdict: str, make_row: MakeRow) -> None:
    assert row_verdict(timed(make_row(), 90, 100, 110), timed(make_row(), *new), RESOLUTION) == verdict


@pytest.mark.parametrize(
    ("median", "verdict"),
    [(100.9, "SAME"), (101.5, "UNCLEAR"), (102.5, "SLOWER"), (99.2, "SAME"), (98.5, "UNCLEAR"), (97.5, "FASTER")],
)
def test_a_narrow_interval_spans_at_least_the_resolution(median: float, verdict: str, make_row: MakeRow) -> None:
    old, new = timed(make_row(), 100, 100, 100), timed(make_row(), median, median, median)
    assert row_verdict(old, new, 0.01) == verdict
    assert row_verdict(old, new, 1e-6) == ("SLOWER" if median > 100 else "FASTER")


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("ok", "failed", "WRONG"),
        ("ok", "error", "WRONG"),
        ("ok", "refused", "NO TIME"),
        ("ok", "unavailable", "NO TIME"),
        ("ok", "interrupted", "NO TIME"),
        ("failed", "ok", "TIME NOW"),
        ("refused", "ok", "TIME NOW"),
        ("refused", "failed", "WRONG"),
        ("failed", "error", None),
        ("checked", "failed", "WRONG"),
        ("checked", "unavailable", "NO TIME"),
        ("checked", "checked", None),
        ("refused", "unavailable", None),
    ],
)
def test_verdicts_without_two_times(old: str, new: str, verdict: str | None, make_row: MakeRow) -> None:
    before, after = (make_row(status=s, reason=None if s == "ok" else "because") for s in (old, new))
    assert row_verdict(before, after, RESOLUTION) == verdict


def test_rows_are_matched_by_workload_pool_and_backend(make_row: MakeRow) -> None:
    row = make_row(grid=(8, 1))
    half = replace(row, workload=replace(row.workload, state_dtype="bfloat16"))
    difference = compare_runs([row, half], [half, make_row(grid=(8, 2)), make_row(backend="swift", grid=(8, 1))])
    assert [(str(change.key), change.verdict) for change in difference.changes] == [
        ("ref on H8/B1 (bfloat16 tokens, bfloat16 states, vk)", "SAME")
    ]
    assert unmatched(difference) == [
        "only in OLD: ref (bfloat16 tokens, float32 states, vk) on H8/B1",
        "only in NEW: ref (bfloat16 tokens, float32 states, vk) on H8/B2",
        "only in NEW: swift (bfloat16 tokens, float32 states, vk) on H8/B1",
    ]


def test_rows_with_tokens_of_another_dtype_are_no_counterparts(make_row: MakeRow) -> None:
    row = make_row(grid=(8, 1))
    narrow = replace(row, workload=replace(row.workload, io_dtype="float16"))
    difference = compare_runs([row], [narrow])
    assert difference.changes == ()
    assert unmatched(difference)[1] == "only in NEW: ref (float16 tokens, float32 states, vk) on H8/B1"


def test_two_rows_for_one_thing(make_row: MakeRow) -> None:
    sentence = r"NEW holds two rows for ref on ring-mini-linear-2.0/medium \(bfloat16 tokens, float32 states, vk\)"
    with pytest.raises(UsageError, match=sentence):
        compare_runs([make_row()], [make_row(), make_row()])


def write(path: Path, rows: Sequence[Row]) -> str:
    path.write_text(to_json_lines(rows))
    return str(path)


def test_an_unchanged_run_is_0(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    file = write(tmp_path / "rows.jsonl", [make_row(), make_row(backend="shy", status="refused", reason="no")])
    assert main(["diff", file, file]) == 0
    printed = capsys.readouterr().out
    assert "SAME" in printed
    assert "shy" not in printed


def test_slower_and_wrong_backends_are_1(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    old = [make_row(backend=name) for name in ("ref", "slow", "bent")]
    new = [
        make_row(backend="ref"),
        make_row(backend="slow", time_us=4000.0),
        make_row(backend="bent", status="failed", reason="state of row 3 is off"),
    ]
    files = write(tmp_path / "old", old), write(tmp_path / "new", new)
    assert main(["diff", *files]) == 1
    printed = capsys.readouterr().out
    assert "SLOWER: slow on ring-mini-linear-2.0/medium (bfloat16 tokens, float32 states, vk)\n" in printed
    assert (
        "WRONG: bent on ring-mini-linear-2.0/medium (bfloat16 tokens, float32 states, vk): state of row 3 is off\n"
        in printed
    )
    assert "2.67x" in printed
    assert main(["diff", *reversed(files)]) == 0
    assert "FASTER" in capsys.readouterr().out
    assert main(["diff", files[0], write(tmp_path / "mild", new[:1] + old[1:]), "--resolution", "50"]) == 0


def test_a_slower_peer_is_no_failure(tmp_path: Path, make_row: MakeRow) -> None:
    peers = [make_row(backend="fla", kind="peer", time_us=time) for time in (100.0, 200.0)]
    files = [write(tmp_path / name, [row]) for name, row in zip(("old", "new"), peers, strict=True)]
    assert main(["diff", *files]) == 0


def test_what_else_changed_is_said(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    row = make_row()
    other = replace(make_row(copy_gb_per_s=22.0), environment=replace(row.environment, torch="2.14.0"))
    assert main(["diff", write(tmp_path / "old", [row]), write(tmp_path / "new", [other])]) == 0
    printed = capsys.readouterr().out
    assert "differs: torch: 2.13.0 in OLD, 2.14.0 in NEW" in printed
    assert "a large copy moves 20.0 GB/s in OLD, 22.0 GB/s in NEW" in printed


def test_a_backend_that_is_gone_is_1(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    old = write(tmp_path / "old", [make_row(), make_row(backend="swift")])
    assert main(["diff", old, write(tmp_path / "new", [make_row()])]) == 1
    assert "LOST: swift on" in capsys.readouterr().out
    absent = make_row(backend="swift", status="unavailable", reason="not installed")
    assert main(["diff", old, write(tmp_path / "new", [make_row(), absent])]) == 1
    assert "NO TIME: swift on" in capsys.readouterr().out


@pytest.mark.parametrize("status", ["refused", "interrupted", "unavailable", "checked"])
def test_a_backend_without_its_times_is_1(status: str, tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    old = [make_row(backend=name, grid=(8, B)) for B in (1, 2) for name in ("ref", "swift")]
    new = [make_row(backend="swift", status=status, reason="no", grid=(8, B)) for B in (1, 2)]
    files = write(tmp_path / "old", old), write(tmp_path / "new", [old[0], old[2], *new])
    assert main(["diff", *files]) == 1
    printed = capsys.readouterr().out
    assert "NO TIME: swift on H8/B1 (bfloat16 tokens, float32 states, vk): no\n" in printed
    assert "No row has a time in both runs" not in printed
    # The other way round they are there again.
    assert main(["diff", *reversed(files)]) == 0


def test_a_peer_without_its_times_is_no_failure(tmp_path: Path, make_row: MakeRow) -> None:
    peers = [make_row(backend="fla", kind="peer"), make_row(backend="fla", kind="peer", status="refused", reason="no")]
    files = [write(tmp_path / str(n), [make_row(), row]) for n, row in enumerate(peers)]
    assert main(["diff", *files]) == 0


def test_two_runs_without_two_times_say_so(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    file = write(tmp_path / "rows", [make_row(status="checked", reason="judged")])
    assert main(["diff", file, file]) == 0
    assert "No row has a time in both runs: no times were compared.\n" in capsys.readouterr().out


def test_a_new_backend_that_is_wrong_is_1(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    bent = make_row(backend="bent", status="failed", reason="row 3 is off")
    files = write(tmp_path / "old", [make_row()]), write(tmp_path / "new", [make_row(), bent])
    assert main(["diff", *files]) == 1
    assert "WRONG: bent on" in capsys.readouterr().out


def test_workloads_of_one_run_alone_are_no_fault(tmp_path: Path, make_row: MakeRow) -> None:
    quick, full = [make_row(grid=(8, 1))], [make_row(grid=(8, 1)), make_row(grid=(8, 2))]
    files = write(tmp_path / "full", full), write(tmp_path / "quick", quick)
    assert main(["diff", *files]) == main(["diff", *reversed(files)]) == 0


def test_nothing_to_compare_is_1(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    files = write(tmp_path / "old", [make_row(grid=(8, 1))]), write(tmp_path / "new", [make_row(grid=(8, 2))])
    assert main(["diff", *files]) == 1
    assert "nothing was compared" in capsys.readouterr().out


def test_two_machines_are_refused_unless_asked_for(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    row = make_row()
    other = replace(row, environment=replace(row.environment, machine="another"))
    files = write(tmp_path / "old", [row]), write(tmp_path / "new", [other])
    assert main(["diff", *files]) == 2
    assert "OLD is from A <made-up> CPU, 2 cores, NEW from another" in capsys.readouterr().err
    assert main(["diff", *files, "--any-machine"]) == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory."),
        ("", "holds no rows."),
        ("not json\n", "does not hold rows of la-bench compare"),
        ('{"schema": 1}\n', "row schema must be 2, got 1."),
        ('{"schema": 2}\n', "does not hold rows of la-bench compare"),
        ("[]\n", "does not hold rows of la-bench compare"),
    ],
    ids=["missing", "empty", "text", "old", "other", "list"],
)
def test_what_is_no_file_of_rows(content: str | None, sentence: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["diff", str(file), str(file)]) == 2
    assert sentence in capsys.readouterr().err


def test_unchanged_kernels_of_two_recorded_runs_are_neither_faster_nor_slower() -> None:
    difference = compare_runs(*(read_rows(RECORD / f"grid-{name}.jsonl") for name in ("all-peers", "quick")))
    for unchanged in ("sglang", "torch-naive", "in-place floor"):
        verdicts = [change.verdict for change in difference.changes if change.key.backend == unchanged]
        assert len(verdicts) == 14
        assert set(verdicts) <= {"SAME", "UNCLEAR"}, unchanged


def test_the_summary_counts_by_backend(make_row: MakeRow) -> None:
    old = [make_row(grid=(8, 1)), make_row(grid=(8, 2)), make_row(backend="shy", status="refused", reason="no")]
    new = [make_row(grid=(8, 1)), make_row(grid=(8, 2), time_us=150.0), old[2]]
    table = summary_table(compare_runs(old, new))
    assert table.rows == (("ref", "1", "1", "0", "0", "0", "0", "0", "0.55x"),)
