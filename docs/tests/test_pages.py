"""The README's example runs as it stands, and what is generated is up to date."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate.py, working on a copy of what it writes."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs_generate", module)
    spec.loader.exec_module(module)
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs" / "reports", tmp_path / "docs" / "reports")
    shutil.copy(ROOT / "docs" / "support_matrix.md", tmp_path / "docs")
    shutil.copytree(ROOT / "bench" / "records", tmp_path / "bench" / "records")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in ("README", "SUPPORT_MATRIX", "REPORTS", "RECORDS"):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).relative_to(ROOT))
    return module


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("README.md", "| 8 | 1 |", "| 8 | 9 |"),
        ("README.md", "| `ref` | `la-ref` |", "| `ref` | `la-other` |"),
        ("docs/reports/nvidia-h200.md", "| ref-cuda |", "| ref-other |"),
        ("docs/reports/index.md", "nvidia-h200", "nvidia-other"),
    ],
)
def test_an_edit_of_what_is_generated_is_found_and_undone(
    file: str, old: str, new: str, generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert generator.main(["--check"]) == 1
    assert f"{file}: differs. Run: python docs/generate.py" in capsys.readouterr().err
    assert generator.main([]) == 0
    assert path.read_text(encoding="utf-8") == text
    assert generator.main(["--check"]) == 0


def test_a_record_that_goes_leaves_a_page_to_remove(
    generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench" / "records" / "nvidia-h200").rename(tmp_path / "bench" / "records" / "another-card")
    assert generator.main(["--check"]) == 1
    printed = capsys.readouterr().err
    assert "docs/reports/another-card.md: differs" in printed
    assert "docs/reports/nvidia-h200.md: belongs to no record. Remove it." in printed


def test_readme_names_the_two_commands_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "python3 -m pip install nox && python3 -m nox -s report" in readme
    assert "python3 -m nox -s tests" in readme
    assert "python3 -m nox -s tests" in ci
