"""Measure a run in fixed memory (durations, counts over time), and format figures, tables and pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np


def seconds(value: float) -> str:
    """Return a duration with three digits that count.

    >>> seconds(0.01234), seconds(12), seconds(1234.5)
    ('12.3 ms', '12.0 s', '1,234 s')
    """
    return f"{figure(value * 1e3)} ms" if value < 0.9995 else f"{figure(value)} s"


def figure(value: float | None) -> str:
    """Return a number with three digits that count.

    >>> figure(0.01234), figure(9.999), figure(57), figure(12345.6), figure(None)
    ('0.0123', '10.0', '57.0', '12,346', '-')
    """
    return "-" if value is None else f"{value:,.{decimals(value)}f}" if value else "0"


def decimals(value: float) -> int:
    """Return how many decimals give a number three digits that count."""
    if not value or not math.isfinite(value):
        return 0
    exponent = math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return max(0, 2 - exponent)


def even(values: Sequence[float | None]) -> list[str]:
    """Return numbers that stand in one column, with as many decimals each: the largest has three digits that count.

    >>> even([50.9, 0.0188, None, 57.0])
    ['50.9', '0.0', '-', '57.0']
    """
    places = min((decimals(value) for value in values if value), default=0)
    return ["-" if value is None else f"{value:,.{places}f}" for value in values]


def gpus_text(model: str | None, gpus: int) -> str:
    """Return a kind of worker in words.

    >>> gpus_text("NVIDIA A10", 1), gpus_text("NVIDIA A100", 4), gpus_text(None, 1), gpus_text(None, 0)
    ('NVIDIA A10', '4 x NVIDIA A100', 'GPU', 'no GPU')
    """
    if not gpus:
        return model or "no GPU"
    return (f"{gpus} x " if gpus > 1 else "") + (model or "GPU")


def span_unit(unit: str, hours: float) -> tuple[float, str]:
    """Return what hours are shown in, so that a short run has digits: how many an hour has, and the name."""
    of = unit.removesuffix("hours")
    if hours >= 1:
        return 1.0, unit
    return (60.0, f"{of}minutes") if hours >= 1 / 60 else (3600.0, f"{of}seconds")


def unit_of(longest: float) -> tuple[float, str]:
    """Return seconds in the unit that fits an axis, and its name.

    >>> unit_of(90), unit_of(7200), unit_of(90000)
    ((1.0, 's'), (60.0, 'min'), (3600.0, 'h'))
    """
    for length, name in ((3600.0, "h"), (60.0, "min")):
        if longest > 5 * length:
            return length, name
    return 1.0, "s"


def percent(share: float) -> str:
    """Return a share of all, with a digit where it is small.

    >>> percent(0.873), percent(0.0123), percent(0.0)
    ('87 %', '1.2 %', '0 %')
    """
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or not share else f"{100 * share:.1f} %"


def shortened(name: str) -> str:
    """Return a name that fits a picture.

    >>> shortened("model.safetensors"), shortened("model-00001-of-00004.safetensors")
    ('model.safetensors', 'model-00001-of-00004.saf...')
    """
    return name if len(name) <= 28 else f"{name[:24]}..."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return columns of text: the first to the left, the others to the right; a row that is shorter is a remark.

    :param words: how many columns are to the left.

    >>> print(table(["Calls", "count"], [["verify", "12"], ["a remark"]]))
    Calls   count
    verify     12
    a remark
    """
    full = [row for row in [heads, *rows] if len(row) == len(heads)]
    widths = [max(len(row[n]) for row in full) for n in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            cell.ljust(width) if n < words else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


_PER_DECADE = 400


_LOWEST, _DECADES = -6, 13  # From a microsecond to four months.


class Histogram:
    """Durations in seconds, counted in bins of equal ratio: percentiles are within 0.6 %, the rest is exact.

    :ivar count: how many; `total`, their sum; `least` and `most` of them, in seconds.
    """

    def __init__(self) -> None:
        self.count, self.least, self.most = 0, math.inf, 0.0
        self.total = self._squares = 0.0
        self._counts = [0] * (_PER_DECADE * _DECADES)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.count += 1
        self.total += seconds
        self._squares += seconds * seconds
        self.least = min(self.least, seconds)
        self.most = max(self.most, seconds)
        place = int((math.log10(seconds) - _LOWEST) * _PER_DECADE) if seconds > 10.0**_LOWEST else 0
        self._counts[min(place, len(self._counts) - 1)] += 1

    @property
    def mean(self) -> float:
        """The mean, in seconds; 0 of none."""
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation, in seconds."""
        return math.sqrt(max(0.0, self._squares / self.count - self.mean**2)) if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return the duration that this share of all are not longer than, in seconds; 0 of none."""
        wanted = percent / 100 * self.count
        below = 0
        for place, count in enumerate(self._counts):
            if count and below + count >= wanted:
                exponent: float = _LOWEST + (place + (wanted - below) / count) / _PER_DECADE
                return min(max(math.pow(10.0, exponent), self.least), self.most)
            below += count
        return self.most

    def rebinned(self, edges: Sequence[float]) -> list[float]:
        """Return how many lie between each two edges, in seconds; a bin across an edge is shared out."""
        places = np.linspace(_LOWEST, _LOWEST + _DECADES, _PER_DECADE * _DECADES + 1)
        below = np.concatenate([[0], np.cumsum(self._counts)])
        cumulated = np.interp(np.asarray(edges, dtype=float), 10.0**places, below)
        return [float(count) for count in np.diff(cumulated)]

    def summary(self) -> dict[str, float]:
        """Return count, mean, deviation, least, percentiles and most, in seconds."""
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 95, 99)}
        least = self.least if self.count else 0.0
        figures = {"count": self.count, "mean": self.mean, "deviation": self.deviation, "least": least}
        return {**figures, **percentiles, "most": self.most}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 10th, 50th and 90th percentile of some numbers, and the least and the most of them.

    >>> percentiles([3.0, 1.0, 2.0])
    {'least': 1.0, 'p10': 1.2, 'p50': 2.0, 'p90': 2.8, 'most': 3.0}
    """
    points = np.percentile(values, (0, 10, 50, 90, 100))
    return dict(zip(("least", "p10", "p50", "p90", "most"), map(float, points), strict=True))


class Timeline:
    """Counts over time in at most `bins` bins, whose width doubles as time goes on."""

    def __init__(self, bins: int = 1024, width: float = 0.02) -> None:
        if bins < 2 or bins % 2:
            raise ValueError("a timeline needs an even number of bins, 2 or more")
        self.width = width
        self._counts = [0] * bins
        self._last = -1

    def add(self, time: float, count: int) -> None:
        """Add a count at a time, in seconds from 0."""
        place = int(max(time, 0.0) / self.width)
        while place >= len(self._counts):
            pairs = zip(self._counts[::2], self._counts[1::2], strict=True)
            self._counts = [a + b for a, b in pairs] + [0] * (len(self._counts) // 2)
            self.width *= 2
            self._last //= 2
            place = int(time / self.width)
        self._counts[place] += count
        self._last = max(self._last, place)

    def cumulated(self) -> list[tuple[float, int]]:
        """Return (time in seconds, how many until then) at each bin's end, as far as there were any."""
        totals = itertools.accumulate(self._counts[: self._last + 1])
        return [(0.0, 0), *((place * self.width, total) for place, total in enumerate(totals, 1))]


class SeenItems:
    """The item numbers that were seen before, a byte each."""

    def __init__(self) -> None:
        self._marks = bytearray()

    def add(self, first: int, end: int) -> int:
        """Mark the items from `first` up to, not including, `end`, and return how many of them are new."""
        marks = self._marks
        if end > len(marks):
            marks.extend(bytes(max(end - len(marks), len(marks))))
        if end - first == 1:
            new = 1 - marks[first]
            marks[first] = 1
            return new
        new = marks.count(0, first, end)
        marks[first:end] = b"\1" * (end - first)
        return new


# Okabe and Ito's colours, which people of every colour vision can distinguish, without yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, PALE, DARK = "#7A7A7A", "#E4E4E4", "#222222"
WIDTH = 7.0  # Inches: a page's text.
STYLE = {
    "font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "",
    "text.parse_math": False, "axes.edgecolor": GREY, "xtick.color": DARK, "ytick.color": DARK, "axes.axisbelow": True,
}  # fmt: skip
