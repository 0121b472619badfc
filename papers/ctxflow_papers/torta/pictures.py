"""TORTA's Figures 4, 5 and 8 to 11, drawn from our own runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.observe.measures import COLOURS, GREY, PALE, WIDTH
from ctxflow.policies.torta.quantities import Floats
from ctxflow_papers.drawing import write_pictures
from ctxflow_papers.torta import printed
from ctxflow_papers.torta.experiments import Compared

STYLES = {
    "torta": ("TORTA", COLOURS[0]),
    "torta_unsized": ("TORTA, all servers", COLOURS[2]),
    "torta_transport": ("TORTA, transport", GREY),
    "skylb": ("SkyLB", COLOURS[1]),
    "skylb_sized": ("SkyLB, sized", PALE),
    "sdib": ("SDIB", COLOURS[3]),
    "sdib_sized": ("SDIB, sized", COLOURS[5]),
    "round_robin": ("round-robin", COLOURS[4]),
}
FIGURES = {
    "figure8": "response",
    "figure9": "power",
    "figure9b": "overhead",
    "figure10": "balance",
    "figure11": "waiting",
}
UNITS = {"response": "s", "power": "$", "overhead": "hours", "balance": "1/(1+CV)", "waiting": "s"}


@dataclasses.dataclass(frozen=True)
class Results:
    """What the pictures are drawn from."""

    compared: Mapping[str, Mapping[float, Compared]]
    failures: Mapping[str, Mapping[str, Floats]]
    milp: Mapping[int, tuple[float, bool]]


def draw_all(folder: Path, results: Results) -> None:
    """Draw them as PNG files.

    :raises CtxflowError: if matplotlib is not installed.
    """

    def of(metric: str) -> Any:
        return lambda figure_class: _by_load(figure_class, results, metric)

    drawn = {name: of(metric) for name, metric in FIGURES.items()}
    drawn["figure4"] = lambda figure_class: _failure(figure_class, results)
    drawn["figure5"] = lambda figure_class: _milp(figure_class, results)
    write_pictures(folder, "torta", drawn)


def _by_load(figure_class: Any, results: Results, metric: str) -> Any:
    """Medians of the seeds by load, a panel for each topology."""
    figure = figure_class(figsize=(WIDTH, 2.8), layout="constrained")
    panels = np.ravel(figure.subplots(1, len(results.compared), squeeze=False))
    for plot, (topology, loads) in zip(panels, results.compared.items(), strict=True):
        for name, (label, colour) in STYLES.items():
            medians = [float(np.median(each.values[name][metric])) for each in loads.values()]
            plot.plot(list(loads), medians, "o-", color=colour, label=label, linewidth=1, markersize=3)
        plot.set(title=topology, xlabel="load", ylabel=UNITS[metric])
    figure.suptitle(metric)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _failure(figure_class: Any, results: Results) -> Any:
    """What becomes of a failed region's tasks."""
    figure = figure_class(figsize=(WIDTH, 2.4), layout="constrained")
    titles = {"completed": "completed, %", "waiting": "waiting of these, s", "response": "response of these, s"}
    for plot, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        factor = 100 if name == "completed" else 1
        for place, (method, values) in enumerate(results.failures.items()):
            plot.bar(place, factor * float(np.median(values[name])), color=STYLES[method][1], width=0.7)
        labels = [STYLES[method][0] for method in results.failures]
        plot.set(title=title, xticks=range(len(labels)))
        plot.set_xticklabels(labels, rotation=35, ha="right", fontsize=7)
    return figure


def _milp(figure_class: Any, results: Results) -> Any:
    figure = figure_class(figsize=(WIDTH * 0.6, 2.6), layout="constrained")
    plot = figure.subplots()
    tasks = list(results.milp)
    plot.plot(tasks, [results.milp[each][0] for each in tasks], "o-", color=COLOURS[0], label="ours")
    plot.plot(list(printed.MILP), list(printed.MILP.values()), "s:", color=GREY, label="the paper's")
    plot.set(xscale="log", yscale="log", xlabel="tasks", ylabel="s", title="the exact program")
    for axis in (plot.xaxis, plot.yaxis):  # Numbers as they are, at powers of ten alone: formulas are not drawn.
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(lambda value, place: "")
    plot.legend(frameon=False)
    return figure
