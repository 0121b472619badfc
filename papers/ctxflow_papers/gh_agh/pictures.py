"""The paper's Figure 2 and its Tables 4 and 5, drawn from our own runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.observe.measures import COLOURS, GREY, PALE, WIDTH
from ctxflow_papers.drawing import write_pictures
from ctxflow_papers.gh_agh import experiments, table4
from ctxflow_papers.gh_agh.day import VOLATILITIES
from ctxflow_papers.gh_agh.experiments import Runtime
from ctxflow_papers.gh_agh.printed import ROLLING, RUNTIMES

METHODS = {
    "exact": "exact",
    "agh": "agh",
    "agh-printed": "agh-printed",
    "gh": "gh",
    "agh+1.25": "agh, planned with\na margin of 1.25",
}
"""What is drawn of Figures 2a to 2c: the improved method is as the exact one."""
TERMS = {"rental": "rent", "model_storage": "models", "data_storage": "data", "delay": "delay", "unserved": "unserved"}
AXES = {
    "figure2d": ("delay limits", "error limits"),
    "figure2e": ("budget", "rents"),
    "figure2f": ("rents", "delay limits"),
}
ROWS = {
    "dm_24h": ("exact, once a day", COLOURS[1], "-"),
    "gh_24h": ("gh, once a day", COLOURS[2], "-"),
    "agh_24h": ("agh, once a day", COLOURS[3], "--"),
    "agh_5min": ("agh, every 5 min, switching priced", COLOURS[3], "-"),
    "agh_printed_24h": ("agh-printed, once a day", COLOURS[0], "--"),
    "agh_printed_5min": ("agh-printed, every 5 min", COLOURS[0], "-"),
}


@dataclasses.dataclass(frozen=True)
class Results:
    """What the pictures are drawn from."""

    stressed: list[dict[str, Any]]
    grids: Mapping[str, experiments.Grid]
    times: Mapping[tuple[tuple[int, int, int], str], Runtime]
    days: table4.Table


def draw_all(folder: Path, results: Results) -> None:
    """Draw them as PNG files.

    :raises CtxflowError: if matplotlib is not installed.
    """
    write_pictures(
        folder,
        "gh-agh",
        {
            "figure2abc": lambda figure_class: _stress(figure_class, results.stressed),
            "figure2def": lambda figure_class: _grids(figure_class, results.grids),
            "table4": lambda figure_class: _days(figure_class, results.days),
            "table5": lambda figure_class: _times(figure_class, results.times),
        },
    )


def _stress(figure_class: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Cost and violations over the inflation, and what the cost is made of without it."""
    figure = figure_class(figsize=(WIDTH, 3.0), layout="constrained")
    cost, violated, parts = figure.subplots(1, 3)
    for number, (method, label) in enumerate(METHODS.items()):
        mine = [row for row in rows if row["method"] == method]
        style = {"color": COLOURS[number], "label": label, "linestyle": ":" if method == "agh" else "-"}
        cost.plot([row["inflation"] for row in mine], [row["cost"] for row in mine], "o", markersize=4, **style)
        violated.plot(
            [row["inflation"] for row in mine], [100 * row["violated"] for row in mine], "o", markersize=4, **style
        )
    ticks = {"xlabel": "delays and errors times", "xticks": sorted({row["inflation"] for row in rows})}
    cost.set(yscale="log", title="a: cost in $", **ticks)
    violated.set(title="b: query types violated in %", **ticks)
    start = {row["method"]: row for row in rows if row["inflation"] == 1.0}
    for place, method in enumerate(METHODS):
        bottom = 0.0
        for number, term in enumerate(TERMS):
            value = start[method][term]
            parts.bar(place, value, bottom=bottom, color=(*COLOURS[:4], GREY)[number], width=0.7)
            bottom += value
    parts.set(title="c: cost in $, not inflated", xticks=range(len(METHODS)))
    parts.set_xticklabels([method.replace("-", "-\n").replace("+", "\n+") for method in METHODS], fontsize=7)
    handles = [parts.bar(0, 0, color=(*COLOURS[:4], GREY)[n]) for n in range(len(TERMS))]
    parts.legend(handles, list(TERMS.values()), frameon=False, fontsize=7)
    figure.legend(*cost.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _grids(figure_class: Any, grids: Mapping[str, Mapping[tuple[float, float], float]]) -> Any:
    """AGH's cost by two factors, a colour and a number for each."""
    figure = figure_class(figsize=(WIDTH, 2.7), layout="constrained")
    for plot, (name, grid) in zip(figure.subplots(1, len(grids)), grids.items(), strict=True):
        rows, columns = sorted({a for a, _ in grid}), sorted({b for _, b in grid})
        values = np.array([[grid[a, b] for b in columns] for a in rows])
        plot.imshow(np.log(values), cmap="Blues", origin="lower", aspect="auto")
        middle = (np.log(values).min() + np.log(values).max()) / 2
        for (y, x), value in np.ndenumerate(values):
            colour = "white" if np.log(value) > middle else "black"
            plot.text(x, y, f"{value:,.0f}", ha="center", va="center", fontsize=7, color=colour)
        plot.set(xticks=range(len(columns)), xticklabels=columns, yticks=range(len(rows)), yticklabels=rows)
        plot.set(title=f"{name[-1]}: agh's cost in $", ylabel=f"{AXES[name][0]} times", xlabel=f"{AXES[name][1]} times")
    return figure


def _days(figure_class: Any, table: Any) -> Any:
    """The mean cost of a day by volatility, ours and the paper's."""
    figure = figure_class(figsize=(WIDTH, 3.4), layout="constrained")
    ours, theirs = figure.subplots(1, 2)
    for row, (label, colour, line) in ROWS.items():
        name = f"{row}_priced" if row == "agh_5min" else row
        found = {sigma: days for (sigma, key), days in table.days.items() if key == name}
        means = [float((days.dollars + days.switching_dollars).mean()) for days in found.values()]
        counts = {len(days.dollars) for days in found.values()}
        trials = f" ({min(counts)} trials)" if row == "agh_5min" and counts else ""
        ours.plot(list(found), means, f"o{line}", color=colour, markersize=4, label=label + trials)
    for row, papers in ROLLING.items():
        _, colour, line = ROWS[row.replace("agh_", "agh_printed_")] if row.startswith("agh") else ROWS[row]
        theirs.plot(VOLATILITIES, [mean for mean, _ in papers], f"o{line}", color=colour, markersize=4)
    for plot, title in ((ours, "ours"), (theirs, "the paper's")):
        plot.set(title=f"{title}: $ a day", xlabel="volatility of 5 minutes", xticks=VOLATILITIES)
        plot.set_ylim(bottom=0)
        plot.grid(axis="y", color=PALE)
    figure.legend(*ours.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _times(figure_class: Any, times: Mapping[tuple[tuple[int, int, int], str], Any]) -> Any:
    """Seconds by size: ours with full lines, the paper's dotted; hollow where the exact method was stopped."""
    figure = figure_class(figsize=(WIDTH, 2.9), layout="constrained")
    plot = figure.subplots()
    shapes = list(dict.fromkeys(shape for shape, _ in times))
    names = ["x".join(map(str, shape)) for shape in shapes]
    for number, method in enumerate(dict.fromkeys(method for _, method in times)):
        mine = [times[shape, method] for shape in shapes]
        plot.plot(names, [each.seconds for each in mine], "-", color=COLOURS[number], label=method)
        for name, each in zip(names, mine, strict=True):
            fill = "full" if each.done else "none"
            plot.plot(name, each.seconds, "o", color=COLOURS[number], markersize=5, fillstyle=fill)
        papers = RUNTIMES.get(method.removesuffix("-printed"), {})
        shown = [shape in papers and method != "agh" for shape in shapes]
        if any(shown):
            there = [name for name, yes in zip(names, shown, strict=True) if yes]
            seconds = [papers[shape] for shape, yes in zip(shapes, shown, strict=True) if yes]
            plot.plot(there, seconds, "s:", color=COLOURS[number], markersize=3, label=f"{method}, the paper's")
    if not all(each.done for each in times.values()):
        plot.plot([], [], "o", color=GREY, markersize=5, fillstyle="none", label="stopped, not proven")
    plot.set(yscale="log", ylabel="s", xlabel="query types x models x tiers")
    plot.grid(axis="y", color=PALE)
    figure.legend(*plot.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure
