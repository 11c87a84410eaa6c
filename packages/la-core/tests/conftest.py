"""Made-up backends, found as real ones are: by the metadata of a distribution on `sys.path`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from la_core.backends.discover_backends import forget_backends

Install = Callable[..., None]

GOOD = (Path(__file__).parent / "made_backend.py.txt").read_text(encoding="utf-8")
"""Runs K = 64 and remembers its calls; `{name}` stands for its name."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install("made", source)` adds a distribution `made-dist 1.0` whose entry point `made` names its `backend`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    count = 0

    def add(name: str, source: str = GOOD, entry_point: str | None = None) -> None:
        nonlocal count
        count += 1
        module = f"made_up_{tmp_path.name.replace('-', '_')}_{count}"
        (tmp_path / f"{module}.py").write_text(source.replace("{name}", name))
        info = tmp_path / f"{module}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist{count}\nVersion: 1.{count}\n")
        target = entry_point or f"{module}:backend"
        (info / "entry_points.txt").write_text(f"[la_core.backends]\n{name} = {target}\n")
        forget_backends()

    yield add
    monkeypatch.undo()
    forget_backends()
