"""A plan for a run, made of what was known at a moment: a pure function.

Limits that cannot be kept are reported and dropped; then items of apps with alternatives are divided among contexts,
and machines that tiers share into workers; then AGH finds which workers hold what (`staffing`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from ctxflow.policies.agh.hastening import hastened
from ctxflow.policies.agh.live_work import Margin, Offer, Wanted
from ctxflow.policies.agh.staffing import Mixes, Staffing, StaffingProblem
from ctxflow.policies.protocols import Plan
from ctxflow.policies.views import TierView

PARTS = 4  # A group's GPUs are divided among its tiers by quarters.
Cut = dict[str, int]
"""Tier -> the most workers that it may have."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a tier may have at a moment: fewest and most workers, the GPUs of one, and the machines' name."""

    minimum: int
    maximum: int
    gpus: int
    machines: str

    @classmethod
    def of(cls, tier: TierView) -> Bounds:
        """Return the bounds of a tier as it is now."""
        return cls(tier.minimum, tier.maximum, tier.gpus, tier.machines)


@dataclasses.dataclass(frozen=True)
class Made:
    """A plan, and what the next one is compared with: its staffing, and how items and machines are divided."""

    plan: Plan = dataclasses.field(default_factory=Plan)
    staffing: Staffing | None = None
    mixes: Mixes = dataclasses.field(default_factory=dict)
    cut: Cut = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a plan is made of, immutable. Calling it makes the plan.

    :ivar offers: the tiers with their expected workers. :ivar tiers: the site's bounds.
    :ivar probes: tier -> the context that one worker there is to hold, whatever else is planned.
    :ivar unable: apps that no tier can run. :ivar before: the present plan.
    :ivar hold_hours: how long a plan is expected to stay: what it saves in that time pays for its loads.
    :ivar least_gain: the share of the present plan's cost that a new plan must save besides.
    :ivar hasten: whether workers that have nothing to do are released, so that more may be held for a shorter time.
    """

    wanted: Sequence[Wanted]
    offers: Sequence[Offer]
    tiers: Mapping[str, Bounds]
    probes: Mapping[str, str]
    unable: Sequence[str]
    before: Made
    hold_hours: float
    least_gain: float
    hasten: bool = False

    def __call__(self) -> Made:
        """Return the plan that AGH makes of it, or the one before with other numbers, if a change does not pay."""
        before = self.before
        wanted, reasons = without_impossible(self.wanted)
        mixes = cheapest(wanted, self.offers, before.mixes, self.least_gain)
        cut = cut_best(wanted, mixes, self.offers, self.tiers, before.cut, self.least_gain)
        problem = StaffingProblem.of(wanted, mixes, limited(self.offers, cut))
        share = problem.possible()
        staffing = self._revised(problem, share)
        scarce = share < 1 or staffing.short
        reasons += [
            f"{app}: (5f) no tier has the GPUs, and the memory on each, that its context needs" for app in self.unable
        ]
        if staffing.short:
            reasons.append("(5g) all workers together do not answer in time all that waits: all of them are used")
            share = problem.fitting(share)
            staffing = self._revised(problem, share)
        counts = problem.counts(share, staffing)
        if scarce:
            problem.fill(counts)
        planned = {tier for _, tier in counts}
        if self.hasten and not scarce:
            counts = self._hastened(problem, counts)
        counts |= {(context, tier): 1 for tier, context in self.probes.items() if tier not in planned}
        old = before.plan.holders
        if counts.keys() == old.keys() and all(n <= old[pair] <= 1.25 * n for pair, n in counts.items()):
            counts = dict(old)
        several = [each.app for each in wanted if len(each.candidates) > 1]
        shares = {(app, context): part for app in several for context, part in mixes[app].items()}
        order = problem.preferred(counts)
        margins = margins_of(wanted, counts)
        plan = dataclasses.replace(
            _as_plan(counts, self.tiers), shares=shares, order=order, margins=margins, reasons=tuple(reasons)
        )
        return Made(plan, staffing, mixes, cut)

    def _hastened(self, problem: StaffingProblem, counts: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
        # Of tiers that are the same machines, more of one would be fewer of another.
        whole = [offer for offer in problem.offers if not self.tiers[offer.name].machines]
        period = self.hold_hours * 1800
        return hastened(problem.tasks, whole, counts, self.before.plan.holders, period, self.least_gain)

    def _revised(self, problem: StaffingProblem, share: float) -> Staffing:
        before = self.before.staffing or Staffing((), ())
        return problem.revised(share, before, self.hold_hours, self.least_gain)


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


def without_impossible(wanted: Sequence[Wanted]) -> tuple[list[Wanted], list[str]]:
    """Return what can be planned for, and a sentence (the same each time) for each limit that had to be left out.

    >>> from ctxflow.policies.agh.live_work import ContextOption
    >>> large = ContextOption("large", {"a10": 4.0}, 10.0)
    >>> left, reasons = without_impossible([Wanted("ask", 9.0, (large,), 2.0, None)])
    >>> left[0].max_delay, reasons
    (None, ['ask: (5i) no tier answers an item within max_delay = 2 s: it is planned for without the limit'])
    """
    found, reasons = [], []
    for each in wanted:
        best = min(candidate.known_delay(tier) for candidate in each.candidates for tier in candidate.seconds)
        if each.max_delay is None or best <= each.max_delay:
            found.append(_with_room(each))
            continue
        found.append(dataclasses.replace(each, max_delay=None))
        limit = f"max_delay = {each.max_delay:g} s"
        reasons.append(f"{each.app}: (5i) no tier answers an item within {limit}: it is planned for without the limit")
    return found, reasons


def margins_of(wanted: Sequence[Wanted], counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], Margin]:
    """Return a plan's margins by context and tier, the largest of its apps', those of delays that have a limit."""
    found: dict[tuple[str, str], Margin] = {}
    for each in wanted:
        for option in each.candidates:
            for tier, margin in option.margins.items():
                if (pair := (option.context, tier)) in counts:
                    delay = 0.0 if each.max_delay is None else margin.delay
                    found[pair] = Margin(*map(max, found.get(pair, Margin()), (margin.work, delay)))
    return {pair: margin for pair, margin in found.items() if any(margin)}


def _with_room(wanted: Wanted) -> Wanted:
    """Return an app with no more margin in its delays than some tier leaves below the limit."""
    kept = [candidate.delay(tier) for candidate in wanted.candidates for tier in candidate.seconds]
    if wanted.max_delay is None or min(kept) <= wanted.max_delay:
        return wanted
    best = min(candidate.known_delay(tier) for candidate in wanted.candidates for tier in candidate.seconds)
    room = (1 - 1e-9) * wanted.max_delay / best - 1  # So that what has just the limit is within it.
    candidates = tuple(
        dataclasses.replace(
            each,
            margins={tier: margin._replace(delay=min(margin.delay, room)) for tier, margin in each.margins.items()},
        )
        for each in wanted.candidates
    )
    return dataclasses.replace(wanted, candidates=candidates)


# --- contexts: how the items of apps that name alternatives are divided


def mixes(wanted: Wanted) -> list[dict[str, float]]:
    """Return the mixes of an app's contexts that may be the cheapest, its own alone first, which keeps the limit.

    An average over two contexts has every error between theirs, so the cheapest mix is one context, or two at the
    limit, if there are enough workers. (With an error constraint in the problem instead, GH fills the limit with the
    cheapest context first, and then has no place for the rest.)

    >>> from ctxflow.policies.agh.live_work import ContextOption
    >>> large, small = ContextOption("large", {"a10": 4.0}, 10.0, 0.05), ContextOption("small", {"a10": 0.5}, 2.0, 0.3)
    >>> mixes(Wanted("ask", 9.0, (large, small), None, 0.1))
    [{'large': 1.0}, {'large': 0.8, 'small': 0.2}]
    >>> mixes(Wanted("ask", 9.0, (large, small), None, 0.3))
    [{'large': 1.0}, {'small': 1.0}]
    """
    limit = max(wanted.candidates[0].error, 1.0 if wanted.max_error is None else wanted.max_error)
    errors = {each.context: each.error for each in wanted.candidates}
    found = [{context: 1.0} for context, error in errors.items() if error <= limit]
    for first, second in itertools.combinations(errors, 2):
        low, high = sorted((errors[first], errors[second]))
        if low < limit < high:
            share = round((limit - errors[second]) / (errors[first] - errors[second]), 9)
            found.append({first: share, second: round(1 - share, 9)})
    return found


def cheapest(
    wanted: Sequence[Wanted], offers: Sequence[Offer], before: Mixes, least_gain: float
) -> dict[str, Mapping[str, float]]:
    """Return app -> the share of each context, for all apps, one app after the other.

    :param before: the present mixes, each of which is kept unless another saves `least_gain` of the cost.
    """
    chosen: dict[str, Mapping[str, float]] = {}
    for each in wanted:
        possible = mixes(each)
        chosen[each.app] = next((mix for mix in possible if _same(mix, before.get(each.app, {}))), possible[0])
    for each in wanted:
        possible = mixes(each)
        if len(possible) < 2:
            continue
        costs = [cost(wanted, {**chosen, each.app: mix}, offers) for mix in possible]
        best = min(range(len(possible)), key=costs.__getitem__)
        if costs[best] < (1 - least_gain) * costs[possible.index(dict(chosen[each.app]))]:
            chosen[each.app] = possible[best]
    return chosen


def _same(mix: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return mix.keys() == other.keys() and all(abs(share - other[name]) < 1e-6 for name, share in mix.items())


def cost(wanted: Sequence[Wanted], chosen: Mixes, offers: Sequence[Offer]) -> float:
    """Return what the workers of a plan by AGH cost in an hour, with a high price on what is unserved."""
    problem = StaffingProblem.of(wanted, chosen, offers)
    return problem.dollars(problem.solve())


# --- machines: tiers that are the same ones, cut into workers with more or fewer GPUs


def groups(offers: Sequence[Offer], tiers: Mapping[str, Bounds]) -> list[list[Offer]]:
    """Return the offers that are the same machines; each list has two at least."""
    found: dict[str, list[Offer]] = {}
    for offer in offers:
        if tiers[offer.name].machines and offer.workers:
            found.setdefault(tiers[offer.name].machines, []).append(offer)
    return [those for those in found.values() if len(those) > 1]


def cuts(group: Sequence[Offer], gpus: Mapping[str, int], total: int) -> list[Cut]:
    """Return the ways to divide a group's total GPUs, given those of a worker of each tier.

    >>> two = [Offer("one-gpu", 8, 1.0), Offer("four-gpus", 2, 4.0)]
    >>> cuts(two, {"one-gpu": 1, "four-gpus": 4}, 8)
    [{'one-gpu': 0, 'four-gpus': 2}, {'one-gpu': 4, 'four-gpus': 1}, {'one-gpu': 8, 'four-gpus': 0}]
    """
    found: list[Cut] = []
    for parts in itertools.product(range(PARTS + 1), repeat=len(group) - 1):
        if sum(parts) > PARTS:
            continue
        cut, left = {}, total
        # The tiers with the most GPUs a worker first: what they cannot use is left to the others.
        ordered = sorted(group, key=lambda offer: -gpus[offer.name])
        for offer, part in zip(ordered, (*parts, PARTS), strict=True):
            most = left if part == PARTS else min(left, part * total // PARTS)
            cut[offer.name] = min(offer.workers, most // gpus[offer.name])
            left -= cut[offer.name] * gpus[offer.name]
        cut = {offer.name: cut[offer.name] for offer in group}
        if cut not in found:
            found.append(cut)
    return sorted(found, key=lambda cut: tuple(cut.values()))


def cut_best(
    wanted: Sequence[Wanted],
    mixes: Mixes,
    offers: Sequence[Offer],
    tiers: Mapping[str, Bounds],
    before: Cut,
    least_gain: float,
) -> Cut:
    """Cut groups one after the other, as before unless another way saves `least_gain` of the cost.

    A group with GPUs enough is not in the answer.
    """
    gpus = {name: tier.gpus for name, tier in tiers.items()}
    chosen: Cut = {}
    for group in groups(offers, tiers):
        names = [offer.name for offer in group]
        total = max(tiers[name].maximum * gpus[name] for name in names)
        problem = StaffingProblem.of(wanted, mixes, limited(offers, chosen))
        staffing = problem.solve()
        used = sum(n * gpus[tier] for (_, tier), n in problem.counts(1.0, staffing).items() if tier in names)
        if not staffing.short and used <= total:
            continue
        ways = cuts(group, gpus, total)
        costs = [cost(wanted, mixes, limited(offers, {**chosen, **way})) for way in ways]
        best = min(range(len(ways)), key=costs.__getitem__)
        kept = [n for n, way in enumerate(ways) if all(before.get(name) == most for name, most in way.items())]
        if kept and costs[best] >= (1 - least_gain) * costs[kept[0]]:
            best = kept[0]
        chosen.update(ways[best])
    return chosen


def limited(offers: Sequence[Offer], cut: Cut) -> list[Offer]:
    """Return the offers with no more workers than a cut has."""
    return [dataclasses.replace(o, workers=min(o.workers, cut.get(o.name, o.workers))) for o in offers]
