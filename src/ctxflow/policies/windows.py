"""The window of calls in flight that keeps an engine busy and no more, found while it works (docs/batching.md).

What is measured. An item that was in flight for S seconds, and has L tokens, moved by L / S a second; what is in flight
now, or was lost with its worker, moves as items did that took at least as long. All of them together are the engine's
throughput. Whatever their lengths, an engine that divides its time evenly shows the same by each item, so that few
suffice. Only items count that began since the worker's window is full and what it is: on a new worker all.

What is decided. `CurveOdds` tells how likely each window is within the margin of the best. The present one stays as
long as that is likely of it. Else one that may well be better is tried, and a smaller one that may well be as good; but
each further change takes more to be made, so that noise does not let it wander. Where the throughput or the items'
length differs from what it was, at the present window or when it was the window before, all that was measured is
forgotten.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ctxflow.policies.protocols import View
from ctxflow.policies.throughput_curves import CALM, LEVELS, CurveOdds, EvictionRisk, Floats, InFlightCost
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
MOMENT = 1e-6  # Seconds by which a beginning may seem earlier than it was.
RISEN = 1.4  # Evictions are looked at again where they are so many times more often.
QUANTILES = 32  # So many lengths stand for all.
FEWEST = 16  # Items that are looked at together, at least,
FIRST = 2  # and so many windows of items at first,
GROWTH = 1.4  # and after so many times the items again,
MOST_ITEMS = 2000  # but after so many more at the latest.
KEPT = 16_384  # Items that are kept to be looked at.
KEPT_STRETCHES = 1024  # Stretches that are over of which it is kept what was in flight then.
KEPT_WINDOWS = 8  # Items of so many windows are kept to tell how their lengths vary.
GUESSED = 0.1  # The deviation of what is guessed of items in flight.
SYSTEMATIC = 0.01  # The deviation of what is measured at one window from one time to the next, beside chance.
CHANGED = (
    0.12  # By so much, and by so many standard errors, throughput or length differs where the workload is another.
)
ERRORS = 5.0


class _Item(NamedTuple):
    """An item that ended: its tokens, how long it was in flight, and how fast it moved."""

    tokens: float
    seconds: float
    speed: float


@dataclasses.dataclass(slots=True)
class _Stretch:
    """One worker's time with a full window, and the items that began in it.

    :ivar begun: when it began.
    :ivar old: how many are in flight that began before, and do not count.
    :ivar at: when its last item ended, and `flying`, how many were in flight then.
    :ivar time: of all that count, until then, and `ended`, of those that ended.
    """

    begun: float
    old: int
    at: float
    flying: int
    time: float = 0.0
    ended: float = 0.0

    @property
    def young(self) -> int:
        """How many are in flight that count."""
        return max(0, self.flying - self.old)

    def go_on(self, now: float, flying: int) -> None:
        """Note that an item ends, of so many."""
        self.flying = flying
        self.time += (now - self.at) * self.young
        self.at = now


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """What a number of items show: tokens a second of one in flight, its relative standard error, and their lengths."""

    speed: float
    error: float
    tokens: float
    tokens_error: float


def _of_items(items: Floats) -> _Measured:
    """Return what items show, each a row as in `_Item`."""
    tokens, spans, speeds = items.T
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
    :param most: the largest window; a context may bear less.

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
        # How long items were in flight where that was measured last, at a level; how often workers were evicted then.
        self._taken: tuple[int, Floats] = self._level, np.ones(1)
        self._risk = 0.0
        self._works: collections.deque[Floats] = collections.deque(maxlen=KEPT_WINDOWS)  # Tokens of items, or as many.
        self._begin(-math.inf)

    @property
    def throughput(self) -> float | None:
        """Tokens a second of a worker at the present window, None before that was measured."""
        return self._throughput

    def _begin(self, now: float, lowered: bool = False) -> None:
        """Begin to measure the present window.

        :param lowered: there is more in flight than it, until enough has ended.
        """
        self._begun, self._lowered = now, lowered
        self._items: collections.deque[_Item] = collections.deque(maxlen=KEPT)
        self._counted = self._gone = self._old = self._strange = 0
        self._stretches: dict[str, _Stretch] = {}
        # Of stretches that are over: items in flight, and their time.
        self._lost: collections.deque[tuple[int, float]] = collections.deque(maxlen=KEPT_STRETCHES)
        self._next_look = FEWEST
        self._throughput: float | None = None

    def finished(
        self,
        view: View,
        app: AppView,
        worker: WorkerView,
        seconds: float,
        tokens: int | None,
        evictions: EvictionRisk = CALM,
    ) -> None:
        """Take into account an item that ended.

        :param evictions: of such workers.
        """
        flying = worker.in_flight(app.context) + 1  # With the one that has just ended.
        stretch = self._stretches.get(worker.id)
        if stretch is not None:
            stretch.go_on(view.now, flying)
        if worker.noticed is not None or worker.draining or not app.backlog:
            self._end_stretch(worker.id)
            return
        if not FULL * self.window <= flying <= self.window / FULL + 2:
            self._end_stretch(worker.id)
            return
        if stretch is None:
            self._end_lost(view)
            stretch = self._stretches[worker.id] = self._stretch(view, app, worker, seconds)
        if view.now - seconds < stretch.begun - MOMENT:
            stretch.old = max(0, stretch.old - 1)
            return
        seconds = max(seconds, 1e-9)
        stretch.ended += seconds
        tokens = 1 if tokens is None else max(1, tokens)
        self.measured += 1
        self._counted += 1
        self._items.append(_Item(float(tokens), seconds, tokens / seconds))
        if self._counted + self._gone >= self._next_look:
            self._look(view, app, evictions)
        elif self._dearer(evictions):
            self._move(min(self._level, self._best(self._seen, evictions)), view.now)

    def _stretch(self, view: View, app: AppView, worker: WorkerView, seconds: float) -> _Stretch:
        """Return the stretch that a worker is in, which may have begun when it was given its first items.

        :param seconds: of an item that has just ended.
        """
        begins = sorted([view.now - seconds, *(a.started for a in worker.running.values() if a.app == app.id)])
        full = min(len(begins), math.ceil(FULL * self.window)) - 1
        over = self._lowered and begins[0] < self._begun
        begun = view.now if over else max(begins[full], self._begun)
        young = [view.now - each for each in begins if each >= begun - MOMENT]
        return _Stretch(begun, len(begins) - len(young), view.now, len(begins), sum(young))

    def _end_stretch(self, name: str) -> None:
        """Keep what was in flight at the end of a stretch: it had been so for so long."""
        stretch = self._stretches.pop(name, None)
        if stretch is not None and stretch.young and stretch.time > stretch.ended:
            self._lost.append((stretch.young, stretch.time - stretch.ended))

    def _end_lost(self, view: View) -> None:
        """End the stretches of workers that are gone: what they had in flight took longer than that."""
        for name in [name for name in self._stretches if name not in view.workers]:
            self._gone += self._stretches[name].young
            self._end_stretch(name)

    def _rate(self, view: View, app: AppView, items: Floats, mean: float) -> tuple[float, float]:
        """Return tokens a second of a worker, and the share that was guessed.

        What is in flight counts as what ended and took at least as long.
        """
        order = items[np.argsort(items[:, 1])]
        # Of items that took at least as long as each: the mean speed.
        longer = np.cumsum(order[::-1, 0])[::-1] / np.cumsum(order[::-1, 1])[::-1]
        last = len(order) - 1 - len(order) // 10
        ages, counts = [items[:, 1][:0]], [items[:, 1][:0]]
        for name, stretch in self._stretches.items():
            worker = view.workers[name]
            began = (a.started for a in worker.running.values() if a.app == app.id)
            found = np.array([view.now - each for each in began if each >= stretch.begun - MOMENT])
            ages.append(found)
            counts.append(np.ones(len(found)))
        if self._lost:
            gone = np.array(self._lost)
            ages.append(gone[:, 1] / gone[:, 0])
            counts.append(gone[:, 0])
        age, count = np.concatenate(ages), np.concatenate(counts)
        # Of lengths that nobody counted, only the ends tell.
        speeds = longer[np.minimum(np.searchsorted(order[:, 1], age), last)] * (items[:, 0].max() > 1)
        time = float(items[:, 1].sum())
        guessed = float(age @ count)
        return self.window * float(mean * time + speeds @ (age * count)) / (time + guessed), guessed / (time + guessed)

    def _look(self, view: View, app: AppView, evictions: EvictionRisk) -> None:
        """Look at what was measured, and decide."""
        self._end_lost(view)
        first = max(FEWEST, FIRST * self.window * max(1, len(self._stretches)))
        count = self._counted + self._gone
        if count < first or self._counted < FEWEST:
            self._next_look = max(math.ceil(first), count + FEWEST - self._counted)
            return
        self._next_look = count + max(FEWEST, min(math.ceil((GROWTH - 1) * count), MOST_ITEMS))
        items = np.array(self._items)
        found = _of_items(items)
        if self._changed(items):
            self._forget()
            self._begin(view.now)
            return
        self._throughput, guessed = self._rate(view, app, items, found.speed)
        error = found.error**2 + SYSTEMATIC**2 + (GUESSED * guessed) ** 2
        here = math.log(max(self._throughput, 1e-300)), error
        level, work = self._level, items[:, 1] * (self._throughput / self.window)
        if level in self._seen:
            before, variance = _weighted(self._seen[level])
            if abs(here[0] - before) > max(CHANGED, ERRORS * math.sqrt(error + variance)):
                self._forget()
        parts = np.array_split(np.sort(np.concatenate([*self._works, work])), min(QUANTILES, len(work)))
        self._taken = self._level, np.array([part.mean() for part in parts]) * (self.window / self._throughput)
        seen = {**self._seen, level: [*self._seen.get(level, ()), here]}
        # A larger window than what is left would fill shows nothing.
        enough = app.backlog / max(1, len(self._stretches))
        most = max(level, sum(each <= enough for each in LEVELS) - 1)
        self._move(min(most, self._best(seen, evictions)), view.now)
        if self._level != level:
            self._seen = seen
            self._works.append(work[-MOST_ITEMS:])

    def _forget(self) -> None:
        """Forget what was measured of a workload that is another by now."""
        self._seen.clear()
        self._works.clear()

    def _best(self, seen: Mapping[int, list[tuple[float, float]]], evictions: EvictionRisk) -> int:
        """Return the level that is best by what was seen, or the present one."""
        self._risk = evictions.rate
        odds = CurveOdds({level: _weighted(times) for level, times in seen.items()}, self._levels)
        return self._target(odds, InFlightCost(*self._taken, evictions))

    def _dearer(self, evictions: EvictionRisk) -> bool:
        """Return whether nothing is known of the present window, but evictions are more than when it was chosen."""
        return bool(self._seen) and self._throughput is None and evictions.rate > RISEN * self._risk

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
        enough = max(4 * self.window * len(self._stretches), 200)
        if self._counted >= max(2 * KEPT, enough):  # All that is kept came later; of more, nothing else would be left.
            enough = min(enough, KEPT // 4)
        if new < enough:
            return False
        self._old = self._counted
        now, before = _of_items(items[-new:]), _of_items(items[:-new])
        apart = abs(math.log(now.speed / before.speed))
        longer = abs(math.log(now.tokens / before.tokens))
        chance = math.hypot(now.tokens_error / now.tokens, before.tokens_error / before.tokens)
        differs = apart > max(CHANGED, ERRORS * math.hypot(now.error, before.error))
        self._strange = self._strange + 1 if differs or longer > max(CHANGED, ERRORS * chance) else 0
        return self._strange >= 2

    def _move(self, level: int, now: float) -> None:
        if level != self._level:
            self.changes += 1
            lowered = level < self._level
            self._level, self.window = level, LEVELS[level]
            self._begin(now, lowered)


def _weighted(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of measurements, weighted by their variances, and its variance."""
    weight = sum(1 / variance for _, variance in times)
    return sum(value / variance for value, variance in times) / weight, 1 / weight
