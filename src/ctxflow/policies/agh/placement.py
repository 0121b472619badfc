"""The placement policy `agh`: which contexts on which tiers, with how many workers, planned while a run goes on.

AGH plans every few minutes, from what was measured (`demand`), and what runs is kept unless a new plan is worth its
change (`live_plan`). It is deterministic: a run's replay plans the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from ctxflow.policies.agh.demand import Demand
from ctxflow.policies.agh.live_plan import Bounds, Made, Moment
from ctxflow.policies.agh.staffing import Offer
from ctxflow.policies.helpers import active
from ctxflow.policies.protocols import Plan, View
from ctxflow.policies.views import TierView


class AdaptivePlacement:
    """Plans by AGH from measured speeds and what is queued.

    Until anything is measured, every context may be anywhere. Then each context with work gets workers on the tiers
    where it costs least, as many as answer what is queued within `clear` seconds; if the site has not as many, all
    contexts are served alike less. A context without work may be anywhere, and nothing changes while there is no work.

    :param period: seconds from one plan to the next. It plans at once, but not within a fifth of that, when there is
        work for a context that the plan does not know, when one was measured for the first time, when the site's
        bounds change, when sessions want more workers than were planned for their context, and when a quarter of the
        workers are lost; also if that was while the plan was computed.
    :param clear: seconds in which what is queued should be answered.
    :param least_gain: the share of the present plan's cost that a new plan has to save.
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
        self._gives: dict[str, int] = {}  # Of tiers that did not give what was asked.

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
        """Return a tier with as many workers as it may have.

        One that does not give what was asked has twice what it gave.
        """
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
        """Return a context for each tier that gave no workers.

        One is asked for and used, to see whether it gives again.
        """
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
    """What decides whether to plan anew.

    :ivar busy: contexts with work; `measured`: those of which a speed is known.
    :ivar carriers: the workers that sessions keep busy, by context.
    """

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
        # What no tier can run has a worker of its own, or waits for one: no plan is for it.
        busy = frozenset(app.context for app in working if any(view.able(app, tier) for tier in view.tiers.values()))
        there = Counter(worker.tier for worker in view.workers.values() if not worker.draining)
        return cls(view.now, bounds, busy, measured, there, demand.carriers(view))

    def differs(self, before: _Occasion, plan: Plan) -> bool:
        """Return whether so much is different that planning cannot wait."""
        lost = sum((before.connected - self.connected).values()) - _given_back(before.connected, plan)
        return (
            self.bounds != before.bounds
            or not self.busy <= plan.tiers.keys()
            or not self.measured <= before.measured
            or lost > 0.25 * before.connected.total()
            or any(n > max(before.carriers.get(each, 0.0), _holders(plan, each)) for each, n in self.carriers.items())
        )


def _holders(plan: Plan, context: str) -> int:
    """Return the workers that a plan wants to hold a context."""
    return sum(workers for (each, _), workers in plan.holders.items() if each == context)


def _given_back(connected: Mapping[str, int], plan: Plan) -> int:
    """Return how many of the workers that were there the plan does not want."""
    return sum(max(0, there - plan.workers.get(tier, (0, there))[1]) for tier, there in connected.items())
