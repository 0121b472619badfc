"""A plan for a run, made of what was known of the run at a moment: a pure function, whatever the run does meanwhile.

What does not live here: when that is (`live`), how items are divided among contexts (`mixes`), tiers that are the same
machines (`machines`), the problem made of it all (`asked`), and finding plans (`rolling`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ctxflow.policies.agh.allocation import Allocation
from ctxflow.policies.agh.asked import SERVED, Asked, Mixes
from ctxflow.policies.agh.demand import Wanted
from ctxflow.policies.agh.impossible import too_much, unable, without_impossible
from ctxflow.policies.agh.machines import Bounds, Cut, cut_best, limited
from ctxflow.policies.agh.mixes import cheapest
from ctxflow.policies.agh.problem import Problem
from ctxflow.policies.agh.rolling import Switching, plan_rolling
from ctxflow.policies.agh.workers import Offer, staffing
from ctxflow.policies.protocols import Plan


@dataclasses.dataclass(frozen=True)
class Made:
    """A plan, and what the next one is compared with.

    :ivar problem: the one that `allocation` answers; both None before the first plan.
    :ivar mixes: how items of each app are divided; `cut`: how machines are cut into workers.
    """

    plan: Plan = dataclasses.field(default_factory=Plan)
    problem: Problem | None = None
    allocation: Allocation | None = None
    mixes: Mixes = dataclasses.field(default_factory=dict)
    cut: Cut = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a plan is made of; nobody changes it. Calling it makes the plan.

    :ivar offers: the tiers with the workers that are counted on.
    :ivar tiers: the site's bounds.
    :ivar probes: tier -> the context that one worker there is to hold, whatever else is planned.
    :ivar unable: apps that no tier can run.
    :ivar before: what holds until then.
    """

    wanted: Sequence[Wanted]
    offers: Sequence[Offer]
    tiers: Mapping[str, Bounds]
    probes: Mapping[str, str]
    unable: Sequence[str]
    before: Made
    switching: Switching

    def __call__(self) -> Made:
        """The plan that AGH makes of it, or the one before with other numbers, if a change does not pay."""
        before, least_gain = self.before, self.switching.least_gain
        wanted, reasons = without_impossible(self.wanted)
        mixes = cheapest(wanted, self.offers, before.mixes, least_gain)
        cut = cut_best(wanted, mixes, self.offers, self.tiers, before.cut, least_gain)
        offers = limited(self.offers, cut)
        asked = Asked.of(wanted, mixes, offers)
        share = asked.possible()
        problem = asked.problem(share)
        allocation = self._revised(problem)
        reasons += unable(self.unable) + too_much(allocation.unserved)
        if max(allocation.unserved) > SERVED:
            problem = asked.fitting(share)
            allocation = self._revised(problem)
            share = 0.0
        counts = {
            (asked.tasks[each.model].context, offers[each.offer].name): each.workers
            for each in staffing(problem, offers, asked.speeds, allocation)
        }
        if share < 1:
            asked.fill(counts)
        planned = {tier for _, tier in counts}
        counts |= {(context, tier): 1 for tier, context in self.probes.items() if tier not in planned}
        old = before.plan.holders
        if counts.keys() == old.keys() and all(n <= old[pair] <= 1.25 * n for pair, n in counts.items()):
            counts = dict(old)
        several = [each.app for each in wanted if len(each.candidates) > 1]
        shares = {(app, context): share for app in several for context, share in mixes[app].items()}
        plan = dataclasses.replace(_as_plan(counts, self.tiers), shares=shares, reasons=tuple(reasons))
        return Made(plan, problem, allocation, mixes, cut)

    def _revised(self, problem: Problem) -> Allocation:
        before = self.before
        return plan_rolling(problem, before.allocation, before=before.problem, switching=self.switching).allocation


def _as_plan(counts: Mapping[tuple[str, str], int], tiers: Mapping[str, Bounds]) -> Plan:
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
