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
from la_bench.rows import Row, to_json_lines


def render_report(rows: Sequence[Row]) -> dict[str, str]:
    """Contents by file name: `report.md` with its plots as SVG files, `report.html` and `rows.jsonl`."""
    blocks = grid_blocks(rows) if rows and rows[0].workload.grid else report_blocks(rows)
    files = {"report.md": to_markdown(blocks), "report.html": to_html(blocks), "rows.jsonl": to_json_lines(rows)}
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


def write_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write all files of a report and return their paths. The rows come first: they are what cannot be made again.

    Raises
    ------
    UsageError
        A file cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows_file = folder / "rows.jsonl"
        rows_file.write_text(to_json_lines(rows), encoding="utf-8", newline="\n")
        for name, content in render_report(rows).items():
            path = folder / name
            path.write_text(content, encoding="utf-8", newline="\n")
            paths.append(path)
    except OSError as reason:
        raise _unusable(folder, reason) from reason
    return paths


def _unusable(folder: Path, reason: OSError) -> UsageError:
    return UsageError(
        f"--out must be a folder that can be written to; {folder}: {reason.strerror or reason}. Pass another one."
    )
