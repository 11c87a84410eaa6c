"""The suite runs against backends that are wrong on purpose: each must fail, and the right one must pass."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = (HERE / "wrong_backends.py").read_text(encoding="utf-8")
FAULTS = re.findall(r'^    "(\w+)": "', SOURCE, flags=re.MULTILINE)
RIGHT = re.findall(r'^    "(right\w*)": \{', SOURCE, flags=re.MULTILINE)

NOT_FOR_LOOPS = "not test_import_touches_no_gpu"
"""The import test starts a process per backend and says nothing about values."""

FILES = sorted(
    (path.name for path in HERE.parent.glob("test_*.py")),
    key=lambda name: (name not in ("test_decode_values.py", "test_decode_state_pool.py"), name),
)
"""All of the suite, what catches most faults first: a backend that has failed often enough is left alone."""

Outcomes = dict[str, dict[str, list[str]]]
RecordProperty = Callable[[str, object], None]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each backend passed and failed, from one run of the suite in a process that has them installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "wrong_backends.py").write_text(SOURCE)
    info = site / "wrong_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-backends\nVersion: 1.0\n")
    names = [*(f"wrong_{fault}" for fault in FAULTS), *RIGHT]
    points = "".join(f"{name} = wrong_backends:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[la_core.backends]\n{points}")
    report = site / "outcomes.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "--no-summary", "-p", "no:cacheprovider"),
            *[str(HERE.parent / name) for name in FILES],
            *("-k", NOT_FOR_LOOPS),
            *("--backend", ",".join(names), "--enough-failures", "3", "--hypothesis-profile", "quick"),
            *("--outcomes", str(report)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert report.exists(), f"the run broke off:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found: Outcomes = json.loads(report.read_text())["outcomes"]
    return found


def test_the_lists_were_read() -> None:
    assert len(FAULTS) >= 35
    assert len(RIGHT) == 4


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_backend_is_caught(outcomes: Outcomes, fault: str, record_property: RecordProperty) -> None:
    caught_by = outcomes[f"wrong_{fault}-cpu"].get("failed", [])
    record_property("caught_by", caught_by)
    assert caught_by, f"no test caught the backend with the fault {fault!r}"


@pytest.mark.parametrize("name", RIGHT)
def test_right_backend_passes(outcomes: Outcomes, name: str) -> None:
    """Also with declared limits, and then still by running most of the tests."""
    right = outcomes[f"{name}-cpu"]
    assert right.get("failed", []) == []
    assert len(right["passed"]) > 400
