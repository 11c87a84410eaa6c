"""The report as one HTML file that needs nothing else: plots and styles inside, phone and desktop, light and dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import takewhile

from la_bench.report_blocks import Block, Bullets, Folded, Heading, Paragraph, Plot, Table

STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5a6675; --page: #ffffff; --line: #d9dee5;
  --grid: #d9dee5; --band: #f4f6f9; --alarm: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ee; --soft: #9aa7b7; --page: #14181f; --line: #333c48; --grid: #333c48; --band: #1c222b;
    --alarm: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
h3 + p { color: var(--soft); font-size: .875rem; }
.alarm { color: var(--alarm); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.5rem; }
.even { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: .5rem 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 40rem; }
figcaption { color: var(--soft); font-size: .875rem; max-width: 36rem; }
.table { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem .35rem 0; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
th.words, td.words { text-align: left; }
td.long { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .5rem 0; font-weight: 600; }
tbody tr:hover { background: var(--band); }
@media (max-width: 36rem) {
  th, td { padding-right: .5rem; font-size: .8rem; }
  td.words { white-space: normal; }
}
""".strip()

LONG_CELL = 40
"""Characters from which on a cell of words may wrap."""


def to_html(blocks: Sequence[Block]) -> str:
    """The blocks as a complete document."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    parts: list[str] = []
    for number, block in enumerate(blocks):
        is_plot = isinstance(block, Plot)
        if is_plot and not (number and isinstance(blocks[number - 1], Plot)):
            # An even number fills two columns; three columns of an odd one leave less empty.
            together = len(list(takewhile(lambda block: isinstance(block, Plot), blocks[number:])))
            parts.append(f'<div class="plots{"" if together % 2 else " even"}">')
        parts.append(_html(block))
        if is_plot and not (number + 1 < len(blocks) and isinstance(blocks[number + 1], Plot)):
            parts.append("</div>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def to_svg_file(plot: Plot) -> str:
    """The plot as a file of its own, which brings the colours that the page has inside of a report."""
    style = (
        "<style>svg { color: #1c2430; background: #ffffff; --grid: #d9dee5; } @media (prefers-color-scheme: dark) "
        "{ svg { color: #e4e8ee; background: #14181f; --grid: #333c48; } }</style>"
    )
    head, rest = plot.svg.split(">", 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>\n{style}{rest}\n'


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f'<p class="alarm">{escape(block.text)}</p>' if block.alarm else f"<p>{escape(block.text)}</p>"
    if isinstance(block, Bullets):
        items = (
            f"<strong>{escape(term)}</strong>: {escape(text)}" if term else escape(text) for term, text in block.items
        )
        return "<ul>\n" + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"
    if isinstance(block, Plot):
        return f"<figure>\n{_inline(block)}\n<figcaption>{escape(block.caption)}</figcaption>\n</figure>"
    if isinstance(block, Folded):
        return f"<details>\n<summary>{escape(block.title)}</summary>\n{_table(block.table)}\n</details>"
    return _table(block)


def _inline(plot: Plot) -> str:
    """The plot with names of its own: ids must be unique in the document."""
    svg = re.sub(r'\bid="', f'id="{plot.name}-', plot.svg)
    svg = re.sub(r"url\(#", f"url(#{plot.name}-", svg)
    svg = re.sub(r'href="#', f'href="#{plot.name}-', svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.caption)}" ', 1)


def _table(table: Table) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        parts = []
        for n, value in enumerate(values):
            words = n < table.text_columns
            kind = ("words long" if len(value) > LONG_CELL else "words") if words else ""
            # "in-place floor+overlap" may wrap where it is a head: columns are as wide as their numbers then.
            text = escape(value).replace("+", "+<wbr>") if tag == "th" else escape(value)
            parts.append(f"<{tag}{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{text}</{tag}>")
        return "<tr>" + "".join(parts) + "</tr>"

    body = "\n".join(cells("td", row) for row in table.rows)
    return (
        f'<div class="table" tabindex="0"><table>\n<thead>{cells("th", table.columns)}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )
