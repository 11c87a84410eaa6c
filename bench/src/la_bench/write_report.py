"""Rows -> files. The same rows give the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
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
        raise unusable(folder, reason) from reason


def write_report(rows: Sequence[Row], folder: Path, *, rows_are_there: bool = False) -> list[Path]:
    """Write all files of a report and return their paths. The rows come first: they are what cannot be made again.

    With `rows_are_there` their file is complete already and left alone.

    Raises
    ------
    OSError
        A file cannot be written. Then none is but that of the rows, if it could be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not rows_are_there:
        _write({folder / ROWS: to_json_lines(rows)})
    files = {folder / name: content for name, content in render_report(rows).items()}
    _write({file: content for file, content in files.items() if file.name != ROWS})
    return list(files)


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
        raise unusable(file, reason, "file") from reason


def write_file(file: Path, content: str) -> None:
    """Write an output file.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    try:
        _write({file: content})
    except OSError as reason:
        raise unusable(file, reason, "file") from reason


def unusable(path: Path, reason: OSError, kind: str = "folder") -> UsageError:
    """What to say of an output that cannot be written."""
    return UsageError(
        f"--out must be a {kind} that can be written to; {path}: {reason.strerror or reason}. Pass another one."
    )


def _write(files: Mapping[Path, str]) -> None:
    """Write files whole, and all or none of them: a disk that is full must not cost what was there before."""
    finished = {}
    try:
        for file, content in files.items():
            new = file
            # A device or a pipe cannot be replaced.
            if file.is_file() or not file.exists():
                new = finished[file] = file.with_name(file.name + ".new")
            new.write_text(content, encoding="utf-8", newline="\n")
        for file, new in finished.items():
            new.replace(file)
    finally:
        for new in finished.values():
            new.unlink(missing_ok=True)
