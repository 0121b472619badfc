"""Draw the pictures of a report: transfers, workers and items over time, durations of calls, and lifetimes of workers.

This needs matplotlib (the extra "report"), which is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.errors import CtxflowError, counted
from ctxflow.files import written_whole
from ctxflow.installing import how_to_install
from ctxflow.observe.history import AppHistory, History, TierHistory
from ctxflow.observe.measures import COLOURS, DARK, GREY, PALE, STYLE, WIDTH, seconds, shortened, unit_of
from ctxflow.observe.transfers import MANAGER, FileTree, Transfer, Transfers, file_name, megabytes, rows_by_host


def draw(
    directory: Path, history: History | None, found: Transfers, trees: Sequence[FileTree], form: str = "png"
) -> list[Path]:
    """Draw the pictures that there is something for into a directory, and return their files.

    :param form: "png", "svg" or "pdf".
    :raises CtxflowError: if matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise CtxflowError(f"pictures need matplotlib: {how_to_install('matplotlib', extra='report')}") from None
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(STYLE):
        for name, picture in pictures(history, found, trees):
            written.append(directory / f"{name}.{form}")
            with written_whole(written[-1], sync=False) as file:
                picture(Figure).savefig(file, format=form, dpi=200)
    return written


def pictures(
    history: History | None, found: Transfers, trees: Sequence[FileTree]
) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return what there is to draw: each picture's name, and what makes it with a given class of figures."""
    there: list[tuple[str, Callable[[Any], Any]]] = []
    if found.transfers:
        there.append(("transfers", lambda figure: transfers_picture(figure, found, trees)))
    if history is not None and (history.workers.joined or history.items.done):
        there.append(("workers_and_items", lambda figure: workers_and_items(figure, history)))
    if history is not None and any(app.calls for app in history.apps.values()):
        there.append(("call_times", lambda figure: _call_times(figure, history)))
    if history is not None and history.workers.lifetimes:
        there.append(("lifetimes", lambda figure: lifetimes(figure, history)))
    return there


# --- transfers

_LINKED, _FAILED = (0, (3, 1.5)), (0, (1, 1.5))  # Dashes.
_LABELLED = 48  # More rows than this are labelled by host only.
_ARROWS = 400  # More transfers than this are lines without heads.


def transfers_picture(figure_class: Any, found: Transfers, trees: Sequence[FileTree]) -> Any:
    """Draw time to the right, a row for the manager and each worker, an arrow for each transfer."""
    rows, hosts = rows_by_host(found)
    height = min(max(2.2, 0.9 + 0.2 * len(rows)), 9.5)
    figure = figure_class(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    times = [at for t in found.transfers for at in (t.asked, t.start, t.end) if at is not None] or [0.0]
    begin, end = min(times), max(*times, min(times) + 1e-3)
    for _, first, last in hosts[::2]:
        axes.axhspan(first - 0.5, last + 0.5, color="#F5F5F5", linewidth=0, zorder=0)
    _presence(axes, found, rows, begin, end)
    colours = _colours(found, trees)
    many = len(found.transfers)
    scale = 1.0 if many <= _LABELLED else 0.6 if many <= _ARROWS else 0.0
    if not scale:
        _lines(axes, found.transfers, rows, colours)
    for transfer in found.transfers:
        if scale or transfer.error or transfer.kind == "made":
            _arrow(axes, transfer, rows, colours.get(transfer.file, GREY), scale)
    margin = 0.02 * (end - begin)
    axes.set(xlim=(begin - margin, end + margin), ylim=(len(rows) - 0.4, -0.6), xlabel="time in the run (s)")
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    _label_rows(axes, rows, hosts)
    _key(figure, found, trees, colours)
    return figure


def _presence(axes: Any, found: Transfers, rows: dict[str, int], begin: float, end: float) -> None:
    """Draw a pale line while a worker is connected, with a bar where it was lost."""
    line = 0.8 if len(rows) <= _LABELLED else 0.25
    lines: list[tuple[float, float, int, int]] = []
    lost: list[tuple[float, int]] = []
    for name, row in rows.items():
        peer = found.peers.get(name)
        joined = begin if peer is None or peer.joined is None else peer.joined
        gone = end if peer is None or peer.lost is None else peer.lost
        lines.append((joined, gone, row, row))
        if peer is not None and peer.lost is not None and peer.lost <= end:
            lost.append((gone, row))
    axes.plot(*_joined(lines), color="#C8C8C8", linewidth=line, zorder=1)
    marks = {"marker": "|", "markersize": 8, "markeredgewidth": 1.6, "linestyle": ""}
    axes.plot([at for at, _ in lost], [row for _, row in lost], color=DARK, zorder=2, **marks)


def _joined(lines: Sequence[tuple[float, float, int, int]]) -> tuple[list[float], list[float]]:
    """Return lines (from, to, row, row there) as one with gaps: drawn one by one, thousands take minutes."""
    across = [at for begin, end, _, _ in lines for at in (begin, end, math.nan)]
    down = [at for _, _, above, below in lines for at in (above, below, math.nan)]
    return across, down


def _lines(axes: Any, transfers: Sequence[Transfer], rows: dict[str, int], colours: dict[str, str]) -> None:
    """Draw transfers that went well as lines that end in a dot."""
    alike: dict[tuple[str, bool], list[tuple[float, float, int, int]]] = {}
    for transfer in transfers:
        begin, over = transfer.span
        if begin is not None and over is not None and not transfer.error and transfer.kind != "made":
            key = (colours.get(transfer.file, GREY), transfer.kind == "linked")
            alike.setdefault(key, []).append((begin, over, rows[transfer.sender], rows[transfer.receiver]))
    for (colour, linked), lines in alike.items():
        dashes = _LINKED if linked else "-"
        axes.plot(*_joined(lines), color=colour, linewidth=0.5, linestyle=dashes, zorder=3)
        ends = [over for _, over, _, _ in lines], [below for _, _, _, below in lines]
        axes.plot(*ends, marker=".", markersize=2, linestyle="", color=colour, zorder=4)


def _arrow(axes: Any, transfer: Transfer, rows: dict[str, int], colour: str, scale: float) -> None:
    begin, over = transfer.span
    if begin is None:
        return
    above, below = rows[transfer.sender], rows[transfer.receiver]
    if transfer.kind == "made":
        axes.plot([begin, over], [below, below], color=colour, linewidth=2.2, zorder=3)
        return
    if transfer.error:
        axes.plot([begin, over], [above, below], color=colour, linewidth=1.0, linestyle=_FAILED, zorder=3)
        axes.plot([over], [below], marker="x", markersize=6, markeredgewidth=1.6, color=colour, zorder=4)
        return
    dashes = _LINKED if transfer.kind == "linked" else "-"
    arrow = {
        "arrowstyle": "-|>", "color": colour, "linewidth": 1.1 * scale, "linestyle": dashes,
        "mutation_scale": 7 * scale, "shrinkA": 0, "shrinkB": 0,
    }  # fmt: skip
    axes.annotate("", xy=(over, below), xytext=(begin, above), arrowprops=arrow, zorder=3)


def _label_rows(axes: Any, rows: dict[str, int], hosts: list[tuple[str, int, int]]) -> None:
    labels: list[tuple[float, str]]
    if len(rows) <= _LABELLED:
        labels = [(row, shortened(name) or "(unknown)") for name, row in rows.items()]
        for host, first, last in hosts:
            short = shortened(host.partition(".")[0])
            axes.annotate(
                short, xy=(1.0, (first + last) / 2), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", va="center", color=GREY, annotation_clip=False,
            )  # fmt: skip
    else:
        labels = [(row, name) for name, row in rows.items() if name == MANAGER]
        step = -(-len(hosts) // _LABELLED)
        for host, first, last in hosts[step // 2 :: step]:
            labels.append(((first + last) / 2, shortened(host.partition(".")[0])))
    axes.set_yticks([row for row, _ in labels], [label for _, label in labels])
    axes.tick_params(axis="y", length=0)


def _colours(found: Transfers, trees: Sequence[FileTree]) -> dict[str, str]:
    """Return a colour for each of the largest files; the others are grey."""
    sizes = {digest: file.bytes or 0 for digest, file in found.files.items()}
    largest = sorted(trees, key=lambda tree: sizes.get(tree.file, 0), reverse=True)[: len(COLOURS)]
    return {tree.file: colour for tree, colour in zip(largest, COLOURS, strict=False)}


def _key(figure: Any, found: Transfers, trees: Sequence[FileTree], colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    entries = []
    for tree in trees:
        if tree.file in colours:
            file = found.files.get(tree.file)
            size = f", {megabytes(file.bytes)}" if file and file.bytes is not None else ""
            label = shortened(file_name(tree.file, found)) + size
            entries.append(Line2D([], [], color=colours[tree.file], label=label))
    if len(trees) > len(colours):
        entries.append(Line2D([], [], color=GREY, label=f"{len(trees) - len(colours)} smaller files"))
    kinds = {transfer.kind for transfer in found.transfers if not transfer.error}
    failed = any(transfer.error for transfer in found.transfers)
    lost = any(peer.lost is not None for peer in found.peers.values())
    marks: list[tuple[bool, dict[str, Any]]] = [
        ("linked" in kinds, {"linestyle": _LINKED, "label": "hard link"}),
        ("made" in kinds, {"linewidth": 2.2, "label": "written by a call"}),
        (failed, {"linestyle": _FAILED, "marker": "x", "label": "failed"}),
        (lost, {"linestyle": "", "marker": "|", "markersize": 8, "label": "worker lost"}),
    ]
    entries += [Line2D([], [], color=DARK, **looks) for there, looks in marks if there]
    figure.legend(handles=entries, loc="outside upper left", ncols=3, frameon=False, handlelength=2.4)


# --- durations of calls


def _call_times(figure_class: Any, history: History) -> Any:
    """Draw a histogram of the durations of calls for each of the apps that called most, one above the other."""
    apps = sorted((app for app in history.apps.values() if app.calls), key=lambda app: -app.calls)[:4]
    least = min(app.call_seconds.least for app in apps)
    most = max(app.call_seconds.most for app in apps)
    slow = max(app.call_seconds.percentile(99) for app in apps)
    logarithmic = slow / max(min(app.call_seconds.percentile(1) for app in apps), 1e-6) > 12
    figure = figure_class(figsize=(WIDTH, 1.0 + 1.7 * len(apps)), layout="constrained")
    plots = figure.subplots(len(apps), sharex=True, squeeze=False)[:, 0]
    bins = int(np.clip(2 * np.sqrt(max(app.calls for app in apps)), 12, 48))
    if logarithmic:
        edges = np.geomspace(max(least, 1e-6) * 0.98, most * 1.03, bins + 1)
    else:
        top = max(app.call_seconds.percentile(99.5) for app in apps)
        edges = np.append(np.linspace(0.0, top * 1.02, bins + 1), np.inf)
    for axes, app, colour in zip(plots, apps, COLOURS, strict=False):
        _one_histogram(axes, app, edges, colour, logarithmic)
    plots[-1].set_xlabel("duration of a call (s)" + (", logarithmic" if logarithmic else ""))
    return figure


def _one_histogram(axes: Any, app: AppHistory, edges: Any, colour: str, logarithmic: bool) -> None:
    beyond = 0.0
    counts = np.array(app.call_seconds.rebinned(edges))
    if np.isinf(edges[-1]):
        beyond, counts, edges = counts[-1], counts[:-1], edges[:-1]
    axes.stairs(counts, edges, fill=True, color=colour, alpha=0.55)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(edges[0], edges[-1])
    some = counts[counts >= 0.5]
    if len(some) and some.max() / np.median(some) > 100:  # Or the rare slow calls could not be seen.
        axes.set_yscale("symlog", linthresh=10)
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("calls")
    for percent, style in ((50, "-"), (99, "--")):
        at = app.call_seconds.percentile(percent)
        axes.axvline(at, color=DARK, linewidth=0.9, linestyle=style, label=f"p{percent} {seconds(at)}")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderaxespad=0.1)
    trimmed = f", {round(beyond):,} longer ones not shown" if round(beyond) else ""
    narrow = axes.figure.get_figwidth() < WIDTH
    name = app.name if not narrow and len(app.name) <= 80 else shortened(app.name)
    above = 18.0 if narrow or len(name) > 28 else None  # Where both have no place on a line.
    axes.set_title(
        f"{name}: {counted(app.calls, 'call')}, {counted(app.items, 'item')}{trimmed}", loc="left", pad=above
    )


# --- tiers

# Of Okabe and Ito's; vermilion is for evictions, and what is dark beside it is lost.
_SHADES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_EVICTED = "#D55E00"
_OTHERS = "other tiers"
_POINTS = 700  # That can be distinguished from left to right.


def shades(history: History) -> dict[str, str]:
    """Return the colour of each tier that had workers, those with the most worker time first, and of all others."""
    joined = [name for name, tier in history.tiers.items() if tier.joined]
    names = sorted(joined, key=lambda name: -history.tiers[name].worker_seconds)
    colours = {name: _SHADES[n] if n < len(_SHADES) else GREY for n, name in enumerate(names)}
    return {**colours, _OTHERS: GREY}


def workers_and_items(figure_class: Any, history: History) -> Any:
    """Draw workers connected above, completed items below, stacked by tier, as the paper's Figures 6 and 7 have them.

    In a run of sessions alone, their chunks are below.
    """
    figure = figure_class(figsize=(WIDTH, 4.2), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(1.15, 1))
    length, unit = unit_of(history.duration)
    end = max(history.duration, 1e-3)
    colours = shades(history)
    counts = {name: history.tiers[name].counts for name in colours if name != _OTHERS}
    times = _thinned(np.unique([time for points in counts.values() for time, _ in points] + [0.0, end]))
    stacked = _folded({name: _steps(points, times) for name, points in counts.items()})
    labels = {name: shortened(name) for name in stacked} if len(stacked) > 1 else dict.fromkeys(stacked, "workers")
    _stacked(above, times / length, stacked, colours, labels, step="post")
    _losses(above, history, length)
    above.set(xlim=(0, end / length), ylim=(0, max(history.peak_workers * 1.08, 1)), ylabel="workers connected")
    _items(below, history, end, length, colours)
    below.set_xlabel(f"time in the run ({unit})")
    for axes in (above, below):
        axes.grid(axis="both", color=PALE, linewidth=0.6)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.align_ylabels()
    handles = [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False)
    return figure


def _thinned(times: Any) -> Any:
    """Return as many of the times as can be distinguished in a picture."""
    return times if len(times) <= _POINTS else np.linspace(times[0], times[-1], _POINTS)


def _steps(points: list[tuple[float, int]], times: Any) -> Any:
    """Return what a count is at each of the times, when it changes at its points."""
    at = np.array([time for time, _ in points])
    return np.array([count for _, count in points])[np.searchsorted(at, times, side="right") - 1]


def _folded(series: dict[str, Any]) -> dict[str, Any]:
    """Return those that have no colour of their own, added up."""
    folded: dict[str, Any] = {}
    for n, (name, values) in enumerate(series.items()):
        key = name if n < len(_SHADES) else _OTHERS
        folded[key] = folded.get(key, 0) + values
    return folded


def _stacked(
    axes: Any,
    times: Any,
    series: dict[str, Any],
    colours: dict[str, str],
    labels: dict[str, str] | None = None,
    step: str | None = None,
) -> None:
    """Draw areas one upon the other, with a line along the top of all."""
    total = np.zeros(len(times))
    drawn = "default" if step is None else f"steps-{step}"
    for name, values in series.items():
        looks = {"color": colours[name], "alpha": 0.75, "linewidth": 0, "label": (labels or {}).get(name), "zorder": 2}
        axes.fill_between(times, total, total + values, step=step, **looks)
        axes.plot(times, total, drawstyle=drawn, color="white", linewidth=0.6, zorder=2)
        total = total + values
    axes.plot(times, total, drawstyle=drawn, color=DARK, linewidth=0.9, zorder=3)


def _losses(axes: Any, history: History, length: float) -> None:
    for evicted, label, colour in ((True, "eviction", _EVICTED), (False, "worker lost", DARK)):
        step = max(history.duration, 1e-3) / _POINTS
        places = sorted({round(time / step) for time, kind in history.losses if kind is evicted})
        times = [place * step / length for place in places]
        if times:
            # Thin, so that many of them can be distinguished.
            marks = {"marker": "|", "linestyle": "", "markersize": 7, "markeredgewidth": 0.6, "clip_on": False}
            axes.plot(times, [0.0] * len(times), color=colour, label=label, zorder=5, **marks)


def _items(axes: Any, history: History, end: float, length: float, colours: dict[str, str]) -> None:
    chunks = history.chunks > 0 and not history.items.done
    tiers = {name: history.tiers[name] for name in colours if name != _OTHERS}
    lines = {name: (tier.chunks if chunks else tier.done).cumulated() for name, tier in tiers.items()}
    ends = {name: np.minimum([time for time, _ in points], end) for name, points in lines.items()}
    times = _thinned(np.unique(np.concatenate([[0.0, end], *ends.values()])))
    items = {name: np.interp(times, ends[name], [count for _, count in points]) for name, points in lines.items()}
    _stacked(axes, times / length, _folded(items), colours)
    most = history.chunks if chunks else history.items.done
    axes.set(ylim=(0, max(1, most * 1.06)), ylabel="chunks of sessions" if chunks else "completed items")


def lifetimes(figure_class: Any, history: History) -> Any:
    """Draw the share of each tier's workers that were evicted by an age, as `TierHistory.survival` estimates it."""
    figure = figure_class(figsize=(WIDTH, 2.9), layout="constrained")
    axes = figure.add_subplot()
    colours = shades(history)
    lost_some = [(name, history.tiers[name]) for name in colours if name != _OTHERS and history.tiers[name].lifetimes]
    shown = lost_some[: len(_SHADES)]
    longest = max(_oldest(tier) for _, tier in shown)
    length, unit = unit_of(longest)
    for name, tier in shown:
        points = [(0.0, 0.0), *tier.survival()]
        points.append((_oldest(tier), points[-1][1]))
        ages, shares = zip(*points, strict=True)
        label = f"{shortened(name)}: {tier.evicted:,} of {counted(tier.joined, 'worker')} evicted"
        looks = {"where": "post", "color": colours[name], "linewidth": 1.7, "label": label}
        axes.step(np.array(ages) / length, 100 * np.array(shares), **looks)
    axes.axhline(50, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xlim=(0, 1.02 * longest / length), ylim=(0, 102), xlabel=f"time since the worker joined ({unit})")
    axes.set_ylabel("evicted by then (% of workers)")
    axes.grid(color=PALE, linewidth=0.6)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure


def _oldest(tier: TierHistory) -> float:
    return max(*tier.lifetimes, *tier.stays, 1e-3)
