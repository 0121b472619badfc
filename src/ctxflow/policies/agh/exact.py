"""The exact method: the MILP of P_DM on HiGHS, from AGH's answer; and the improved one: the MILP around that answer."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, check
from ctxflow.policies.agh.draft import Draft, nearest
from ctxflow.policies.agh.heuristics import adaptive, enough, prohibitive
from ctxflow.policies.agh.linear_programs import Effort, Solver
from ctxflow.policies.agh.option_sets import OptionSets
from ctxflow.policies.agh.placement_program import PlacementProgram, build, read, written
from ctxflow.policies.agh.priced_search import PricedSearch, neighbourhood
from ctxflow.policies.agh.problem import Arrays, Bools, Problem
from ctxflow.policies.agh.set_program import OptionTable


@dataclasses.dataclass(frozen=True)
class MilpResult:
    """What the solver found.

    :ivar allocation: its best, None if it found none in its time, or if there is none.
    :ivar bound: the least dollars of any allocation; None if there is none, or if the solver contradicted itself.
    :ivar closed: whether the allocation was proven to be the best, within the gap requested.
    """

    allocation: Allocation | None
    bound: float | None
    closed: bool


def exact(arrays: Arrays, time_limit: float = 600.0, gap: float = 1e-4, tightened: bool = True) -> MilpResult:
    """Return the cheapest allocation, or the best found in time, with a bound on how much better there could be.

    It starts from AGH's answer, and its own never costs more. Each answer is checked against the constraints; one that
    contradicts them, or the bound, is found again without presolve, and if that does too, it comes without a bound.

    :param time_limit: seconds for the solver; the answer is rounded after that.
    :param gap: the share of the cost by which the answer may be above the bound and still count as the best.
    :param tightened: as in `build`.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> poor = paper_instance().model_copy(update={"budget_dollars": 20.0})
    >>> exact(Arrays.of(poor)).closed
    True
    """
    known = adaptive(arrays).allocation()
    start = None if check(arrays.problem, known) else known
    return search(arrays, arrays.options(), Effort(seconds=time_limit, gap=gap), start, tightened)


def search(
    arrays: Arrays, options: Bools, effort: Effort, start: Allocation | None, tightened: bool = True
) -> MilpResult:
    """Return the cheapest allocation over some configurations (J, K, C), as far as the effort goes.

    :param start: an allocation that breaks no constraint: the answer costs no more.
    """
    made = build(arrays, options, tightened)
    most = np.inf if start is None else start.costs(arrays.problem).total
    begun = time.monotonic()
    outcome = _attempt(arrays, made, effort, start, presolve=True)
    if not _credible(arrays.problem, outcome, most, effort.gap):
        left = dataclasses.replace(effort, seconds=effort.seconds - (time.monotonic() - begun))
        outcome = _attempt(arrays, made, left, start, presolve=False)
        if not _credible(arrays.problem, outcome, most, effort.gap):
            outcome = MilpResult(outcome.allocation, None, False)
    return _no_worse(arrays.problem, outcome, start)


def _credible(problem: Problem, outcome: MilpResult, most: float, gap: float) -> bool:
    """Return whether the checker agrees, and neither bound nor proof is above what a feasible allocation costs."""
    slack = 1 + max(gap, 1e-5)
    if outcome.allocation is None:
        possible = np.isfinite(most) or all(kind.max_unserved >= 1 for kind in problem.query_types)
        return not (outcome.closed and possible) and (outcome.bound or 0.0) <= most * slack
    total = outcome.allocation.costs(problem).total
    agreed = outcome.bound is not None and outcome.bound <= min(total, most) * slack + 1e-6
    least = most if outcome.bound is None else min(most, outcome.bound)
    proven = not outcome.closed or total <= least * slack + 1e-6
    return agreed and proven and not check(problem, outcome.allocation)


def _no_worse(problem: Problem, outcome: MilpResult, start: Allocation | None) -> MilpResult:
    """Return the outcome, with the start in the place of an answer that costs more or breaks a constraint."""
    found = outcome.allocation
    if start is None:
        return outcome
    if found is not None and not check(problem, found) and found.costs(problem).total <= start.costs(problem).total:
        return outcome
    return dataclasses.replace(outcome, allocation=start, closed=outcome.closed and found is not None)


def _attempt(
    arrays: Arrays, made: PlacementProgram, effort: Effort, start: Allocation | None, presolve: bool
) -> MilpResult:
    values = None if start is None else written(made, start, arrays)
    program, solver = made.program, Solver(presolve)
    found = solver.solve(program, effort, values)
    if found.values is None:
        bound = None if found.infeasible else max(found.bound * made.unit, 0.0)
        return MilpResult(None, bound, found.infeasible)
    # What is whole is rounded, and the rest found anew.
    whole = np.round(found.values)
    lower, upper = (np.where(program.integral, whole, edge) for edge in (program.lower, program.upper))
    rest = dataclasses.replace(program, lower=lower, upper=upper, integral=np.zeros_like(program.integral))
    clean = solver.solve(rest).values
    return MilpResult(
        read(arrays, made, found.values if clean is None else clean), found.bound * made.unit, found.closed
    )


AROUND = 24  # Configurations in the neighbourhood besides those of the best set's own pairs.
WORK = 800_000  # Of the search for that set, in the unit of `OptionSets.work`.
NODES = 300  # Of the branch and bound in the neighbourhood.


def improved(arrays: Arrays, seed: int = 0) -> Allocation:
    """Return the best allocation among the most promising configurations around AGH's answer, never above AGH's own.

    Deterministic: it is limited in work, not in time.

    :param seed: of AGH's random orderings.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> arrays = Arrays.of(paper_instance())
    >>> improved(arrays).costs(arrays.problem).total <= adaptive(arrays).total + 1e-6
    True
    """
    draft = adaptive(arrays, seed=seed)
    known = draft.allocation()
    start = known if enough(draft) and not check(arrays.problem, known) else None
    near = _near(arrays, draft)
    if not near.any():
        return known
    found = search(arrays, near, Effort(nodes=NODES), start).allocation
    return known if found is None or check(arrays.problem, found) else found


def _near(arrays: Arrays, draft: Draft) -> Bools:
    """Return (J, K, C) the configurations around a draft, or around a better one that a longer search finds."""
    sets = OptionSets(OptionTable(arrays, prohibitive(arrays)))
    chosen = nearest(draft, sets.options.options, sets.options.span)
    found = PricedSearch(sets, WORK).search(chosen) or PricedSearch(sets, WORK).search([])
    return neighbourhood(sets, () if found is None else found.chosen, AROUND)
