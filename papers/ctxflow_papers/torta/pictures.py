"""TORTA's Figures 2, 4, 5 and 8 to 12, drawn from our own runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.observe.measures import COLOURS, GREY, PALE, WIDTH
from ctxflow.policies.torta.quantities import Floats
from ctxflow_papers.drawing import write_pictures
from ctxflow_papers.torta import printed
from ctxflow_papers.torta.experiments import Compared, Course, surge_begins
from ctxflow_papers.torta.settings import LOADS, SLOT

STYLES = {
    "torta": ("TORTA", COLOURS[0]),
    "lookahead": ("look-ahead", COLOURS[2]),
    "transport": ("transport", COLOURS[5]),
    "skylb": ("SkyLB", COLOURS[1]),
    "sdib": ("SDIB", COLOURS[3]),
    "round_robin": ("round-robin", COLOURS[4]),
}
LONGEST = 60.0
"""Seconds of a response that are drawn; a method beyond it says its mean in the legend."""


@dataclasses.dataclass(frozen=True)
class Results:
    """What the pictures are drawn from."""

    compared: Mapping[str, Mapping[str, Compared]]
    surges: Mapping[str, Course]
    failures: Mapping[str, Mapping[str, Floats]]
    accuracies: Mapping[float, Mapping[str, Floats]]
    milp: Mapping[int, tuple[float, bool]]


def draw_all(folder: Path, results: Results) -> None:
    """Draw them as PNG files.

    :raises CtxflowError: if matplotlib is not installed.
    """
    write_pictures(
        folder,
        "torta",
        {
            "figure2": lambda figure_class: _surge(figure_class, results),
            "figure4": lambda figure_class: _failure(figure_class, results),
            "figure5": lambda figure_class: _milp(figure_class, results),
            "figure8": lambda figure_class: _responses(figure_class, results),
            "figure9": lambda figure_class: _costs(figure_class, results),
            "figure10": lambda figure_class: _balances(figure_class, results),
            "figure11": lambda figure_class: _parts(figure_class, results),
            "figure12": lambda figure_class: _accuracies(figure_class, results),
        },
    )


def _surge(figure_class: Any, results: Results) -> Any:
    """Mean waiting and active servers by slot, about the surge."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    waiting, active = figure.subplots(1, 2)
    for number, (name, course) in enumerate(results.surges.items()):
        begins = surge_begins(len(course.waiting))
        shown = slice(max(begins - 25, 0), begins + 45)
        minutes = (np.arange(len(course.waiting)) - begins)[shown] * SLOT / 60
        waiting.plot(minutes, course.waiting[shown], color=COLOURS[number], label=name)
        active.plot(minutes, course.active[shown], color=COLOURS[number])
    waiting.set(xlabel="minutes from the surge", ylabel="s", title="waiting")
    active.set(xlabel="minutes from the surge", title="active servers")
    for plot in (waiting, active):
        plot.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        plot.set_ylim(bottom=0)
    figure.legend(*waiting.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _failure(figure_class: Any, results: Results) -> Any:
    """What becomes of a failed region's tasks."""
    figure = figure_class(figsize=(WIDTH, 2.4), layout="constrained")
    titles = {"completed": "completed, %", "waiting": "waiting of these, s", "response": "response of these, s"}
    for plot, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        values = {method: float(each[name].mean()) for method, each in results.failures.items()}
        factor = 100 if name == "completed" else 1
        _bars(plot, {method: factor * value for method, value in values.items()}, title)
    return figure


def _bars(plot: Any, values: Mapping[str, float], title: str) -> None:
    for place, (method, value) in enumerate(values.items()):
        plot.bar(place, value, color=STYLES[method][1], width=0.7)
    labels = [STYLES[method][0] for method in values]
    plot.set(title=title, xticks=range(len(labels)))
    plot.set_xticklabels(labels, rotation=35, ha="right", fontsize=7)


def _milp(figure_class: Any, results: Results) -> Any:
    figure = figure_class(figsize=(WIDTH * 0.6, 2.6), layout="constrained")
    plot = figure.subplots()
    tasks = list(results.milp)
    plot.plot(tasks, [results.milp[each][0] for each in tasks], "o-", color=COLOURS[0], label="ours")
    plot.plot(list(printed.MILP), list(printed.MILP.values()), "s:", color=GREY, label="the paper's")
    plot.set(xscale="log", yscale="log", xlabel="tasks", ylabel="s", title="the exact program")
    _plain(plot.xaxis)
    _plain(plot.yaxis)
    plot.legend(frameon=False)
    return figure


def _plain(axis: Any) -> None:
    """Numbers as they are, at powers of ten alone: formulas are not drawn."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(lambda value, place: "")


def _panels(figure_class: Any, results: Results, height: float) -> tuple[Any, Sequence[tuple[str, Any]]]:
    names = list(results.compared)
    figure = figure_class(figsize=(WIDTH, height), layout="constrained")
    return figure, list(zip(names, np.ravel(figure.subplots(1, len(names), squeeze=False)), strict=True))


def _responses(figure_class: Any, results: Results) -> Any:
    """The distribution of response times at the middle load."""
    figure, panels = _panels(figure_class, results, 2.8)
    bins = np.linspace(0, LONGEST, 61)
    for topology, plot in panels:
        for method, (label, colour) in STYLES.items():
            each = results.compared[topology].get(method)
            if each is None:
                continue
            share = np.histogram(each.responses, bins)[0] / max(len(each.responses), 1)
            plot.plot(bins[:-1], share, color=colour, label=label, linewidth=1)
            plot.axvline(min(each.responses.mean(), LONGEST), color=colour, linewidth=0.6, linestyle="--")
        plot.set(title=topology, xlabel="s", yticks=[])
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _costs(figure_class: Any, results: Results) -> Any:
    """Power and overhead beside round-robin's, ours and the paper's marks."""
    figure = figure_class(figsize=(WIDTH, 4.2), layout="constrained")
    names = list(results.compared)
    middle = len(LOADS) // 2
    for row, (metric, table) in zip(
        figure.subplots(2, len(names), squeeze=False),
        (("power", printed.POWER), ("overhead", printed.OVERHEAD)),
        strict=True,
    ):
        for plot, topology in zip(row, names, strict=True):
            found = results.compared[topology]
            base = found["round_robin"].values[metric][middle].mean()
            shown = {name: float(found[name].values[metric][middle].mean() / base) for name in STYLES if name in found}
            _bars(plot, shown, f"{topology}: {metric}")
            for place, name in enumerate(shown):
                if name in printed.METHODS:
                    paper = table[topology][printed.METHODS.index(name)] / table[topology][3]
                    plot.plot([place - 0.35, place + 0.35], [paper, paper], color="black", linewidth=1)
    figure.supylabel("over round-robin's; black: the paper's", fontsize=8)
    return figure


def _balances(figure_class: Any, results: Results) -> Any:
    """The cumulative distribution of Eq. 11 over slots."""
    figure, panels = _panels(figure_class, results, 2.6)
    for topology, plot in panels:
        for method, (label, colour) in STYLES.items():
            each = results.compared[topology].get(method)
            if each is not None:
                ordered = np.sort(each.balances)
                plot.plot(ordered, np.linspace(0, 1, len(ordered)), color=colour, label=label, linewidth=1)
        plot.set(title=topology, xlabel="1/(1+CV)")
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _parts(figure_class: Any, results: Results) -> Any:
    """Waiting, and inference with the switches before it."""
    figure = figure_class(figsize=(WIDTH, 2.8), layout="constrained")
    names = list(results.compared)
    middle = len(LOADS) // 2
    for plot, (title, parts) in zip(
        figure.subplots(1, 2),
        {"waiting, s": ("waiting",), "inference, s": ("inference", "loading")}.items(),
        strict=True,
    ):
        present = [name for name in STYLES if name in results.compared[names[0]]]
        for number, method in enumerate(present):
            heights = [
                sum(float(results.compared[topology][method].values[part][middle].mean()) for part in parts)
                for topology in names
            ]
            places = np.arange(len(names)) + (number - len(present) / 2) * 0.8 / len(present)
            plot.bar(
                places, heights, 0.8 / len(present), color=STYLES[method][1], label=STYLES[method][0], align="edge"
            )
        plot.set(title=title, xticks=range(len(names)), xticklabels=names)
        if title.startswith("waiting"):
            plot.set_yscale("symlog", linthresh=1.0)
            _plain(plot.yaxis)
        else:
            plot.set_ylim(bottom=13)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _accuracies(figure_class: Any, results: Results) -> Any:
    """Response by the forecast's accuracy; the baselines do not forecast."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    response, inference = figure.subplots(1, 2)
    shown = sorted(results.accuracies)
    topology = next(iter(results.compared))
    for plot, parts in ((response, ("response",)), (inference, ("inference", "loading"))):
        values = np.array([sum(results.accuracies[each][part] for part in parts) for each in shown])
        plot.plot(shown, values.mean(axis=1), "o-", color=COLOURS[0], markersize=3, label="TORTA")
        plot.fill_between(shown, values.min(axis=1), values.max(axis=1), color=PALE)
        for method in ("sdib", "skylb"):
            base = results.compared[topology][method].values
            level = sum(float(base[part][len(LOADS) // 2].mean()) for part in parts)
            plot.axhline(level, color=STYLES[method][1], linewidth=1, label=STYLES[method][0])
        plot.set(title=f"{parts[0]}, s", xlabel="accuracy of the forecast (Eq. 12)")
    figure.legend(*response.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
