"""The pictures of a report for a page: SVG that takes its colours from the page, in a wide and in a narrow form.

Needs matplotlib (the extra "report"). What does not live here: the pictures themselves (plots.py).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

from ctxflow.observe.plots import pictures
from ctxflow.observe.report import Report
from ctxflow.observe.style import DARK, STYLE, WIDTH

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
    """The wide and the narrow form of each picture, by name, as `<svg>` elements.

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
    """An SVG file as an element of a page, which decides its size, its letters and what its colours are.

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
