"""Measures, most in fixed memory: a histogram of durations, counts over time, which items were seen before.

What does not live here: what is measured (history.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_PER_DECADE = 400
_LOWEST, _DECADES = -6, 13  # From a microsecond to four months.


class Histogram:
    """Durations in seconds, counted in bins of equal ratio: percentiles are within 0.6 %, the rest is exact.

    >>> times = Histogram()
    >>> for n in range(1, 1001):
    ...     times.add(n / 100)
    >>> times.count, round(times.mean, 3), times.least, times.most
    (1000, 5.005, 0.01, 10.0)
    >>> round(times.percentile(50), 1), round(times.percentile(100), 1)
    (5.0, 10.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.least = math.inf
        self.most = 0.0
        self._sum = 0.0
        self._squares = 0.0
        self._counts = [0] * (_PER_DECADE * _DECADES)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.count += 1
        self._sum += seconds
        self._squares += seconds * seconds
        self.least = min(self.least, seconds)
        self.most = max(self.most, seconds)
        place = int((math.log10(seconds) - _LOWEST) * _PER_DECADE) if seconds > 10.0**_LOWEST else 0
        self._counts[min(place, len(self._counts) - 1)] += 1

    @property
    def mean(self) -> float:
        """In seconds; 0 of none."""
        return self._sum / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation, in seconds."""
        return math.sqrt(max(0.0, self._squares / self.count - self.mean**2)) if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The duration that this share of all are not longer than, in seconds; 0 of none."""
        wanted = percent / 100 * self.count
        below = 0
        for place, count in enumerate(self._counts):
            if count and below + count >= wanted:
                exponent: float = _LOWEST + (place + (wanted - below) / count) / _PER_DECADE
                return min(max(math.pow(10.0, exponent), self.least), self.most)
            below += count
        return self.most

    def rebinned(self, edges: Sequence[float]) -> list[float]:
        """How many lie between each two edges, in seconds; a bin across an edge is shared out."""
        places = np.linspace(_LOWEST, _LOWEST + _DECADES, _PER_DECADE * _DECADES + 1)
        below = np.concatenate([[0], np.cumsum(self._counts)])
        cumulated = np.interp(np.asarray(edges, dtype=float), 10.0**places, below)
        return [float(count) for count in np.diff(cumulated)]

    def summary(self) -> dict[str, float]:
        """Count, mean, deviation, least, percentiles and most, in seconds."""
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 95, 99)}
        least = self.least if self.count else 0.0
        return {
            "count": self.count, "mean": self.mean, "deviation": self.deviation, "least": least, **percentiles,
            "most": self.most,
        }  # fmt: skip


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 10th, 50th and 90th percentile of some numbers, and the least and the most of them.

    >>> percentiles([3.0, 1.0, 2.0])
    {'least': 1.0, 'p10': 1.2, 'p50': 2.0, 'p90': 2.8, 'most': 3.0}
    """
    points = np.percentile(values, (0, 10, 50, 90, 100))
    return dict(zip(("least", "p10", "p50", "p90", "most"), map(float, points), strict=True))


class Timeline:
    """Counts over time in at most `bins` bins, whose width doubles as time goes on.

    >>> done = Timeline(bins=4, width=1.0)
    >>> for second in range(10):
    ...     done.add(second, 2)
    >>> done.width, done.cumulated()
    (4.0, [(0.0, 0), (4.0, 8), (8.0, 16), (12.0, 20)])
    """

    def __init__(self, bins: int = 1024, width: float = 0.02) -> None:
        if bins < 2 or bins % 2:
            raise ValueError("a timeline needs an even number of bins, 2 or more")
        self.width = width
        self._counts = [0] * bins
        self._last = -1

    def add(self, time: float, count: int) -> None:
        """Count something at a time, in seconds from 0."""
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
        """(time in seconds, how many until then) at each bin's end, as far as there were any."""
        points, total = [(0.0, 0)], 0
        for place in range(self._last + 1):
            total += self._counts[place]
            points.append(((place + 1) * self.width, total))
        return points


class Seen:
    """Which item numbers were there before, a byte each.

    >>> seen = Seen()
    >>> seen.add(3, 6), seen.add(5, 8)
    (3, 2)
    """

    def __init__(self) -> None:
        self._marks = bytearray()

    def add(self, first: int, end: int) -> int:
        """Mark the items from `first` up to, not including, `end`; gives how many of them are new."""
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
