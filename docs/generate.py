"""Write the tables of backends into README.md and docs/support_matrix.md, from what installed backends declare.

    python docs/generate.py            writes both files
    python docs/generate.py --check    writes nothing; exits 1 and names each file that differs

Only backends of this project appear, so that the result does not depend on what else is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import la_core
from la_core.backends.capabilities import TABLE_HEADER, Capabilities
from la_core.backends.discover_backends import KNOWN_NAMES, load_backend

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SUPPORT_MATRIX = ROOT / "docs" / "support_matrix.md"
BEGIN, END = "<!-- backends -->", "<!-- /backends -->"

SUPPORT_MATRIX_TEXT = """\
# Support matrix

<!-- Written by docs/generate.py. Do not edit: run `python docs/generate.py`. -->

What each backend declares to run, read from its `capabilities`. A legal call outside of a backend's row is refused by
that backend with a sentence that says why; `la_core.explain_choice` prints those sentences for a call. The shared suite
tests each declaration in both directions: a declared yes must run, a declared no must be refused.

{sizes}

State layout `vk` means that K is contiguous in memory, `kv` that V is; see
[the spec](spec/lightning_decode.md#the-state-pool).

## Operators and contract

{ops}
"""


@dataclass(frozen=True)
class Row:
    """One installed backend of this project."""

    name: str
    distribution: str
    spec_revision: int | None
    capabilities: Capabilities


def installed_rows() -> list[Row]:
    """The project's own backends that are installed, in order of preference; stops at one that cannot be loaded."""
    infos = {info.name: info for info in la_core.list_backends()}
    rows = []
    for name in KNOWN_NAMES:
        if name not in infos:
            continue
        info = infos[name]
        if info.error is not None:
            sys.exit(f"docs/generate.py: {info.error}")
        distribution = info.distribution.rpartition(" ")[0]
        rows.append(Row(name, distribution, info.spec_revision, load_backend(name).capabilities))
    return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, one line a row."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def backend_table(rows: Sequence[Row]) -> str:
    """Name, distribution and capabilities of each backend."""
    return markdown_table(
        ("backend", "distribution", *TABLE_HEADER),
        [(f"`{row.name}`", f"`{row.distribution}`", *row.capabilities.table_row()) for row in rows],
    )


def ops_table(rows: Sequence[Row]) -> str:
    """Operators and revision of the contract of each backend."""
    return markdown_table(
        ("backend", "operators", "spec revision"),
        [(f"`{row.name}`", ", ".join(row.capabilities.ops), str(row.spec_revision)) for row in rows],
    )


def new_readme(old: str, rows: Sequence[Row]) -> str:
    """The README with the table between its markers replaced."""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"docs/generate.py: README.md must contain {BEGIN} and {END}, in this order, on lines of their own.")
    return f"{before}{BEGIN}\n{backend_table(rows)}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description="Generate the tables of backends in README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs, and name it")
    check = parser.parse_args(arguments).check

    rows = installed_rows()
    contents = {
        README: new_readme(README.read_text(encoding="utf-8"), rows),
        SUPPORT_MATRIX: SUPPORT_MATRIX_TEXT.format(sizes=backend_table(rows), ops=ops_table(rows)),
    }
    made_from = f"installed backends: {', '.join(row.name for row in rows) or 'none'}"
    stale = 0
    for path, content in contents.items():
        name = path.relative_to(ROOT).as_posix()
        if path.exists() and path.read_text(encoding="utf-8") == content:
            print(f"{name}: up to date ({made_from})")
        elif check:
            print(f"{name}: differs ({made_from}). Run: python docs/generate.py", file=sys.stderr)
            stale += 1
        else:
            path.write_text(content, encoding="utf-8", newline="\n")
            print(f"{name}: written ({made_from})")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
