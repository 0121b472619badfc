"""TurboServe's Figures 4, 7 and 8, and the GPUs of a run beside the bound's, drawn from our own runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.observe.measures import COLOURS, DARK, GREY, PALE, WIDTH
from ctxflow_papers.drawing import write_pictures
from ctxflow_papers.turboserve import printed
from ctxflow_papers.turboserve.experiments import Compared
from ctxflow_papers.turboserve.traces import Statistics, generate

_NAMES = {"round_robin": "round-robin", "load_aware": "load-aware", "memory_aware": "memory-aware"}


@dataclasses.dataclass(frozen=True)
class Results:
    """What the pictures are drawn from."""

    compared: Mapping[str, Compared]
    study: Mapping[str, tuple[float, float]]
    first: Statistics
    seed: int


def draw_all(folder: Path, results: Results) -> None:
    """Draw the four figures as PNG files.

    :raises CtxflowError: if matplotlib is not installed.
    """
    write_pictures(
        folder,
        "turboserve",
        {
            "figure4": lambda figure_class: _study(figure_class, results),
            "figure7": lambda figure_class: _compared(figure_class, results),
            "figure8": lambda figure_class: _without(figure_class, results),
            "gpus": lambda figure_class: _gpus(figure_class, results),
        },
    )


def _bars(plot: Any, groups: list[str], bars: dict[str, list[float]], label: str) -> None:
    width = 0.8 / len(bars)
    for number, (name, values) in enumerate(bars.items()):
        places = [at + (number - (len(bars) - 1) / 2) * width for at in range(len(groups))]
        plot.bar(places, values, width * 0.92, color=COLOURS[number], label=name)
    plot.set(xticks=range(len(groups)), xticklabels=groups, ylabel=label)


def _study(figure_class: Any, results: Results) -> Any:
    """What each mechanism saves on the base configuration, beside the paper's."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    for plot, place, what in zip(figure.subplots(1, 2, sharey=True), (0, 1), ("latency", "cost"), strict=True):
        ours = [values[place] for values in results.study.values()]
        paper = [printed.FIGURE_4[name][place] for name in results.study]
        _bars(plot, list(results.study), {"ours": ours, "paper": paper}, f"% less {what}")
        plot.axhline(0.0, color=GREY, linewidth=0.8)
        plot.tick_params(labelleft=True)
    plot.legend(frameon=False)
    return figure


def _compared(figure_class: Any, results: Results) -> Any:
    """Worst-case latency at matched cost, and cost at matched latency; ours is drawn as a line over each bar."""
    figure = figure_class(figsize=(WIDTH, 4.6), layout="constrained")
    traces = list(results.compared)
    for plot, what in zip(figure.subplots(2, 1), ("latency", "cost"), strict=True):
        theirs: dict[str, list[float]] = {}
        for number, (name, shown) in enumerate(_NAMES.items()):
            for at, trace in enumerate(traces):
                pair = getattr(results.compared[trace], what).get(name)
                ratio = float("nan")
                if pair is not None:
                    mine, other = (pair.ours.worst, pair.theirs.worst)
                    if what == "cost":
                        mine, other = pair.ours.gpu_seconds, pair.theirs.gpu_seconds
                    ratio = 100 * mine / other
                    place = at + (number - 1) * 0.8 / 3
                    plot.text(place, ratio + 1.5, f"{ratio:.0f}", ha="center", fontsize=6.5, color=DARK)
                theirs.setdefault(shown, []).append(ratio)
        label = "worst-case latency,\n% of the baseline's" if what == "latency" else "cost,\n% of the baseline's"
        _bars(plot, traces, theirs, label)
        saved = printed.LATENCY_SAVED if what == "latency" else printed.COST_SAVED
        plot.axhline(100 - saved, color=GREY, linewidth=0.8, linestyle="--", label="the paper's mean")
        plot.axhline(100, color=PALE, linewidth=0.8)
        plot.set_ylim(0, 118)
    figure.axes[0].legend(frameon=False, ncols=4, loc="upper left", fontsize=7.5)
    return figure


def _without(figure_class: Any, results: Results) -> Any:
    """What leaving a mechanism out costs at the target latency."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    plot = figure.subplots()
    bars: dict[str, list[float]] = {}
    for each in results.compared.values():
        for name in ("migration", "autoscaling", "anticipation"):
            other, rise = each.without.get(name), float("nan")
            if other is not None and each.full is not None:
                rise = 100 * (other.gpu_seconds / each.full.gpu_seconds - 1)
            bars.setdefault(f"without {name}", []).append(rise)
    _bars(plot, list(results.compared), bars, "% more cost")
    plot.axhline(0.0, color=GREY, linewidth=0.8)
    plot.legend(frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, 1.16))
    return figure


def _gpus(figure_class: Any, results: Results) -> Any:
    """The GPUs held over the first trace, beside what its sessions fill at the capacity."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    plot = figure.subplots()
    name = results.first.name
    each, trace = results.compared[name], generate(results.first, results.seed)
    highest = trace.counts(10.0)[1]
    minutes = np.arange(len(highest)) / 6
    plot.fill_between(minutes, highest / 12, step="post", color=PALE, label="active sessions / K")
    times, gpus = zip(*each.own.history, (trace.seconds, each.own.history[-1][1]), strict=True)
    plot.step([time / 60 for time in times], gpus, where="post", color=COLOURS[0], linewidth=1.2, label="GPUs held")
    plot.set(xlabel=f"minutes of {name}", ylabel="GPUs")
    plot.set_ylim(0, None)
    plot.legend(frameon=False)
    return figure
