"""A report is a function of its rows, and says everything that they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import la_bench.write_report
from la_bench.errors import UsageError
from la_bench.report_blocks import Paragraph, Table, to_markdown
from la_bench.report_html import to_html
from la_bench.rows import Row, to_json_lines
from la_bench.write_report import check_file, check_folder, render_report, write_file, write_report

MakeRow = Callable[..., Row]

SECTIONS = ["Plots", "All results", "What was not timed, and why", "Environment", "How to read this report"]


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    """Two workloads; a fast backend, a slow one, one that is wrong, one that refuses."""
    rows = []
    for workload in ("ring-mini-linear-2.0/medium", "minicpm-sala/heavy"):
        rows += [
            make_row(workload, "ref"),
            make_row(workload, "swift", time_us=500.0),
            make_row(workload, "bent", "failed", "state of 3 of 384 (row, head) is off; worst in row 2, head 1"),
            make_row(workload, "shy", "refused", "decode: backend 'shy' runs nothing <here> | ever"),
        ]
    return rows


def test_a_commit_that_is_not_known_is_said_to_be(make_row: MakeRow) -> None:
    row = make_row()
    report = render_report([replace(row, environment=replace(row.environment, commit=None, dirty=None))])["report.md"]
    assert "| commit | unknown |\n| dirty | unknown |\n" in report
    assert "| cuda | none |" in report


def test_the_same_rows_give_the_same_bytes(rows: Sequence[Row]) -> None:
    assert render_report(rows) == render_report(rows)


def test_another_process_gives_the_same_bytes(rows: Sequence[Row], tmp_path: Path) -> None:
    here = write_report(rows, tmp_path / "here")
    program = (
        "import sys; from pathlib import Path; from la_bench.rows import from_json_lines; "
        "from la_bench.write_report import write_report; "
        "write_report(from_json_lines(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "here" / "rows.jsonl"), str(tmp_path / "there")],
        check=True,
        env={"PYTHONHASHSEED": "77", "PATH": "", "MPLCONFIGDIR": str(tmp_path)},
    )
    for path in here:
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name


def test_files(rows: Sequence[Row], tmp_path: Path) -> None:
    paths = write_report(rows, tmp_path / "deep" / "folder")
    names = {path.name for path in paths}
    assert names == {"report.md", "report.html", "rows.jsonl", "share_of_copy.svg", "time.svg", "accuracy.svg"}
    assert (tmp_path / "deep" / "folder" / "rows.jsonl").read_text() == to_json_lines(rows)
    markdown = (tmp_path / "deep" / "folder" / "report.md").read_text()
    for name in re.findall(r"\]\((\S+?)\)", markdown):
        assert name in names


def test_host_times_are_a_plot_of_their_own_where_there_are_some(make_row: MakeRow) -> None:
    rows = [
        make_row(backend="cute", host_us=5.0),
        make_row("minicpm-sala/heavy", "cute", host_us=7.0),
        make_row(backend="in-place floor", kind="floor", host_us=99.0),
    ]
    files = render_report(rows)
    assert "cute" in files["host_time.svg"]
    assert "floor" not in files["host_time.svg"]
    assert re.findall(r"\]\((\S+?)\)", files["report.md"]) == [
        *("share_of_copy.svg", "time.svg", "host_time.svg", "accuracy.svg")
    ]


def test_sections_come_in_order(rows: Sequence[Row]) -> None:
    files = render_report(rows)
    assert re.findall(r"^## (.*)$", files["report.md"], re.MULTILINE) == SECTIONS
    assert re.findall(r"<h2>(.*?)</h2>", files["report.html"]) == SECTIONS


def test_the_summary_names_the_best_of_each_workload(rows: Sequence[Row]) -> None:
    summary = render_report(rows)["report.md"].split("## Plots")[0]
    assert "Backends that were timed: ref, swift. Of 2 workloads, swift is the fastest on 2." in summary
    for workload in ("ring-mini-linear-2.0/medium", "minicpm-sala/heavy"):
        assert f"| {workload} | swift | 500 us | 600 % | 3.00x |" in summary


def test_a_wrong_backend_is_named_first_and_has_no_time(rows: Sequence[Row]) -> None:
    markdown = render_report(rows)["report.md"]
    summary = markdown.split("## Plots")[0]
    assert "**FAILED: bent on ring-mini-linear-2.0/medium, minicpm-sala/heavy. First: state of 3 of 384" in summary
    assert markdown.count("| bent | FAILED | - | - |") == 2


def test_what_was_not_timed_is_listed_with_its_reason(rows: Sequence[Row]) -> None:
    listed = render_report(rows)["report.md"].split("## What was not timed, and why")[1]
    assert "| shy | refused | all | decode: backend 'shy' runs nothing \\<here\\> \\| ever |" in listed
    assert "| bent | FAILED | all |" in listed
    assert "ref: ok; chosen: ref (asked for 'auto')" in listed


def test_ref_alone_is_said_to_be_alone(make_row: MakeRow) -> None:
    rows = [
        make_row(),
        make_row(backend="cute", status="unavailable", reason="backend 'cute' is not installed"),
        make_row(backend="triton", status="checked", reason="run under an interpreter"),
    ]
    summary = render_report(rows)["report.md"].split("## Plots")[0]
    assert "ref (la-ref) is the only backend that was timed" in summary
    assert "triton is right on" in summary
    assert "that ran" not in summary
    assert "what plain torch gives" in summary


def test_an_unsteady_machine_is_reported(make_row: MakeRow) -> None:
    steady = [make_row(), make_row("minicpm-sala/heavy", copy_gb_per_s=22.0)]
    unsteady = [make_row(), make_row("minicpm-sala/heavy", copy_gb_per_s=40.0)]
    assert "not steady" not in render_report(steady)["report.md"]
    assert "scattered" not in render_report(steady)["report.md"]
    assert "lay between 20.0 and 40.0 GB/s" in render_report(unsteady)["report.md"]


def test_scattered_times_are_reported(make_row: MakeRow) -> None:
    row = make_row()
    assert row.result is not None
    wide = replace(row, result=replace(row.result, time_us_p80=5 * row.result.time_us_p20))
    summary = render_report([wide])["report.md"].split("## Plots")[0]
    assert "the median says little: ref on ring-mini-linear-2.0/medium." in summary


def test_warm_states_and_an_interrupted_run_are_reported(make_row: MakeRow) -> None:
    row = make_row()
    warm = replace(row, workload=replace(row.workload, reuse_bytes=1 << 20))
    stopped = make_row("minicpm-sala/heavy", status="interrupted", reason="stopped by Ctrl-C")
    markdown = render_report([warm, stopped])["report.md"]
    assert "On ring-mini-linear-2.0/medium part of the states is found in the machine's cache" in markdown
    assert "**The run was stopped by Ctrl-C: 1 workload not finished.**" in markdown


def test_nothing_that_ran_is_still_a_report(make_row: MakeRow) -> None:
    files = render_report([make_row(status="error", reason="RuntimeError: no")])
    assert "No backend has a result." in files["report.md"]
    assert "<svg" not in files["report.html"]
    assert "There are no rows to report." in render_report([])["report.md"]


class _Page(HTMLParser):
    """Collects what a browser would load or show."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        self.loads += [str(values[name]) for name in ("src", "href", "xlink:href") if values.get(name)]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_self_contained_and_well_formed(rows: Sequence[Row]) -> None:
    html = render_report(rows)["report.html"]
    page = _Page()
    page.feed(html)
    assert page.tags.count("svg") == 3
    assert page.tags.count("table") == 1 + 2 + 1 + 2
    assert "script" not in page.tags
    assert all(target.startswith("#") for target in page.loads)
    assert len(set(page.ids)) == len(page.ids)
    assert {target[1:] for target in page.loads} <= set(page.ids)
    assert "url(http" not in html
    assert "@media (prefers-color-scheme: dark)" in html
    assert 'name="viewport"' in html
    assert "A <made-up> CPU" in page.text
    for svg in re.findall(r"<svg .*?</svg>", html, re.DOTALL):
        # Text and axes take the page's colours.
        assert "currentColor" in svg
        assert "#010203" not in svg
        ElementTree.fromstring(svg)


def test_plot_files_are_well_formed_and_bring_their_colours(rows: Sequence[Row]) -> None:
    files = render_report(rows)
    for name in ("share_of_copy.svg", "time.svg", "accuracy.svg"):
        root = ElementTree.fromstring(files[name].encode())
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme: dark" in files[name]
        for text in ("Ring-mini-linear-2.0", "MiniCPM-SALA", "swift"):
            assert text in files[name]


def test_text_is_never_taken_for_markup() -> None:
    blocks = [Paragraph("a <b> & *c* `d` [e] _f_ la_core"), Table(("x|y",), (("1|2",), ("-",)))]
    assert (
        to_markdown(blocks)
        == "a \\<b\\> & \\*c\\* \\`d\\` \\[e\\] \\_f\\_ la_core\n\n| x\\|y |\n| --- |\n| 1\\|2 |\n| - |\n"
    )
    assert "<p>a &lt;b&gt; &amp; *c* `d` [e] _f_ la_core</p>" in to_html(blocks)


def test_a_folder_that_cannot_be_written_to(rows: Sequence[Row], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="--out must be a folder that can be written to"):
        check_folder(file)
    with pytest.raises(NotADirectoryError):
        write_report(rows, file / "below")


def test_a_file_that_cannot_be_written_to(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("kept")
    check_file(old)
    assert old.read_text() == "kept"
    check_file(tmp_path / "new" / "tiles.jsonl")
    with pytest.raises(UsageError, match="--out must be a file that can be written to"):
        check_file(tmp_path)
    with pytest.raises(UsageError, match=r"/dev/full: No space left on device\. Pass another one"):
        write_file(Path("/dev/full"), "rows\n")


def test_rows_are_on_disk_before_anything_that_can_fail(
    rows: Sequence[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: Sequence[Row]) -> dict[str, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(la_bench.write_report, "render_report", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_report(rows, tmp_path)
    assert (tmp_path / "rows.jsonl").read_text() == to_json_lines(rows)
