"""One front for all methods: a problem in, a checked solution out.

What lives here: choosing the method by name, timing it, checking what it gives. What does not live here: any method.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ctxflow.policies.placement.adaptive import adaptive
from ctxflow.policies.placement.allocation import Allocation, Costs
from ctxflow.policies.placement.arrays import Arrays
from ctxflow.policies.placement.check import Violation, check
from ctxflow.policies.placement.draft import Mechanisms
from ctxflow.policies.placement.exact import exact
from ctxflow.policies.placement.greedy import greedy
from ctxflow.policies.placement.improved import improved
from ctxflow.policies.placement.problem import Problem
from ctxflow.policies.placement.reasons import Reason, reasons

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

    :ivar allocation: None if there is none, or if the exact method found none in its time.
    :ivar costs: its five terms.
    :ivar violations: what the independent checker says: none if it is feasible.
    :ivar seconds: for the method, without the check.
    :ivar bound: the exact method's lower bound in dollars, None for the others.
    :ivar proven: whether it is proven to be the best within the gap asked for; if there is no allocation, that there
        is none.
    :ivar reasons: why not all is served.
    """

    problem: Problem
    method: str
    allocation: Allocation | None
    costs: Costs | None
    violations: list[Violation]
    seconds: float
    bound: float | None
    proven: bool
    reasons: list[Reason]

    @property
    def feasible(self) -> bool:
        """Whether there is an allocation that keeps every constraint."""
        return self.allocation is not None and not self.violations

    @property
    def gap(self) -> float | None:
        """How much of the cost might be saved at most, None without a bound."""
        if self.bound is None or self.costs is None:
            return None
        return max(0.0, (self.costs.total - self.bound) / self.costs.total) if self.costs.total else 0.0

    def as_data(self) -> dict[str, Any]:
        """All of it for JSON; docs/placement.md tells each field."""
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
) -> Solution:
    """Solve a problem, and check the answer.

    :param method: one of `METHODS`.
    :param mechanisms: M1 to M3 for gh, agh and agh-printed; all on by default.
    :param seed: of the random orderings of agh and improved.
    :param time_limit: seconds for the solver of improved (2 by default) and exact (600).
    :param gap: the share of the cost at which the exact method is content.
    :raises ValueError: for an unknown method.
    :raises ModuleNotFoundError: for improved and exact without SciPy.

    >>> from ctxflow.policies.placement.instances import paper_instance
    >>> solution = solve(paper_instance(), "agh")
    >>> solution.feasible, max(solution.allocation.unserved)
    (True, 0.0)
    """
    begun = time.perf_counter()
    bound, proven = None, False
    arrays = Arrays.of(problem)
    allocation: Allocation | None
    if method == "gh":
        allocation = greedy(arrays, mechanisms).allocation()
    elif method in ("agh", "agh-printed"):
        allocation = adaptive(arrays, mechanisms, seed, printed=method == "agh-printed").allocation()
    elif method == "improved":
        allocation = improved(arrays, seed, 2.0 if time_limit is None else time_limit)
    elif method == "exact":
        outcome = exact(arrays, 600.0 if time_limit is None else time_limit, gap)
        allocation, bound, proven = outcome.allocation, outcome.bound, outcome.closed
    else:
        raise ValueError(f"there is no placement method {method!r}: choose one of {', '.join(METHODS)}")
    seconds = time.perf_counter() - begun
    served = allocation is not None and max(allocation.unserved) <= 1e-6
    return Solution(
        problem=problem,
        method=method,
        allocation=allocation,
        costs=None if allocation is None else allocation.costs(problem),
        violations=[] if allocation is None else check(problem, allocation),
        seconds=seconds,
        bound=bound,
        proven=proven,
        reasons=[] if served else reasons(problem, allocation),
    )
