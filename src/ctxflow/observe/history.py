"""The history of a run: who was there, what was done when; and the measures that it is made of.

A `Histogram` of durations and a `Timeline` of counts take a fixed amount of memory, however long the run. A history is
read from an event log by history_reader.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxflow.observe.accounts import Accounts
from ctxflow.observe.causes import Causes

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
        """The mean, in seconds; 0 of none."""
        return self._sum / self.count if self.count else 0.0

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
        return {
            "count": self.count, "mean": self.mean, "deviation": self.deviation, "least": least, **percentiles,
            "most": self.most,
        }  # fmt: skip


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 10th, 50th and 90th percentile of some numbers, and the least and the most of them.

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
        points, total = [(0.0, 0)], 0
        for place in range(self._last + 1):
            total += self._counts[place]
            points.append(((place + 1) * self.width, total))
        return points


class SeenItems:
    """The item numbers that were seen before, a byte each.

    >>> seen = SeenItems()
    >>> seen.add(3, 6), seen.add(5, 8)
    (3, 2)
    """

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


@dataclasses.dataclass
class Items:
    """How many items ended how. `run_again`: how often one ran that had run before."""

    submitted: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    run_again: int = 0

    @property
    def open(self) -> int:
        """Items without an answer when the log ends."""
        return self.submitted - self.done - self.dead - self.cancelled


@dataclasses.dataclass
class TierHistory:
    """What one tier contributed. Times in seconds.

    :ivar lost: workers that went, for whatever reason.
    :ivar evicted: those of them that were taken back; their times from joining until then are in `lifetimes`.
    :ivar returned: those that ctxflow gave back.
    :ivar stays: how long those were there that were not evicted, the ones that were there to the end included.
    :ivar counts: (time, workers connected from then on).
    :ivar jobs_started: jobs that began to run; where it is known, they had waited as long as in `waits`.
    :ivar held: how often a job was held, by the reason.
    :ivar done: items, over time; `chunks` of sessions.
    """

    joined: int = 0
    lost: int = 0
    evicted: int = 0
    returned: int = 0
    items_done: int = 0
    lifetimes: list[float] = dataclasses.field(default_factory=list)
    stays: list[float] = dataclasses.field(default_factory=list)
    jobs_started: int = 0
    jobs_evicted: int = 0
    waits: Histogram = dataclasses.field(default_factory=Histogram)
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    worker_seconds: float = 0.0
    counts: list[tuple[float, int]] = dataclasses.field(default_factory=lambda: [(0.0, 0)])
    done: Timeline = dataclasses.field(default_factory=Timeline)
    chunks: Timeline = dataclasses.field(default_factory=Timeline)

    def connected(self, time: float, change: int) -> None:
        """Record that workers came or went."""
        since, before = self.counts[-1]
        self.worker_seconds += before * (time - since)
        self.counts.append((time, before + change))

    @property
    def unexplained(self) -> int:
        """Workers that were lost for no known reason."""
        return self.lost - self.evicted - self.returned

    @property
    def eviction_rate(self) -> float | None:
        """Evictions for each hour that a worker was connected; None if none ever was."""
        return 3600 * self.evicted / self.worker_seconds if self.worker_seconds else None

    def survival(self) -> list[tuple[float, float]]:
        """Return (age, share of workers evicted by that age) for each age at which one was: Kaplan and Meier's
        estimate.

        Workers that were not evicted count for as long as they were there; left out, as in a plain distribution of
        lifetimes, they would make a tier look the worse the longer it lets workers live.

        >>> TierHistory(lifetimes=[1.0, 2.0], stays=[1.5, 9.0]).survival()
        [(1.0, 0.25), (2.0, 0.625)]
        """
        ends = sorted([(age, 0) for age in self.lifetimes] + [(age, 1) for age in self.stays])
        points, left = [], 1.0
        for n, (age, stayed) in enumerate(ends):
            if not stayed:
                left *= 1 - 1 / (len(ends) - n)
                points.append((age, 1 - left))
        return points


@dataclasses.dataclass
class AppHistory:
    """The calls of one app: their durations, and those divided by their items. Failed calls are in neither.

    :ivar spec: how it was declared; that of a context likewise.
    """

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: int = 0
    items: int = 0
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    call_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    item_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class ContextLoads:
    """How often a context was built, how long that took, and how often it failed."""

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    staged: int = 0
    failed: int = 0
    load_seconds: Histogram = dataclasses.field(default_factory=Histogram)


@dataclasses.dataclass
class HostFigures:
    """What was done on a host, and what went wrong there.

    :ivar calls: that ended well; `failed`, those that did not; `contexts_failed`, contexts that could not be built.
    :ivar lost: workers that were lost, without those that were evicted or given back; `quarantines`, how often it, or a
        worker of it, got no work for a while.
    """

    joined: int = 0
    calls: int = 0
    failed: int = 0
    contexts_failed: int = 0
    lost: int = 0
    evicted: int = 0
    quarantines: int = 0


@dataclasses.dataclass
class History:
    """What happened in a run. Times in seconds on the run's clock.

    :ivar duration: the time of the last event.
    :ivar losses: (time, whether it was an eviction) of each worker that was lost and had not been given back.
    :ivar apps: by id, as are `contexts`; `tiers` by name.
    :ivar accounts: what the workers' time went into; `causes`: why calls, contexts and items failed.
    :ivar chunks: that sessions got.
    :ivar simulated: whether it was a run in virtual time, without workers.
    :ivar plans: (since when, the `Place` command) of each placement that held, in order.
    :ivar quarantines: (since when, the `Quarantine` command) of each bad host or worker, in order.
    """

    duration: float = 0.0
    events: int = 0
    items: Items = dataclasses.field(default_factory=Items)
    chunks: int = 0
    workers: TierHistory = dataclasses.field(default_factory=TierHistory)
    tiers: dict[str, TierHistory] = dataclasses.field(default_factory=dict)
    apps: dict[str, AppHistory] = dataclasses.field(default_factory=dict)
    contexts: dict[str, ContextLoads] = dataclasses.field(default_factory=dict)
    losses: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    notices: int = 0
    hosts: set[str] = dataclasses.field(default_factory=set)
    by_host: dict[str, HostFigures] = dataclasses.field(default_factory=dict)
    accounts: Accounts = dataclasses.field(default_factory=Accounts)
    causes: Causes = dataclasses.field(default_factory=Causes)
    plans: list[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=list)
    quarantines: list[tuple[float, dict[str, Any]]] = dataclasses.field(default_factory=list)
    simulated: bool = False

    @property
    def mean_workers(self) -> float:
        """Workers connected, averaged over the run."""
        return self.workers.worker_seconds / self.duration if self.duration else float(self.workers.counts[-1][1])

    @property
    def peak_workers(self) -> int:
        """The most workers connected at a time."""
        return max(count for _, count in self.workers.counts)
