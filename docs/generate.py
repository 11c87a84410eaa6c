"""Write what is generated in README.md and docs/: tables of backends from what they declare, speeds from records.

    python docs/generate.py            writes the files
    python docs/generate.py --check    writes nothing; exits 1 and names each file that differs

Only backends of this project appear in the tables of backends, so that they do not depend on what else is installed.
Speeds and outcomes come from bench/records alone, whatever the machine that this runs on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import la_core
from la_bench.record_pages import card_page, cards, readme_table
from la_core.backends.capabilities import TABLE_HEADER, Capabilities
from la_core.backends.discover_backends import KNOWN_NAMES, load_backend

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SUPPORT_MATRIX = ROOT / "docs" / "support_matrix.md"
REPORTS = ROOT / "docs" / "reports"
RECORDS = ROOT / "bench" / "records"

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

REPORTS_INDEX_TEXT = """\
# Runs on real cards

<!-- Written by docs/generate.py. Do not edit: run `python docs/generate.py`. -->

One page for each card, made from the records in `bench/records` and nothing else. Of every backend the newest run
counts. A record speaks for the sources whose hash it holds; `nox -s records` lists those that have changed since.
[How we measure](../how_we_measure.md) explains every figure.

```{{toctree}}
:maxdepth: 1

{pages}
```
"""


@dataclass(frozen=True)
class Row:
    """One installed backend of this project."""

    name: str
    distribution: str
    spec_revision: int | None
    capabilities: Capabilities


def installed_rows() -> list[Row]:
    """The project's own backends, in order of preference; stops at one that is not installed or cannot be loaded."""
    infos = {info.name: info for info in la_core.list_backends()}
    rows = []
    for name in KNOWN_NAMES:
        if name not in infos:
            sys.exit(f"docs/generate.py: la-{name} is not installed; the tables show all packages of the repository.")
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


def between_markers(text: str, name: str, content: str) -> str:
    """The text with what stands between the two markers of a name replaced."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = text.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        sys.exit(
            f"docs/generate.py: README.md must contain {opening} and {closing}, in this order, on their own lines."
        )
    return f"{before}{opening}\n{content}\n{closing}{after}"


def tables_of_backends(readme: str) -> tuple[str, dict[Path, str]]:
    """The README with its table of backends, and the support matrix."""
    rows = installed_rows()
    matrix = SUPPORT_MATRIX_TEXT.format(sizes=backend_table(rows), ops=ops_table(rows))
    return between_markers(readme, "backends", backend_table(rows)), {SUPPORT_MATRIX: matrix}


def pages_of_records(readme: str) -> tuple[str, dict[Path, str]]:
    """The README with its table of speeds, a page for each card, and their index."""
    names = cards(RECORDS)
    index = REPORTS_INDEX_TEXT.format(pages="\n".join(names))
    pages = {REPORTS / f"{name}.md": card_page(RECORDS, name) for name in names}
    return between_markers(readme, "speed", readme_table(RECORDS)), {REPORTS / "index.md": index, **pages}


def leftovers(contents: dict[Path, str]) -> list[Path]:
    """Pages of cards that have no record."""
    return [path for path in sorted(REPORTS.glob("*.md")) if path not in contents]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description="Generate what is generated in README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs, and name it")
    check = parser.parse_args(arguments).check

    readme, matrix = tables_of_backends(README.read_text(encoding="utf-8"))
    readme, pages = pages_of_records(readme)
    contents = {README: readme, **matrix, **pages}
    stale = 0
    for path, content in contents.items():
        name = path.relative_to(ROOT).as_posix()
        if path.exists() and path.read_text(encoding="utf-8") == content:
            print(f"{name}: up to date")
        elif check:
            print(f"{name}: differs. Run: python docs/generate.py", file=sys.stderr)
            stale += 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8", newline="\n")
            print(f"{name}: written")
    for path in leftovers(contents):
        print(f"{path.relative_to(ROOT).as_posix()}: belongs to no record. Remove it.", file=sys.stderr)
        stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
