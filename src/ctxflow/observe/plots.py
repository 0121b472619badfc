"""Draw the pictures of a report, into files and for its page.

This needs matplotlib (the extra "report"), which is imported when a picture is drawn. The transfer tree and the
histogram of call times are drawn here, the pictures of tiers in tier_plots.py; `drawings` gives all of them as SVG that
takes its colours from the page, in a wide and in a narrow form.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.errors import CtxflowError, counted
from ctxflow.files import written_whole
from ctxflow.installing import how_to_install
from ctxflow.observe.formatting import COLOURS, DARK, GREY, PALE, STYLE, WIDTH, seconds, shortened
from ctxflow.observe.history import AppHistory, History
from ctxflow.observe.run_report import Report
from ctxflow.observe.tier_plots import lifetimes, workers_and_items
from ctxflow.observe.transfer_trees import FileTree, file_name, megabytes
from ctxflow.observe.transfers import MANAGER, Transfer, Transfers

_LABELLED = 48  # More rows than this are labelled by host only.
_ARROWS = 400  # More transfers than this are lines without heads.


def draw(
    directory: Path, history: History | None, found: Transfers, trees: Sequence[FileTree], form: str = "png"
) -> list[Path]:
    """Draw the pictures that there is something for, and return their files.

    :param directory: where they go; made if it is not there.
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
        there.append(("transfers", lambda figure: _transfers(figure, found, trees)))
    if history is not None and (history.workers.joined or history.items.done):
        there.append(("workers_and_items", lambda figure: workers_and_items(figure, history)))
    if history is not None and any(app.calls for app in history.apps.values()):
        there.append(("call_times", lambda figure: _call_times(figure, history)))
    if history is not None and history.workers.lifetimes:
        there.append(("lifetimes", lambda figure: lifetimes(figure, history)))
    return there


# --- the transfer tree


def _transfers(figure_class: Any, found: Transfers, trees: Sequence[FileTree]) -> Any:
    """Draw time to the right, a row for the manager and each worker, an arrow for each transfer."""
    rows, hosts = _rows(found)
    height = min(max(2.2, 0.9 + 0.2 * len(rows)), 9.5)
    figure = figure_class(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    begin, end = _span(found.transfers)
    _stripes(axes, hosts, rows)
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
    _label_rows(axes, rows, hosts, found)
    _key(figure, found, trees, colours)
    return figure


def _span(transfers: Sequence[Transfer]) -> tuple[float, float]:
    times = [at for t in transfers for at in (t.asked, t.start, t.end) if at is not None] or [0.0]
    return min(times), max(*times, min(times) + 1e-3)


def _rows(found: Transfers) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    """Return the row of everybody, those of a host side by side, and (host, first row, last row) of each."""
    order: dict[str, list[str]] = {}
    for transfer in found.transfers:
        for name in (transfer.sender, transfer.receiver):
            peer = found.peers.get(name)
            group = order.setdefault("" if peer is None else peer.host, [])
            if name not in group:
                group.append(name)
    rows: dict[str, int] = {}
    hosts = []
    for host in sorted(order, key=lambda host: host != ""):  # Who is on no host comes first: the manager.
        first = len(rows)
        for name in order[host]:
            rows[name] = len(rows)
        if host:
            hosts.append((host, first, len(rows) - 1))
    return rows, hosts


def _stripes(axes: Any, hosts: list[tuple[str, int, int]], rows: dict[str, int]) -> None:
    for n, (_, first, last) in enumerate(hosts):
        if n % 2 == 0:
            axes.axhspan(first - 0.5, last + 0.5, color="#F5F5F5", linewidth=0, zorder=0)


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
        begin = transfer.start if transfer.start is not None else transfer.asked
        if begin is not None and not transfer.error and transfer.kind != "made":
            over = transfer.end if transfer.end is not None else begin
            key = (colours.get(transfer.file, GREY), transfer.kind == "linked")
            alike.setdefault(key, []).append((begin, over, rows[transfer.sender], rows[transfer.receiver]))
    for (colour, linked), lines in alike.items():
        dashes = (0, (3, 1.5)) if linked else "-"
        axes.plot(*_joined(lines), color=colour, linewidth=0.5, linestyle=dashes, zorder=3)
        ends = [over for _, over, _, _ in lines], [below for _, _, _, below in lines]
        axes.plot(*ends, marker=".", markersize=2, linestyle="", color=colour, zorder=4)


def _arrow(axes: Any, transfer: Transfer, rows: dict[str, int], colour: str, scale: float) -> None:
    begin = transfer.start if transfer.start is not None else transfer.asked
    if begin is None:
        return
    over = transfer.end if transfer.end is not None else begin
    above, below = rows[transfer.sender], rows[transfer.receiver]
    if transfer.kind == "made":
        axes.plot([begin, over], [below, below], color=colour, linewidth=2.2, zorder=3)
        return
    if transfer.error:
        axes.plot([begin, over], [above, below], color=colour, linewidth=1.0, linestyle=(0, (1, 1.5)), zorder=3)
        axes.plot([over], [below], marker="x", markersize=6, markeredgewidth=1.6, color=colour, zorder=4)
        return
    dashes = (0, (3, 1.5)) if transfer.kind == "linked" else "-"
    arrow = {
        "arrowstyle": "-|>", "color": colour, "linewidth": 1.1 * scale, "linestyle": dashes,
        "mutation_scale": 7 * scale, "shrinkA": 0, "shrinkB": 0,
    }  # fmt: skip
    axes.annotate("", xy=(over, below), xytext=(begin, above), arrowprops=arrow, zorder=3)


def _label_rows(axes: Any, rows: dict[str, int], hosts: list[tuple[str, int, int]], found: Transfers) -> None:
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
    """Return the largest files have a colour each, the others are grey."""

    def size(tree: FileTree) -> int:
        file = found.files.get(tree.file)
        return (file.bytes or 0) if file else 0

    largest = sorted(trees, key=size, reverse=True)[: len(COLOURS)]
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
    if "linked" in kinds:
        entries.append(Line2D([], [], color=DARK, linestyle=(0, (3, 1.5)), label="hard link"))
    if "made" in kinds:
        entries.append(Line2D([], [], color=DARK, linewidth=2.2, label="written by a call"))
    if any(transfer.error for transfer in found.transfers):
        entries.append(Line2D([], [], color=DARK, linestyle=(0, (1, 1.5)), marker="x", label="failed"))
    if any(peer.lost is not None for peer in found.peers.values()):
        entries.append(Line2D([], [], color=DARK, linestyle="", marker="|", markersize=8, label="worker lost"))
    figure.legend(handles=entries, loc="outside upper left", ncols=3, frameon=False, handlelength=2.4)


# --- call times


def _call_times(figure_class: Any, history: History) -> Any:
    """Return a histogram of the durations of calls for each of the apps that called most, one above the other."""
    apps = sorted((app for app in history.apps.values() if app.calls), key=lambda app: -app.calls)[:4]
    least = min(app.call_seconds.least for app in apps)
    most = max(app.call_seconds.most for app in apps)
    spread = max(app.call_seconds.percentile(99) for app in apps) / max(
        min(a.call_seconds.percentile(1) for a in apps), 1e-6
    )
    logarithmic = spread > 12
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


NARROW = 3.9  # Inches: a phone.
_COLUMNS = {"workers_and_items": 2, "call_times": 2}  # Of a narrow picture's key; all others have one.
_MOST = 1500  # More transfers than this are pixels, or they would be a page of megabytes.
_LINE = 0.17  # Inches of a line of a key.
_DIGITS = re.compile(r"(\.\d\d)\d+")
_STYLE = {
    **STYLE, "svg.fonttype": "none", "text.color": DARK, "axes.labelcolor": DARK, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "font.family": "sans-serif",
}  # fmt: skip


def drawings(report: Report) -> dict[str, tuple[str, str]]:
    """Return the wide and the narrow form of each picture, by name, as `<svg>` elements.

    Their colours are CSS variables, named after what they are in print, such as `--c-0072b2`, with that as default.

    :raises ImportError: if matplotlib is not installed.
    """
    from matplotlib import rc_context

    found = {}
    for name, picture in pictures(report.history, report.transfers, report.trees):
        with rc_context(_STYLE):
            many = name == "transfers" and len(report.transfers.transfers) + len(report.transfers.peers) > _MOST
            forms = [_svg(name, picture, width, many) for width in (WIDTH, NARROW)]
        found[name] = (forms[0], forms[1])
    return found


def _svg(name: str, picture: Callable[[Any], Any], width: float, pixels: bool) -> str:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    class Sized(Figure):
        """A figure as wide as the page has place for, with a key of so many columns."""

        def __init__(self, figsize: tuple[float, float], **options: Any) -> None:
            super().__init__(figsize=(width, figsize[1]), **options)

        def legend(self, *what: Any, ncols: int = 1, **options: Any) -> Any:
            most = ncols if width == WIDTH else min(ncols, _COLUMNS.get(name, 1))
            made = super().legend(*what, ncols=most, **options)
            entries = len(made.get_texts())
            self.set_figheight(self.get_figheight() + _LINE * (math.ceil(entries / most) - math.ceil(entries / ncols)))
            return made

    figure = picture(Sized)
    for axes in figure.axes if pixels else ():
        axes.set_rasterization_zorder(10)
    rcParams["svg.hashsalt"] = f"{name}-{width}"  # Names of parts must differ from those of other pictures.
    written = io.StringIO()
    figure.savefig(written, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    return themed(written.getvalue(), name.replace("_", " "))


def themed(svg: str, label: str) -> str:
    """Return an SVG file as an element of a page, which decides its size, its letters and what its colours are.

    >>> themed('<?xml?><svg width="9pt" height="9pt" viewBox="0 0 9 9"><path style="fill: #0072b2"/></svg>', "all")
    '<svg role="img" aria-label="all" viewBox="0 0 9 9"><path style="fill: var(--c-0072b2, #0072b2)"/></svg>'
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r" <metadata>.*?</metadata>\n", "", svg, count=1, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    rest = re.sub(r'<g id="[^"]*"', "<g", rest)  # Nobody refers to groups, and all pictures have the same.
    rest = re.sub(r"(?<=[ :])#[0-9a-f]{6}(?=[;\"])", lambda found: f"var(--c-{found[0][1:]}, {found[0]})", rest)
    rest = re.sub(r"font-family: [^;\"]*;? ?", "", rest)
    rest = re.sub(r'(?<= )(d|x|y)="[^"]*"', lambda found: _DIGITS.sub(r"\1", found[0].replace(" \n", " ")), rest)
    rest = re.sub(r"\n +", "\n", rest)
    return f'<svg role="img" aria-label="{label}" {box[0] if box else ""}>{rest}'.strip()
