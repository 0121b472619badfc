"""The paper's studies of a plan: the second stage of its evaluation, stress, and the ablation of M1 to M3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ctxflow.policies.agh.allocation import Allocation
from ctxflow.policies.agh.draft import Mechanisms
from ctxflow.policies.agh.problem import Problem
from ctxflow.policies.agh.solution import solve
from ctxflow_papers.gh_agh.operation import Operation, operate

SPREAD = 0.25
"""How far delays and errors are from what was planned with, at most, as a share."""
ARRIVALS = 0.20
"""How far arrivals are."""
VIOLATED = 0.01
"""A query type of which more than this is unserved has its limits violated."""


def perturbed(
    problem: Problem,
    allocation: Allocation,
    scenarios: int = 500,
    inflation: float = 1.0,
    seed: int = 0,
    spread: float = SPREAD,
    arrivals: float = ARRIVALS,
) -> Operation:
    """A plan in operation when delays, errors and arrivals are not as planned.

    Delays and errors are drawn by route, arrivals by query type, evenly within the spreads.

    :param inflation: what all delays and errors are multiplied by besides.
    :param seed: of the scenarios: the same ones for every plan of a problem, and for every inflation.
    :raises ModuleNotFoundError: without SciPy.
    """
    random = np.random.default_rng([seed, scenarios])
    shape = problem.shape
    delays, errors = random.uniform(1 - spread, 1 + spread, (2, scenarios, *shape)) * inflation
    rates = random.uniform(1 - arrivals, 1 + arrivals, (scenarios, shape[0]))
    return operate(problem, allocation, rates, delays, errors)


def second_stage(
    problem: Problem,
    allocation: Allocation,
    scenarios: int = 500,
    inflation: float = 1.0,
    seed: int = 0,
    spread: float = SPREAD,
    arrivals: float = ARRIVALS,
) -> tuple[float, float]:
    """What a plan costs when delays, errors and arrivals are not as planned: section 4.2, with the parameters above.

    :returns: the expected cost C1 + C2 + mean(C3 + C4 + C5) in $, and the share of query types over the scenarios of
        which more than 1 % is unserved.
    :raises ModuleNotFoundError: without SciPy.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> problem = paper_instance()
    >>> planned = solve(problem, "agh")
    >>> cost, violated = second_stage(problem, planned.allocation, scenarios=1, spread=0.0, arrivals=0.0)
    >>> cost <= planned.costs.total + 1e-6, violated
    (True, 0.0)
    """
    found = perturbed(problem, allocation, scenarios, inflation, seed, spread, arrivals)
    costs = allocation.costs(problem)
    expected = costs.rental + costs.model_storage + float(found.total.mean())
    return expected, float((found.unserved > VIOLATED).mean())


def stress(
    problem: Problem,
    methods: Sequence[str] = ("exact", "gh", "agh"),
    inflations: Iterable[float] = (1.0, 1.2, 1.5),
    scenarios: int = 500,
    seed: int = 0,
    time_limit: float | None = None,
) -> list[dict[str, Any]]:
    """Plans of several methods under stress (Figure 2a to 2c): a row for each method and inflation.

    :param methods: of `METHODS`; one with "+1.25" at its end plans with a margin of 0.25.
    :param time_limit: seconds for the exact method.
    :returns: rows of `method`, `inflation`, `planned` ($), `cost` ($), its five parts `rental`, `model_storage`,
        `data_storage`, `delay` and `unserved` ($), `violated` (a share).
    :raises ValueError: if a method has no allocation.
    """
    rows = []
    plans = {}
    for method in methods:
        name, _, margin = method.partition("+")
        kept = [float(margin or 1) - 1] * len(problem.query_types)
        planned = solve(problem, name, time_limit=time_limit, margins=kept)
        if planned.allocation is None:
            raise ValueError(f"{method} has no allocation for {problem.name}, so that there is nothing to stress")
        plans[method] = planned.allocation
    for inflation in inflations:
        for method, plan in plans.items():
            costs = plan.costs(problem)
            found = perturbed(problem, plan, scenarios, inflation, seed)
            rows.append({
                "method": method, "inflation": inflation, "planned": costs.total,
                "cost": costs.rental + costs.model_storage + float(found.total.mean()),
                "rental": costs.rental, "model_storage": costs.model_storage,
                "data_storage": float(found.data_storage.mean()), "delay": float(found.delay.mean()),
                "unserved": float(found.unserved_dollars.mean()),
                "violated": float((found.unserved > VIOLATED).mean()),
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
