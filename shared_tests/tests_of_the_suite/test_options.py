"""A run says what it did not run, and does not pass by testing nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1]
ONE_FILE = str(SUITE / "test_decode_state_pool.py")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_named_backend_runs_and_the_others_are_listed_as_not_run() -> None:
    done = _run(ONE_FILE, "-k", "identity", "--backend", "ref")
    assert done.returncode == 0, done.stdout
    assert "ref-cpu: 2 passed, 0 failed, 0 skipped" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--require-backend", "not-there"), ("--backend", "not-there"), ("--backend", "ref,not-there")],
    ids=" ".join,
)
def test_an_absent_backend_fails_the_run(arguments: tuple[str, ...]) -> None:
    done = _run(ONE_FILE, "-k", "identity", *arguments)
    assert done.returncode == 1, done.stdout
    assert "not-there: NOT RUN, not installed" in done.stdout
    assert "not-there: MISSING, was asked for and passed no test" in done.stdout


@pytest.mark.parametrize("option", ["--backend", "--require-backend"])
def test_a_run_without_a_passed_test_fails(option: str) -> None:
    done = _run(ONE_FILE, "-k", "no_test_has_this_name", option, "ref")
    assert done.returncode != 0
    assert "ref: MISSING, was asked for and passed no test" in done.stdout


def test_an_empty_name_is_refused() -> None:
    done = _run(ONE_FILE, "--backend", "")
    assert done.returncode == 4
    assert "take names, got an empty one" in done.stderr


def test_outcomes_hold_what_ran_on_which_sources(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    done = _run(ONE_FILE, "-k", "test_identity", "--backend", "ref", "--outcomes", str(path))
    assert done.returncode == 0, done.stdout
    record = json.loads(path.read_text())
    (passed,) = record["outcomes"]["ref-cpu"]["passed"]
    assert passed.endswith("test_decode_state_pool.py::test_identity_offsets[ref-cpu]")
    assert len(record["environment"]["sources_sha256"]["ref"]) == 64


def test_a_sample_lists_the_rest_as_not_run() -> None:
    test = str(SUITE / "test_window_refusals.py")
    arguments = (test, "-k", "test_declared_dtypes_are_what_runs", "--backend", "ref", "--sample", "20", "-rs")
    done = _run(*arguments)
    assert done.returncode == 0, done.stdout
    assert "ref-cpu: 3 passed, 0 failed, 51 skipped" in done.stdout
    assert "not run: one in 20 of these is (--sample)" in done.stdout
