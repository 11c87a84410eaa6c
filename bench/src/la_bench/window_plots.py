"""The plots of a report of an operator with a window: what a call takes beside its rivals, over states in a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

from matplotlib.ticker import NullLocator

from la_bench.grid_plots import MARKERS, accuracy_bars, host_bars, variant_colours
from la_bench.report_blocks import Plot
from la_bench.report_plots import GRID, TEXT, new_plot, to_svg
from la_bench.rows import Result, Row, ok_rows
from la_bench.variants import OVERLAP

PANEL_INCHES = 2.8
LEGEND_INCHES = 0.06
"""Of each line in the legend, which has two columns."""

Ratio = Callable[[Result], float | None]
"""A result's time over that of a rival; None without one."""


def over_floor(result: Result) -> float | None:
    """Time over that of the in-place floor."""
    return None if result.share_of_floor is None else 1 / result.share_of_floor


def over(role: str) -> Ratio:
    """Time over that of the rival with a role."""
    return lambda result: (result.time_over or {}).get(role)


PLOTS: dict[str, tuple[tuple[str, str, Ratio], ...]] = {
    "deferred": (
        ("time_over_floor", "time over the in-place floor of recurrent decode with float32 states", over_floor),
        ("time_over_recurrent", "time over recurrent decode of the same backend", over("recurrent")),
    ),
    "verify": (
        ("time_over_decodes", "time over as many calls of decode", over("decodes")),
        ("time_over_commit", "time over verify and immediate commit", over("commit")),
    ),
    "commit": (
        ("time_over_commits", "commit_layers: time over one commit a layer", over("commit")),
        ("time_over_folds", "commit_layers: time over one fold a layer", over("fold")),
    ),
}
"""By operator: name, words and value of each plot."""


def window_plots(rows: Sequence[Row]) -> list[Plot]:
    """Ratios, host time and accuracy; those of which there is nothing to show are left out."""
    if not ok_rows(rows):
        return []
    plots = [
        Plot(name, f"{words[0].upper()}{words[1:]}, lower is better, by states in a call.", svg)
        for name, words, ratio in PLOTS[rows[0].workload.op or ""]
        if (svg := ratio_over_states(rows, ratio)) is not None
    ]
    host = host_bars(rows)
    if host is not None:
        plots.append(
            Plot("host_time", "Host time: median over the points with small calls, and from least to most.", host)
        )
    caption = (
        "Relative L2 error against float64 in the worst (row, head), lower is better: median over the points, and a "
        "bar to the largest. Dots: output. Diamonds: state."
    )
    return [*plots, Plot("accuracy", caption, accuracy_bars(rows))]


def ratio_over_states(rows: Sequence[Row], ratio: Ratio) -> str | None:
    """Lines: a ratio of each variant with a window over H x B; None without any."""
    lines: dict[str, list[tuple[int, float]]] = {}
    overlaps: dict[str, bool] = {}
    for row, result in ok_rows(rows):
        value = ratio(result)
        if row.window is not None and value is not None:
            states = row.workload.H * row.workload.padded_rows[0]
            lines.setdefault(row.backend.name, []).append((states, value * 100))
            overlaps[row.backend.name] = row.backend.overlap
    if not lines:
        return None
    colours = variant_colours(rows)
    # The same mark with overlap and without.
    markers = dict(zip(dict.fromkeys(map(_without_overlap, lines)), cycle(MARKERS)))
    with new_plot(PANEL_INCHES + LEGEND_INCHES * len(lines)) as (figure, axes):
        for name, points in lines.items():
            style = {"linewidth": 1.6, **markers[_without_overlap(name)]}
            dashes = "--" if overlaps[name] else "-"
            points = sorted(points)
            axes.plot([x for x, _ in points], [y for _, y in points], dashes, color=colours[name], label=name, **style)
        axes.axhline(100, color=TEXT, linewidth=1)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(x) for x in ticks], fontsize=6)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_xlabel("states in a call, H x B")
        axes.set_ylabel("share of that time (%)")
        axes.grid(color=GRID, linewidth=0.7)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=7)
    return to_svg(figure)


def _without_overlap(name: str) -> str:
    return name.removesuffix(OVERLAP)
