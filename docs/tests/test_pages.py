"""The README's example runs as it stands, and what is generated is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_readme_example_prints_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"<!-- example -->\n```python\n(.*?)```\n<!-- /example -->", readme, flags=re.DOTALL)
    done = _run("-c", example)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in readme.replace("`", "")
    code = [line for line in example.splitlines() if line and not line.startswith(("import", "print", "assert"))]
    assert len(code) <= 10


def test_generated_tables_are_up_to_date() -> None:
    done = _run(str(ROOT / "docs" / "generate.py"), "--check")
    assert done.returncode == 0, done.stderr


def test_readme_names_the_two_commands_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "python3 -m pip install nox && python3 -m nox -s report" in readme
    assert "python3 -m nox -s tests" in readme
    assert "python3 -m nox -s tests" in ci
