"""A fingerprint of a package's sources, so that a record of a run can be told from one of other sources."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

MADE_OF_SOURCES = {"__pycache__", "prebuilt"}
"""Folders of what is made of a package's sources: byte code, and kernels built ahead of time."""


def source_hash(module: str) -> str | None:
    """SHA-256 over names and contents of the files of the top-level package of `module`, what is made of them left out.

    None for a package without files of its own.
    """
    package = importlib.import_module(module.partition(".")[0])
    if not getattr(package, "__file__", None):
        return None
    digest = hashlib.sha256()
    root = Path(str(package.__file__))
    files = sorted(root.parent.rglob("*")) if root.name == "__init__.py" else [root]
    for file in files:
        if file.is_file() and MADE_OF_SOURCES.isdisjoint(file.relative_to(root.parent).parts):
            digest.update(file.relative_to(root.parent).as_posix().encode() + b"\0")
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()
