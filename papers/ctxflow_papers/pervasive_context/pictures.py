"""The paper's Figures 4 to 7, drawn from our own runs, with what the paper prints beside them.

What the paper only draws is not shown: it has no number.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.observe.measures import COLOURS, DARK, GREY, PALE, WIDTH
from ctxflow_papers.drawing import write_pictures
from ctxflow_papers.pervasive_context.experiments import Run
from ctxflow_papers.pervasive_context.tasks import TABLE_2

BLUE, ORANGE = COLOURS[:2]

PRINTED_WORKERS = {"pv0": 1.0, "pv6": 157.0}
"""Average numbers of workers that the paper prints by name."""


def draw_all(folder: Path, runs: Mapping[str, Run]) -> None:
    """Draw the four figures as PNG files.

    :raises CtxflowError: if matplotlib is not installed.
    """
    write_pictures(
        folder,
        "pervasive-context",
        {
            "figure4": lambda figure_class: _experiments(figure_class, list(runs.values())),
            "figure5": lambda figure_class: _histograms(figure_class, runs),
            "figure6": lambda figure_class: _busy(figure_class, runs),
            "figure7": lambda figure_class: _unrestricted(figure_class, runs),
        },
    )


def _experiments(figure_class: Any, runs: Sequence[Run]) -> Any:
    """Figure 4: workers connected on average, and the time of each experiment."""
    figure = figure_class(figsize=(WIDTH, 4.6), layout="constrained")
    workers, seconds = figure.subplots(2, sharex=True, height_ratios=(1, 2))
    names = [each.settings.name for each in runs]
    places = range(len(names))
    workers.bar(places, [each.workers for each in runs], 0.6, color=GREY)
    shown = [(x, PRINTED_WORKERS[name]) for x, name in enumerate(names) if name in PRINTED_WORKERS]
    workers.plot(*zip(*shown, strict=True), "D", color=ORANGE, markersize=5)
    workers.set(ylabel="workers\non average")
    seconds.bar(places, [each.seconds for each in runs], 0.6, color=BLUE, label="ours")
    for source, marker in (("printed", "D"), ("derived", "d")):
        points = [(x, e.settings.paper) for x, e in enumerate(runs) if e.settings.paper_source == source]
        points = [(x, paper) for x, paper in points if paper is not None]
        if points:
            label = f"the paper's, {source}"
            fill = "full" if source == "printed" else "none"
            seconds.plot(*zip(*points, strict=True), marker, color=ORANGE, markersize=5, label=label, fillstyle=fill)
    least = 0.3 * min(each.seconds for each in runs)
    for x, each in enumerate(runs):
        seconds.text(
            x, 1.15 * least, _short(each.seconds), ha="center", va="bottom", rotation=90, fontsize=7, color="white"
        )
    seconds.set(yscale="log", ylabel="execution time, s", xticks=places)
    seconds.set_ylim(least, max(each.seconds for each in runs) * 2)
    seconds.set_xticklabels(names, rotation=60, ha="right", rotation_mode="anchor")
    seconds.legend(frameon=False, ncols=3, loc="upper right", fontsize=7.5)
    return figure


def _short(seconds: float) -> str:
    return f"{seconds / 1000:.1f}k" if seconds < 99_950 else f"{seconds / 1000:.0f}k"


def _histograms(figure_class: Any, runs: Mapping[str, Run]) -> Any:
    """Figure 5: the times of tasks with partial and with pervasive context; the longest are beyond the edge."""
    figure = figure_class(figsize=(WIDTH, 3.2), layout="constrained")
    for plot, size, most, bins in zip(figure.subplots(1, 2), ("1", "100"), (20.0, 120.0), (80, 60), strict=True):
        for effort, colour in (("pv3", ORANGE), ("pv4", BLUE)):
            name = f"{effort}_{size}"
            tasks, paper = runs[name].tasks, TABLE_2[name][0]
            beyond = sum(seconds > most for seconds in tasks) / len(tasks)
            label = f"{name} (beyond: {100 * beyond:.1f} %)"
            plot.hist(tasks, bins, range=(0.0, most), color=colour, alpha=0.65, label=label)
            plot.axvline(sum(tasks) / len(tasks), color=colour, linewidth=1.2)
            plot.axvline(paper, color=colour, linewidth=1.2, linestyle=":")
        plot.set(yscale="log", xlabel="seconds of a task", xlim=(0, most), title=f"batches of {size}")
        plot.plot([], [], "-", color=DARK, label="our mean")
        plot.plot([], [], ":", color=DARK, label="the paper's mean")
        plot.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.axes[0].set_ylabel("tasks")
    return figure


def _busy(figure_class: Any, runs: Mapping[str, Run]) -> Any:
    """Figure 6: the pool is drained from minute 15 on."""
    figure = figure_class(figsize=(WIDTH, 3.0), layout="constrained")
    inferences = figure.subplots()
    workers = inferences.twinx()
    for name, what, colour in (("pv5p", "partial", ORANGE), ("pv5s", "pervasive", BLUE)):
        each = runs[name]
        _progress(inferences, workers, each, colour, f"{name}, {what}")
        if (paper := each.settings.paper_done) is not None:
            label = f"the paper's, derived: {paper:,}"
            inferences.plot(each.settings.until / 60, paper, "D", color=colour, label=label, clip_on=False, zorder=3)
    inferences.axvline(15, color=PALE, linewidth=1, zorder=0)
    _axes(inferences, workers)
    workers.set_ylim(0, 30)
    inferences.set_xlim(0, 35.5)
    inferences.legend(frameon=False, loc="upper left", fontsize=7.5)
    return figure


def _unrestricted(figure_class: Any, runs: Mapping[str, Run]) -> Any:
    """Figure 7: as many workers as there are to be had, on three occasions."""
    figure = figure_class(figsize=(WIDTH, 2.8), layout="constrained")
    for plot, name in zip(figure.subplots(1, 3), ("pv6_10a", "pv6_11p", "pv6"), strict=True):
        each, workers = runs[name], plot.twinx()
        _progress(plot, workers, each, BLUE, "inferences")
        printed = "" if each.settings.paper is None else f" (the paper's: {each.settings.paper:,.0f} s)"
        plot.set_title(f"{name}\n{each.outcomes[0].seconds:,.0f} s{printed}", fontsize=8.5)
        if each.settings.paper is not None:
            plot.axvline(each.settings.paper / 60, color=ORANGE, linewidth=1)
        _axes(plot, workers)
        workers.set_ylim(0, 1.15 * max(count for _, count in _connected(each)))
        if name != "pv6_10a":
            plot.set_ylabel("")
        if name != "pv6":
            workers.set_ylabel("")
    return figure


def _progress(inferences: Any, workers: Any, each: Run, colour: str, label: str) -> None:
    """Inferences done, and workers connected, over the minutes of a run."""
    first = each.outcomes[0]
    inferences.plot([time / 60 for time in first.times], first.answered, color=colour, label=label)
    times, counts = zip(*_connected(each), strict=True)
    workers.step([time / 60 for time in times], counts, where="post", color=colour, linewidth=0.8, linestyle="--")


def _connected(each: Run) -> list[tuple[float, int]]:
    """(time, workers connected from then on)."""
    first = each.outcomes[0]
    counts = itertools.accumulate(change for _, _, change in first.presence)
    steps = list(zip((time for time, _, _ in first.presence), counts, strict=True))
    return [(0.0, 0), *steps, (first.seconds, steps[-1][1])]


def _axes(inferences: Any, workers: Any) -> None:
    inferences.set(xlabel="minutes", ylabel="inferences done (lines)", ylim=(0, None))
    inferences.yaxis.set_major_formatter(lambda value, place: f"{value / 1000:.0f}k")
    workers.set_ylabel("workers (dashed)")
    workers.spines["right"].set_visible(True)
