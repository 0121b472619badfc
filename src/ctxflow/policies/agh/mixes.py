"""How the items of apps that name alternatives are divided: the cheapest mix of contexts within the error limit.

An average over two contexts has every error between theirs, so that the cheapest mix of all is one context, or two at
the limit, as long as there are workers enough. There are few of these; each is planned, and the cheapest taken. (Left
to the problem's own error constraint (5j), GH fills the limit with the cheapest context first, and then has no place
for the rest.)

What does not live here: the problem (`asked`), and plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ctxflow.policies.agh.asked import Asked, Mixes
from ctxflow.policies.agh.demand import Wanted
from ctxflow.policies.agh.solution import solve
from ctxflow.policies.agh.workers import Offer


def mixes(wanted: Wanted) -> list[dict[str, float]]:
    """The mixes of an app's contexts that may be the cheapest, first its own context alone, which keeps the limit.

    >>> from ctxflow.policies.agh.demand import ContextOption
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
    """App -> the share of each context, for all apps, one app after the other.

    :param before: the mixes in place, each of which is kept unless another saves `least_gain` of the cost.
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
    """What the workers of a plan by AGH cost in an hour; what is unserved is dear."""
    problem = Asked.of(wanted, chosen, offers).problem(1.0)
    solution = solve(problem, "agh")
    return solution.allocation.costs(problem).total if solution.allocation is not None else float("inf")
