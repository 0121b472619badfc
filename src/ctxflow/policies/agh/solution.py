"""One front for all methods: solve a problem, and plan again while its answer runs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, CostTerms, Deployment, Route, Violation, check
from ctxflow.policies.agh.draft import Choices, Draft, Mechanisms
from ctxflow.policies.agh.exact import MilpResult, exact, improved
from ctxflow.policies.agh.heuristics import adaptive, greedy, rerouted
from ctxflow.policies.agh.margins import with_margins
from ctxflow.policies.agh.problem import Arrays, Constants, Problem
from ctxflow.policies.agh.unserved import LEAST_SHARE, Reason, Unserved, judge

METHODS = {
    "gh": "the paper's greedy heuristic",
    "agh": "the paper's adaptive one, which here also relocates whole deployments",
    "agh-printed": "the adaptive one with the paper's moves alone",
    "improved": "AGH, then the exact method around its answer",
    "exact": "the MILP, proven as far as the time limit allows",
}


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a method found.

    :ivar allocation: None if there is none, or if the exact method found none in its time. :ivar costs: its five terms.
    :ivar violations: what the independent checker says. :ivar seconds: for the method, without the check.
    :ivar bound: the exact method's lower bound in dollars, of all that keep the margins; None for the others.
    :ivar margins: by query type, the share by which delays and errors may be above what is known: see `margins`.
    :ivar proven: whether it is proven to be the best within the gap; without an allocation, that there is none.
    """

    problem: Problem
    method: str
    allocation: Allocation | None
    costs: CostTerms | None
    violations: list[Violation]
    seconds: float
    bound: float | None
    proven: bool
    margins: tuple[float, ...] = ()

    @functools.cached_property
    def left(self) -> Unserved:
        """Return what of the unserved demand could be served, and what keeps the rest; worked out when first asked."""
        if self.allocation is not None and max(self.allocation.unserved) <= LEAST_SHARE:
            return Unserved()
        return judge(self.problem, self.allocation)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why not all is served."""
        return self.left.reasons

    @property
    def feasible(self) -> bool:
        """Return whether there is an allocation that keeps every constraint."""
        return self.allocation is not None and not self.violations

    @property
    def gap(self) -> float | None:
        """Return how much of the cost might be saved at most, None without a bound."""
        if self.bound is None or self.costs is None:
            return None
        return max(0.0, (self.costs.total - self.bound) / self.costs.total) if self.costs.total else 0.0

    def as_data(self) -> dict[str, Any]:
        """Return all of it for JSON; docs/placement.md describes each field."""
        costs = None if self.costs is None else {**dataclasses.asdict(self.costs), "total": self.costs.total}
        nothing: dict[str, Any] = {"deployments": [], "routes": [], "unserved": {}}
        return {
            "problem": self.problem.name,
            "method": self.method,
            "feasible": self.feasible,
            "violations": [{**dataclasses.asdict(each), "text": str(each)} for each in self.violations],
            "costs": costs,
            "seconds": self.seconds,
            "bound": self.bound,
            "gap": self.gap,
            "proven": self.proven,
            "reasons": [{**dataclasses.asdict(each), "text": str(each)} for each in self.reasons],
            "margins": {kind.name: m for kind, m in zip(self.problem.query_types, self.margins, strict=False)},
            "could_be_served": self.left.possible,
            "could_be_served_dollars": self.left.dollars,
            "unserved_settled": self.left.settled,
            **(nothing if self.allocation is None else self.allocation.as_data(self.problem)),
        }


def solve(
    problem: Problem,
    method: str = "agh",
    *,
    mechanisms: Mechanisms | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    gap: float = 1e-4,
    margins: Sequence[float] | None = None,
) -> Solution:
    """Solve a problem, and check the answer.

    :param method: one of `METHODS`.
    :param mechanisms: M1 to M3 for gh, agh and agh-printed; all on by default.
    :param seed: of the random orderings of agh and improved.
    :param time_limit: seconds for the solver of exact (600 by default), which ends within `gap`, a share of the cost.
    :param margins: by query type, by how much delays and errors may turn out above what the problem says; none by
        default. A query type that cannot be served whole with its margin is planned without, and all are where more is
        served so.
    :raises ValueError: for an unknown method.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> solution = solve(paper_instance(), "agh")
    >>> solution.feasible, max(solution.allocation.unserved)
    (True, 0.0)
    """
    if method not in METHODS:
        raise ValueError(f"there is no placement method {method!r}: choose one of {', '.join(METHODS)}")
    begun = time.perf_counter()
    kept = list(margins or [0.0] * len(problem.query_types))

    def planned(margins: Sequence[float]) -> tuple[MilpResult, list[float]]:
        arrays = Arrays.of(with_margins(problem, margins))
        found = _found(arrays, method, mechanisms, seed, time_limit, gap)
        return found, [1.0] * len(kept) if found.allocation is None else list(found.allocation.unserved)

    found, unserved = planned(kept)
    while any(margin and share > LEAST_SHARE for margin, share in zip(kept, unserved, strict=True)):
        kept = [0.0 if share > LEAST_SHARE else margin for margin, share in zip(kept, unserved, strict=True)]
        found, unserved = planned(kept)
    if any(kept) and max(unserved) > LEAST_SHARE:  # The margins of those that are served take room, too.
        without = [0.0] * len(kept)
        other, left = planned(without)
        if sum(left) < sum(unserved) - LEAST_SHARE:
            found, kept = other, without
    seconds = time.perf_counter() - begun
    allocation = found.allocation
    return Solution(
        problem=problem,
        method=method,
        allocation=allocation,
        costs=None if allocation is None else allocation.costs(problem),
        violations=[] if allocation is None else check(problem, allocation),
        seconds=seconds,
        bound=found.bound,
        proven=found.closed,
        margins=tuple(kept),
    )


def _found(
    arrays: Arrays, method: str, mechanisms: Mechanisms | None, seed: int, time_limit: float | None, gap: float
) -> MilpResult:
    """Return what a method finds, with a bound if it is the exact one."""
    if method == "exact":
        return exact(arrays, 600.0 if time_limit is None else time_limit, gap)
    if method == "gh":
        allocation = greedy(arrays, mechanisms).allocation()
    elif method == "improved":
        allocation = improved(arrays, seed)
    else:
        allocation = adaptive(arrays, mechanisms, seed, printed=method == "agh-printed").allocation()
    return MilpResult(allocation, None, False)


@dataclasses.dataclass(frozen=True)
class Switching:
    """The price of a change of plans, and how much better a new one must be. By default the paper's keep-best.

    A deployment that is new, or in another configuration, is paid for while it starts and loads. Closing one is free.

    :ivar start_seconds: from when a GPU is requested until it can load.
    :ivar load_seconds_per_gb: for each GB of the model's weights.
    :ivar hold_hours: how long a new plan is expected to stay: what it saves in that time pays for the change.
    :ivar least_gain: hysteresis: the share of the present plan's cost that the new one must save besides.
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
    """What a step decided: the allocation to run, and whether deployments change.

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
    """Return the next allocation, given the one that runs now and the problem as it is now: the keep-best of 4.3.

    Deterministic. What runs is kept, with new routes, unless a new plan saves more than the change to it
    costs, or what runs breaks a constraint and the new plan breaks none.

    :param previous: what runs; None or no deployments at the start.
    :param before: the problem of `previous`, if its lists are not the new problem's: names are then matched.
    :param method: how new plans are found, one of `METHODS`. :param seed: of its random orderings.
    :param switching: what a change costs; nothing by default, as in the paper.
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

    Left out are deployments whose model or tier is gone, whose configuration the tier no longer allows or holds, and
    the last ones beyond the GPUs that a tier still has.
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
    """Return the allocation's deployments as they are, with the cheapest routes found over them."""
    empty = Draft(Choices(arrays, Mechanisms()))
    for each in allocation.deployments:
        same = (arrays.tensor == each.tensor_parallel) & (arrays.pipeline == each.pipeline_parallel)
        empty.activate(each.model, each.tier, int(np.flatnonzero(same)[0]))
    return rerouted(empty, [(each.query_type, each.model, each.tier, each.share) for each in allocation.routes])
