"""What a report is made of, and how it reads in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """Level 1 to 3."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Plain text; `alarm` marks what must not be overlooked."""

    text: str
    alarm: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list; a term in front of each item, or an empty one."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Cells of text; the first `text_columns` columns are words, the others numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1


@dataclass(frozen=True)
class Folded:
    """A long table under a title; a browser shows it on a click."""

    title: str
    table: Table


@dataclass(frozen=True)
class Plot:
    """An SVG image that takes its colours from `currentColor` and `--grid`."""

    name: str
    caption: str
    svg: str


Block = Heading | Paragraph | Bullets | Table | Folded | Plot


def to_markdown(blocks: Sequence[Block]) -> str:
    """The blocks as GitHub-flavoured Markdown; plots are linked as `<name>.svg`."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_escape(block.text)}"
    if isinstance(block, Paragraph):
        return f"**{_escape(block.text)}**" if block.alarm else _escape(block.text)
    if isinstance(block, Bullets):
        return "\n".join(
            f"- **{_escape(term)}**: {_escape(text)}" if term else f"- {_escape(text)}" for term, text in block.items
        )
    if isinstance(block, Plot):
        return f"![{_escape(block.caption)}]({block.name}.svg)\n\n{_escape(block.caption)}"
    if isinstance(block, Folded):
        return f"### {_escape(block.title)}\n\n{_markdown(block.table)}"
    aligns = ["---" if n < block.text_columns else "---:" for n in range(len(block.columns))]
    lines = [block.columns, tuple(aligns), *block.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _escape(text: str) -> str:
    """Text that Markdown would take for markup, made plain."""
    # An underscore within a word is not markup.
    return " ".join(re.sub(r"[\\`*<>\[\]|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text).split())


def _cell(text: str) -> str:
    return text if set(text) <= {"-", ":"} else _escape(text)
