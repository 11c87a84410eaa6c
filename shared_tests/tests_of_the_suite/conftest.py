"""Runs of the suite on backends that are wrong, or right, on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent

Outcomes = dict[str, dict[str, list[str]]]
RunSuite = Callable[..., Outcomes]

NOT_FOR_LOOPS = "not test_import_touches_no_gpu"
"""The import test starts a process per backend and says nothing about values."""

SAMPLES = "test_sample_case"
"""Few tests, which catch most faults."""


@pytest.fixture(scope="session")
def run_suite(tmp_path_factory: pytest.TempPathFactory) -> RunSuite:
    """`run_suite(module, names, files)`: what backends of a module passed and failed in files of the suite.

    One run in a process that has them installed; a backend that has failed is left alone.
    """

    def run(module: str, names: Sequence[str], files: Sequence[str], tests: str = NOT_FOR_LOOPS) -> Outcomes:
        site = tmp_path_factory.mktemp("site")
        for source in HERE.glob("*_backends.py"):
            if not source.name.startswith("test_"):
                (site / source.name).write_text(source.read_text(encoding="utf-8"))
        info = site / "wrong_backends-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-backends\nVersion: 1.0\n")
        points = "".join(f"{name} = {module}:{name}\n" for name in names)
        (info / "entry_points.txt").write_text(f"[la_core.backends]\n{points}")
        report = site / "outcomes.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "--no-summary"),
                *("-p", "no:cacheprovider"),
                *[str(HERE.parent / name) for name in files],
                *("-k", tests),
                *("--backend", ",".join(names), "--enough-failures", "1", "--hypothesis-profile", "quick"),
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

    return run


@pytest.fixture(scope="session")
def run_faulty(run_suite: RunSuite) -> RunSuite:
    """`run_faulty(module, names, files)`: the same of backends that should fail.

    Those that pass the sample cases, and only those, see all tests.
    """

    def run(module: str, names: Sequence[str], files: Sequence[str]) -> Outcomes:
        outcomes = run_suite(module, names, files, SAMPLES)
        left = [name for name in names if not outcomes[f"{name}-cpu"].get("failed")]
        return {**outcomes, **(run_suite(module, left, files) if left else {})}

    return run
