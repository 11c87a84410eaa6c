"""The rows of a run on disk, as soon as they are there: what is measured must survive what comes after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from la_bench.rows import Row, to_json_lines


class RowFile:
    """A file of rows that grows; the first rows replace what it held before.

    A write that fails is undone, so that the file never ends in half a row, and tried again with the next rows.

    Attributes
    ----------
    path
        The file.
    written
        Rows in it.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self.written = 0
        self._bytes = 0
        self._complain = complain
        self._pending: list[Row] = []
        self._complained = False

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether the file is there and has as many rows."""
        return self.written == len(rows) and self.path.exists()

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows; a disk that is full, or a folder that is gone, is a complaint and no exception."""
        self._pending += rows
        try:
            self._append(to_json_lines(self._pending).encode())
        except OSError as reason:
            if not self._complained:
                self._complain(
                    f"{self.path}: {reason.strerror or reason}. It holds the first {self.written} rows. The run goes "
                    "on; the other rows are written as soon as they can be."
                )
            self._complained = True
        else:
            self.written += len(self._pending)
            self._pending = []

    def _append(self, content: bytes) -> None:
        if self.written and not self.path.exists():
            # Somebody moved or removed it: a file that lacks the first rows would pass for a whole one.
            raise FileNotFoundError(2, "It is gone")
        if self.written:
            # What lies behind the rows that are known to be there was interrupted, and comes again.
            os.truncate(self.path, self._bytes)
        with self.path.open("ab" if self.written else "wb", buffering=0) as file:
            try:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
            except BaseException:
                os.truncate(self.path, self._bytes)
                raise
        self._bytes += len(content)


def rows_in(path: Path) -> int:
    """Rows that a file holds; none if it cannot be read."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0
