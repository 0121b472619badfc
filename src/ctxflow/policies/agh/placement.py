"""The placement policy `agh`: which contexts on which tiers, with how many workers, planned while a run goes on.

When to plan (`_Occasion`), from what was measured (`live_demand`). `live_plan` makes the plan. It is deterministic: a
run's replay plans the same. How many workers are requested is up to the scaling policy, within the plan's bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from ctxflow.policies.agh.live_demand import Demand, Given
from ctxflow.policies.agh.live_plan import Bounds, Made, Moment
from ctxflow.policies.agh.live_work import Offer
from ctxflow.policies.helpers import active
from ctxflow.policies.protocols import Plan, View
from ctxflow.policies.views import TierView

MEASURED = "measured"


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
    :param margin: how much worse than known what was measured is planned to be (`live_demand.Spread`); or a share for
        all seconds and errors: items that take 1 + margin times as long, limits on errors divided by that.
    :raises ValueError: for a number that makes no sense.
    """

    def __init__(
        self, period: float = 300.0, clear: float = 1800.0, least_gain: float = 0.05, margin: float | str = MEASURED
    ) -> None:
        for name, value in (("period", period), ("clear", clear)):
            if not (_is_number(value) and value > 0):
                raise ValueError(f"{name} is a number of seconds: give more than 0, not {value!r}")
        if not (_is_number(least_gain) and least_gain >= 0):
            raise ValueError(f"least_gain is a share of the cost: give 0 or more, not {least_gain!r}")
        self._period = period
        self._hold_hours, self._least_gain = 2 * period / 3600, least_gain
        if margin != MEASURED and not (_is_number(margin) and float(margin) >= 0):
            raise ValueError(f"margin is a share, or {MEASURED!r}: give 0 or more, not {margin!r}")
        self._demand = Demand(clear, period, None if margin == MEASURED else float(margin))
        self._made = Made()
        self._planned: _Occasion | None = None
        self._given = Given(period)

    def plan(self, view: View) -> Plan:
        """Return the plan in place."""
        self._demand.look(view)
        self._given.look(view)
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
        early = before is not None and (now.differs(before, self._made.plan) or self._given.gives_again(view))
        if not (regular or early):
            return None
        wanted = self._demand.wanted(view) if now.measured else []
        if not wanted:
            return None
        self._given.judge(view)
        offers = [self._offer(tier) for tier in view.tiers.values()]
        self._planned = now
        if not any(offer.workers for offer in offers):
            return None
        tiers = {name: Bounds.of(tier) for name, tier in view.tiers.items()}
        probes, unable = self._probes(view), self._demand.unable
        terms = self._hold_hours, self._least_gain, view.releases_idle
        return Moment(wanted, offers, tiers, probes, unable, self._made, *terms)

    def planned(self, made: Made) -> None:
        """Follow this plan from now on."""
        self._made = made

    def _offer(self, tier: TierView) -> Offer:
        price = 1.0 if tier.price is None else tier.price
        return Offer(tier.name, self._given.offered(tier.name, tier.maximum), price)

    def _probes(self, view: View) -> dict[str, str]:
        """Return a context for each tier that gave no workers, for one worker that probes whether it gives again."""
        found, sessions = {}, active(view)
        for tier in view.tiers.values():
            able = [app for app in view.apps.values() if (app.backlog or app.id in sessions) and view.able(app, tier)]
            if self._given.most.get(tier.name) == 0 and able and tier.maximum:
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
