"""The experiments on one plan: under stress, with less money, with other limits and prices; and planning's time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ctxflow.policies.agh import Problem, solve
from ctxflow_papers.gh_agh.instances import draw
from ctxflow_papers.gh_agh.studies import stress

FACTORS = (0.6, 0.8, 1.0, 1.2, 1.5)
"""What limits and prices are multiplied by: the paper's axes are only drawn."""
BUDGET_FACTORS = (0.3, 0.4, 0.5, 0.75, 1.0)
"""What the budget is multiplied by: the plan of the paper's instance spends 44 of its 100 $."""
STORAGES = (600.0, 800.0, 900.0, 1000.0, 1200.0)
"""C_s in GB."""
SHAPES = ((4, 4, 5), (6, 6, 10), (10, 10, 10), (15, 15, 10), (20, 20, 20))
MEDIA = (4, 5)
"""phi_4 and phi_5 of Table 2: image and video, counted from 0."""

Step = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


def scaled(
    problem: Problem,
    delay: float = 1.0,
    error: float = 1.0,
    price: float = 1.0,
    budget: float = 1.0,
    media: float = 1.0,
) -> Problem:
    """The problem with its delay limits, error limits, rents, budget, or penalties for media times these.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> scaled(paper_instance(), budget=0.75).budget_dollars
    75.0
    """
    kinds = tuple(
        kind.model_copy(
            update={
                "max_delay_seconds": kind.max_delay_seconds * delay,
                "max_error": min(1.0, kind.max_error * error),
                "unserved_dollars": kind.unserved_dollars * (media if n in MEDIA else 1.0),
            }
        )
        for n, kind in enumerate(problem.query_types)
    )
    tiers = tuple(tier.model_copy(update={"dollars_per_hour": tier.dollars_per_hour * price}) for tier in problem.tiers)
    update = {"query_types": kinds, "tiers": tiers, "budget_dollars": problem.budget_dollars * budget}
    return problem.model_copy(update=update)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of Table 2.

    :ivar budget: delta in $. :ivar media: what the penalties of image and video are multiplied by.
    """

    name: str
    budget: float
    media: float = 1.0


SETTINGS = (
    Setting("S1", 100.0),
    Setting("S2", 75.0),
    Setting("S3", 72.0),
    Setting("S4", 75.0, 5.0),
    Setting("S5", 72.0, 5.0),
)


def budgets(
    problem: Problem, settings: Sequence[Setting], methods: Sequence[str], scenarios: int, seed: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Table 2: a row of `stress` without inflation for each setting and method."""
    found = {}
    for setting in settings:
        given = scaled(problem, budget=setting.budget / problem.budget_dollars, media=setting.media)
        for row in stress(given, methods, (1.0,), scenarios, seed):
            found[setting.name, row["method"]] = row
    return found


Grid = dict[tuple[float, float], float]
"""AGH's cost in $ by two factors."""


def grid(problem: Problem, first: str, second: str, factors: Sequence[float] = FACTORS) -> Grid:
    """Figures 2d to 2f: AGH's cost with two of `scaled`'s parameters varied."""
    found = {}
    for a in BUDGET_FACTORS if first == "budget" else factors:
        for b in factors:
            costs = solve(scaled(problem, **{first: a, second: b}), "agh").costs
            assert costs is not None, "agh always has an allocation"
            found[a, b] = costs.total
    return found


def storages(problem: Problem, sizes: Sequence[float] = STORAGES) -> dict[float, tuple[float, float]]:
    """AGH's cost in $, and the share of demand that it leaves unserved, by C_s in GB."""
    found = {}
    for size in sizes:
        solution = solve(problem.model_copy(update={"storage_gb": size}), "agh")
        assert solution.allocation is not None and solution.costs is not None, "agh always has an allocation"
        found[size] = solution.costs.total, sum(solution.allocation.unserved) / len(solution.allocation.unserved)
    return found


def stressed_draws(
    shape: tuple[int, int, int],
    draws: int,
    scenarios: int,
    seed: int,
    time_limit: float,
    step: Step = lambda done: None,
) -> list[dict[str, float]]:
    """For each of some draws, the cost of each method's plan at 1.5 times the delays and errors, by method.

    :param time_limit: seconds for the exact method on each.
    """
    rows = []
    for number in range(draws):
        problem = draw(seed + number, shape)
        found = stress(problem, ("exact", "gh", "agh-printed", "agh"), (1.5,), scenarios, seed, time_limit)
        rows.append({row["method"]: row["cost"] for row in found})
        step((number + 1) / draws)
    return rows


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Seconds that a method took, and whether it was proven within its limit (exact) or is a heuristic's."""

    seconds: float
    done: bool


def runtimes(
    shapes: Sequence[tuple[int, int, int]], methods: Sequence[str], time_limit: float, seed: int, step: Step
) -> dict[tuple[tuple[int, int, int], str], Runtime]:
    """Table 5: CPU seconds from the problem to the checked answer; of the exact method, with a limit, on the clock."""
    found, number = {}, 0
    for shape in shapes:
        problem = draw(seed, shape)
        for method in methods:
            begun = time.process_time()
            solution = solve(problem, method, time_limit=time_limit)
            cpu = time.process_time() - begun
            exact = method == "exact"
            found[shape, method] = Runtime(solution.seconds if exact else cpu, solution.proven or not exact)
            number += 1
            step(number / (len(shapes) * len(methods)))
    return found
