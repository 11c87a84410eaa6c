"""The program as a person meets it: help, sentences for wrong options, files and exit statuses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import la_bench.compare_command
import la_bench.tensors
import la_bench.timing
from la_bench.cli import main
from la_bench.rows import Row, from_json_lines
from la_bench.terminal import print_line

Install = Callable[[object], None]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.tensors.ARENA_BYTES, "cpu", 48 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)


@pytest.mark.parametrize(
    "command",
    [(), ("compare",), ("diff",), ("report",), ("records",), ("tune",), ("first",), ("host",), ("ref",)],
    ids=lambda c: " ".join(c) or "none",
)
def test_help(command: tuple[str, ...], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: la-bench" in capsys.readouterr().out


def test_help_imports_no_torch() -> None:
    program = (
        "import sys\nfrom la_bench.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0


def test_the_installed_program_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "la_bench.cli", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("la-bench ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workloads", "nonsense"], "no workload is called 'nonsense' or starts with it. Known: ring-mini"),
        (["--backends", "ref,nonsense"], "no backend is called 'nonsense'. Installed:"),
        (["--out", "/dev/null/report"], "--out must be a folder that can be written to; /dev/null/report:"),
        (["--out", "/dev/null"], "--out must be a folder that can be written to; /dev/null:"),
    ],
    ids=["workload", "backend", "below_a_file", "a_file"],
)
def test_wrong_options_of_compare(arguments: list[str], sentence: str, capsys: Capture) -> None:
    assert main(["compare", "--device", "cpu", *arguments]) == 2
    written = capsys.readouterr()
    assert written.err.startswith("la-bench compare: ")
    assert sentence in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_cuda_without_a_gpu(capsys: Capture) -> None:
    assert main(["compare", "--device", "cuda"]) == 2
    assert "--device cuda needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["compare", "--seed", "-1"],
        ["compare", "--seed", "x"],
        ["compare", "--device", "tpu"],
        ["compare", "--peer", "cula"],
        ["compare", "--out", ""],
        ["report", "rows.jsonl", "--out", ""],
        ["tune", "--out", ""],
        ["first", "--backend", "ref", "--out", ""],
        ["compare", "--grid", "8", "--state-dtype", "int8"],
        ["tune", "--units", "0"],
        ["tune", "--units", "8,x"],
        ["tune", "--heads", "0"],
        ["host", "--max-ratio", "x"],
        ["host", "--max-ratio", "0"],
        ["host", "--samples", "0"],
        ["first"],
        ["first", "--backend", "ref", "--max-ms", "0"],
        ["ref", "--rounds", "0"],
    ],
    ids=" ".join,
)
def test_mistyped_options(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "error: " in message
    assert not re.search(r"invalid _\w+ value", message)


def test_a_reason_of_many_lines_is_one_line_of_the_list(capsys: Capture) -> None:
    print_line("ERROR: cute on H8/B1: CompileError: no code:\n  at line 3\n\tof it")
    print_line("  indented")
    assert capsys.readouterr().out == ("ERROR: cute on H8/B1: CompileError: no code: at line 3 of it\n  indented\n")


def test_a_limit_on_the_block_sweep_is_refused(capsys: Capture) -> None:
    assert main(["ref", "--blocks", "--max-ratio", "4"]) == 2
    assert "Pass it without --blocks" in capsys.readouterr().err


def test_list(capsys: Capture) -> None:
    assert main(["compare", "--device", "cpu", "--list"]) == 0
    out = capsys.readouterr().out
    assert "minimax-01-tp8/heavy: MiniMax-01 at TP 8: 8 of 64 heads, 70 linear layers of 80" in out
    assert "backend ref: la-ref " in out


@pytest.mark.usefixtures("small")
def test_a_quick_run_from_end_to_end(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "report"
    arguments = ["compare", "--quick", "--device", "cpu", "--workloads", "minimax-01-tp8/light", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name in ("report.md", "report.html", "rows.jsonl"):
        assert (out / name).stat().st_size > 0
        assert str(out / name) in printed
    assert re.match(r"1 workload x \d+ variants, about \d+ s\. Ctrl-C keeps what is done\.\n", printed)
    assert "minimax-01-tp8/light" in printed
    rows = from_json_lines((out / "rows.jsonl").read_text())
    ref = next(row for row in rows if row.backend.name == "ref")
    assert ref.status == "ok"
    assert ref.environment.quick
    assert {row.backend.name for row in rows} >= {"ref", "triton", "cute"}
    assert all(row.reason for row in rows if row.status != "ok")


@pytest.mark.usefixtures("small")
def test_a_wrong_backend_makes_the_exit_status_1(
    tmp_path: Path, capsys: Capture, install: Install, made_up: SimpleNamespace
) -> None:
    install(made_up.Wrong())
    arguments = ["--backends", "wrong", "--workloads", "minimax-01-tp8/light", "--out", str(tmp_path)]
    assert main(["compare", "--quick", "--device", "cpu", *arguments]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: wrong on minimax-01-tp8/light: out of" in printed
    assert "; state of" in printed
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 0), ("refused", 1), ("unavailable", 1), ("error", 1), ("interrupted", 130)]
)
def test_exit_statuses(
    status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_row: Callable[..., Row]
) -> None:
    row = make_row(status=status, reason=None if status == "ok" else "because")
    monkeypatch.setattr(la_bench.compare_command, "run_compare", lambda *arguments, **options: [row])
    assert main(["compare", "--device", "cpu", "--workloads", "ring", "--out", str(tmp_path)]) == code
    assert (tmp_path / "rows.jsonl").exists()
