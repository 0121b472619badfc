"""Planning every five minutes while demand wanders, or once a day (section 4.3)."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from ctxflow.policies.agh import Allocation, Problem, solve
from ctxflow.policies.agh.problem import Bools, Floats
from ctxflow.policies.agh.solution import Revision, Switching, plan_rolling
from ctxflow_papers.gh_agh.operation import keeps_up, operate

VOLATILITIES = (0.01, 0.02, 0.03, 0.04, 0.05)
"""sigma, of a step of five minutes."""
TRIALS, WINDOWS = 30, 288
LOAD = 3.0
"""What the rates are multiplied by: on the paper's instance the exact plan's GPUs are then used to 81 and 42 %."""
SWITCHING = Switching(start_seconds=120.0, load_seconds_per_gb=1.0, hold_hours=1.0, least_gain=0.01)
"""What a change is taken to cost: the paper has none. Two minutes until a GPU is there, weights at 1 GB/s."""

Step = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


def rolling_problem(problem: Problem) -> Problem:
    """The problem of a day whose demand matters: throughput decides, as in (12).

    alpha is 2 FLOP per parameter and token (the bytes of FP16 weights), as "derived from model FLOPs" has it, and the
    rates are `LOAD` times the instance's: with the values of the author's other study GPUs are used to 1 %, and no
    demand changes anything. The budget is ten times the instance's, and storage has no limit.
    """
    work = tuple(
        tuple((model.weights_gb,) * len(problem.tiers) for model in problem.models) for _ in problem.query_types
    )
    update: dict[str, object] = {"name": f"{problem.name}-rolling", "gflop_per_token": work, "storage_gb": 1e6}
    update["budget_dollars"] = 10 * problem.budget_dollars
    return at(problem.model_copy(update=update), np.full(problem.shape[0], LOAD))


def demand(types: int, volatility: float, trials: int, windows: int, seed: int) -> Floats:
    """(trials, windows, types) what the rates are multiplied by: a geometric random walk that starts at 1."""
    random = np.random.default_rng([seed, round(1e6 * volatility)])
    steps = random.normal(0.0, volatility, (trials, windows, types))
    steps[:, 0] = 0.0
    walk: Floats = np.exp(np.cumsum(steps, axis=1))
    return walk


def at(problem: Problem, factors: Floats) -> Problem:
    """The problem with its rates (I,) times these."""
    kinds = tuple(
        kind.model_copy(update={"queries_per_hour": kind.queries_per_hour * float(factor)})
        for kind, factor in zip(problem.query_types, factors, strict=True)
    )
    return problem.model_copy(update={"query_types": kinds})


@dataclasses.dataclass(frozen=True)
class Days:
    """What some trials came to.

    :ivar dollars: (trials,) of a day, without what changes of plan cost.
    :ivar switches: (trials,) how often deployments changed.
    :ivar switching_dollars: (trials,) what that costs by `SWITCHING`, whether or not the planner looked at it.
    """

    dollars: Floats
    switches: Floats
    switching_dollars: Floats


def static(problem: Problem, allocation: Allocation, walk: Floats) -> Days:
    """Days of a plan that stays: deployments and routes as planned, shares chosen anew in every window by (12).

    :param walk: (trials, windows, types) as `demand` gives it.
    """
    trials, windows, types = walk.shape
    found = operate(problem, allocation, walk.reshape(-1, types)).total.reshape(trials, windows)
    costs = allocation.costs(problem)
    none = np.zeros(trials)
    return Days(costs.rental + costs.model_storage + found.mean(axis=1), none, none)


class Replanner:
    """Days of plans that are revised in every window.

    A window is left out where what runs is the plan that is found for demand that needs no throughput, and it serves
    all of the window's: limits only narrow with demand, so that no better one is to be found there.

    :param method: how new plans are found.
    :param switching: what the planner takes a change to cost.
    :param seed: of the method's random orderings.
    """

    def __init__(self, problem: Problem, method: str, switching: Switching, seed: int) -> None:
        self.problem, self.method, self.switching, self.seed = problem, method, switching, seed
        least = solve(at(problem, np.full(problem.shape[0], 1e-9)), method, seed=seed)
        if least.allocation is None or least.costs is None:
            raise ValueError(f"{method} finds no plan for {problem.name}, so that there is nothing to revise")
        self.least, self.least_dollars = least.allocation, least.costs.total
        self.solved = 0

    def days(self, walk: Floats, step: Step = lambda done: None) -> Days:
        """What they come to."""
        trials, windows, types = walk.shape
        calm = keeps_up(self.problem, self.least, walk.reshape(-1, types)).reshape(trials, windows)
        plans, switches, dollars = [], np.zeros(trials), np.zeros(trials)
        for trial in range(trials):
            runs, switches[trial], dollars[trial] = self._day(walk[trial], calm[trial])
            plans.append(runs)
            step((trial + 1) / trials)
        return Days(_dollars(self.problem, plans, walk), switches, dollars)

    def _day(self, walk: Floats, calm: Bools) -> tuple[list[Allocation], int, float]:
        """What runs in each window, how often that changed, and what the changes cost."""
        runs: list[Allocation] = []
        now, switches, dollars = self._first(), 0, 0.0
        for factors, easy in zip(walk, calm, strict=True):
            if not (easy and now.deployments == self.least.deployments):
                revision = self._revise(at(self.problem, factors), now)
                if revision.switched:
                    switches += 1
                    dollars += SWITCHING.dollars(self.problem, now, revision.allocation)
                now = revision.allocation
            elif now != self.least:
                now = self.least  # The same deployments, and room for the routes that are best without a limit.
            runs.append(now)
        return runs, switches, dollars

    def _first(self) -> Allocation:
        """The plan of the start, where demand is as in the problem."""
        return plan_rolling(self.problem, method=self.method, seed=self.seed).allocation

    def _revise(self, problem: Problem, now: Allocation) -> Revision:
        self.solved += 1
        return plan_rolling(problem, now, method=self.method, switching=self.switching, seed=self.seed)


def _dollars(problem: Problem, plans: list[list[Allocation]], walk: Floats) -> Floats:
    """(trials,) what days cost whose windows have these plans; shares are chosen as in `static`."""
    found = np.zeros(walk.shape[:2])
    alike: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for trial, runs in enumerate(plans):
        for window, plan in enumerate(runs):
            places = frozenset((route.query_type, route.model, route.tier) for route in plan.routes)
            alike[plan.deployments, places].append((trial, window))
    for where in alike.values():
        trial, window = np.array(where).T
        plan = plans[trial[0]][window[0]]
        costs = plan.costs(problem)
        rest = operate(problem, plan, walk[trial, window]).total
        found[trial, window] = costs.rental + costs.model_storage + rest
    mean: Floats = found.mean(axis=1)
    return mean


def other_plans(problem: Problem, walk: Floats, every: int) -> float:
    """The share of windows in which GH deploys something else than at the start; one window in so many is looked at."""
    start = solve(problem, "gh").allocation
    assert start is not None, "gh always has an allocation"
    looked = walk[:, ::every].reshape(-1, walk.shape[2])
    found = [solve(at(problem, factors), "gh").allocation for factors in looked]
    return float(np.mean([plan is not None and plan.deployments != start.deployments for plan in found]))
