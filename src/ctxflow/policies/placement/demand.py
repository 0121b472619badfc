"""What a run asks of a plan: how much of each context, and how fast each tier's workers are at it, as measured.

What does not live here: what is made of it (`live`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ctxflow.policies.placement.workers import Speed
from ctxflow.policies.protocols import AppView, View

_LOOKS = 16  # In a period.


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A context with work.

    :ivar per_hour: items that should be answered in an hour.
    :ivar speeds: by tier, of those that can run it.
    :ivar max_delay: seconds, None where nobody minds.
    """

    context: str
    per_hour: float
    speeds: dict[str, Speed]
    load_seconds: float
    max_delay: float | None


class Demand:
    """Keeps what was measured, also of workers that are gone, and by when what is queued should be done.

    :param clear: seconds in which an item should be answered.
    :param period: from one plan to the next; what is overdue counts as due by then.
    """

    def __init__(self, clear: float, period: float) -> None:
        self._clear = clear
        self._period = period
        self._seconds: dict[tuple[str, str], float] = {}
        self._loads: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._known: dict[str, int] = {}  # What had been submitted when it was asked last, by app.
        self._came: dict[str, list[tuple[float, int]]] = {}

    def look(self, view: View) -> None:
        """Note what has been submitted; to be called often."""
        for app in view.apps.values():
            seen = self._came.setdefault(app.id, [])
            if not seen or view.now >= seen[-1][0] + self._period / _LOOKS:
                seen.append((view.now, app.arrived))
                del seen[: -2 * _LOOKS]

    def settled(self, view: View, seconds: float) -> bool:
        """Whether somebody has been working long enough that a first plan rests on something."""
        return any(worker.joined + seconds <= view.now for worker in view.workers.values())

    def measured(self, view: View) -> frozenset[str]:
        """Look at what workers have shown; gives the contexts of which a speed is known."""
        for app in view.apps.values():
            shown: dict[str, list[tuple[float, int]]] = {}
            for worker in view.workers.values():
                seconds, items = worker.seconds_per_item(app.id), worker.items_done(app.id)
                if seconds is not None and items:
                    shown.setdefault(worker.tier, []).append((seconds, items))
            for tier, each in shown.items():
                self._seconds[app.id, tier] = _mean(each)
        for context in {app.context for app in view.apps.values()}:
            loads = [s for worker in view.workers.values() if (s := worker.load_seconds(context)) is not None]
            if loads:
                self._loads[context] = sum(loads) / len(loads)
        return frozenset(view.apps[app].context for app, _ in self._seconds)

    def wanted(self, view: View) -> list[Wanted]:
        """The contexts with work, in the order of their apps; without those that no tier can run."""
        running = Counter(attempt.app for attempt in view.attempts.values() for _ in attempt.items)
        apps: dict[str, list[tuple[AppView, float]]] = {}
        for app in view.apps.values():
            rate = self._rate(app, app.backlog + running[app.id], view.now)
            if rate > 0:
                apps.setdefault(app.context, []).append((app, rate))
        pace = self._tier_paces(view)
        found = []
        for context, those in apps.items():
            tiers = [tier.name for tier in view.tiers.values() if all(view.able(app, tier) for app, _ in those)]
            delays = [app.max_delay for app, _ in those if app.max_delay is not None]
            total = sum(rate for _, rate in those)
            speeds = {}
            for tier in tiers:
                seconds = sum(rate * self._item(app.id, tier, pace) for app, rate in those) / total
                speeds[tier] = Speed(seconds if delays else 0.0, seconds)
            if speeds:
                load = self._loads.get(context, 0.0)
                found.append(Wanted(context, total, speeds, load, min(delays, default=None)))
        return found

    def _rate(self, app: AppView, left: int, now: float) -> float:
        """Items an hour: what waits until it is due, and what keeps coming. What is new is due later than the rest."""
        new = min(left, app.arrived - self._known.get(app.id, 0))
        self._known[app.id] = app.arrived
        if not left:
            self._due[app.id] = now
        else:
            self._due[app.id] = ((left - new) * self._due.get(app.id, now) + new * (now + self._clear)) / left
        return 3600 * (self._steady(app, now) + left / max(self._period, self._due[app.id] - now))

    def _steady(self, app: AppView, now: float) -> float:
        """Items a second that keep coming: the median over the quarters of the last period.

        So what was submitted all at once does not come again. 0 until an app has been known for a period.
        """
        times, counts = zip(*self._came.get(app.id, ()), (now, app.arrived), strict=True)
        if times[0] > now - self._period:
            return 0.0
        quarters = now - self._period * np.linspace(1, 0, 5)
        return float(np.median(np.diff(np.interp(quarters, times, counts)))) / (self._period / 4)

    def _tier_paces(self, view: View) -> dict[str, float]:
        """How many times longer than on all tiers an item takes on each, over the apps measured there."""
        own = {app: _average(s for (a, _), s in self._seconds.items() if a == app) for app, _ in self._seconds}
        ratios: dict[str, list[float]] = {}
        for (app, tier), seconds in self._seconds.items():
            ratios.setdefault(tier, []).append(seconds / own[app] if own[app] else 1.0)
        # A tier that nobody knows is taken to be as fast as the fastest, so that it is tried.
        best = min((_average(each) for each in ratios.values()), default=1.0)
        return {name: _average(ratios[name]) if name in ratios else best for name in view.tiers}

    def _item(self, app: str, tier: str, pace: dict[str, float]) -> float:
        """Seconds of an item: measured, or from other tiers or apps."""
        known = self._seconds.get((app, tier))
        if known is not None:
            return max(known, 1e-9)
        others = [seconds for (a, _), seconds in self._seconds.items() if a == app] or list(self._seconds.values())
        return max(_average(others) * pace[tier], 1e-9)


def _mean(shown: Sequence[tuple[float, int]]) -> float:
    return sum(seconds * items for seconds, items in shown) / sum(items for _, items in shown)


def _average(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
