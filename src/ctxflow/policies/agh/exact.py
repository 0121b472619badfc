"""The exact method: the MILP of P_DM (`milp`) on HiGHS; and the improved one: AGH, then the MILP around its answer."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import numpy as np

from ctxflow.installing import how_to_install
from ctxflow.policies.agh.allocation import Allocation, Deployment, Route, check
from ctxflow.policies.agh.arrays import Arrays, Bools, Floats
from ctxflow.policies.agh.draft import Choices, Mechanisms
from ctxflow.policies.agh.heuristics import adaptive, enough, greedy
from ctxflow.policies.agh.local_search import Exchange
from ctxflow.policies.agh.milp import Program, build
from ctxflow.policies.agh.problem import Problem

INFEASIBLE = 2  # SciPy's status.
DROPPED = 1e-9  # Shares under this are rounding, and no routes.


@dataclasses.dataclass(frozen=True)
class MilpResult:
    """What the solver found.

    :ivar allocation: its best, None if it found none in its time, or if there is none.
    :ivar bound: no allocation costs less than this many dollars; None if there is no allocation at all, or if the
        solver contradicted itself.
    :ivar closed: whether the allocation was proven to be the best, within the gap asked for.
    """

    allocation: Allocation | None
    bound: float | None
    closed: bool


def exact(
    arrays: Arrays, time_limit: float = 600.0, gap: float = 1e-4, options: Bools | None = None, tightened: bool = True
) -> MilpResult:
    """Return the cheapest allocation, or the best found in time, with a bound on how much better there could be.

    Each answer is checked against the constraints and against GH's; one that contradicts them is found again without
    presolve, and if that does too, it comes without a bound.

    :param time_limit: seconds for the solver; the answer is cleaned up after that.
    :param gap: the share of the cost by which the answer may be above the bound and still count as the best.
    :param options: (J, K, C) which configurations may be used; the bound then holds among those only.
    :param tightened: False for the paper's own formulation, with a weaker relaxation: see `program.build`.
    :raises ModuleNotFoundError: without SciPy, saying what to install.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> outcome = exact(Arrays.of(paper_instance()))
    >>> outcome.closed
    True
    """
    _scipy()
    program = build(arrays, arrays.options() if options is None else options, tightened)
    feasible = greedy(arrays)
    most = feasible.total if options is None and not check(arrays.problem, feasible.allocation()) else np.inf
    begun = time.monotonic()
    outcome = _attempt(arrays, program, time_limit, gap, presolve=True)
    if not _credible(arrays.problem, outcome, most, gap):
        left = time_limit - (time.monotonic() - begun)
        outcome = _attempt(arrays, program, left, gap, presolve=False)
        if not _credible(arrays.problem, outcome, most, gap):
            return MilpResult(outcome.allocation, None, False)
    return outcome


def _credible(problem: Problem, outcome: MilpResult, most: float, gap: float) -> bool:
    """Return whether the checker agrees with the solver: HiGHS's presolve has given wrong optima on badly scaled rows.

    :param most: what a feasible allocation costs: neither the bound nor what is proven can be above it.
    """
    slack = 1 + max(gap, 1e-5)
    if outcome.allocation is None:
        possible = np.isfinite(most) or all(kind.max_unserved >= 1 for kind in problem.query_types)
        return not (outcome.closed and possible) and (outcome.bound or 0.0) <= most * slack
    total = outcome.allocation.costs(problem).total
    agreed = outcome.bound is not None and outcome.bound <= min(total, most) * slack + 1e-6
    least = most if outcome.bound is None else min(most, outcome.bound)
    proven = not outcome.closed or total <= least * slack + 1e-6
    return agreed and proven and not check(problem, outcome.allocation)


def _attempt(arrays: Arrays, program: Program, time_limit: float, gap: float, presolve: bool) -> MilpResult:
    options = {"mip_rel_gap": gap, "time_limit": max(time_limit, 1e-3), "presolve": presolve}
    found = _solve(program, options, program.lower, program.upper, program.integral)
    bound = getattr(found, "mip_dual_bound", None)
    if found.x is None:
        infeasible = found.status == INFEASIBLE
        return MilpResult(None, None if bound is None or infeasible else max(bound * program.unit, 0.0), infeasible)
    whole = np.round(found.x)
    lower, upper = (np.where(program.integral, whole, edge) for edge in (program.lower, program.upper))
    clean = _solve(program, {"presolve": presolve}, lower, upper, np.zeros_like(program.integral))
    allocation = read(arrays, program, found.x if clean.x is None else clean.x)
    if bound is None:  # No variable was integral: a linear program is its own bound.
        bound = found.fun
    return MilpResult(allocation, bound * program.unit, found.status == 0)


def _solve(program: Program, options: dict[str, Any], lower: Floats, upper: Floats, integral: Bools) -> Any:
    milp, linear, bounds = _scipy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What HiGHS says of options that it passes on.
        return milp(
            program.cost,
            integrality=integral.astype(int),
            bounds=bounds(lower, upper),
            constraints=linear(program.matrix, -np.inf, program.limit),
            options=options,
        )


def _scipy() -> tuple[Any, Any, Any]:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"the exact and improved placement methods need SciPy: {how_to_install('scipy', extra='policies')}"
        ) from None
    return milp, LinearConstraint, Bounds


def read(arrays: Arrays, program: Program, values: Floats) -> Allocation:
    """Return the allocation that a solution stands for."""
    w, _, x, _, _ = program.parts(values, arrays.shape[0])
    chosen = program.options[w > 0.5]
    deployments = tuple(
        Deployment(int(j), int(k), int(arrays.tensor[c]), int(arrays.pipeline[c]), int(arrays.gpus[c]))
        for j, k, c in chosen
    )
    x = np.where(x > DROPPED, x, 0.0)
    x /= np.maximum(x.sum(axis=1, keepdims=True), 1.0)  # A solver's shares may be a rounding above the whole.
    routes = tuple(
        Route(int(i), int(program.pairs[p, 0]), int(program.pairs[p, 1]), float(x[i, p])) for i, p in np.argwhere(x)
    )
    unserved = tuple(float(share) for share in np.maximum(0.0, 1.0 - x.sum(axis=1)))
    return Allocation(deployments, routes, unserved)


AROUND = 24
"""Configurations in the neighbourhood besides those of AGH's own pairs."""


def improved(arrays: Arrays, seed: int = 0, time_limit: float = 2.0) -> Allocation:
    """Return the best allocation among the configurations that look most promising around AGH's answer.

    It is never above AGH's own.

    :param seed: of AGH's random orderings.
    :param time_limit: seconds for the solver; AGH's answer stands if it finds nothing better.
    :raises ModuleNotFoundError: without SciPy, saying what to install.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> arrays = Arrays.of(paper_instance())
    >>> improved(arrays).costs(arrays.problem).total <= adaptive(arrays).total + 1e-6
    True
    """
    draft = adaptive(arrays, seed=seed)
    found = draft.allocation()
    # Where AGH leaves more unserved than is allowed, what is near its answer is no better: all of it then.
    near = Exchange(arrays, Choices(arrays, Mechanisms())).pool(draft, AROUND) if enough(draft) else None
    if near is not None and not near.any():
        return found
    better = exact(arrays, time_limit, options=near).allocation
    if better is None or check(arrays.problem, better):
        return found
    return better if not enough(draft) or better.costs(arrays.problem).total < draft.total else found
