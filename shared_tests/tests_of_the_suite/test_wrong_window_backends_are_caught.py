"""The window's part of the suite runs against backends whose window operators are wrong on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = (HERE / "wrong_window_backends.py").read_text(encoding="utf-8")
FAULTS = re.findall(r'^    "(\w+)": "', SOURCE, flags=re.MULTILINE)
RIGHT = re.findall(r'^    "(right\w*)": \{', SOURCE, flags=re.MULTILINE)

FIRST = ("test_window_values.py", "test_window_drafts.py", "test_window_slots.py")
FILES = [
    *FIRST,
    *sorted(path.name for path in HERE.parent.glob("test_window_*.py") if path.name not in FIRST),
    "test_backend_contract.py",
]
"""What catches most faults comes first: a backend that has failed often enough is left alone."""

RunSuite = Callable[..., dict[str, dict[str, list[str]]]]
RecordProperty = Callable[[str, object], None]


def test_the_lists_were_read() -> None:
    assert len(FAULTS) >= 45
    assert len(RIGHT) == 4


def test_wrong_backends_are_caught(run_faulty: RunSuite, record_property: RecordProperty) -> None:
    outcomes = run_faulty("wrong_window_backends", [f"wrong_{fault}" for fault in FAULTS], FILES)
    caught_by = {fault: outcomes[f"wrong_{fault}-cpu"].get("failed", []) for fault in FAULTS}
    record_property("caught_by", caught_by)
    for fault, tests in caught_by.items():
        assert tests, f"no test caught the backend with the fault {fault!r}"


@pytest.mark.parametrize("name", RIGHT)
def test_right_backend_passes(run_suite: RunSuite, name: str) -> None:
    """Also with declared limits, and then still by running most of the tests."""
    right = run_suite("wrong_window_backends", [name], FILES)[f"{name}-cpu"]
    assert right.get("failed", []) == []
    assert len(right["passed"]) > 400
