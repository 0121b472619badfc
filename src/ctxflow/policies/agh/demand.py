"""What a run asks of a plan: how much of each context, and how fast each tier's workers are at it, as measured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ctxflow.policies.helpers import SESSIONS, active, forget
from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView

_LOOKS = 16  # In a period.
UNTRIED = 0.1
"""Seconds of an item with an alternative that nobody tried, in those of the app's own: tried if that may be of use."""


@dataclasses.dataclass(frozen=True)
class ContextOption:
    """A context that may answer an app's items.

    :ivar seconds: of an item, by tier, of those that can run it; there is one at least.
    :ivar error: the share of its answers that are wrong.
    """

    context: str
    seconds: dict[str, float]
    load_seconds: float
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The items of one app that should be answered; of sessions that have something to do, an item each second.

    :ivar per_hour: how many in an hour.
    :ivar candidates: the contexts that may do it, the app's own first; there is one at least.
    :ivar max_delay: seconds, None where nobody minds; `max_error` likewise, a share.
    """

    app: str
    per_hour: float
    candidates: tuple[ContextOption, ...]
    max_delay: float | None = None
    max_error: float | None = None


class Demand:
    """Keeps what was measured, also of workers that are gone, and by when what is queued should be done.

    A session that has something to do counts as an item a second, which takes one K-th of a worker's second.

    :param clear: seconds in which an item should be answered.
    :param period: from one plan to the next; what is overdue counts as due by then.
    :ivar unable: apps with work that no tier can run and no worker serves, when it was asked last.
    """

    def __init__(self, clear: float, period: float) -> None:
        self._clear = clear
        self._period = period
        self._seconds: dict[tuple[str, str], float] = {}
        self._loads: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._known: dict[str, int] = {}  # What had been submitted when it was asked last, by app.
        self._came: dict[str, list[tuple[float, int]]] = {}
        self.unable: list[str] = []

    def look(self, view: View) -> None:
        """Note what has been submitted; to be called often."""
        for table in (self._came, self._due, self._known):
            forget(table, view.apps)
        for name, family in _families(view).items():
            seen = self._came.setdefault(name, [])
            if not seen or view.now >= seen[-1][0] + self._period / _LOOKS:
                seen.append((view.now, _arrived(family)))
                del seen[: -2 * _LOOKS]

    def settled(self, view: View, seconds: float) -> bool:
        """Return whether somebody has been working long enough that a first plan rests on something."""
        return any(worker.joined + seconds <= view.now for worker in view.workers.values())

    def measured(self, view: View) -> frozenset[str]:
        """Look at what workers have shown; gives the contexts of which a speed is known."""
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key[0] in view.apps}
        for app in view.apps.values():
            shown: dict[str, list[tuple[float, int]]] = {}
            for worker in view.workers.values():
                seconds, items = worker.seconds_per_item(app.id), worker.items_done(app.id)
                if seconds is not None and items:
                    shown.setdefault(worker.tier, []).append((seconds, items))
            for tier, each in shown.items():
                self._seconds[app.id, tier] = _mean(each)
            for tier, most in _capacities(view, app).items():
                self._seconds[app.id, tier] = 1 / most
        for context in {app.context for app in view.apps.values()}:
            loads = [s for worker in view.workers.values() if (s := worker.load_seconds(context)) is not None]
            if loads:
                self._loads[context] = sum(loads) / len(loads)
        forget(self._loads, {app.context for app in view.apps.values()})
        return frozenset(view.apps[app].context for app, _ in self._seconds)

    def carriers(self, view: View) -> dict[str, float]:
        """Return the workers that sessions with something to do keep busy where it is fastest, by context."""
        found: dict[str, float] = {}
        for name, sessions in active(view).items():
            known = [seconds for (app, _), seconds in self._seconds.items() if app == name]
            context = view.apps[name].context
            found[context] = found.get(context, 0.0) + len(sessions) * min(known, default=1 / SESSIONS)
        return found

    def wanted(self, view: View) -> list[Wanted]:
        """Return what there is to do, in the order of apps; what no tier can run is in `unable`."""
        self.unable = []
        running = Counter(attempt.app for attempt in view.attempts.values() for _ in attempt.items)
        pace = self._tier_paces(view)
        sessions = active(view)
        found = []
        for name, family in _families(view).items():
            rate = self._rate(family, sum(app.backlog + running[app.id] for app in family), view.now)
            rate += 3600.0 * len(sessions.get(name, ()))
            if rate <= 0:
                continue
            untried = 1 / SESSIONS if name in sessions else None
            own, *others = [self._candidate(view, app, pace, untried) for app in family]
            if own.seconds:
                able = (own, *(each for each in others if each.seconds))
                found.append(Wanted(name, rate, able, family[0].max_delay, family[0].max_error))
            elif not any(view.holders(app.context) for app in family):
                self.unable.append(name)
        return found

    def _candidate(self, view: View, app: AppView, pace: dict[str, float], untried: float | None) -> ContextOption:
        tiers = [tier.name for tier in view.tiers.values() if view.able(app, tier)]
        seconds = {tier: self._item(view, app, tier, pace, untried) for tier in tiers}
        return ContextOption(app.context, seconds, self._loads.get(app.context, 0.0), app.error)

    def _rate(self, family: Sequence[AppView], left: int, now: float) -> float:
        """Return the items an hour: what waits until it is due, and what keeps coming.

        What is new is due later than the rest.
        """
        name, arrived = family[0].id, _arrived(family)
        new = min(left, max(0, arrived - self._known.get(name, 0)))
        self._known[name] = arrived
        if not left:
            self._due[name] = now
        else:
            self._due[name] = ((left - new) * self._due.get(name, now) + new * (now + self._clear)) / left
        return 3600 * (self._steady(name, arrived, now) + left / max(self._period, self._due[name] - now))

    def _steady(self, name: str, arrived: int, now: float) -> float:
        """Return the items a second that keep coming: the median over the quarters of the last period.

        So what was submitted all at once does not come again. While an app is new, over the time since it was seen.
        """
        times, counts = zip(*self._came.get(name, ()), (now, arrived), strict=True)
        span = min(self._period, now - times[0])
        if span < self._period / 8:
            return 0.0
        quarters = now - span * np.linspace(1, 0, 5)
        # Of an app that was forgotten in between, fewer have arrived than before.
        return float(max(0.0, np.median(np.diff(np.interp(quarters, times, counts)))) / (span / 4))

    def _tier_paces(self, view: View) -> dict[str, float]:
        """Return how many times longer than on all tiers an item takes on each, over the apps measured there."""
        own = {app: _average(s for (a, _), s in self._seconds.items() if a == app) for app, _ in self._seconds}
        ratios: dict[str, list[float]] = {}
        for (app, tier), seconds in self._seconds.items():
            ratios.setdefault(tier, []).append(seconds / own[app] if own[app] else 1.0)
        # A tier that nobody knows is taken to be as fast as the fastest, so that it is tried.
        best = min((_average(each) for each in ratios.values()), default=1.0)
        return {name: _average(ratios[name]) if name in ratios else best for name in view.tiers}

    def _item(self, view: View, app: AppView, tier: str, pace: dict[str, float], untried: float | None = None) -> float:
        """Return the seconds of an item: measured, or from other tiers or apps.

        Where it is nothing like others', `untried` is taken.
        """
        known = self._seconds.get((app.id, tier))
        if known is not None:
            return max(known, 1e-9)
        others = [seconds for (a, _), seconds in self._seconds.items() if a == app.id]
        if not others and app.alternative_of:
            return UNTRIED * self._item(view, view.apps[app.alternative_of], tier, pace)
        if not others and untried is not None:
            return untried * pace[tier]
        return max(_average(others or self._seconds.values()) * pace[tier], 1e-9)


def _families(view: View) -> dict[str, list[AppView]]:
    """Return the apps that items are submitted to, each with its alternatives after it."""
    found: dict[str, list[AppView]] = {}
    for app in view.apps.values():
        found.setdefault(app.alternative_of or app.id, []).append(app)
    return found


def _capacities(view: View, app: AppView) -> dict[str, int]:
    """Return K of an app's sessions by tier: the most that a worker of it serves within the app's chunk target."""
    found: dict[str, int] = {}
    for worker in view.workers.values():
        if worker.step_seconds(app.id):
            found[worker.tier] = max(found.get(worker.tier, 1), view.capacity(app, worker))
    return found


def _arrived(family: Sequence[AppView]) -> int:
    return sum(app.arrived for app in family)


def _mean(shown: Sequence[tuple[float, int]]) -> float:
    return sum(seconds * items for seconds, items in shown) / sum(items for _, items in shown)


def _average(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
