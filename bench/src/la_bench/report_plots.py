"""The plots of a report, as SVG that takes its text and grid colours from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from la_bench.rows import Result, Row, ok_rows

COLOURS = {"ref": "#5b8def", "triton": "#e08a3c", "cute": "#2fa374"}
MORE_COLOURS = (
    *("#b06bd3", "#c29a1e", "#d65c7a", "#4aa3b5", "#8a8f98", "#7a9a3a"),
    *("#c4703f", "#6f78d6", "#3f9c8f", "#b3588f", "#9c7a4d", "#5d93c9"),
)
"""Readable on white and on near black; backends that are not named above take the next one."""

WIDTH_INCHES = 4.2
"""Narrow, so that letters stay readable on a phone; a wide page scales the plot up."""

TEXT, GRID = "#010203", "#040506"
"""Stand-ins that no plot uses otherwise, replaced by what a page can set."""


def share_plot(rows: Sequence[Row]) -> str:
    """Bars: share of copy bandwidth for each backend on each workload."""

    def draw(axes: Axes, y: float, height: float, result: Result, colour: str) -> None:
        axes.barh(y, result.share_of_copy * 100, height=height * 0.9, color=colour)

    figure, axes = _chart(rows, draw)
    axes.set_xlim(left=0, right=max(100.0, axes.get_xlim()[1]))
    axes.set_xlabel("share of copy bandwidth (%)")
    return to_svg(figure)


def time_plot(rows: Sequence[Row]) -> str:
    """Dots with bars from p20 to p80 on a logarithmic axis, and a stroke at each copy floor."""

    def draw(axes: Axes, y: float, height: float, result: Result, colour: str) -> None:
        axes.plot([result.time_us_p20, result.time_us_p80], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([result.time_us], [y], "o", color=colour, markersize=4)
        floor = result.copy_floor_us
        axes.plot([floor, floor], [y - height / 2, y + height / 2], color=TEXT, linewidth=1.5)

    figure, axes = _chart(rows, draw)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("time per call")
    return to_svg(figure)


def accuracy_plot(rows: Sequence[Row]) -> str:
    """Errors on a logarithmic axis: filled dots for the output, hollow diamonds for the state."""

    def draw(axes: Axes, y: float, height: float, result: Result, colour: str) -> None:
        # An exact result has no place on a logarithmic axis.
        for error, marker, face in ((result.out_error, "o", colour), (result.state_error, "D", "none")):
            if error:
                axes.plot([error], [y], marker, color=colour, markerfacecolor=face, markersize=4.5)

    figure, axes = _chart(rows, draw)
    axes.set_xscale("log")
    axes.set_xlabel("relative L2 error (dot: output, diamond: state)")
    return to_svg(figure)


def backend_colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for every backend that has a result."""
    names = dict.fromkeys(row.backend.name for row, _ in ok_rows(rows))
    others = [name for name in names if name not in COLOURS]
    more = {name: MORE_COLOURS[n % len(MORE_COLOURS)] for n, name in enumerate(others)}
    return {name: COLOURS.get(name) or more[name] for name in names}


_Draw = Callable[[Axes, float, float, Result, str], None]
"""Draws one result: axes, its place on the y axis, the height it may use, the result, its colour."""


def _chart(rows: Sequence[Row], draw: _Draw) -> tuple[Figure, Axes]:
    """One line per workload under a heading per model, one mark per backend in each line."""
    timed = ok_rows(rows)
    colours = backend_colours(rows)
    lane = 1.0 / max(1, len(colours))
    workloads = list(dict.fromkeys(row.workload.name for row, _ in timed))
    model_of = {row.workload.name: row.workload.model for row, _ in timed}
    ticks: list[float] = []
    labels: list[str] = []
    headings: list[tuple[float, str]] = []
    y = 0.0
    for workload in workloads:
        model = model_of[workload]
        if model not in [title for _, title in headings]:
            headings.append((y + 0.1, model))
            y += 1.1
        ticks.append(y)
        labels.append(workload.split("/")[-1])
        y += 1.25
    inches = 0.75 + y * (0.13 + 0.11 * len(colours))
    with new_plot(inches) as (figure, axes):
        for row, result in timed:
            n = list(colours).index(row.backend.name)
            place = ticks[workloads.index(row.workload.name)] + (n + 0.5) * lane - 0.5
            draw(axes, place, lane, result, colours[row.backend.name])
        for place, title in headings:
            axes.annotate(title, (0, place), xycoords=("axes fraction", "data"), xytext=(3, 0),
                          textcoords="offset points", va="center", weight="bold")  # fmt: skip
        axes.set_ylim(y - 0.5, -0.6)
        axes.set_yticks(ticks, labels)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        handles = [axes.plot([], [], "s", color=colour)[0] for colour in colours.values()]
        figure.legend(handles, list(colours), loc="outside upper left", ncols=4, frameon=False)
    return figure, axes


@contextmanager
def new_plot(inches: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure that is `inches` high, with one pair of axes in the look of all plots; drawn to inside."""
    with matplotlib.rc_context({"font.size": 8, "text.color": TEXT, "font.family": "sans-serif"}):
        figure = Figure(figsize=(WIDTH_INCHES, inches), layout="constrained")
        axes = figure.add_subplot()
        axes.tick_params(which="both", colors=TEXT, length=0)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(TEXT)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
        yield figure, axes


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that depends on nothing but what was drawn."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "la-bench", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor").replace(GRID, "var(--grid)")
    # Without fixed sizes it takes the width of the page.
    return re.sub(r'<svg ([^>]*?)\b(width|height)="[^"]*" ', r"<svg \1", re.sub(r"\n\s*", "\n", svg)).strip()
