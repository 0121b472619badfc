"""Write a report as one page of HTML that needs nothing else: no network, no other file, no script.

This needs jinja2 (the extra "report"), and matplotlib for the pictures. How the page looks: page.html, page.css.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import io
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxflow.errors import CtxflowError
from ctxflow.files import written_out
from ctxflow.installing import __version__, how_to_install
from ctxflow.observe import summary as summaries
from ctxflow.observe.load_times import PARTS, load_rows
from ctxflow.observe.measures import DARK, STYLE, WIDTH, even, figure, percent, seconds, span_unit
from ctxflow.observe.plots import pictures
from ctxflow.observe.run_report import EVENTS, Report, counts_text, loads_table, overview, tables
from ctxflow.observe.summary import conclusion
from ctxflow.observe.transfers import FileTree, Transfers, TreeNode, describe, title

if TYPE_CHECKING:
    from jinja2 import Environment


_MOST_CAUSES, _MOST_HOSTS = 50, 400
_SHOWN_PARTS = frozenset(PARTS)  # Of loads, which have a colour each.
_PICTURES = {
    "workers_and_items": ("Workers and items", "Above the workers connected, below the items completed, both by tier."),
    "call_times": ("Durations of calls", "How many calls took how long."),
    "lifetimes": ("How long workers lived", "The share of a tier's workers that were evicted by an age."),
    "transfers": ("Transfers", "A row for the manager and for each worker; an arrow for each file sent."),
}  # fmt: skip


def page(report: Report, drawings: Mapping[str, tuple[str, str]], every: bool = False) -> str:
    """Return the page. All that comes from the run is escaped.

    :param drawings: pictures as `drawings.drawings` gives them; none are shown if it is empty.
    :param every: show all causes of failures and all transfers, however large the page gets.
    :raises CtxflowError: if jinja2 is not installed.
    """
    environment = page_environment(_resource)
    causes = report.causes if every else report.causes[:_MOST_CAUSES]
    return environment.get_template("page.html").render(
        run=report.run,
        name=_name(report),
        simulated=report.history is not None and report.history.simulated,
        conclusion=_unbroken(conclusion(report.summary, report.history)) if report.summary is not None else "",
        cards=_cards(report),
        overview=overview(report.history) if report.history is not None else [],
        summary=report.summary,
        time=_time(report.summary),
        loads=_loads(report),
        tables=tables(report.history) if report.history is not None else [],
        pictures=[(name, *_PICTURES[name], *drawings[name]) for name in _PICTURES if name in drawings],
        trees=tree_sections(report, every),
        causes=[(cause, counts_text(cause)) for cause in causes],
        causes_left=len(report.causes) - len(causes),
        settings=list(_settings(report)),
        version=__version__,
        written=_written(report),
        css=_resource("page.css"),
    )


def write_page(path: Path, text: str) -> None:
    """Write a page, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_out(path) as file:
        file.write(text.encode(errors="replace"))


def page_environment(load: Callable[[str], str]) -> Environment:
    """Return what renders pages: all that is put into one is escaped.

    :param load: gives a template by its name.
    :raises CtxflowError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise CtxflowError(f"a page needs jinja2: {how_to_install('jinja2', extra='report')}") from None
    environment = Environment(
        autoescape=True, loader=FunctionLoader(load), trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    # For what is made here, of numbers and escaped text: the style and the pictures.
    environment.filters["markup"] = Markup
    environment.filters["value"] = _value
    return environment


def _resource(name: str) -> str:
    return importlib.resources.files("ctxflow.observe").joinpath(name).read_text(encoding="utf-8")


def _name(report: Report) -> str:
    """Return what a person knows the run by: a batch job's output, else the run's directory."""
    if report.batch is not None and isinstance(report.batch.get("output"), str):
        return Path(report.batch["output"]).name
    parts = report.run.resolve().parts
    return "/".join(parts[-2:])


def _written(report: Report) -> str:
    log = report.run / EVENTS
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(log.stat().st_mtime)) if log.is_file() else ""


def _cards(report: Report) -> list[tuple[str, str, str]]:
    """Return the figures that one looks at first: (what, the figure, a remark)."""
    summary = report.summary
    if summary is None:
        return []
    items, workers, hours = summary["items"], summary["workers"], summary["hours"]
    rest = {"dead": items["dead"], "cancelled": items["cancelled"], "without an answer": items["open"]}
    remarks = [f"{count:,} {what}" for what, count in rest.items() if count]
    cards = [("items done", f"{items['done']:,}", ", ".join(remarks) or "all that there were")]
    tokens = summary["tokens_per_second"]
    speed = f"{figure(tokens)} tokens/s" if tokens is not None else f"over {seconds(summary['duration'])}"
    if summary["items_per_second"] is not None:
        cards.append(("items/s", figure(summary["items_per_second"]), speed))
    fluid = summary["fluid"]
    if fluid["efficiency"] is not None:
        could = f"could have been {seconds(fluid['bound'])} instead of {seconds(fluid['took'])}"
        cards.append(("of the fluid bound", percent(fluid["efficiency"]), could))
    gone = [f"{workers['evicted']:,} evicted"] + [f"{workers['lost']:,} lost"] * bool(workers["lost"])
    cards.append(("workers at most", f"{workers['most']:,}", f"{workers['joined']:,} joined, {', '.join(gone)}"))
    scale, unit = span_unit(summary["unit"], hours["connected"])
    if hours["connected"]:
        useful = percent(hours["useful"] / hours["connected"])
        cards.append((unit, figure(scale * hours["connected"]), f"{useful} useful"))
    return cards


def _time(summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what workers' time went into, as a bar and a table, and what ran where."""
    if summary is None or not summary["places"]:
        return None
    scale, unit = span_unit(summary["unit"], summary["hours"]["connected"])
    heads, rows = summaries.places_table(summary)
    parts = summaries.parts_rows(summary)
    *values, total = even([*(value for _, _, value, _ in parts), scale * summary["hours"]["connected"]])
    hosts = sorted({host for place in summary["places"] for host in place["hosts"]})
    return {
        "unit": unit,
        "total": total,
        "parts": [
            {"part": part, "name": name, "value": value, "share": percent(share), "width": 100 * share}
            for (part, name, _, share), value in zip(parts, values, strict=True)
        ],
        "efficiency": summaries.efficiency_text(summary),
        "heads": heads,
        "rows": rows,
        "hosts": hosts[:_MOST_HOSTS],
        "hosts_left": max(0, len(hosts) - _MOST_HOSTS),
    }  # fmt: skip


def _loads(report: Report) -> dict[str, Any] | None:
    """Return what the time of context loads went into, as a bar and tables; None where nobody told it."""
    history = report.history
    found = None if history is None else loads_table(history)
    if history is None or found is None:
        return None
    times, hours = history.load_times, (report.summary or {}).get("hours", {})
    connected = hours.get("connected")
    return {
        "count": times.loads.count,
        "median": seconds(times.loads.percentile(50)),
        "parts": [
            {"part": part if part in _SHOWN_PARTS else "other", "name": name, "median": median,
             "share": percent(share), "width": 100 * share}
            for part, name, median, share in load_rows(times)
        ],
        "useful": percent(hours["useful"] / connected) if connected else "",
        "loading": percent(hours["loading"] / connected) if connected else "",
        "heads": found[0],
        "rows": found[1],
    }  # fmt: skip


def _unbroken(text: str) -> str:
    """Return a text in which no line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(%|m?s)\b|%)", "\N{NO-BREAK SPACE}", text)


def _settings(report: Report) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield what ran, and how: (of what, [(setting, value)]), without what was left as it is."""
    for heading, key in (("Job", "job"), ("Site", "site")):
        noted = (report.batch or {}).get(key)
        if isinstance(noted, dict):
            yield heading, list(noted.items())
    history = report.history
    if history is None:
        return
    kinds: Sequence[tuple[str, Any]] = (("App", history.apps), ("Context", history.contexts))
    for heading, found in kinds:
        for each in found.values():
            given = [(name, value) for name, value in each.spec.items() if value not in (None, "", [], {}, False)]
            given = [(name, value) for name, value in given if name not in ("is", "name")]
            if given:
                yield f"{heading}: {each.name}", given


def _value(value: Any) -> str:
    """Return a setting's value in words.

    >>> _value(["a", "b"]), _value({"policy": "fixed", "size": 3}), _value(None)
    ('a, b', 'policy: fixed, size: 3', 'none')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_value(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return "none" if value is None else str(value)


_MOST, _MOST_FILES = 400, 30  # Lines of a file, and files, if not all are wanted.
_OPEN = 60  # Trees of more lines than this are folded below their second level.


@dataclasses.dataclass(frozen=True)
class Section:
    """A file's tree: its title and its lists, as HTML that is escaped."""

    title: str
    html: Any


def tree_sections(report: Report, every: bool) -> list[Section]:
    """Return a section for each file, most often sent first; unless for `every` one, a line says how many more."""
    trees = sorted(report.trees, key=lambda tree: -(tree.copies + tree.links))
    shown = trees if every else trees[:_MOST_FILES]
    sections = [Section(title(tree, report.transfers), _html(tree, report.transfers, every)) for tree in shown]
    if len(shown) < len(trees):
        sections.append(Section(f"... and {len(trees) - len(shown):,} more files (--all shows them)", ""))
    return sections


def _html(tree: FileTree, found: Transfers, every: bool) -> Any:
    """Return nested lists: each transfer below the one that brought the file to its sender.

    It has a stack of its own, so that no tree is too deep.
    """
    from markupsafe import Markup, escape

    total = sum(1 for _ in tree.walk())
    most = total if every else _MOST
    out: list[str] = []
    stack: list[str | tuple[TreeNode, int]] = []
    for sender, roots in reversed(tree.by_sender(found)):
        top = f"<ul><li><span class=sender>{escape(sender)}</span>"
        stack += ["</li></ul>", *_below(roots, 1, found)[::-1], top]
    drawn = 0
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            out.append(part)
            continue
        node, depth = part
        drawn += 1
        if drawn > most:
            continue
        line = f"<span{' class=failed' if node.transfer.error else ''}>{escape(describe(node.transfer, found))}</span>"
        if node.children:
            folded = "" if total > _OPEN and depth >= 2 else " open"
            out.append(f"<li><details{folded}><summary>{line}</summary>")
            stack += ["</details></li>", *_below(node.children, depth + 1, found)[::-1]]
        else:
            out.append(f"<li>{line}</li>")
    if drawn > most:
        out.append(f"<p class=remark>These are the first {most:,} of {total:,} transfers; --all shows them all.</p>")
    return Markup("".join(out))


def _below(nodes: list[TreeNode], depth: int, found: Transfers) -> list[str | tuple[TreeNode, int]]:
    """Return the list of what is below one place, in parts: nodes, and HTML around them."""
    from markupsafe import escape

    linked: dict[str, list[str]] = {}
    parts: list[str | tuple[TreeNode, int]] = ["<ul>"]
    for node in nodes:
        transfer = node.transfer
        peer = found.peers.get(transfer.receiver)
        if transfer.kind == "linked" and not transfer.error and not node.children and peer is not None and peer.host:
            linked.setdefault(peer.host.partition(".")[0], []).append(transfer.receiver)
        else:
            parts.append((node, depth))
    for host, workers in linked.items():
        names = ", ".join(workers[:8]) + (f" and {len(workers) - 8} more" if len(workers) > 8 else "")
        count = "hard link" if len(workers) == 1 else f"{len(workers)} hard links"
        parts.append(f"<li class=link>{escape(f'{count} on {host}: {names}')}</li>")
    return [*parts, "</ul>"]


# --- pictures

NARROW = 3.9  # Inches: a phone.
_COLUMNS = {"workers_and_items": 2, "call_times": 2}  # Of a narrow picture's key; all others have one.
_MOST_VECTORS = 1500  # More transfers than this are pixels, or they would be a page of megabytes.
_LINE = 0.17  # Inches of a line of a key.
_DIGITS = re.compile(r"(\.\d\d)\d+")
_STYLE = {
    **STYLE, "svg.fonttype": "none", "text.color": DARK, "axes.labelcolor": DARK, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "font.family": "sans-serif",
}  # fmt: skip


def drawings(report: Report) -> dict[str, tuple[str, str]]:
    """Return the wide and the narrow form of each picture, by name, as `<svg>` elements.

    Their colours are CSS variables, named after what they are in print, such as `--c-0072b2`, with that as default.
    """
    from matplotlib import rc_context

    found = {}
    for name, picture in pictures(report.history, report.transfers, report.trees):
        with rc_context(_STYLE):
            many = name == "transfers" and len(report.transfers.transfers) + len(report.transfers.peers) > _MOST_VECTORS
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
