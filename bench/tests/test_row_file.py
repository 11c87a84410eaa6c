"""What has been measured survives what comes after it: kills, full disks, lost folders, backends that fall over."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import la_bench.grid
import la_bench.row_file
import la_bench.tensors
import la_bench.timing
from la_bench.cli import main
from la_bench.compare_runs import read_rows
from la_bench.row_file import RowFile
from la_bench.rows import Row, from_json_lines, to_json_lines

MakeRow = Callable[..., Row]
Capture = pytest.CaptureFixture[str]

WORKLOADS = "minimax-01-tp8/light,ling-2.6-flash-tp4/light"
COMPARE = ["compare", "--quick", "--device", "cpu", "--workloads", WORKLOADS]
GRID = ["compare", "--quick", "--device", "cpu", "--grid", "2x1,2,4"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.tensors.ARENA_BYTES, "cpu", 48 << 20)
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)


SMALL = """
import la_bench.grid, la_bench.tensors, la_bench.timing
la_bench.tensors.ARENA_BYTES["cpu"] = 48 << 20
la_bench.grid.LAP_BYTES["cpu"] = 1 << 20
la_bench.timing.COPY_BYTES["cpu"] = 8 << 20
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """la-bench in a process of its own, after a few lines of Python."""
    whole = f"import sys\n{SMALL}{program}\nfrom la_bench.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", whole, *arguments], capture_output=True, text=True, timeout=300)


def statuses(file: Path, backend: str) -> list[str]:
    return [row.status for row in from_json_lines(file.read_text()) if row.backend.name == backend]


def test_rows_replace_those_of_an_older_run_and_then_add_up(tmp_path: Path, make_row: MakeRow) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    first, second = [make_row(grid=(8, 1)), make_row(grid=(8, 2))], [make_row(grid=(8, 4))]
    file = RowFile(path, pytest.fail)
    file.add(first)
    assert path.read_text() == to_json_lines(first)
    assert not file.holds([*first, *second])
    file.add(second)
    assert path.read_text() == to_json_lines([*first, *second])
    assert file.holds([*first, *second])


def test_any_character_in_a_reason_is_read_back(tmp_path: Path, make_row: MakeRow) -> None:
    row = make_row(status="error", reason="a\u2028b\x85c\ud800")
    RowFile(tmp_path / "rows.jsonl", pytest.fail).add([row])
    assert read_rows(tmp_path / "rows.jsonl") == [row]


def test_a_row_that_was_cut_off_is_left_out_and_said(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    rows = [make_row(grid=(8, batch)) for batch in (1, 2)]
    path = tmp_path / "rows.jsonl"
    path.write_text(to_json_lines(rows)[:-20])
    assert read_rows(path) == rows[:1]
    assert capsys.readouterr().err == f"{path}: its last row was cut off, and is left out.\n"
    # Whole, but for the end of the line.
    path.write_text(to_json_lines(rows)[:-1])
    assert read_rows(path) == rows
    assert capsys.readouterr().err == ""


def test_half_a_row_is_taken_back_and_written_later(
    tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [make_row(grid=(8, batch)) for batch in (1, 2, 4)]
    complaints: list[str] = []
    file = RowFile(path, complaints.append)
    file.add(rows[:1])
    whole = Path.open

    def full(self: Path, *arguments: object, **options: object) -> object:
        opened = whole(self, *arguments, **options)  # type: ignore[call-overload]
        opened.write(b"half a")
        opened.close()
        # As a disk does that fills up within a write.
        return open("/dev/full", "ab", buffering=0) if self == path else opened

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        file.add(rows[1:2])
        file.add([])
    assert len(complaints) == 1
    assert f"{path}: No space left on device. It holds the first 1 rows." in complaints[0]
    file.add(rows[2:])
    assert path.read_text() == to_json_lines(rows)


def test_a_folder_that_goes_is_a_complaint_and_is_made_again(
    tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    out = tmp_path / "report"
    rows = [make_row(), make_row("minicpm-sala/heavy")]

    def measure(*arguments: object, keep: Callable[[list[Row]], None], **options: object) -> list[Row]:
        keep(rows[:1])
        shutil.rmtree(out)
        keep(rows[1:])
        return rows

    monkeypatch.setattr("la_bench.compare_command.run_compare", measure)
    assert main(["compare", "--device", "cpu", "--workloads", "ring", "--out", str(out)]) == 0
    assert f"{out}/rows.jsonl: It is gone. It holds the first 1 rows." in capsys.readouterr().err
    assert (out / "rows.jsonl").read_text() == to_json_lines(rows)
    assert (out / "report.html").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("arguments", [COMPARE, GRID], ids=["workloads", "grid"])
def test_a_full_disk_costs_only_the_rows_that_do_not_fit(arguments: list[str], tmp_path: Path) -> None:
    # Three rows of each subject take 5 to 8 kB: those of the first fit.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))"
    done = run(limit, *arguments, "--out", str(tmp_path))
    assert done.returncode == 1, done.stderr
    first, last = done.stderr.strip().splitlines()
    assert f"{tmp_path}/rows.jsonl: File too large. It holds the first " in first
    kept = from_json_lines((tmp_path / "rows.jsonl").read_text())
    subjects = 2 if arguments is COMPARE else 3
    assert last == (
        f"la-bench compare: {tmp_path}: File too large. No report was written. The first {len(kept)} of {3 * subjects} "
        f"rows are in {tmp_path}/rows.jsonl: la-bench report {tmp_path}/rows.jsonl --out ELSEWHERE makes it of them."
    )
    assert f"the first {len(kept)} rows" in first
    assert [row.status for row in kept if row.backend.name == "ref"] == ["ok"]
    # All figures are at least on the terminal.
    for subject in WORKLOADS.split(",") if arguments is COMPARE else ["1 ", "2 ", "4 "]:
        (line,) = re.findall(rf"^{subject}.*$", done.stdout, re.MULTILINE)[:1]
        assert "ERROR" not in line
    # No half of a report.
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]


@pytest.mark.parametrize(("status", "code"), [("ok", 1), ("interrupted", 130)])
def test_a_report_that_does_not_fit_leaves_all_rows_and_says_how_to_go_on(
    status: str, code: int, tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    rows = [make_row(), make_row("minicpm-sala/heavy", status=status, reason=None if status == "ok" else "stopped")]

    def measure(*arguments: object, keep: Callable[[list[Row]], None], **options: object) -> list[Row]:
        keep(rows)
        return rows

    whole = Path.write_text

    def full(self: Path, content: str, **options: str) -> int:
        if "html" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(self, content, **options)

    monkeypatch.setattr("la_bench.compare_command.run_compare", measure)
    arguments = ["compare", "--device", "cpu", "--workloads", "ring", "--out", str(tmp_path / "report")]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert main(arguments) == code
    file = tmp_path / "report" / "rows.jsonl"
    assert capsys.readouterr().err == (
        f"la-bench compare: {file.parent}: No space left on device. No report was written. All 2 rows are in {file}: "
        f"la-bench report {file} --out ELSEWHERE makes it of them.\n"
    )
    assert list((tmp_path / "report").iterdir()) == [file]
    assert main(["report", str(file), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "report.html").exists()


KILLED = """
import la_bench.run_compare, os, signal
whole = la_bench.run_compare.Comparison.rows
done = []

def rows(self, say, tick):
    if len(done) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(self)
    return whole(self, say, tick)

la_bench.run_compare.Comparison.rows = rows
"""


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
@pytest.mark.parametrize("arguments", [COMPARE, GRID], ids=["workloads", "grid"])
def test_a_kill_keeps_what_is_done_and_a_report_can_be_made_of_it(
    arguments: list[str], tmp_path: Path, capsys: Capture
) -> None:
    done = run(KILLED, *arguments, "--out", str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert statuses(tmp_path / "rows.jsonl", "ref") == ["ok"]
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert main(["report", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert str(tmp_path / "report.html") in capsys.readouterr().out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("arguments", [COMPARE, GRID], ids=["workloads", "grid"])
def test_ctrl_c_keeps_what_is_done(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    whole = la_bench.run_compare.Comparison.rows
    done: list[object] = []

    def rows(self: la_bench.run_compare.Comparison, say: object, tick: object) -> list[Row]:
        if done:
            raise KeyboardInterrupt
        done.append(self)
        return whole(self, say, tick)  # type: ignore[arg-type]

    monkeypatch.setattr(la_bench.run_compare.Comparison, "rows", rows)
    assert main([*arguments, "--out", str(tmp_path)]) == 130
    subjects = 2 if arguments is COMPARE else 3
    assert statuses(tmp_path / "rows.jsonl", "ref") == ["ok"] + ["interrupted"] * (subjects - 1)
    assert "not finished" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("arguments", [COMPARE, GRID], ids=["workloads", "grid"])
def test_a_backend_that_falls_over_half_way_leaves_the_others(
    arguments: list[str],
    tmp_path: Path,
    capsys: Capture,
    install: Callable[[object], None],
    made_up: SimpleNamespace,
) -> None:
    raising = made_up.Raising()
    # It passes the gate and raises while it is timed.
    raising.good_calls = 4
    install(raising)
    assert main([*arguments, "--backends", "raising", "--out", str(tmp_path)]) == 1
    subjects = 2 if arguments is COMPARE else 3
    assert statuses(tmp_path / "rows.jsonl", "raising") == ["error"] * subjects
    assert statuses(tmp_path / "rows.jsonl", "ref") == ["ok"] * subjects
    assert "RuntimeError: the kernel fell over" in capsys.readouterr().out


def test_a_report_is_that_of_one_run(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    row = make_row(grid=(8, 1))
    verify = replace(row, workload=replace(row.workload, name="verify/H8/B1/T4/L1", op="verify"))
    for rows, sentence in (
        ([verify, row], "holds rows of verify and a grid of decode"),
        ([row, verify], "holds rows of a grid of decode and verify"),
        ([row, make_row()], "holds rows of a grid of decode and workloads"),
        ([row, make_row(grid=(8, 2)), row], "holds two rows for ref on H8/B1 (bfloat16 tokens, float32 states, vk)"),
    ):
        file = tmp_path / "some.jsonl"
        file.write_text(to_json_lines(rows))
        assert main(["report", str(file), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"la-bench report: {file} {sentence}. Pass the rows of one run.\n"
    assert not (tmp_path / "out").exists()


def test_a_report_of_recorded_rows(tmp_path: Path, make_row: MakeRow, capsys: Capture) -> None:
    rows = tmp_path / "some.jsonl"
    rows.write_text(to_json_lines([make_row()]))
    assert main(["report", str(rows), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "rows.jsonl").read_text() == rows.read_text()
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "No such file" in capsys.readouterr().err
