"""The placement policy `agh`: which contexts on which tiers, with how many workers, planned while a run goes on.

Each context with work is a query type that only its own model serves; tiers are divided into blocks of workers
(`workers`). AGH plans every few minutes, from what was measured, and what runs is kept unless a new plan is worth its
change (`rolling`). It is deterministic: a run's replay plans the same.

What lives here: when to plan, what of it all, and what becomes of the answer. What does not live here: what is wanted
and how fast workers are (`demand`), how items are divided among contexts (`mixes`), the problem made of that
(`asked`), finding plans (`rolling`), and following them (the scheduler).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ctxflow.policies.placement.allocation import Allocation
from ctxflow.policies.placement.asked import ROOM_GB, SERVED, Asked
from ctxflow.policies.placement.demand import Demand, Wanted
from ctxflow.policies.placement.impossible import too_much, unable, without_impossible
from ctxflow.policies.placement.machines import Cut, cut_best, limited
from ctxflow.policies.placement.mixes import cheapest
from ctxflow.policies.placement.problem import Problem
from ctxflow.policies.placement.rolling import Switching, plan_rolling
from ctxflow.policies.placement.workers import Offer, staffing
from ctxflow.policies.protocols import Plan, View
from ctxflow.policies.views import TierView


class AdaptivePlacement:
    """Plans by AGH from measured speeds and what is queued.

    Until anything is measured, every context may be anywhere. Then each context with work gets workers on the tiers
    where it costs least, as many as answer what is queued within `clear` seconds; if the site has not as many, all
    contexts are served alike less. A context without work may be anywhere, and nothing changes while there is no work.

    :param period: seconds from one plan to the next. It plans at once, but not within a fifth of that, when there is
        work for a context that the plan does not know, when one was measured for the first time, when the site's
        bounds change, and when a quarter of the workers are lost.
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
        hold = 2 * period / 3600
        self._switching = Switching(load_seconds_per_gb=1.0, hold_hours=hold, least_gain=least_gain)
        self._demand = Demand(clear, period)
        self._plan = Plan()
        self._state: tuple[Problem, Allocation] | None = None
        self._mixes: dict[str, Mapping[str, float]] = {}
        self._cut: Cut = {}
        self._planned: _Occasion | None = None
        self._gives: dict[str, int] = {}  # Of tiers that did not give what was asked.

    def plan(self, view: View) -> Plan:
        """The plan in place, or a new one if it is time for it."""
        self._demand.look(view)
        before = self._planned
        if before is not None and view.now < before.at + self._period / 5:
            return self._plan
        if before is None and not self._demand.settled(view, self._period / 5):
            return self._plan
        now = _Occasion.of(view, self._demand.measured(view))
        regular = before is None or now.at >= before.at + self._period
        if before is not None and not regular and not now.differs(before, self._plan):
            return self._plan
        wanted = self._demand.wanted(view) if now.measured else []
        if not wanted:
            return self._plan
        offers = [self._offer(tier, now, before, regular) for tier in view.tiers.values()]
        self._planned = now
        if any(offer.workers for offer in offers):
            self._plan = self._new(view, wanted, offers)
        return self._plan

    def _offer(self, tier: TierView, now: _Occasion, before: _Occasion | None, regular: bool) -> Offer:
        """A tier with as many workers as it may have; of one that does not give what was asked, twice what it gave."""
        there = now.connected[tier.name]
        _, asked = self._plan.workers.get(tier.name, (0, tier.maximum))
        lost = before is not None and there < before.connected[tier.name]
        if there < asked and (regular or lost):
            self._gives[tier.name] = 2 * there
        elif tier.name in self._gives and there and there >= asked:
            self._gives[tier.name] = max(self._gives[tier.name], 2 * there)
        most = min(tier.maximum, self._gives.get(tier.name, tier.maximum))
        return Offer(tier.name, most, 1.0 if tier.price is None else tier.price, ROOM_GB)

    def _new(self, view: View, wanted: Sequence[Wanted], offers: Sequence[Offer]) -> Plan:
        wanted, reasons = without_impossible(wanted)
        self._mixes = cheapest(wanted, offers, self._mixes, self._switching.least_gain)
        self._cut = cut_best(wanted, self._mixes, offers, view.tiers, self._cut, self._switching.least_gain)
        offers = limited(offers, self._cut)
        asked = Asked.of(wanted, self._mixes, offers)
        share = asked.possible()
        previous, allocation = self._state or (None, None)
        problem = asked.problem(share)
        revision = plan_rolling(problem, allocation, before=previous, switching=self._switching)
        reasons += unable(self._demand.unable) + too_much(revision.allocation.unserved)
        if max(revision.allocation.unserved) > SERVED:
            problem = asked.fitting(share)
            revision = plan_rolling(problem, allocation, before=previous, switching=self._switching)
            share = 0.0
        self._state = (problem, revision.allocation)
        counts = {
            (asked.tasks[each.model].context, offers[each.offer].name): each.workers
            for each in staffing(problem, offers, asked.speeds, revision.allocation)
        }
        if share < 1:
            asked.fill(counts)
        self._probe(view, counts)
        old = self._plan.holders
        if counts.keys() == old.keys() and all(n <= old[pair] <= 1.25 * n for pair, n in counts.items()):
            counts = dict(old)
        several = [each.app for each in wanted if len(each.candidates) > 1]
        shares = {(app, context): share for app in several for context, share in self._mixes[app].items()}
        return dataclasses.replace(_as_plan(counts, view.tiers), shares=shares, reasons=tuple(reasons))

    def _probe(self, view: View, counts: dict[tuple[str, str], int]) -> None:
        """Have one worker asked for, and used, of each tier that gave none, to see whether it gives any again."""
        for name in [name for name, workers in self._gives.items() if not workers and name in view.tiers]:
            able = [app for app in view.apps.values() if app.backlog and view.able(app, view.tiers[name])]
            if able and view.tiers[name].maximum and not any(tier == name for _, tier in counts):
                counts[max(able, key=lambda app: app.backlog).context, name] = 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class _Occasion:
    """What decides whether to plan anew.

    :ivar busy: contexts with work; `measured`: those of which a speed is known.
    """

    at: float
    bounds: tuple[tuple[str, int, int], ...]
    busy: frozenset[str]
    measured: frozenset[str]
    connected: Counter[str]

    @classmethod
    def of(cls, view: View, measured: frozenset[str]) -> _Occasion:
        bounds = tuple((tier.name, tier.minimum, tier.maximum) for tier in view.tiers.values())
        running = {attempt.app for attempt in view.attempts.values() if attempt.items}
        working = [app for app in view.apps.values() if app.backlog or app.id in running]
        # What no tier can run has a worker of its own, or waits for one: no plan is for it.
        busy = frozenset(app.context for app in working if any(view.able(app, tier) for tier in view.tiers.values()))
        there = Counter(worker.tier for worker in view.workers.values() if not worker.draining)
        return cls(view.now, bounds, busy, measured, there)

    def differs(self, before: _Occasion, plan: Plan) -> bool:
        """Whether so much is different that planning cannot wait."""
        lost = sum((before.connected - self.connected).values()) - _given_back(before.connected, plan)
        return (
            self.bounds != before.bounds
            or not self.busy <= plan.tiers.keys()
            or not self.measured <= before.measured
            or lost > 0.25 * before.connected.total()
        )


def _given_back(connected: Mapping[str, int], plan: Plan) -> int:
    """How many of the workers that were there the plan does not want."""
    return sum(max(0, there - plan.workers.get(tier, (0, there))[1]) for tier, there in connected.items())


def _as_plan(counts: Mapping[tuple[str, str], int], tiers: Mapping[str, TierView]) -> Plan:
    places: dict[str, set[str]] = {}
    needed = Counter(dict.fromkeys(tiers, 0))
    for (context, tier), workers in counts.items():
        places.setdefault(context, set()).add(tier)
        needed[tier] += workers
    return Plan(
        tiers={context: frozenset(those) for context, those in places.items()},
        workers={name: (tier.minimum, max(tier.minimum, needed[name])) for name, tier in tiers.items()},
        holders=dict(counts),
    )
