"""FlexTopo's Figures 8 to 11, drawn from our own runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.observe.measures import COLOURS, DARK, GREY, PALE, WIDTH
from ctxflow.policies.flextopo.cluster import Node
from ctxflow_papers.drawing import write_pictures
from ctxflow_papers.flextopo.experiments import Tallies, crossing
from ctxflow_papers.flextopo.workloads import WORKLOADS

_COLOUR = dict(zip((workload.name for workload in WORKLOADS), COLOURS, strict=False))
_SHOWN = ("standard", "imp", "exhaustive", "exact")


def draw_all(
    folder: Path,
    snapshots: Mapping[str, Sequence[Node]],
    histories: Mapping[str, Sequence[Mapping[str, int]]],
    by_workload: Tallies,
    latencies: Tallies,
) -> None:
    """Draw the four figures as PNG files.

    :raises CtxflowError: if matplotlib is not installed.
    """
    write_pictures(
        folder,
        "flextopo",
        {
            "figure8": lambda figure_class: _snapshots(figure_class, snapshots),
            "figure9": lambda figure_class: _scaling(figure_class, histories),
            "figure10": lambda figure_class: _sourcing(figure_class, by_workload),
            "figure11": lambda figure_class: _latencies(figure_class, latencies),
        },
    )


def _snapshots(figure_class: Any, snapshots: Mapping[str, Sequence[Node]]) -> Any:
    """Which workload holds each GPU of each node, with lines between the GPUs of an instance."""
    figure = figure_class(figsize=(WIDTH, 2.3 * len(snapshots)), layout="constrained")
    for plot, (way, end) in zip(figure.subplots(len(snapshots), squeeze=False)[:, 0], snapshots.items(), strict=True):
        bad = set(crossing(end))
        for x, node in enumerate(end):
            for instance in node.instances:
                colour, gpus = _COLOUR[instance.id[0]], sorted(instance.gpus)
                dotted = gpus[-1] - gpus[0] >= len(gpus)
                plot.plot([x] * len(gpus), gpus, ":" if dotted else "-", color=colour, linewidth=1.2)
                plot.plot([x] * len(gpus), gpus, "o", color=colour, markersize=3)
                if (node.name, instance.id) in bad:
                    plot.plot(x, 3.5, "o", color="#CC0000", markersize=14, fillstyle="none")
        plot.axhline(3.5, color=PALE, linewidth=0.8, zorder=0)
        plot.set(title=f"{way}: {len(bad)} instances across sockets", ylabel="GPU", yticks=range(8))
    plot.set_xlabel("node")
    return figure


def _scaling(figure_class: Any, histories: Mapping[str, Sequence[Mapping[str, int]]]) -> Any:
    """The number of instances of each workload over two scaling events."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    plots = figure.subplots(1, len(histories), sharey=True, squeeze=False)[0]
    for plot, (way, history) in zip(plots, histories.items(), strict=True):
        for workload, colour in _COLOUR.items():
            plot.plot([counts[workload] for counts in history], color=colour, label=workload)
        plot.set(title=way, xlabel="preemptions")
    plots[0].set_ylabel("instances")
    plots[-1].legend(frameon=False)
    return figure


def _sourcing(figure_class: Any, tallies: Tallies) -> Any:
    """What decisions for each workload take."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    plot = figure.subplots()
    for number, way in enumerate(_SHOWN):
        for position, workload in enumerate(_COLOUR):
            seconds = tallies[way, workload].seconds
            plot.plot(
                [position + (number - 1.5) * 0.15] * len(seconds),
                [1e3 * each for each in seconds],
                "o",
                color=COLOURS[number],
                markersize=3,
                label=way if position == 0 else None,
            )
    plot.set(
        xticks=range(len(_COLOUR)), xticklabels=list(_COLOUR), yscale="log", xlabel="workload", ylabel="ms a decision"
    )
    plot.legend(frameon=False, ncols=2)
    return figure


def _latencies(figure_class: Any, tallies: Tallies) -> Any:
    """How the times of decisions are distributed: boxes from the first to the third quartile, whiskers to P90."""
    figure = figure_class(figsize=(WIDTH, 2.6), layout="constrained")
    for plot, workload in zip(figure.subplots(1, 2), "BC", strict=True):
        samples = [[1e3 * each for each in tallies[way, workload].seconds] for way in _SHOWN]
        line = {"color": DARK}
        plot.boxplot(samples, whis=(0, 90), showfliers=False, medianprops=line, boxprops={"color": GREY})
        plot.set(xticklabels=_SHOWN, yscale="log", title=f"workload {workload}", ylabel="ms a decision")
    return figure
