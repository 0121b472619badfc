"""The paper's studies of a plan: the second stage of its evaluation, stress, and the ablation of M1 to M3.

What lives here: tables as data, one dict a row. What does not live here: the figures that the paper prints, and how
tables are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ctxflow.policies.placement.allocation import Allocation
from ctxflow.policies.placement.arrays import Arrays, Floats
from ctxflow.policies.placement.draft import Mechanisms
from ctxflow.policies.placement.problem import Problem
from ctxflow.policies.placement.solution import solve

SPREAD = 0.25
"""How far delays and errors are from what was planned with, at most, as a share."""
ARRIVALS = 0.20
"""How far arrivals are."""
VIOLATED = 0.01
"""A query type of which more than this is unserved has its limits violated."""


def second_stage(
    problem: Problem,
    allocation: Allocation,
    scenarios: int = 500,
    inflation: float = 1.0,
    seed: int = 0,
    spread: float = SPREAD,
    arrivals: float = ARRIVALS,
) -> tuple[float, float]:
    """What a plan costs when delays, errors and arrivals are not as planned: (12a) to (12f).

    What is deployed stays, and each query type is sent only where it was planned to go; shares are chosen anew.
    Delays and errors are drawn by route, arrivals by query type, evenly within the spreads.

    :param inflation: what all delays and errors are multiplied by besides.
    :param seed: of the scenarios: the same ones for every plan of a problem, and for every inflation.
    :returns: the expected cost C1 + C2 + mean(C3 + C4 + C5) in $, and the share of query types over the scenarios of
        which more than 1 % is unserved.
    :raises ModuleNotFoundError: without SciPy.

    >>> from ctxflow.policies.placement.instances import paper_instance
    >>> problem = paper_instance()
    >>> planned = solve(problem, "agh")
    >>> cost, violated = second_stage(problem, planned.allocation, scenarios=1, spread=0.0, arrivals=0.0)
    >>> cost <= planned.costs.total + 1e-6, violated
    (True, 0.0)
    """
    arrays = Arrays.of(problem)
    random = np.random.default_rng([seed, scenarios])
    costs = allocation.costs(problem)
    recourse, violated = [], []
    for _ in range(scenarios):
        shape = arrays.error.shape
        delays, errors = np.asarray(random.uniform(1 - spread, 1 + spread, (2, *shape)) * inflation)
        rates = np.asarray(random.uniform(1 - arrivals, 1 + arrivals, shape[0]))
        cost, unserved = _recourse(arrays, allocation, delays, errors, rates)
        recourse.append(cost)
        violated.append(float((unserved > VIOLATED).mean()))
    return costs.rental + costs.model_storage + float(np.mean(recourse)), float(np.mean(violated))


def _recourse(
    arrays: Arrays, allocation: Allocation, delays: Floats, errors: Floats, rates: Floats
) -> tuple[float, Floats]:
    """C3 + C4 + C5 of a scenario, and what is unserved of each type, from the linear program (12)."""
    from scipy.optimize import linprog

    types, routes = len(rates), allocation.routes
    deployed = {(each.model, each.tier): n for n, each in enumerate(allocation.deployments)}
    cost = np.concatenate([np.zeros(len(routes)), arrays.unserved_dollars])
    served = np.hstack([np.zeros((types, len(routes))), np.eye(types)])
    limits = np.zeros((2 * types + len(deployed), len(cost)))
    stored = np.zeros(len(cost))
    for n, route in enumerate(routes):
        i, j, k = route.query_type, route.model, route.tier
        where = allocation.deployments[deployed[j, k]]
        config = int(np.flatnonzero((arrays.tensor == where.tensor_parallel) & (arrays.gpus == where.gpus))[0])
        seconds = arrays.delay[i, j, k, config] * delays[i, j, k]
        served[i, n] = 1.0
        cost[n] = arrays.delay_dollars[i] * seconds
        stored[n] = arrays.data_dollars[i] * rates[i]
        limits[i, n] = seconds / arrays.max_delay[i]
        limits[types + i, n] = arrays.error[i, j, k] * errors[i, j, k] / max(float(arrays.max_error[i]), 1e-12)
        limits[2 * types + deployed[j, k], n] = arrays.work[i, j, k] * rates[i] / (arrays.capacity[k] * where.gpus)
    found = linprog(cost, A_ub=limits, b_ub=np.ones(len(limits)), A_eq=served, b_eq=np.ones(types), bounds=(0, 1))
    if found.x is None:
        raise ArithmeticError(f"the second stage has an answer, and the solver found none: {found.message}")
    return float(found.fun + stored @ found.x), np.asarray(found.x[len(routes) :], dtype=float)


def stress(
    problem: Problem,
    methods: Sequence[str] = ("exact", "gh", "agh"),
    inflations: Iterable[float] = (1.0, 1.2, 1.5),
    scenarios: int = 500,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Plans of several methods under stress (Figure 2a to 2c): a row for each method and inflation.

    :returns: rows of `method`, `inflation`, `planned` ($), `rental` ($), `cost` ($), `violated` (a share).
    """
    rows = []
    plans = {method: solve(problem, method) for method in methods}
    for inflation in inflations:
        for method, plan in plans.items():
            if plan.allocation is None or plan.costs is None:
                raise ValueError(f"{method} has no allocation for {problem.name}, so that there is nothing to stress")
            cost, violated = second_stage(problem, plan.allocation, scenarios, inflation, seed)
            rows.append({
                "method": method, "inflation": inflation, "planned": plan.costs.total, "rental": plan.costs.rental,
                "cost": cost, "violated": violated,
            })  # fmt: skip
    return rows


def ablation(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """AGH with the paper's moves, whole and without each mechanism (Table 3): a row for each.

    :returns: rows of `without` ("", "M1", "M2", "M3"), `infeasible` (of the problems, a share), `cost` (their mean,
        $), `violated` (the constraints that were broken).
    """
    switched = {"": Mechanisms(), "M1": Mechanisms(select=False), "M2": Mechanisms(rank=False)}
    switched["M3"] = Mechanisms(upgrade=False)
    rows = []
    for without, mechanisms in switched.items():
        found = [solve(problem, "agh-printed", mechanisms=mechanisms) for problem in problems]
        rows.append({
            "without": without,
            "infeasible": float(np.mean([bool(each.violations) for each in found])),
            "cost": float(np.mean([each.costs.total for each in found if each.costs is not None])),
            "violated": sorted({violation.constraint for each in found for violation in each.violations}),
        })  # fmt: skip
    return rows
