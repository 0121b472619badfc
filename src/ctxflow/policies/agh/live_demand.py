"""What live AGH plans with: measured seconds of items and loads, what is asked, and what tiers give of it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ctxflow.policies.agh.live_work import UTILIZATION, ContextOption, Margin, Wanted
from ctxflow.policies.helpers import SESSIONS, active, forget, paces, serving
from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView

_LOOKS = 16  # In a period.
DEVIATIONS = 2.0  # That a margin has room for.
MOST_MARGIN = 0.5  # Of what is known.
_GUESS = 0.25  # A worker's deviation, of which one is counted beside those that were measured.
_REMEMBERED = 32  # Deviations.
UNTRIED = 0.1  # Seconds of an item with an alternative that was not measured, in those of the app's own.


class Demand:
    """What a run asks of a plan: measurements, also of workers that are gone, and by when queued items are due.

    An active session counts as an item a second, which takes one K-th of a worker's second.

    :param clear: seconds in which an item should be answered.
    :param period: from one plan to the next; what is overdue counts as due by then.
    :param margin: a share that items and errors may be worse than known; None for the `Spread` of what was measured.
    :ivar unable: apps with work that no tier can run and no worker serves, at the last call of `wanted`.
    """

    def __init__(self, clear: float, period: float, margin: float | None = None) -> None:
        self._clear = clear
        self._period = period
        self._margin = margin
        self._spread = Spread()
        self._seconds: dict[tuple[str, str], float] = {}
        self._beside: dict[tuple[str, str], float] = {}  # Items that share a worker's time, where they do.
        self._loads: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._known: dict[str, int] = {}  # Items submitted at the last call of `wanted`, by app.
        self._came: dict[str, list[tuple[float, int]]] = {}
        self.unable: list[str] = []

    def look(self, view: View) -> None:
        """Note what has been submitted; call it often."""
        for table in (self._came, self._due, self._known):
            forget(table, view.apps)
        for name, family in _families(view).items():
            seen = self._came.setdefault(name, [])
            if not seen or view.now >= seen[-1][0] + self._period / _LOOKS:
                seen.append((view.now, _arrived(family)))
                del seen[: -2 * _LOOKS]

    def settled(self, view: View, seconds: float) -> bool:
        """Return whether a worker has been there long enough for a first plan."""
        return any(worker.joined + seconds <= view.now for worker in view.workers.values())

    def measured(self, view: View) -> frozenset[str]:
        """Update the measurements; return the contexts of which a speed is known."""
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key[0] in view.apps}
        self._beside = {key: beside for key, beside in self._beside.items() if key[0] in view.apps}
        self._shown: dict[tuple[str, str], list[float]] = {}
        for app in view.apps.values():
            shown: dict[str, list[tuple[float, float, int]]] = {}
            for worker, seconds in paces(view.workers.values(), app.id):
                if items := worker.items_done(app.id):
                    beside = worker.calls_beside(app.id) or 1.0
                    shown.setdefault(worker.tier, []).append((seconds, seconds * beside, items))
            for tier, each in shown.items():
                total = sum(items for _, _, items in each)
                spent = sum(seconds * items for seconds, _, items in each)
                self._seconds[app.id, tier] = spent / total
                self._beside[app.id, tier] = sum(delay * items for _, delay, items in each) / spent if spent else 1.0
                self._shown[app.id, tier] = [seconds for seconds, _, _ in each]
            for tier, most in _capacities(view, app).items():
                self._seconds[app.id, tier] = 1 / most
        for context in {app.context for app in view.apps.values()}:
            loads = [s for worker in view.workers.values() if (s := worker.load_seconds(context)) is not None]
            if loads:
                self._loads[context] = sum(loads) / len(loads)
        forget(self._loads, {app.context for app in view.apps.values()})
        return frozenset(view.apps[app].context for app, _ in self._seconds)

    def carriers(self, view: View) -> dict[str, float]:
        """Return the workers that active sessions keep busy where they are fastest, by context."""
        found: dict[str, float] = {}
        for name, sessions in active(view).items():
            known = [seconds for (app, _), seconds in self._seconds.items() if app == name]
            context = view.apps[name].context
            found[context] = found.get(context, 0.0) + len(sessions) * min(known, default=1 / SESSIONS)
        return found

    def wanted(self, view: View) -> list[Wanted]:
        """Return what there is to do, in the order of apps; what no tier can run is in `unable`."""
        self.unable = []
        self._spread.compare(self._shown, self._seconds)
        running = Counter(attempt.app for attempt in view.attempts.values() for _ in attempt.items)
        pace = self._tier_paces(view)
        sessions = active(view)
        found = []
        for name, family in _families(view).items():
            left = sum(app.backlog + running[app.id] for app in family)
            steady = 3600 * (self._steady(name, _arrived(family), view.now) + len(sessions.get(name, ())))
            rate = steady + self._due_rate(family, left, view.now)
            if rate <= 0:
                continue
            untried = 1 / SESSIONS if name in sessions else None
            own, *others = [self._candidate(view, app, pace, untried) for app in family]
            if own.seconds:
                able = (own, *(each for each in others if each.seconds))
                most = family[0].max_error
                most = None if most is None else most / (1 + (self._margin or 0.0))
                found.append(Wanted(name, rate, able, family[0].max_delay, most, left))
            elif not any(view.holders(app.context) for app in family):
                self.unable.append(name)
        return found

    def _candidate(self, view: View, app: AppView, pace: dict[str, float], untried: float | None) -> ContextOption:
        tiers = [tier.name for tier in view.tiers.values() if view.able(app, tier)]
        seconds = {tier: self._item(view, app, tier, pace, untried) for tier in tiers}
        margins = {tier: self._margin_of(app, tier) for tier in tiers}
        measured = frozenset(tier for tier in tiers if (app.id, tier) in self._seconds)
        known = {tier: beside for (name, tier), beside in self._beside.items() if name == app.id}
        beside = {tier: known.get(tier, _average(known.values())) for tier in tiers} if known else {}
        return ContextOption(
            app.context, seconds, self._loads.get(app.context, 0.0), app.error, margins, measured, beside
        )

    def _margin_of(self, app: AppView, tier: str) -> Margin:
        if self._margin is not None:
            return Margin(self._margin, self._margin)
        return self._spread.margin((app.id, tier))

    def _due_rate(self, family: Sequence[AppView], left: int, now: float) -> float:
        """Return the items an hour that answer what is queued until it is due, new items later."""
        name, arrived = family[0].id, _arrived(family)
        new = min(left, max(0, arrived - self._known.get(name, 0)))
        self._known[name] = arrived
        if not left:
            self._due[name] = now
        else:
            self._due[name] = ((left - new) * self._due.get(name, now) + new * (now + self._clear)) / left
        return 3600 * left / max(self._period, self._due[name] - now)

    def _steady(self, name: str, arrived: int, now: float) -> float:
        """Return the items a second that keep coming: the median over the quarters of the last period, or less."""
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
        # An unmeasured tier counts as fast as the fastest, so that it is tried.
        best = min((_average(each) for each in ratios.values()), default=1.0)
        return {name: _average(ratios[name]) if name in ratios else best for name in view.tiers}

    def _item(self, view: View, app: AppView, tier: str, pace: dict[str, float], untried: float | None = None) -> float:
        """Return the seconds of an item: measured, or from other tiers or apps, or `untried`."""
        known = self._seconds.get((app.id, tier))
        if known is not None:
            return max(known, 1e-9)
        others = [seconds for (a, _), seconds in self._seconds.items() if a == app.id]
        if not others and app.alternative_of:
            return UNTRIED * self._item(view, view.apps[app.alternative_of], tier, pace)
        if not others and untried is not None:
            return untried * pace[tier]
        # An app of items that was measured elsewhere is tried where it may be a deviation faster than others are there.
        hope = 1 - _GUESS if others and untried is None else 1.0
        return max(_average(others or self._seconds.values()) * pace[tier] * hope, 1e-9)


def _families(view: View) -> dict[str, list[AppView]]:
    """Return the apps that items are submitted to, each with its alternatives."""
    found: dict[str, list[AppView]] = {}
    for app in view.apps.values():
        found.setdefault(app.alternative_of or app.id, []).append(app)
    return found


def _capacities(view: View, app: AppView) -> dict[str, int]:
    """Return K of an app's sessions by tier."""
    found: dict[str, int] = {}
    for worker in view.workers.values():
        if worker.step_seconds(app.id):
            found[worker.tier] = max(found.get(worker.tier, 1), view.capacity(app, worker))
    return found


def _arrived(family: Sequence[AppView]) -> int:
    return sum(app.arrived for app in family)


def _average(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


class Spread:
    """How far workers were from what was known of them when it was planned with, and the margins that follow.

    A margin has room for two deviations of a worker in a delay, which each worker's items have to keep, and two
    standard errors of the mean in the work, which all workers do together: as far as these exceed the tenth of the
    workers' time that no plan uses. One guessed deviation is counted beside the measured ones, the last 32.

    >>> spread, key = Spread(), ("ask", "a10")
    >>> spread.compare({key: [1.1, 0.9, 1.1, 0.9]}, {key: 1.0})
    >>> spread.margin(key)
    Margin(work=0.02, delay=0.29)
    """

    def __init__(self) -> None:
        self._planned: dict[tuple[str, str], float] = {}
        self._off: dict[tuple[str, str], list[float]] = {}

    def compare(self, shown: Mapping[tuple[str, str], list[float]], means: Mapping[tuple[str, str], float]) -> None:
        """Compare what workers show, seconds of an item by app and tier, with what the last plan was made of."""
        for key, seconds in shown.items():
            known = self._planned.get(key, means[key])
            if known > 0:
                off = self._off.setdefault(key, [])
                off.extend(each / known - 1 for each in seconds)
                del off[:-_REMEMBERED]
        self._planned = {key: means[key] for key in means}
        self._off = {key: off for key, off in self._off.items() if key in means}

    def margin(self, key: tuple[str, str]) -> Margin:
        """Return by how much worse than its mean an app on a tier is planned to be.

        Nothing where no worker was measured: it is tried as it may be at its best.
        """
        if key not in self._off:
            return Margin()
        off = [_GUESS, *self._off[key]]
        deviation = math.sqrt(sum(each * each for each in off) / len(off))
        work = DEVIATIONS * deviation / math.sqrt(len(off)) - (1 / UTILIZATION - 1)
        return Margin(*(round(max(0.0, min(MOST_MARGIN, share)), 2) for share in (work, DEVIATIONS * deviation)))


@dataclasses.dataclass
class _Lack:
    """Since when a tier has lacked workers, the fewest requested in that time, and the most that were there."""

    since: float
    requested: int
    there: int


class Given:
    """How many workers each tier gives, as far as it did not give all that was requested of it.

    Only requests count, which the scaling policy makes: what a plan allows beyond them was asked of nobody. A tier that
    had fewer workers than requested for `patience` seconds and a boot, or that lost some that are still requested,
    gives as many as it had.

    :ivar most: tier -> the workers that it gave, for tiers that did not give what was requested.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._lacks: dict[str, _Lack] = {}
        self._before: Counter[str] = Counter()  # What was there for the last plan.
        self.most: dict[str, int] = {}

    def look(self, view: View) -> None:
        """Note what is requested and what is there; call it often."""
        there = _acquired(view)
        for name, tier in view.tiers.items():
            requested, has = tier.requested or 0, there[name]
            if has >= requested:
                self._lacks.pop(name, None)
                continue
            lack = self._lacks.setdefault(name, _Lack(view.now, requested, has))
            lack.requested, lack.there = min(lack.requested, requested), max(lack.there, has)
            if lack.there >= lack.requested:  # All that was requested then was given: what is lacking now is newer.
                self._lacks[name] = _Lack(view.now, requested, has)

    def judge(self, view: View) -> None:
        """Update `most`, for a plan."""
        there, before = _acquired(view), self._before
        self._before = there
        for name, tier in view.tiers.items():
            lack, has = self._lacks.get(name), there[name]
            if lack is not None and has < before[name]:
                self.most[name] = has
            elif lack is not None and view.now >= lack.since + self._patience + (tier.boot_seconds or 0.0):
                self.most[name] = lack.there
            elif name in self.most:
                self.most[name] = max(self.most[name], has)

    def offered(self, name: str, maximum: int) -> int:
        """Return how many workers of a tier to count on: twice what it gave, if that was not all."""
        return min(maximum, 2 * self.most.get(name, maximum))

    def gives_again(self, view: View) -> bool:
        """Return whether some tier has as many workers as were counted on, or any where none were."""
        there = _acquired(view)
        return any(there[name] >= max(1, 2 * most) for name, most in self.most.items())


def _acquired(view: View) -> Counter[str]:
    """Return the workers of each tier that were requested, and stay."""
    return Counter(worker.tier for worker in serving(view.workers.values()) if worker.acquired)
