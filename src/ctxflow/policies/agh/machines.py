"""Tiers that are the same machines, cut into workers with more or fewer GPUs: how many workers each may have.

What does not live here: what is on them, and which of a site's tiers belong together (the site file says so).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from ctxflow.policies.agh.asked import SERVED, Asked, Mixes
from ctxflow.policies.agh.demand import Wanted
from ctxflow.policies.agh.mixes import cost
from ctxflow.policies.agh.solution import solve
from ctxflow.policies.agh.workers import Offer, staffing
from ctxflow.policies.views import TierView

PARTS = 4
"""A group's GPUs are divided among its tiers by so many parts: halves and quarters."""
Cut = dict[str, int]
"""Tier -> the most workers that it may have."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a tier may have, at a moment: fewest and most workers, the GPUs of one, and whose machines they are."""

    minimum: int
    maximum: int
    gpus: int
    machines: str

    @classmethod
    def of(cls, tier: TierView) -> Bounds:
        """Those of a tier as it is now."""
        return cls(tier.minimum, tier.maximum, tier.gpus, tier.machines)


def groups(offers: Sequence[Offer], tiers: Mapping[str, Bounds]) -> list[list[Offer]]:
    """The offers that are the same machines; each list has two at least."""
    found: dict[str, list[Offer]] = {}
    for offer in offers:
        if tiers[offer.name].machines and offer.workers:
            found.setdefault(tiers[offer.name].machines, []).append(offer)
    return [those for those in found.values() if len(those) > 1]


def cuts(group: Sequence[Offer], gpus: Mapping[str, int], total: int) -> list[Cut]:
    """The ways to divide a group's GPUs.

    :param gpus: of a worker of each tier.
    :param total: of the group.

    >>> two = [Offer("one-gpu", 8, 1.0, 1.0), Offer("four-gpus", 2, 4.0, 1.0)]
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
    """How to cut all groups: as before, unless another way saves `least_gain` of the cost; one group after the other.

    Where what is wanted takes no more GPUs than a group has, its tiers are as they are, and not in the answer.
    """
    gpus = {name: tier.gpus for name, tier in tiers.items()}
    chosen: Cut = {}
    for group in groups(offers, tiers):
        names = [offer.name for offer in group]
        total = max(tiers[name].maximum * gpus[name] for name in names)
        used = _used(wanted, mixes, limited(offers, chosen))
        if used is not None and sum(used[name] * gpus[name] for name in names) <= total:
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
    """The offers with no more workers than a cut has."""
    return [dataclasses.replace(o, workers=min(o.workers, cut.get(o.name, o.workers))) for o in offers]


def _used(wanted: Sequence[Wanted], mixes: Mixes, offers: Sequence[Offer]) -> Counter[str] | None:
    """Workers that a plan by AGH takes of each tier; None if it cannot serve all."""
    asked = Asked.of(wanted, mixes, offers)
    problem = asked.problem(1.0)
    allocation = solve(problem, "agh").allocation
    if allocation is None or max(allocation.unserved) > SERVED:
        return None
    found: Counter[str] = Counter()
    for each in staffing(problem, offers, asked.speeds, allocation):
        found[offers[each.offer].name] += each.workers
    return found
