"""A fingerprint of a package's sources, so that a record of a run can be told from one of other sources."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable
from pathlib import Path


def source_hash(module: str) -> str | None:
    """SHA-256 over names and contents of the files of the top-level package of `module`, byte code left out.

    None for a package without files of its own.
    """
    package = importlib.import_module(module.partition(".")[0])
    if not getattr(package, "__file__", None):
        return None
    root = Path(str(package.__file__))
    return folder_hash(root.parent) if root.name == "__init__.py" else _files_hash(root.parent, [root])


def folder_hash(folder: Path) -> str:
    """The same over all files of a folder."""
    return _files_hash(folder, sorted(folder.rglob("*")))


def _files_hash(folder: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()
