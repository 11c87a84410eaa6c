"""Rows -> files. The same rows give the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from la_bench.errors import UsageError
from la_bench.report_blocks import Plot, to_markdown
from la_bench.report_content import report_blocks
from la_bench.report_grid import grid_blocks
from la_bench.report_html import to_html, to_svg_file
from la_bench.report_window import window_blocks
from la_bench.rows import Row, to_json_lines

ROWS = "rows.jsonl"
"""Where the rows go: all that cannot be made again."""


def render_report(rows: Sequence[Row]) -> dict[str, str]:
    """Contents by file name: `report.md` with its plots as SVG files, `report.html` and `rows.jsonl`."""
    if rows and rows[0].workload.op is not None:
        blocks = window_blocks(rows)
    else:
        blocks = grid_blocks(rows) if rows and rows[0].workload.grid else report_blocks(rows)
    files = {"report.md": to_markdown(blocks), "report.html": to_html(blocks), ROWS: to_json_lines(rows)}
    files.update({f"{block.name}.svg": to_svg_file(block) for block in blocks if isinstance(block, Plot)})
    return files


def check_folder(folder: Path) -> None:
    """Create the output folder and see that files can be written to it, before anything is measured.

    Raises
    ------
    UsageError
        It cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as reason:
        raise _unusable(folder, reason) from reason


def write_report(rows: Sequence[Row], folder: Path, *, rows_are_there: bool = False) -> list[Path]:
    """Write all files of a report and return their paths. The rows come first: they are what cannot be made again.

    With `rows_are_there` their file is complete already and left alone.

    Raises
    ------
    UsageError
        A file cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not rows_are_there:
            _write(folder / ROWS, to_json_lines(rows))
        for name, content in render_report(rows).items():
            if name != ROWS:
                _write(folder / name, content)
            paths.append(folder / name)
    except OSError as reason:
        raise _unusable(folder, reason) from reason
    return paths


def check_file(file: Path) -> None:
    """Create the folder of an output file and see that the file can be written to; its content stays.

    Raises
    ------
    UsageError
        It cannot be used.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8"):
            pass
    except OSError as reason:
        raise _unusable(file, reason, "file") from reason


def write_file(file: Path, content: str) -> None:
    """Write an output file.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    try:
        _write(file, content)
    except OSError as reason:
        raise _unusable(file, reason, "file") from reason


def _write(file: Path, content: str) -> None:
    """Write a file whole or not at all: a disk that is full must not cost what was there before."""
    if file.exists() and not file.is_file():
        # A device or a pipe cannot be replaced.
        file.write_text(content, encoding="utf-8", newline="\n")
        return
    new = file.with_name(file.name + ".new")
    try:
        new.write_text(content, encoding="utf-8", newline="\n")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _unusable(path: Path, reason: OSError, kind: str = "folder") -> UsageError:
    return UsageError(
        f"--out must be a {kind} that can be written to; {path}: {reason.strerror or reason}. Pass another one."
    )
