"""Planning again while something runs: keep what is there, or change to a new plan.

One step, from the previous allocation and a new problem to the next allocation, and what a change costs: the paper's
keep-best (section 4.3), with a price on switching, which the paper has not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, Deployment, Route, check
from ctxflow.policies.agh.arrays import Arrays, Constants
from ctxflow.policies.agh.draft import NOTHING, Choices, Draft, Mechanisms
from ctxflow.policies.agh.heuristics import orderings
from ctxflow.policies.agh.problem import Problem
from ctxflow.policies.agh.solution import solve

ORDERS = 4
"""From how many orderings the routes over what runs are found, besides the previous routes."""


@dataclasses.dataclass(frozen=True)
class Switching:
    """What it takes to change plans, and how much better a new one has to be.

    A deployment that is new, or in another configuration, is paid for while it starts and loads, and serves nobody.
    Closing one is free. All zero, as by default, is the paper's keep-best.

    :ivar start_seconds: from when a GPU is asked for until it can load.
    :ivar load_seconds_per_gb: for each GB of the model's weights.
    :ivar hold_hours: how long a new plan is expected to stay: what it saves in that time pays for the change.
    :ivar least_gain: hysteresis: the share of the present plan's cost that the new one has to save besides.
    """

    start_seconds: float = 0.0
    load_seconds_per_gb: float = 0.0
    hold_hours: float = 1.0
    least_gain: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} is {value!r}: it has to be a number, 0 or more")

    def dollars(self, problem: Problem, previous: Allocation, new: Allocation) -> float:
        """Return what changing from one allocation to another costs, once.

        >>> from ctxflow.policies.agh.problem import paper_instance
        >>> problem = paper_instance()
        >>> plan = solve(problem, "gh").allocation
        >>> slow = Switching(start_seconds=3600.0)
        >>> rent = plan.costs(problem).rental / problem.horizon_hours
        >>> slow.dollars(problem, Allocation((), (), (1.0,) * 6), plan) == rent, slow.dollars(problem, plan, plan)
        (True, 0.0)
        """
        seconds = 0.0
        for each in set(new.deployments) - set(previous.deployments):
            wait = self.start_seconds + self.load_seconds_per_gb * problem.models[each.model].weights_gb
            seconds += wait * each.gpus * problem.tiers[each.tier].dollars_per_hour
        return seconds / 3600


@dataclasses.dataclass(frozen=True)
class Revision:
    """What a step decided.

    :ivar allocation: what to run from now on.
    :ivar switched: whether deployments change; routes may change without that.
    :ivar kept_dollars: what the present deployments would cost over the horizon, with the best routes found for them.
    :ivar new_dollars: what the new plan costs.
    :ivar switching_dollars: what the change to it costs, once, whether or not it was made.
    """

    allocation: Allocation
    switched: bool
    kept_dollars: float
    new_dollars: float
    switching_dollars: float

    def __str__(self) -> str:
        chosen = "changes to a new plan" if self.switched else "keeps what runs"
        return (
            f"{chosen}: {self.kept_dollars:.2f} $ as it is, {self.new_dollars:.2f} $ as newly planned, and "
            f"{self.switching_dollars:.2f} $ for the change"
        )


def plan_rolling(
    problem: Problem,
    previous: Allocation | None = None,
    *,
    before: Problem | None = None,
    method: str = "agh",
    switching: Switching | None = None,
    seed: int = 0,
) -> Revision:
    """Return the next allocation, given the one that runs now and the problem as it is now.

    Deterministic. What runs is kept, with routes chosen anew, unless a new plan saves more than the change to it
    costs, or what runs breaks a constraint and the new plan breaks none.

    :param previous: what runs; None or no deployments at the start.
    :param before: the problem to which `previous` is an answer, if its lists are not the new problem's: deployments
        and routes are then carried over by name.
    :param method: how new plans are found, one of `METHODS`.
    :param switching: what a change costs; nothing by default, as in the paper.
    :param seed: of the method's random orderings.
    :raises ValueError: for an unknown method.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> problem = paper_instance()
    >>> first = plan_rolling(problem)
    >>> first.switched, plan_rolling(problem, first.allocation).switched
    (True, False)
    """
    switching = switching or Switching()
    arrays = Arrays.of(problem)
    nothing = Allocation((), (), (1.0,) * len(problem.query_types))
    runs = carried(previous or nothing, before or problem, problem)
    kept = over_deployments(arrays, runs).allocation()
    found = solve(problem, method, seed=seed)
    new = kept if found.allocation is None else found.allocation
    kept_dollars, new_dollars = kept.costs(problem).total, new.costs(problem).total
    price = switching.dollars(problem, runs, new)
    saved = (kept_dollars - new_dollars) * switching.hold_hours / problem.horizon_hours
    wanted = price + switching.least_gain * kept_dollars * switching.hold_hours / problem.horizon_hours
    better = saved > wanted + 1e-9
    if check(problem, kept):
        better = better or (found.allocation is not None and not found.violations)
    elif found.violations:
        better = False
    chosen = new if better else kept
    return Revision(chosen, set(chosen.deployments) != set(runs.deployments), kept_dollars, new_dollars, price)


def carried(allocation: Allocation, before: Problem, problem: Problem) -> Allocation:
    """Return an allocation in the terms of another problem, matched by names.

    Left out are deployments whose model or tier is no more, or whose configuration the tier no longer allows or no
    longer holds; of more GPUs than a tier still has, the deployments that are listed first keep theirs.
    """
    kinds, models, tiers = (
        [
            {each.name: n for n, each in enumerate(getattr(problem, field))}.get(old.name)
            for old in getattr(before, field)
        ]
        for field in ("query_types", "models", "tiers")
    )
    deployments, used = [], [0] * len(problem.tiers)
    for each in allocation.deployments:
        j, k = models[each.model], tiers[each.tier]
        if j is None or k is None:
            continue
        tier = problem.tiers[k]
        allowed = each.tensor_parallel in tier.tensor_parallel and each.pipeline_parallel in tier.pipeline_parallel
        held = problem.models[j].weights_gb <= tier.memory_gb * each.gpus
        if allowed and held and (tier.gpus is None or used[k] + each.gpus <= tier.gpus):
            used[k] += each.gpus
            deployments.append(Deployment(j, k, each.tensor_parallel, each.pipeline_parallel, each.gpus))
    pairs = {(each.model, each.tier) for each in deployments}
    routes = []
    for route in allocation.routes:
        i, j, k = kinds[route.query_type], models[route.model], tiers[route.tier]
        if i is not None and j is not None and k is not None and (j, k) in pairs:
            routes.append(Route(i, j, k, route.share))
    unserved = np.ones(len(problem.query_types))
    for route in routes:
        unserved[route.query_type] -= route.share
    return Allocation(tuple(deployments), tuple(routes), tuple(float(max(0.0, share)) for share in unserved))


def over_deployments(arrays: Constants, allocation: Allocation) -> Draft:
    """Return the allocation's deployments as they are, with the cheapest routes found over them.

    Routes start as they were, each as far as the limits still allow, and from nothing in several orders.
    """
    empty = Draft(Choices(arrays, Mechanisms()))
    for each in allocation.deployments:
        same = (arrays.tensor == each.tensor_parallel) & (arrays.pipeline == each.pipeline_parallel)
        empty.activate(each.model, each.tier, int(np.flatnonzero(same)[0]))
    return rerouted(empty, [(each.query_type, each.model, each.tier, each.share) for each in allocation.routes])


def rerouted(empty: Draft, routes: Sequence[tuple[int, int, int, float]]) -> Draft:
    """Return the cheapest routes found over what a draft without routes deploys.

    :param routes: those of before: query type, model, tier and share.
    """
    as_before, worth = empty.copy(), empty.arrays.unserved_dollars
    for route in sorted(routes, key=lambda route: -worth[route[0]]):
        _place(as_before, *route)
    drafts = [_fill(as_before, sorted(range(len(worth)), key=lambda i: -worth[i]))]
    if as_before.unserved.max() > NOTHING or not routes:
        drafts += [_fill(empty.copy(), order) for order in itertools.islice(orderings(empty.arrays, 0), ORDERS)]
    return min(drafts, key=lambda draft: draft.total)


def _place(draft: Draft, i: int, j: int, k: int, share: float) -> None:
    possible = min(share, _room(draft, i, j, k))
    if possible > NOTHING:
        draft.place(i, j, k, int(draft.config[j, k]), possible)


def _fill(draft: Draft, order: list[int]) -> Draft:
    """Serve what is unserved with what runs, where it costs least for its share; the draft is changed."""
    arrays, pairs = draft.arrays, [(int(j), int(k)) for j, k in np.argwhere(draft.config >= 0)]
    for i in order:
        while draft.unserved[i] > NOTHING:
            wanted = float(draft.unserved[i])
            shares = {pair: min(wanted, _room(draft, i, *pair)) for pair in pairs}
            costs = {
                (j, k): arrays.delay_dollars[i] * arrays.delay[i, j, k, draft.config[j, k]]
                + (0.0 if (j, k) in draft.routes[i] else arrays.model_dollars[j] / share)
                for (j, k), share in shares.items()
                if share > NOTHING
            }
            if not costs:
                break
            best = min(costs, key=lambda pair: (shares[pair] < wanted - NOTHING, costs[pair]))
            draft.place(i, *best, int(draft.config[best]), shares[best])
    return draft


def _room(draft: Draft, i: int, j: int, k: int) -> float:
    """Return the share of a query type that an active pair can take besides, as it is: (5c), (5f) to (5j).

    Unlike M3's, it may be one whose delay or error is over the limit: averages count, and another route may be under.
    """
    arrays, config = draft.arrays, int(draft.config[j, k])
    stored = arrays.hours * arrays.storage_price
    weights = 0.0 if (j, k) in draft.routes[i] else float(arrays.weights_gb[j])
    storage = min(
        arrays.storage - draft.stored,
        (arrays.budget - draft.rent - draft.storage_dollars) / stored if stored else np.inf,
    )
    limits = (
        (arrays.max_delay[i] - draft.delay[i], arrays.delay[i, j, k, config]),
        (arrays.max_error[i] - draft.error[i], arrays.error[i, j, k]),
        (arrays.capacity[k] * arrays.gpus[config] - draft.work[j, k], arrays.work[i, j, k]),
        (arrays.spare_gb[j, k, config] - draft.kv[j, k], arrays.kv_gb[i, j, k]),
        (storage - weights, arrays.data_gb[i]),
    )
    if any(left < 0 for left, _ in limits):
        return 0.0
    return min((float(left / each) for left, each in limits if each > 0), default=np.inf)
