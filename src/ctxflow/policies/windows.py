"""The window of calls in flight that keeps an engine busy and no more, found while it works (docs/batching.md).

What is measured. An item that was in flight for S seconds, and has L tokens, moved by L / S a second; what is in flight
now moves as items did that took at least as long. All of them together, weighted by their seconds while the window was
full, are the engine's throughput. Whatever their lengths, an engine that divides its time evenly shows the same by each
item, so that few suffice. What was in flight when the window changed, or when the queue had run dry, does not count
until nearly all of it has ended: what ends first then is short, and what is left is long.

What is decided. `CurveOdds` tells how likely each window is within the margin of the best. The present one stays as
long as that is likely of it. Else one that may well be better is tried, and a smaller one that may well be as good; but
each further change takes more to be made, so that noise does not let it wander. Where the throughput or the items'
length differs from what it was, all that was measured is forgotten.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from ctxflow.policies.protocols import View
from ctxflow.policies.throughput_curves import LEVELS, CurveOdds, Floats, InFlightCost
from ctxflow.policies.views import AppView, WorkerView

MARGIN = 0.02  # Of the best throughput: what is aimed at, so that what is found is within 3 % of it.
LIKELY = 0.75  # How likely the window is good where it stays, and how likely another is better that was tried before.
HOPED = 0.15  # How likely one must be better that was not tried yet, to be tried;
AGAIN = 0.35  # to be tried again where it was measured with an error of more than the next number;
UNSURE = 0.04
BETTER = 0.03  # better by this share.
TRIED = 0.35  # How likely a window is good that is smaller than all before, to be tried.
DOUBT = 0.03  # By so much likelier each, for every change after the first `CHANGES`.
CHANGES = 6
STEP = 4  # Levels beyond those that were tried: to four times the window.
FULL = 0.9  # A window counts as full from this share of it on.
OLD = 0.1  # The share of a window that may be in flight since before it was full, when it begins to count.
PATIENCE = 3.0  # Evictions of a worker that are expected before a window must have been looked at.
FEWEST = 16  # Items that are looked at together, at least,
FIRST = 2  # and so many windows of items at first,
GROWTH = 1.4  # and after so many times the items again,
MOST_ITEMS = 2000  # but after so many more at the latest.
KEPT = 16_384  # Items that are kept to be looked at.
SYSTEMATIC = 0.01  # The deviation of what is measured at one window from one time to the next, beside chance.
CHANGED = (
    0.12  # By so much, and by so many standard errors, throughput or length differs where the workload is another.
)
ERRORS = 5.0
VARIED = 8.0  # The most that the variance of items' seconds counts, in squares of their mean.


class _Item(NamedTuple):
    """An item that ended: its tokens, how long it was in flight, how fast it moved, and how long that counts."""

    tokens: float
    seconds: float
    speed: float
    span: float


@dataclasses.dataclass(slots=True)
class _Stretch:
    """One worker's time with a full window.

    :ivar begun: when it began; `left`: how many items are to end before it counts; `since`: since when it does.
    :ivar span: of the items that ended since.
    """

    begun: float
    moved: bool  # It began since the window changed: what was in flight then moved as it did before.
    left: int
    since: float = math.inf
    span: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """What a number of items show: tokens a second of one in flight, its relative standard error, and their lengths."""

    speed: float
    error: float
    tokens: float
    tokens_error: float


def _of_items(items: Floats) -> _Measured:
    """Return what items show, each a row as in `_Item`."""
    tokens, _, speeds, spans = items.T
    count, total = len(items), spans.sum()
    speed = float(speeds @ spans / total)
    left = (speeds / speed - 1) * spans
    chance = math.sqrt(count / (count - 1))
    return _Measured(
        speed,
        chance * float(np.sqrt(left @ left) / total),
        float(tokens.mean()),
        float(tokens.std()) / math.sqrt(count),
    )


class WindowLearner:
    """Finds the window of workers of one kind for one app.

    :param first: the window before anything is measured.
    :param most: the largest window.

    :ivar window: what it is now.
    :ivar changes: how often it changed.
    :ivar measured: how many items were measured so far.
    """

    def __init__(self, first: int = 64, most: int = LEVELS[-1]) -> None:
        self._levels = sum(level <= most for level in LEVELS)
        self._level = max(number for number in range(self._levels) if LEVELS[number] <= first)
        self.window = LEVELS[self._level]
        self.changes = self.measured = 0
        # Level -> for each time that it was the window, the logarithm of the throughput and its variance.
        self._seen: dict[int, list[tuple[float, float]]] = {}
        self._speed: float | None = None  # Of one item in flight, before the window changed.
        self._begin()

    @property
    def throughput(self) -> float | None:
        """Tokens a second of a worker at the present window, None before that was measured."""
        return self._throughput

    def _begin(self) -> None:
        """Begin to measure the present window."""
        self._begun: float | None = None
        self._items: collections.deque[_Item] = collections.deque(maxlen=KEPT)
        self._counted = self._old = self._strange = 0
        self._stretches: dict[str, _Stretch] = {}
        self._bound = self._below = 0
        self._next_look = FEWEST
        self._throughput: float | None = None
        self._age = 0.0  # Mean seconds that what is in flight has been so.

    def finished(
        self, view: View, app: AppView, worker: WorkerView, seconds: float, tokens: int | None, rate: float
    ) -> None:
        """Take into account an item that ended.

        :param rate: evictions of such a worker a second.
        """
        flying = worker.in_flight(app.context) + 1  # With the one that has just ended.
        if self._begun is None:
            self._begun = view.now
        stretch = self._stretches.get(worker.id)
        if not app.backlog or not FULL * self.window <= flying <= self.window / FULL + 2:
            self._stretches.pop(worker.id, None)
            if app.backlog and flying < FULL * self.window:
                self._look_for_a_bound(flying)
            return
        if stretch is None:
            if self._throughput is None and rate * (view.now - self._begun) > PATIENCE and self._level:
                # Workers do not live long enough to show anything: no larger window will do.
                self._levels = self._level
                self._move(max(0, self._level - STEP // 2))
                return
            moved = self._speed is not None and view.now - self._begun < 4 * seconds
            stretch = self._stretches[worker.id] = _Stretch(view.now, moved, self.window)
        if stretch.left:
            stretch.left -= 1
            if not stretch.left:
                # The longest of those that were there when it began are still in flight, and no fair sample.
                old = sum(a.started <= stretch.begun and a.app == app.id for a in worker.running.values())
                stretch.left = old // 2 if old > OLD * self.window else 0
                stretch.since = view.now
            return
        item = self._item(view.now, stretch, max(seconds, 1e-9), 1.0 if tokens is None else float(max(1, tokens)))
        if item is None:
            return
        stretch.span += item.span
        self.measured += 1
        self._counted += 1
        self._items.append(item)
        if self._counted >= self._next_look:
            self._look(view, app, rate)

    def _item(self, now: float, stretch: _Stretch, seconds: float, tokens: float) -> _Item | None:
        """Return how an item moved while the window was full; None if nobody can tell."""
        span, here = min(seconds, now - stretch.since), now - stretch.begun
        if seconds <= here:
            return _Item(tokens, seconds, tokens / seconds, span)
        if not stretch.moved or self._speed is None or here <= 0:
            return None
        # It moved at another speed before the window changed.
        return _Item(tokens, seconds, max(0.0, tokens - self._speed * (seconds - here)) / here, span)

    def _look_for_a_bound(self, flying: int) -> None:
        """Notice that there is never more in flight than some number: the context bears no more."""
        self._below = self._below + 1 if flying <= self._bound else 0
        self._bound = max(self._bound, flying)
        if self._below >= 3 * self.window + FEWEST:
            self._levels = max(1, sum(level <= self._bound for level in LEVELS))
            self._move(self._levels - 1)

    def _rate(self, view: View, app: AppView, items: Floats, mean: float) -> float:
        """Return tokens a second of a worker: what ended, and what is in flight as what took at least as long."""
        order = items[np.argsort(items[:, 1])]
        # Of items that took at least as long as each: the mean speed.
        longer = np.cumsum((order[:, 2] * order[:, 3])[::-1])[::-1] / np.cumsum(order[:, 3][::-1])[::-1]
        last = len(order) - 1 - len(order) // 10
        work, span = mean * items[:, 3].sum(), items[:, 3].sum()
        busy = total = 0.0
        old = [0.0]
        for name, stretch in self._stretches.items():
            time = view.now - stretch.since
            worker = view.workers.get(name)
            ages = () if worker is None else [view.now - a.started for a in worker.running.values() if a.app == app.id]
            if time <= 0 or not ages:
                continue
            found = np.array(ages)
            old.append(float(found.mean()))
            parts = np.minimum(found, time)
            speeds = longer[np.minimum(np.searchsorted(order[:, 1], found), last)]
            work += float(speeds @ parts)
            span += float(parts.sum())
            busy += stretch.span + float(parts.sum())
            total += time * self.window
        self._age = sum(old) / max(1, len(old) - 1) if self.window >= FEWEST else 0.0
        return float(self.window * work / span * (min(1.0, busy / total) if total else 1.0))

    def _look(self, view: View, app: AppView, rate: float) -> None:
        """Look at what was measured, and decide."""
        for name in [name for name in self._stretches if name not in view.workers]:
            del self._stretches[name]
        first = max(FEWEST, FIRST * self.window * max(1, len(self._stretches)))
        if self._counted < first:
            self._next_look = first
            return
        self._next_look = self._counted + max(
            FEWEST, min(math.ceil(GROWTH * self._counted) - self._counted, MOST_ITEMS)
        )
        items = np.array(self._items)
        found = _of_items(items)
        if self._changed(items):
            self._seen.clear()
            self._speed = None
            self._begin()
            return
        self._throughput = self._rate(view, app, items, found.speed)
        here = math.log(max(self._throughput, 1e-300)), found.error**2 + SYSTEMATIC**2
        seen = {level: _weighted(times) for level, times in self._seen.items()}
        seen[self._level] = _weighted([*self._seen.get(self._level, ()), here])
        mean = float(items[:, 1].mean())
        varied = min(VARIED, float(items[:, 1].var()) / mean**2)
        # Half of an item's time and more, since long ones are in flight for longer; or what is lost if it is now.
        age = max(mean * (1 + varied) / 2, self._age)
        target = self._target(CurveOdds(seen, self._levels), InFlightCost(self._level, age, rate))
        if target != self._level:
            self._seen.setdefault(self._level, []).append(here)
            self._speed = self._throughput / self.window
            self._move(target)

    def _target(self, odds: CurveOdds, load: InFlightCost) -> int:
        """Return the level to go to, or the present one."""
        good, better, expected = odds.good(MARGIN, load), odds.better(self._level, BETTER, load), odds.expected(load)
        here = self._level
        tried = {here, *self._seen}
        known = {level for level, times in self._seen.items() if _weighted(times)[1] < UNSURE**2}
        doubt = min(0.2, DOUBT * max(0, self.changes - CHANGES))  # It has moved enough.
        near = range(max(0, min(tried) - STEP), min(self._levels, max(tried) + STEP + 1))
        if good[here] >= LIKELY - doubt:
            least = min(tried)
            smaller = [n for n in near[: near.index(here)] if good[n] >= (TRIED if n < least else LIKELY) + doubt]
            return smaller[0] if smaller else here
        open_to = [
            n
            for n in near
            if expected[n] > expected[here]
            and better[n] >= (LIKELY if n in known else AGAIN if n in tried else HOPED) + doubt
        ]
        return max(open_to, key=lambda n: expected[n], default=here)

    def _changed(self, items: Floats) -> bool:
        """Return whether the last items differ from those before in throughput or length, twice in a row."""
        new = min(self._counted - self._old, len(items) // 2)
        # Soon after the window changed short items end first, and those that come look longer.
        if new < max(4 * self.window * len(self._stretches), 200):
            return False
        self._old = self._counted
        now, before = _of_items(items[-new:]), _of_items(items[:-new])
        apart = abs(math.log(now.speed / before.speed))
        longer = abs(math.log(now.tokens / before.tokens))
        chance = math.hypot(now.tokens_error / now.tokens, before.tokens_error / before.tokens)
        differs = apart > max(CHANGED, ERRORS * math.hypot(now.error, before.error))
        self._strange = self._strange + 1 if differs or longer > max(CHANGED, ERRORS * chance) else 0
        return self._strange >= 2

    def _move(self, level: int) -> None:
        self.changes += level != self._level
        self._level, self.window = level, LEVELS[level]
        self._begin()


def _weighted(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of measurements, weighted by their variances, and its variance."""
    weight = sum(1 / variance for _, variance in times)
    return sum(value / variance for value, variance in times) / weight, 1 / weight
