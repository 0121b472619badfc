"""The placement policy `agh`: which contexts on which tiers, with how many workers, planned while a run goes on.

What was measured (`Demand`) and when to plan (`_Occasion`). `live_plan` makes the plan. It is deterministic: a run's
replay plans the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ctxflow.policies.agh.live_plan import Bounds, Made, Moment
from ctxflow.policies.agh.staffing import ContextOption, Offer, Wanted
from ctxflow.policies.helpers import SESSIONS, active, forget, paces
from ctxflow.policies.protocols import Plan, View
from ctxflow.policies.views import AppView, TierView

_LOOKS = 16  # In a period.
UNTRIED = 0.1  # Seconds of an item with an alternative that was not measured, in those of the app's own.


class Demand:
    """What a run asks of a plan: measurements, also of workers that are gone, and by when queued items are due.

    An active session counts as an item a second, which takes one K-th of a worker's second.

    :param clear: seconds in which an item should be answered.
    :param period: from one plan to the next; what is overdue counts as due by then.
    :ivar unable: apps with work that no tier can run and no worker serves, at the last call of `wanted`.
    """

    def __init__(self, clear: float, period: float) -> None:
        self._clear = clear
        self._period = period
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
        for app in view.apps.values():
            shown: dict[str, list[tuple[float, float, int]]] = {}
            for worker, seconds in paces(view.workers.values(), app.id):
                beside = worker.calls_beside(app.id) or 1.0
                shown.setdefault(worker.tier, []).append((seconds, seconds * beside, worker.items_done(app.id)))
            for tier, each in shown.items():
                total = sum(items for _, _, items in each)
                seconds = sum(seconds * items for seconds, _, items in each)
                if total:
                    self._seconds[app.id, tier] = seconds / total
                    self._beside[app.id, tier] = sum(d * items for _, d, items in each) / seconds if seconds else 1.0
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
        known = {tier: beside for (name, tier), beside in self._beside.items() if name == app.id}
        beside = {tier: known.get(tier, _average(known.values())) for tier in tiers} if known else {}
        return ContextOption(app.context, seconds, self._loads.get(app.context, 0.0), app.error, beside)

    def _rate(self, family: Sequence[AppView], left: int, now: float) -> float:
        """Return the items an hour: what is queued until it is due (new items later), and what keeps coming."""
        name, arrived = family[0].id, _arrived(family)
        new = min(left, max(0, arrived - self._known.get(name, 0)))
        self._known[name] = arrived
        if not left:
            self._due[name] = now
        else:
            self._due[name] = ((left - new) * self._due.get(name, now) + new * (now + self._clear)) / left
        return 3600 * (self._steady(name, arrived, now) + left / max(self._period, self._due[name] - now))

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
        return max(_average(others or self._seconds.values()) * pace[tier], 1e-9)


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


class AdaptivePlacement:
    """Plans by AGH from measured speeds and what is queued.

    Until anything is measured, every context may be anywhere. Then each context with work gets workers on the tiers
    where it costs least, as many as answer what is queued within `clear` seconds; if the site has fewer, all contexts
    are served less alike. A context without work may be anywhere, and nothing changes while there is no work.

    :param period: seconds from one plan to the next. It plans at once, but not within a fifth of that, when there is
        work for a context that the plan does not know, when one was measured for the first time, when the site's
        bounds change, when sessions want more workers than were planned, and when a quarter of the workers are lost.
    :param clear: seconds in which what is queued should be answered.
    :param least_gain: the share of the present plan's cost that a new plan must save.
    :raises ValueError: for a number that makes no sense.
    """

    def __init__(self, period: float = 300.0, clear: float = 1800.0, least_gain: float = 0.05) -> None:
        for name, value in (("period", period), ("clear", clear)):
            if not (_is_number(value) and value > 0):
                raise ValueError(f"{name} is a number of seconds: give more than 0, not {value!r}")
        if not (_is_number(least_gain) and least_gain >= 0):
            raise ValueError(f"least_gain is a share of the cost: give 0 or more, not {least_gain!r}")
        self._period = period
        self._hold_hours, self._least_gain = 2 * period / 3600, least_gain
        self._demand = Demand(clear, period)
        self._made = Made()
        self._planned: _Occasion | None = None
        self._gives: dict[str, int] = {}  # Workers of tiers that did not give what was requested.

    def plan(self, view: View) -> Plan:
        """Return the plan in place."""
        self._demand.look(view)
        return self._made.plan

    def planning(self, view: View) -> Moment | None:
        """Return all that a new plan is made of, if it is time for one."""
        before = self._planned
        if before is not None and view.now < before.at + self._period / 5:
            return None
        if before is None and not self._demand.settled(view, self._period / 5):
            return None
        now = _Occasion.of(view, self._demand)
        regular = before is None or now.at >= before.at + self._period
        if before is not None and not regular and not now.differs(before, self._made.plan):
            return None
        wanted = self._demand.wanted(view) if now.measured else []
        if not wanted:
            return None
        offers = [self._offer(tier, now, before, regular) for tier in view.tiers.values()]
        self._planned = now
        if not any(offer.workers for offer in offers):
            return None
        tiers = {name: Bounds.of(tier) for name, tier in view.tiers.items()}
        probes, unable = self._probes(view), self._demand.unable
        return Moment(wanted, offers, tiers, probes, unable, self._made, self._hold_hours, self._least_gain)

    def planned(self, made: Made) -> None:
        """Follow this plan from now on."""
        self._made = made

    def _offer(self, tier: TierView, now: _Occasion, before: _Occasion | None, regular: bool) -> Offer:
        """Return a tier with its most workers: twice what it gave if it did not give what was requested."""
        there = now.connected[tier.name]
        _, asked = self._made.plan.workers.get(tier.name, (0, tier.maximum))
        lost = before is not None and there < before.connected[tier.name]
        if there < asked and (regular or lost):
            self._gives[tier.name] = 2 * there
        elif tier.name in self._gives and there and there >= asked:
            self._gives[tier.name] = max(self._gives[tier.name], 2 * there)
        most = min(tier.maximum, self._gives.get(tier.name, tier.maximum))
        return Offer(tier.name, most, 1.0 if tier.price is None else tier.price)

    def _probes(self, view: View) -> dict[str, str]:
        """Return a context for each tier that gave no workers, for one worker that probes whether it gives again."""
        found, sessions = {}, active(view)
        for tier in view.tiers.values():
            able = [app for app in view.apps.values() if (app.backlog or app.id in sessions) and view.able(app, tier)]
            if self._gives.get(tier.name) == 0 and able and tier.maximum:
                found[tier.name] = max(able, key=lambda app: app.backlog).context
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class _Occasion:
    """What decides whether to plan again: contexts with work, those measured, workers, and those of sessions."""

    at: float
    bounds: tuple[tuple[str, int, int], ...]
    busy: frozenset[str]
    measured: frozenset[str]
    connected: Counter[str]
    carriers: Mapping[str, float]

    @classmethod
    def of(cls, view: View, demand: Demand) -> _Occasion:
        bounds = tuple((tier.name, tier.minimum, tier.maximum) for tier in view.tiers.values())
        measured = demand.measured(view)
        running = {attempt.app for attempt in view.attempts.values() if attempt.items} | active(view).keys()
        working = [app for app in view.apps.values() if app.backlog or app.id in running]
        # No plan is for what no tier can run.
        busy = frozenset(app.context for app in working if any(view.able(app, tier) for tier in view.tiers.values()))
        there = Counter(worker.tier for worker in view.workers.values() if not worker.draining)
        return cls(view.now, bounds, busy, measured, there, demand.carriers(view))

    def differs(self, before: _Occasion, plan: Plan) -> bool:
        """Return whether so much is different that planning cannot wait."""
        released = sum(max(0, n - plan.workers.get(tier, (0, n))[1]) for tier, n in before.connected.items())
        lost = sum((before.connected - self.connected).values()) - released
        planned: Counter[str] = Counter()
        for (context, _), workers in plan.holders.items():
            planned[context] += workers
        return (
            self.bounds != before.bounds
            or not self.busy <= plan.tiers.keys()
            or not self.measured <= before.measured
            or lost > 0.25 * before.connected.total()
            or any(n > max(before.carriers.get(each, 0.0), planned[each]) for each, n in self.carriers.items())
        )
