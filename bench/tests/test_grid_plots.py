"""The plots of a grid: what they draw, and that the same rows give the same bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from la_bench.grid_plots import accuracy_bars, grid_plots, host_bars, share_over_batch, time_over_batch, variant_colours
from la_bench.report_plots import COLOURS, TEXT
from la_bench.rows import Row, to_json_lines
from la_bench.write_report import render_report

MakeRow = Callable[..., Row]


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    """Two numbers of heads and three batches; backends with overlap, floors, a peer, and one that fails."""
    rows = []
    for H in (8, 64):
        for B in (1, 16, 512):
            time = 1.0 * H * B
            rows += [
                make_row(backend="triton", time_us=2 * time, against=(1.5, 0.9), host_us=7.0 + B, grid=(H, B)),
                make_row(backend="triton+overlap", time_us=time, against=(3.0, 0.8), host_us=7.0, grid=(H, B)),
                make_row(backend="cute", time_us=1.9 * time, host_us=6.0, grid=(H, B)),
                make_row(backend="in-place floor", time_us=1.8 * time, kind="floor", host_us=90.0, grid=(H, B)),
                make_row(backend="sglang", time_us=3 * time, kind="peer", host_us=41.0, grid=(H, B)),
                make_row(backend="cula", status="failed", reason="off", kind="peer", grid=(H, B)),
            ]
    return [replace(row, backend=replace(row.backend, overlap="+" in row.backend.name)) for row in rows]


def test_a_panel_of_each_kind_for_each_number_of_heads(rows: list[Row]) -> None:
    plots = {plot.name: plot for plot in grid_plots(rows)}
    assert list(plots) == [
        *("share_of_copy_H8", "share_of_copy_H64", "time_H8", "time_H64"),
        *("host_time", "accuracy"),
    ]
    for plot in plots.values():
        ElementTree.fromstring(plot.svg)
        assert TEXT not in plot.svg
    for name in ("share_of_copy_H8", "time_H64"):
        texts = set(re.findall(r"<text[^>]*>([^<]*)</text>", plots[name].svg))
        assert {"triton", "triton+overlap", "cute", "in-place floor", "sglang", "1", "16", "512"} < texts
        assert "cula" not in texts
    assert "copy floor" in plots["time_H8"].svg
    assert "copy floor" not in plots["share_of_copy_H8"].svg


def test_panels_show_their_own_heads_in_the_same_limits(rows: list[Row]) -> None:
    assert share_over_batch(rows, 8) != share_over_batch(rows, 64)
    labels = [
        [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", time_over_batch(rows, H)) if text.endswith("us")]
        for H in (8, 64)
    ]
    assert labels[0] == labels[1] != []


def test_a_backend_keeps_its_colour_with_overlap_and_floors_take_that_of_the_text(rows: list[Row]) -> None:
    colours = variant_colours(rows)
    assert colours["triton"] == colours["triton+overlap"] == COLOURS["triton"]
    assert colours["in-place floor"] == TEXT
    assert len(set(colours.values())) == len(colours) - 1
    svg = time_over_batch(rows, 8)
    assert svg.count("stroke-dasharray") >= 2


def test_host_times_leave_floors_out(rows: list[Row], make_row: MakeRow) -> None:
    svg = host_bars(rows)
    assert svg is not None
    assert "in-place floor" not in svg
    assert "sglang" in svg
    assert host_bars([make_row(grid=(8, 1))]) is None


def test_accuracy_reaches_from_the_median_to_the_largest_error(rows: list[Row]) -> None:
    assert rows[0].result is not None
    worse = replace(rows[0], result=replace(rows[0].result, out_error=5e-2))
    exact = replace(rows[0], result=replace(rows[0].result, state_error=0.0))
    assert accuracy_bars([worse, *rows[1:]]) != accuracy_bars(rows)
    # Without a mark for what has no place on the axis.
    assert accuracy_bars([exact]).count("<path") < accuracy_bars(rows[:1]).count("<path")


def test_one_point_and_no_point(make_row: MakeRow) -> None:
    assert [plot.name for plot in grid_plots([make_row(grid=(8, 1))])] == ["share_of_copy_H8", "time_H8", "accuracy"]
    assert grid_plots([make_row(status="failed", reason="off", grid=(8, 1))]) == []


def test_the_report_has_summary_plots_and_tables_in_this_order(rows: list[Row]) -> None:
    files = render_report(rows)
    assert re.findall(r"^## (.*)$", files["report.md"], re.MULTILINE) == [
        *("Plots", "H = 8", "H = 64", "Host time", "Accuracy", "Extra memory", "All results"),
        *("What was not timed, and why", "Environment", "How to read this report"),
    ]
    summary = files["report.md"].split("## Plots")[0]
    assert "| 8 | 1 | triton+overlap | 8.00 |" in summary
    # 64 x 1 has more heads than 8 x 8, which is not there; 8 x 512 and 64 x 64 likewise.
    assert "| 64 | 1 | triton+overlap | 64.0 |" in summary
    for name in re.findall(r"\]\((\S+?\.svg)\)", files["report.md"]):
        assert name in files


def test_another_process_gives_the_same_bytes(rows: list[Row], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(to_json_lines(rows))
    subprocess.run(
        [sys.executable, "-m", "la_bench", "report", str(file), "--out", str(tmp_path / "there")],
        check=True,
        stdout=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "77", "PATH": "", "MPLCONFIGDIR": str(tmp_path)},
    )
    files = render_report(rows)
    assert {path.name for path in (tmp_path / "there").iterdir()} == set(files)
    for name, content in files.items():
        assert (tmp_path / "there" / name).read_text(encoding="utf-8") == content, name
