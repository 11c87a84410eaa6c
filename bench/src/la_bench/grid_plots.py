"""The plots of a report of a grid: lines over B for each number of heads, and bars over all points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from la_bench.report_blocks import Plot
from la_bench.report_plots import COLOURS, GRID, MORE_COLOURS, TEXT, new_plot, to_svg
from la_bench.rows import Result, Row, ok_rows
from la_bench.timing import spread

PANEL_INCHES = 3.0
LANE_INCHES = 0.26
COPY_FLOOR = "copy floor"

MARKERS: tuple[dict[str, Any], ...] = (
    {"marker": "s", "markersize": 6, "markerfacecolor": "none"},
    {"marker": "o", "markersize": 3},
    {"marker": "D", "markersize": 8, "markerfacecolor": "none"},
)
"""Of our backends: each is seen where another one's line lies on its own, as it does near the limit."""


def grid_plots(rows: Sequence[Row]) -> list[Plot]:
    """Share of copy bandwidth and time for each number of heads, host time, accuracy; none without a result."""
    if not ok_rows(rows):
        return []
    heads = sorted({row.workload.H for row, _ in ok_rows(rows)})
    plots = [
        Plot(f"share_of_copy_H{H}", f"H = {H}: share of the machine's copy bandwidth, higher is better.", svg)
        for H, svg in ((H, share_over_batch(rows, H)) for H in heads)
    ]
    plots += [
        Plot(f"time_H{H}", f"H = {H}: time of a call, lower is better. Both axes are logarithmic.", svg)
        for H, svg in ((H, time_over_batch(rows, H)) for H in heads)
    ]
    host = host_bars(rows)
    if host is not None:
        caption = "Host time of a call: median over the points with small calls, and from the least to the most."
        plots.append(Plot("host_time", caption, host))
    caption = (
        "Relative L2 error against float64 in the worst (row, head), lower is better: median over the points, and a "
        "bar to the largest. Dots: output. Diamonds: state."
    )
    return [*plots, Plot("accuracy", caption, accuracy_bars(rows))]


def share_over_batch(rows: Sequence[Row], heads: int) -> str:
    """Lines: share of copy bandwidth over B; the same limits for all numbers of heads."""
    most = max(result.share_of_copy for _, result in ok_rows(rows)) * 100
    with new_plot(PANEL_INCHES) as (figure, axes):
        _draw_lines(axes, rows, heads, lambda result: result.share_of_copy * 100)
        axes.set_ylim(0, max(100.0, most * 1.03))
        axes.set_ylabel("share of copy bandwidth (%)")
        _finish(figure, axes, rows)
    return to_svg(figure)


def time_over_batch(rows: Sequence[Row], heads: int) -> str:
    """Lines: time over B, both logarithmic, and the copy floor; the same limits for all numbers of heads."""
    times = [value for _, r in ok_rows(rows) for value in (r.time_us, r.copy_floor_us)]
    with new_plot(PANEL_INCHES) as (figure, axes):
        _draw_lines(axes, rows, heads, lambda result: result.time_us)
        floors = {_batch(row): result.copy_floor_us for row, result in ok_rows(rows) if heads == row.workload.H}
        axes.plot(list(floors), list(floors.values()), color=TEXT, linewidth=1, label=COPY_FLOOR)
        axes.set_yscale("log")
        axes.set_ylim(min(times) / 1.3, max(times) * 1.3)
        axes.yaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us")
        axes.yaxis.set_minor_formatter(NullFormatter())
        _finish(figure, axes, rows)
    return to_svg(figure)


def host_bars(rows: Sequence[Row]) -> str | None:
    """Bars to the median, with a stroke from the least to the most; floors are launched otherwise and left out."""
    taken: dict[str, list[float]] = {}
    for row, result in ok_rows(rows):
        if result.host_us is not None and row.backend.kind != "floor":
            taken.setdefault(row.backend.name, []).append(result.host_us)
    if not taken:
        return None
    with _lanes(list(taken)) as (figure, axes):
        for lane, (name, values) in enumerate(taken.items()):
            axes.barh(lane, spread(values).median, height=0.6, color=variant_colours(rows)[name])
            axes.plot([min(values), max(values)], [lane, lane], color=TEXT, linewidth=1.2)
        axes.set_xlim(left=0)
        axes.set_xlabel("host time of a call (us)")
    return to_svg(figure)


def accuracy_bars(rows: Sequence[Row]) -> str:
    """Dots at the median error with bars to the largest: filled for the output, hollow for the state."""
    names = list(dict.fromkeys(row.backend.name for row, _ in ok_rows(rows)))
    with _lanes(names) as (figure, axes):
        for lane, name in enumerate(names):
            results = [result for row, result in ok_rows(rows) if row.backend.name == name]
            colour = variant_colours(rows)[name]
            kinds = (([r.out_error for r in results], "o", colour), ([r.state_error for r in results], "D", "none"))
            for errors, marker, face in kinds:
                # An exact result has no place on a logarithmic axis.
                known = [one for one in errors if one]
                if known:
                    middle = spread(known).median
                    axes.plot([middle, max(known)], [lane, lane], color=colour, linewidth=1.5)
                    axes.plot([middle], [lane], marker, color=colour, markerfacecolor=face, markersize=4.5)
                    axes.plot([max(known)], [lane], "|", color=colour, markersize=8)
        axes.set_xscale("log")
        axes.set_xlabel("relative L2 error (dot: output, diamond: state)")
    return to_svg(figure)


@contextmanager
def _lanes(names: Sequence[str]) -> Iterator[tuple[Figure, Axes]]:
    """A plot with one lane for each name, from above; the names take the place of a legend."""
    with new_plot(0.6 + LANE_INCHES * len(names)) as (figure, axes):
        axes.set_yticks(range(len(names)), list(names))
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        yield figure, axes


def _draw_lines(axes: Axes, rows: Sequence[Row], heads: int, value: Callable[[Result], float]) -> None:
    colours = variant_colours(rows)
    backends = dict.fromkeys(_base(row.backend.name) for row, _ in ok_rows(rows) if row.backend.kind == "backend")
    markers = dict(zip(backends, cycle(MARKERS)))
    for name, colour in colours.items():
        mine = sorted(
            (_batch(row), value(result))
            for row, result in ok_rows(rows)
            if (row.backend.name, row.workload.H) == (name, heads)
        )
        facts = next(row.backend for row, _ in ok_rows(rows) if row.backend.name == name)
        dashes = "--" if facts.overlap else ":" if facts.kind == "floor" else "-"
        ours = facts.kind == "backend"
        style = {"linewidth": 1.8, "zorder": 3, **markers[_base(name)]} if ours else {"linewidth": 1.0}
        axes.plot([batch for batch, _ in mine], [one for _, one in mine], dashes, color=colour, label=name, **style)


def _finish(figure: Figure, axes: Axes, rows: Sequence[Row]) -> None:
    """The axis of batches, the same for all numbers of heads, the grid and the legend above it."""
    batches = sorted({_batch(row) for row, _ in ok_rows(rows)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("B, rows of a call")
    axes.grid(color=GRID, linewidth=0.7)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=7)


def variant_colours(rows: Sequence[Row]) -> dict[str, str]:
    """A backend has the same colour with overlap and without, floors that of the text, peers one each."""
    facts = {row.backend.name: row.backend for row, _ in ok_rows(rows)}
    others = [name for name, one in facts.items() if one.kind != "floor" and name.partition("+")[0] not in COLOURS]
    more = {base: MORE_COLOURS[n % len(MORE_COLOURS)] for n, base in enumerate(dict.fromkeys(map(_base, others)))}
    return {name: TEXT if one.kind == "floor" else {**more, **COLOURS}[_base(name)] for name, one in facts.items()}


def _base(name: str) -> str:
    return name.partition("+")[0]


def _batch(row: Row) -> int:
    return row.workload.padded_rows[0]
